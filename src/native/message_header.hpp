// Header that precedes the bytes of a message between two ranks, in shared memory and on connections.
#pragma once

#include <cstdint>

namespace unisono {

struct Header {
    int64_t tag, count, dtype;
};
// Its format for Python's struct module.
inline constexpr const char* kHeaderFormat = "<qqq";
static_assert(sizeof(Header) == 3 * 8);

}  // namespace unisono
