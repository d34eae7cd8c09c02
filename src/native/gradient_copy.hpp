// Copies of gradients to their places in a bucket.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/platform.hpp"

namespace unisono {

// From this size on, stores bypass the caches: other ranks accessed these lines last, perhaps from cores that share no
// cache with this one, and the data would not remain in this core's cache until it is reduced.
inline constexpr int64_t kNonTemporalBytes = 256 << 10;

inline void copy_gradient(char* destination, const char* gradient, size_t nbytes, bool non_temporal) {
    // The gradient may already be in place, since an earlier step.
    if (destination == gradient || !nbytes) return;
    if (non_temporal)
        copy_non_temporal(destination, gradient, nbytes);
    else
        std::memcpy(destination, gradient, nbytes);
}

}  // namespace unisono
