// 16-bit floats, represented by their bits. Each operation is computed in float, and the result is rounded to nearest
// even, as in torch. Rounding twice, to float and then to 16 bits, is harmless: a float has more than twice the
// significant bits of either 16-bit type.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/platform.hpp"

namespace unisono {

inline float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

struct BFloat16 {
#ifdef UNISONO_AVX2
    UNISONO_AVX2 static FloatVector load(const uint16_t* from) { return load_bfloat16(from); }
    UNISONO_AVX2 static void store(uint16_t* to, FloatVector values) { store_bfloat16(to, values); }
#endif
    static void widen(const uint16_t* from, float* to, size_t count) {
        for (size_t n = 0; n < count; n++) to[n] = float_of_bits(static_cast<uint32_t>(from[n]) << 16);
    }
    static void narrow(const float* from, uint16_t* to, size_t count) {
        for (size_t n = 0; n < count; n++) {
            const uint32_t bits = bits_of_float(from[n]);
            const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
            to[n] = static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
        }
    }
};

struct Float16 {
#ifdef UNISONO_AVX2
    UNISONO_AVX2 static FloatVector load(const uint16_t* from) { return load_float16(from); }
    UNISONO_AVX2 static void store(uint16_t* to, FloatVector values) { store_float16(to, values); }
#endif
    static void widen(const uint16_t* from, float* to, size_t count) {
        for (size_t n = 0; n < count; n++) to[n] = to_float(from[n]);
    }
    static void narrow(const float* from, uint16_t* to, size_t count) {
        for (size_t n = 0; n < count; n++) to[n] = from_float(from[n]);
    }

    static float to_float(uint16_t half) {
        const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, magnitude = half & 0x7FFF;
        // A subnormal number's absolute value is `magnitude` times 2**-24, which a float represents exactly.
        if (magnitude < 0x400) return float_of_bits(bits_of_float(static_cast<float>(magnitude) * 0x1p-24f) | sign);
        const uint32_t exponent = magnitude < 0x7C00 ? magnitude + (112 << 10) : magnitude + (224 << 10);
        return float_of_bits(exponent << 13 | sign | (magnitude > 0x7C00 ? 0x400000 : 0));
    }

    static uint16_t from_float(float value) {
        const uint32_t bits = bits_of_float(value), magnitude = bits & 0x7FFFFFFF;
        const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
        if (magnitude > 0x7F800000) return sign | 0x7E00;
        // Values from 65520 up become infinity: 65520 is halfway between the largest finite half, 65504, and 65536.
        if (magnitude >= 0x477FF000) return sign | 0x7C00;
        if (magnitude < 0x38800000) {
            // In a float near 0.5, the last bit is worth 2**-24, so adding 0.5 rounds the value to a multiple of
            // 2**-24.
            return sign | static_cast<uint16_t>(bits_of_float(float_of_bits(magnitude) + 0.5f) - bits_of_float(0.5f));
        }
        return sign | static_cast<uint16_t>((magnitude - (112 << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13);
    }
};

}  // namespace unisono
