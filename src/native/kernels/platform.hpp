// Processor-specific code: spin-wait hints, non-temporal stores, half floats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace unisono {

inline void cpu_relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Copies without loading the target's cache lines into this processor's caches. Non-temporal stores are unordered, so a
// fence must precede any store that notifies other ranks of the copy.
inline void copy_non_temporal(char* to, const char* from, size_t nbytes) {
#if defined(__x86_64__)
    size_t head = -reinterpret_cast<uintptr_t>(to) & 15;
    head = head < nbytes ? head : nbytes;
    std::memcpy(to, from, head);
    to += head, from += head, nbytes -= head;
    for (; nbytes >= 64; to += 64, from += 64, nbytes -= 64) {
        const auto* source = reinterpret_cast<const __m128i*>(from);
        auto* target = reinterpret_cast<__m128i*>(to);
        const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    _mm_sfence();
#endif
    std::memcpy(to, from, nbytes);
}

// With AVX2 and F16C, one instruction processes eight floats; without these extensions, 16-bit floats are slow.
#if defined(__x86_64__)
#define UNISONO_AVX2 __attribute__((target("avx2,f16c")))

inline bool has_avx2() {
    static const bool supported = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    return supported;
}

using FloatVector = __m256;

UNISONO_AVX2 inline FloatVector add(FloatVector a, FloatVector b) { return _mm256_add_ps(a, b); }
UNISONO_AVX2 inline FloatVector multiply(FloatVector a, FloatVector b) { return _mm256_mul_ps(a, b); }
// If either operand is NaN, returns NaN. The processor's minimum or maximum instruction alone would drop a NaN in the
// first operand.
UNISONO_AVX2 inline FloatVector minimum(FloatVector a, FloatVector b) {
    return _mm256_blendv_ps(_mm256_min_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
UNISONO_AVX2 inline FloatVector maximum(FloatVector a, FloatVector b) {
    return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}

UNISONO_AVX2 inline FloatVector load_float16(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
UNISONO_AVX2 inline void store_float16(uint16_t* to, FloatVector values) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}
UNISONO_AVX2 inline FloatVector load_bfloat16(const uint16_t* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
UNISONO_AVX2 inline void store_bfloat16(uint16_t* to, FloatVector values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    const __m256i chosen = _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), _mm256_set1_epi32(0x7FC0), nan);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(chosen, chosen), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
}
#endif

}  // namespace unisono
