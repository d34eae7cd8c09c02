// The frame that an executor awaits from another rank.
#pragma once

namespace unisono {

struct Wanted {
    int peer;
    // Bytes from it; room for bytes to it.
    bool bytes, room;
};

}  // namespace unisono
