// Copies of gradients to their places in a bucket.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/platform.hpp"

namespace unisono {

// So much is written past the caches: its lines were last read or written by other ranks, whose cores may share no cache
// with this one, and until it is reduced it does not stay in this one's.
inline constexpr int64_t kPastBytes = 256 << 10;

inline void copy_gradient(char* place, const char* gradient, size_t nbytes, bool past) {
    // It may be there already, since an earlier step.
    if (place == gradient || !nbytes) return;
    past ? copy_past_caches(place, gradient, nbytes) : static_cast<void>(std::memcpy(place, gradient, nbytes));
}

}  // namespace unisono
