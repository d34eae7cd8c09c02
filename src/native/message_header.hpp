// Header of a message between two ranks; the same in shared memory and over TCP connections.
#pragma once

#include <cstdint>

namespace unisono {

struct Header {
    int64_t tag, count, dtype;
};
// The header's format for Python's struct module.
inline constexpr const char* kHeaderFormat = "<qqq";
static_assert(sizeof(Header) == 3 * 8);

}  // namespace unisono
