// What a sleeping rank waits for on one of its links.
#pragma once

namespace unisono {

struct Wanted {
    int peer;
    // `bytes`: wait for bytes from the peer. `room`: wait for room for bytes to the peer.
    bool bytes, room;
};

}  // namespace unisono
