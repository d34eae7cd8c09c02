// What depends on the processor and the system: pauses, stores past the caches, half floats, futexes, clocks.
#pragma once

#include <cstdint>
#include <cstring>
#include <ctime>

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace unisono {

inline void pause_processor() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Seconds of the clock that Python's time.monotonic() reads.
inline double monotonic_s() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

inline void futex_wait(const void* word, uint32_t seen, long nanoseconds) {
    const timespec limit{0, nanoseconds};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

inline void futex_wake(const void* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }

// A copy that does not bring the target's lines into this processor's caches. The fence comes before anything that
// tells other ranks of the copy: such stores are not ordered otherwise.
inline void copy_past_caches(char* to, const char* from, size_t nbytes) {
#if defined(__x86_64__)
    size_t ahead = -reinterpret_cast<uintptr_t>(to) & 15;
    ahead = ahead < nbytes ? ahead : nbytes;
    std::memcpy(to, from, ahead);
    to += ahead, from += ahead, nbytes -= ahead;
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

// Whether the processor converts half floats.
inline bool has_f16c() {
#if defined(__x86_64__)
    static const bool found = __builtin_cpu_supports("f16c") && __builtin_cpu_supports("avx");
    return found;
#else
    return false;
#endif
}

#if defined(__x86_64__)
__attribute__((target("f16c,avx"))) inline void halves_to_floats(const uint16_t* from, float* to, size_t count) {
    size_t n = 0;
    for (; n + 8 <= count; n += 8)
        _mm256_storeu_ps(to + n, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + n))));
    for (; n < count; n++) to[n] = _cvtsh_ss(from[n]);
}

__attribute__((target("f16c,avx"))) inline void floats_to_halves(const float* from, uint16_t* to, size_t count) {
    size_t n = 0;
    for (; n + 8 <= count; n += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + n),
                         _mm256_cvtps_ph(_mm256_loadu_ps(from + n), _MM_FROUND_TO_NEAREST_INT));
    for (; n < count; n++) to[n] = _cvtss_sh(from[n], _MM_FROUND_TO_NEAREST_INT);
}
#else
inline void halves_to_floats(const uint16_t*, float*, size_t) {}
inline void floats_to_halves(const float*, uint16_t*, size_t) {}
#endif

}  // namespace unisono
