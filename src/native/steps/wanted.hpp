// What a sleeping rank waits for on one of its links.
#pragma once

namespace unisono {

struct Wanted {
    int peer;
    // bytes: bytes from the peer. room: room for bytes to the peer.
    bool bytes, room;
};

}  // namespace unisono
