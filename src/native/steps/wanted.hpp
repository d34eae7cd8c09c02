// What an executor waits for from one other rank.
#pragma once

namespace unisono {

struct Wanted {
    int peer;
    // That bytes arrive from it; that there is room for bytes to it.
    bool bytes, room;
};

}  // namespace unisono
