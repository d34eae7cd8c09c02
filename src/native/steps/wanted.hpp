// Events that a sleeping rank waits for on one of its links.
#pragma once

namespace unisono {

struct Wanted {
    int peer;
    // `bytes`: wait until bytes arrive from the peer. `room`: wait until the stream to the peer accepts bytes.
    bool bytes, room;
};

}  // namespace unisono
