// Copies gradients to their places in a bucket.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/platform.hpp"

namespace unisono {

// Copies of at least this size use non-temporal stores, which bypass the caches. Ordinary stores to the bucket would be
// slow: its cache lines were last accessed by other ranks, perhaps on cores that share no cache with this core. Caching
// the gradients on this core would not help, because they would be evicted before they are reduced.
inline constexpr int64_t kNonTemporalBytes = 256 << 10;

inline void copy_gradient(char* destination, const char* gradient, size_t nbytes, bool non_temporal) {
    // A gradient that is a view of the bucket is already in place.
    if (destination == gradient || !nbytes) return;
    if (non_temporal)
        copy_non_temporal(destination, gradient, nbytes);
    else
        std::memcpy(destination, gradient, nbytes);
}

}  // namespace unisono
