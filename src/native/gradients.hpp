// Copies of gradients to their places in a bucket.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/platform.hpp"

namespace unisono {

// From this size on, stores bypass the caches: other ranks last accessed these lines, their cores may share no cache
// with this one, and the data does not stay in this core's cache until it is reduced.
inline constexpr int64_t kPastBytes = 256 << 10;

inline void copy_gradient(char* place, const char* gradient, size_t nbytes, bool past) {
    // The gradient may be there already, since an earlier step.
    if (place == gradient || !nbytes) return;
    past ? copy_past_caches(place, gradient, nbytes) : static_cast<void>(std::memcpy(place, gradient, nbytes));
}

}  // namespace unisono
