// Reductions of two rows of elements, for each dtype and operation, and of several rows in their order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "kernels/halves.hpp"

namespace unisono {

// A block summed in one step stays in the nearest cache. Longer copies take a separate path, which is slow to start.
inline constexpr size_t kBlockBytes = 2048;

enum class Op { sum, product, min, max, band, bor, bxor };

template <Op op, class T>
inline T combined(T a, T b) {
    if constexpr (std::is_same_v<T, bool>) {
        if constexpr (op == Op::sum || op == Op::max || op == Op::bor) return a | b;
        if constexpr (op == Op::product || op == Op::min || op == Op::band) return a & b;
        return a ^ b;
    } else if constexpr (op == Op::min) {
        // A NaN on either side is the result, as in torch.minimum.
        return a < b || a != a ? a : b;
    } else if constexpr (op == Op::max) {
        return a > b || a != a ? a : b;
    } else if constexpr (std::is_integral_v<T>) {
        // Integers wrap. Types shorter than int would be promoted to signed int, and its overflow is undefined.
        using Wide = std::conditional_t<sizeof(T) < sizeof(uint32_t), uint32_t, std::make_unsigned_t<T>>;
        const auto x = static_cast<Wide>(a), y = static_cast<Wide>(b);
        if constexpr (op == Op::sum) return static_cast<T>(x + y);
        if constexpr (op == Op::product) return static_cast<T>(x * y);
        if constexpr (op == Op::band) return static_cast<T>(x & y);
        if constexpr (op == Op::bor) return static_cast<T>(x | y);
        return static_cast<T>(x ^ y);
    } else {
        if constexpr (op == Op::sum) return a + b;
        return a * b;
    }
}

// `to` may be `a` or `b`, but shares no memory with them otherwise.
using Kernel = void (*)(const char* a, const char* b, char* to, size_t count);

template <Op op, class T>
void combine_elements(const char* a, const char* b, char* to, size_t count) {
    const auto* low = reinterpret_cast<const T*>(a);
    const auto* high = reinterpret_cast<const T*>(b);
    auto* out = reinterpret_cast<T*>(to);
#pragma GCC ivdep
    for (size_t n = 0; n < count; n++) out[n] = combined<op, T>(low[n], high[n]);
}

#ifdef UNISONO_WIDE
// Returns the number of elements done: all but the last few.
template <Op op, class Half>
UNISONO_WIDE size_t combine_lanes(const char* a, const char* b, char* to, size_t count) {
    const auto* low = reinterpret_cast<const uint16_t*>(a);
    const auto* high = reinterpret_cast<const uint16_t*>(b);
    size_t n = 0;
    for (; n + 8 <= count; n += 8) {
        const Lanes x = Half::load(low + n), y = Half::load(high + n);
        Lanes z;
        if constexpr (op == Op::sum) z = add(x, y);
        if constexpr (op == Op::product) z = multiply(x, y);
        if constexpr (op == Op::min) z = minimum(x, y);
        if constexpr (op == Op::max) z = maximum(x, y);
        Half::store(reinterpret_cast<uint16_t*>(to) + n, z);
    }
    return n;
}
#endif

template <Op op, class Half>
void combine_halves(const char* a, const char* b, char* to, size_t count) {
#ifdef UNISONO_WIDE
    if (has_lanes()) {
        const size_t done = combine_lanes<op, Half>(a, b, to, count);
        a += 2 * done, b += 2 * done, to += 2 * done, count -= done;
    }
#endif
    constexpr size_t step = 256;
    float low[step], high[step];
    for (size_t n = 0; n < count; n += step) {
        const size_t length = std::min(step, count - n);
        Half::widen(reinterpret_cast<const uint16_t*>(a) + n, low, length);
        Half::widen(reinterpret_cast<const uint16_t*>(b) + n, high, length);
        for (size_t i = 0; i < length; i++) low[i] = combined<op, float>(low[i], high[i]);
        Half::narrow(low, reinterpret_cast<uint16_t*>(to) + n, length);
    }
}

template <class T>
void divide_elements(char* at, size_t count, int64_t divisor) {
    auto* values = reinterpret_cast<T*>(at);
    // For a power of two, multiplication gives the same bits, and is faster.
    const T inverse = 1 / static_cast<T>(divisor), by = static_cast<T>(divisor);
    if (divisor & (divisor - 1))
        for (size_t n = 0; n < count; n++) values[n] /= by;
    else
        for (size_t n = 0; n < count; n++) values[n] *= inverse;
}

template <class Half>
void divide_halves(char* at, size_t count, int64_t divisor) {
    constexpr size_t step = 256;
    float wide[step];
    for (size_t n = 0; n < count; n += step) {
        const size_t length = std::min(step, count - n);
        auto* values = reinterpret_cast<uint16_t*>(at) + n;
        Half::widen(values, wide, length);
        divide_elements<float>(reinterpret_cast<char*>(wide), length, divisor);
        Half::narrow(wide, values, length);
    }
}

using Division = void (*)(char* at, size_t count, int64_t divisor);

// Reduction of rows of one dtype by one operation. For an average, halves are divided before the sum, so that the sum
// does not overflow, and other floats after it.
struct Reduction {
    Kernel kernel = nullptr;
    size_t width = 0;
    Division divide_before = nullptr, divide = nullptr;
};

template <class T>
Reduction elements(Op op) {
    if constexpr (std::is_floating_point_v<T>) {
        if (op == Op::sum) return {combine_elements<Op::sum, T>, sizeof(T), nullptr, divide_elements<T>};
    } else {
        if (op == Op::sum) return {combine_elements<Op::sum, T>, sizeof(T)};
        if (op == Op::band) return {combine_elements<Op::band, T>, sizeof(T)};
        if (op == Op::bor) return {combine_elements<Op::bor, T>, sizeof(T)};
        if (op == Op::bxor) return {combine_elements<Op::bxor, T>, sizeof(T)};
    }
    if (op == Op::product) return {combine_elements<Op::product, T>, sizeof(T)};
    if (op == Op::min) return {combine_elements<Op::min, T>, sizeof(T)};
    if (op == Op::max) return {combine_elements<Op::max, T>, sizeof(T)};
    return {};
}

template <class Half>
Reduction halves(Op op) {
    if (op == Op::sum) return {combine_halves<Op::sum, Half>, 2, divide_halves<Half>};
    if (op == Op::product) return {combine_halves<Op::product, Half>, 2};
    if (op == Op::min) return {combine_halves<Op::min, Half>, 2};
    if (op == Op::max) return {combine_halves<Op::max, Half>, 2};
    return {};
}

// Complex sums and averages are computed by parts; `to` may be `a` or `b`.
template <class Part>
void sum_complex(const char* a, const char* b, char* to, size_t count) {
    combine_elements<Op::sum, Part>(a, b, to, 2 * count);
}

template <class Part>
void multiply_complex(const char* a, const char* b, char* to, size_t count) {
    const auto* low = reinterpret_cast<const Part*>(a);
    const auto* high = reinterpret_cast<const Part*>(b);
    auto* out = reinterpret_cast<Part*>(to);
    for (size_t n = 0; n < 2 * count; n += 2) {
        const Part real = low[n] * high[n] - low[n + 1] * high[n + 1];
        const Part imaginary = low[n] * high[n + 1] + low[n + 1] * high[n];
        out[n] = real, out[n + 1] = imaginary;
    }
}

template <class Part>
void divide_complex(char* at, size_t count, int64_t divisor) {
    divide_elements<Part>(at, 2 * count, divisor);
}

template <class Part>
Reduction complexes(Op op) {
    if (op == Op::sum) return {sum_complex<Part>, 2 * sizeof(Part), nullptr, divide_complex<Part>};
    if (op == Op::product) return {multiply_complex<Part>, 2 * sizeof(Part)};
    return {};
}

// Keyed by torch's names of dtypes, without "torch."; returns no kernel if there is none.
inline Reduction reduction_of(std::string_view dtype, Op op) {
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
