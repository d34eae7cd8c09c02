// Kernels that reduce two rows of elements, for each dtype and operation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "kernels/half_precision.hpp"

namespace unisono {

// Size of the blocks in which rows are reduced: small enough for the L1 cache. For copies longer than a block, memcpy
// switches to another code path with a higher startup cost.
inline constexpr size_t kBlockBytes = 2048;

enum class ReduceOp { sum, product, min, max, band, bor, bxor };

template <ReduceOp op, class T>
inline T apply(T a, T b) {
    if constexpr (std::is_same_v<T, bool>) {
        if constexpr (op == ReduceOp::sum || op == ReduceOp::max || op == ReduceOp::bor) return a | b;
        if constexpr (op == ReduceOp::product || op == ReduceOp::min || op == ReduceOp::band) return a & b;
        return a ^ b;
    } else if constexpr (op == ReduceOp::min) {
        // If either operand is NaN, so is the result, as in torch.minimum.
        return a < b || a != a ? a : b;
    } else if constexpr (op == ReduceOp::max) {
        return a > b || a != a ? a : b;
    } else if constexpr (std::is_integral_v<T>) {
        // Integers wrap. Types narrower than int would be promoted to int, whose overflow is undefined.
        using Wide = std::conditional_t<sizeof(T) < sizeof(uint32_t), uint32_t, std::make_unsigned_t<T>>;
        const auto x = static_cast<Wide>(a), y = static_cast<Wide>(b);
        if constexpr (op == ReduceOp::sum) return static_cast<T>(x + y);
        if constexpr (op == ReduceOp::product) return static_cast<T>(x * y);
        if constexpr (op == ReduceOp::band) return static_cast<T>(x & y);
        if constexpr (op == ReduceOp::bor) return static_cast<T>(x | y);
        return static_cast<T>(x ^ y);
    } else {
        if constexpr (op == ReduceOp::sum) return a + b;
        return a * b;
    }
}

// `to` may equal `a` or `b`, but must not overlap them partially.
using Kernel = void (*)(const char* a, const char* b, char* to, size_t count);

template <ReduceOp op, class T>
void combine_elements(const char* a, const char* b, char* to, size_t count) {
    const auto* low = reinterpret_cast<const T*>(a);
    const auto* high = reinterpret_cast<const T*>(b);
    auto* out = reinterpret_cast<T*>(to);
#pragma GCC ivdep
    for (size_t n = 0; n < count; n++) out[n] = apply<op, T>(low[n], high[n]);
}

#ifdef UNISONO_AVX2
// Returns the number of elements reduced: `count` rounded down to a multiple of eight.
template <ReduceOp op, class Half>
UNISONO_AVX2 size_t combine_vectors(const char* a, const char* b, char* to, size_t count) {
    const auto* low = reinterpret_cast<const uint16_t*>(a);
    const auto* high = reinterpret_cast<const uint16_t*>(b);
    size_t n = 0;
    for (; n + 8 <= count; n += 8) {
        const FloatVector x = Half::load(low + n), y = Half::load(high + n);
        FloatVector z;
        if constexpr (op == ReduceOp::sum) z = add(x, y);
        if constexpr (op == ReduceOp::product) z = multiply(x, y);
        if constexpr (op == ReduceOp::min) z = minimum(x, y);
        if constexpr (op == ReduceOp::max) z = maximum(x, y);
        Half::store(reinterpret_cast<uint16_t*>(to) + n, z);
    }
    return n;
}
#endif

template <ReduceOp op, class Half>
void combine_halves(const char* a, const char* b, char* to, size_t count) {
#ifdef UNISONO_AVX2
    if (has_avx2()) {
        const size_t done = combine_vectors<op, Half>(a, b, to, count);
        a += 2 * done, b += 2 * done, to += 2 * done, count -= done;
    }
#endif
    constexpr size_t step = 256;
    float low[step], high[step];
    for (size_t n = 0; n < count; n += step) {
        const size_t length = std::min(step, count - n);
        Half::widen(reinterpret_cast<const uint16_t*>(a) + n, low, length);
        Half::widen(reinterpret_cast<const uint16_t*>(b) + n, high, length);
        for (size_t i = 0; i < length; i++) low[i] = apply<op, float>(low[i], high[i]);
        Half::narrow(low, reinterpret_cast<uint16_t*>(to) + n, length);
    }
}

template <class T>
void divide_elements(char* at, size_t count, int64_t divisor) {
    auto* values = reinterpret_cast<T*>(at);
    // If the divisor is a power of two, multiplying by its inverse gives bit-identical results and is faster.
    const T inverse = 1 / static_cast<T>(divisor), by = static_cast<T>(divisor);
    if (divisor & (divisor - 1))
        for (size_t n = 0; n < count; n++) values[n] /= by;
    else
        for (size_t n = 0; n < count; n++) values[n] *= inverse;
}

template <class Half>
void divide_halves(char* at, size_t count, int64_t divisor) {
    constexpr size_t step = 256;
    float widened[step];
    for (size_t n = 0; n < count; n += step) {
        const size_t length = std::min(step, count - n);
        auto* values = reinterpret_cast<uint16_t*>(at) + n;
        Half::widen(values, widened, length);
        divide_elements<float>(reinterpret_cast<char*>(widened), length, divisor);
        Half::narrow(widened, values, length);
    }
}

using Division = void (*)(char* at, size_t count, int64_t divisor);

// Kernels for one dtype and one operation. For an average, 16-bit floats are divided before they are summed, so that
// the sum does not overflow; wider floats are divided after the sum.
struct Reduction {
    Kernel kernel = nullptr;
    size_t width = 0;
    Division divide_before = nullptr, divide = nullptr;
};

template <class T>
Reduction elements(ReduceOp op) {
    if constexpr (std::is_floating_point_v<T>) {
        if (op == ReduceOp::sum) return {combine_elements<ReduceOp::sum, T>, sizeof(T), nullptr, divide_elements<T>};
    } else {
        if (op == ReduceOp::sum) return {combine_elements<ReduceOp::sum, T>, sizeof(T)};
        if (op == ReduceOp::band) return {combine_elements<ReduceOp::band, T>, sizeof(T)};
        if (op == ReduceOp::bor) return {combine_elements<ReduceOp::bor, T>, sizeof(T)};
        if (op == ReduceOp::bxor) return {combine_elements<ReduceOp::bxor, T>, sizeof(T)};
    }
    if (op == ReduceOp::product) return {combine_elements<ReduceOp::product, T>, sizeof(T)};
    if (op == ReduceOp::min) return {combine_elements<ReduceOp::min, T>, sizeof(T)};
    if (op == ReduceOp::max) return {combine_elements<ReduceOp::max, T>, sizeof(T)};
    return {};
}

template <class Half>
Reduction halves(ReduceOp op) {
    if (op == ReduceOp::sum) return {combine_halves<ReduceOp::sum, Half>, 2, divide_halves<Half>};
    if (op == ReduceOp::product) return {combine_halves<ReduceOp::product, Half>, 2};
    if (op == ReduceOp::min) return {combine_halves<ReduceOp::min, Half>, 2};
    if (op == ReduceOp::max) return {combine_halves<ReduceOp::max, Half>, 2};
    return {};
}

// Complex sums and averages treat the real and imaginary parts as separate elements. `to` may equal `a` or `b`.
template <class Real>
void sum_complex(const char* a, const char* b, char* to, size_t count) {
    combine_elements<ReduceOp::sum, Real>(a, b, to, 2 * count);
}

template <class Real>
void multiply_complex(const char* a, const char* b, char* to, size_t count) {
    const auto* low = reinterpret_cast<const Real*>(a);
    const auto* high = reinterpret_cast<const Real*>(b);
    auto* out = reinterpret_cast<Real*>(to);
    for (size_t n = 0; n < 2 * count; n += 2) {
        const Real real = low[n] * high[n] - low[n + 1] * high[n + 1];
        const Real imaginary = low[n] * high[n + 1] + low[n + 1] * high[n];
        out[n] = real, out[n + 1] = imaginary;
    }
}

template <class Real>
void divide_complex(char* at, size_t count, int64_t divisor) {
    divide_elements<Real>(at, 2 * count, divisor);
}

template <class Real>
Reduction complexes(ReduceOp op) {
    if (op == ReduceOp::sum) return {sum_complex<Real>, 2 * sizeof(Real), nullptr, divide_complex<Real>};
    if (op == ReduceOp::product) return {multiply_complex<Real>, 2 * sizeof(Real)};
    return {};
}

// `dtype` is torch's name of the dtype, without "torch.". If there is no kernel, the result is empty.
inline Reduction reduction_of(std::string_view dtype, ReduceOp op) {
    if (dtype == "float32") return elements<float>(op);
    if (dtype == "float64") return elements<double>(op);
    if (dtype == "float16") return halves<Float16>(op);
    if (dtype == "bfloat16") return halves<BFloat16>(op);
    if (dtype == "int64") return elements<int64_t>(op);
    if (dtype == "int32") return elements<int32_t>(op);
    if (dtype == "int16") return elements<int16_t>(op);
    if (dtype == "int8") return elements<int8_t>(op);
    if (dtype == "uint8") return elements<uint8_t>(op);
    if (dtype == "uint16") return elements<uint16_t>(op);
    if (dtype == "uint32") return elements<uint32_t>(op);
    if (dtype == "uint64") return elements<uint64_t>(op);
    if (dtype == "bool") return elements<bool>(op);
    if (dtype == "complex64") return complexes<float>(op);
    if (dtype == "complex128") return complexes<double>(op);
    return {};
}

}  // namespace unisono
