// What comes before the bytes of a message between two ranks, in shared memory as on connections.
#pragma once

#include <cstdint>

namespace unisono {

struct Header {
    int64_t tag, count, dtype;
};
// Its format as Python's struct has it.
inline constexpr const char* kHeaderFormat = "<qqq";
static_assert(sizeof(Header) == 3 * 8);

}  // namespace unisono
