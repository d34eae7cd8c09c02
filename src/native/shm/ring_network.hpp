// Byte rings of a group whose ranks are all on one host, and wake each other through a shared barrier.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "shm/barrier.hpp"
#include "shm/byte_ring.hpp"
#include "steps/wanted.hpp"

namespace unisono {

// The rings of a group. A rank that moves bytes wakes the rank at the other end of the ring.
class ByteRings {
  public:
    ByteRings(SharedBarrier& barrier, char* memory) : barrier(barrier), memory_{memory, barrier.size} {}

    int rank() const { return barrier.rank; }
    ByteRing between(int from, int to) const { return memory_.between(from, to); }

    // Stores the counter with release semantics, so this rank's earlier writes to the ring, or reads from it, are
    // complete before the peer sees the new count.
    void publish(Word& counter, uint64_t value, int peer) const {
        counter.store(value, std::memory_order_release);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        barrier.wake(peer);
    }

    SharedBarrier& barrier;

  private:
    const RingMemory memory_;
};

// The `Network` of an executor whose frames travel through rings.
class RingNetwork {
  public:
    using Stream = RingStream<ByteRings>;

    RingNetwork(SharedBarrier& barrier, char* memory) : rings_(barrier, memory) {}

    Stream stream(int peer) const { return {rings_, peer}; }

    // Sleeps until one of the `wanted` events occurs, the deadline passes or the barrier is aborted; returns whether a
    // signal has interrupted the wait.
    bool sleep(const std::vector<Wanted>& wanted, double deadline, WaitCallbacks& callbacks) {
        const auto is_ready = [&](const Wanted& one) { return stream(one.peer).is_ready(one); };
        const auto ready = [&] { return std::any_of(wanted.begin(), wanted.end(), is_ready); };
        return rings_.barrier.wait_until(ready, rings_.rank(), deadline, callbacks) == Status::interrupted;
    }

    // Does nothing, because aborting the barrier already ends `sleep`.
    void wake() {}

  private:
    const ByteRings rings_;
};

}  // namespace unisono
