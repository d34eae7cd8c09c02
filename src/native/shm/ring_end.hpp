// Lets Python access the rings, to copy the messages that the native core does not support.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "python_memory.hpp"
#include "shm/byte_ring.hpp"

namespace unisono {

// One end of a ring through which Python sends or receives messages. Each part of a message (its header or its
// contents) is padded to whole cache lines, so every part begins on a cache line. A long part moves in pieces of at
// most a quarter of the ring, so that writer and reader can copy at the same time.
class RingEnd {
  public:
    RingEnd(std::shared_ptr<PythonMemory> memory, const ByteRing& ring) : memory_(std::move(memory)), ring_(ring) {}

    // Number of bytes that can be read, including padding. The load is sequentially consistent, because a thread that
    // is about to sleep must set its flag before its last call to `available`.
    uint64_t available() const {
        return ring_.written().load(std::memory_order_seq_cst) - ring_.read().load(std::memory_order_relaxed);
    }
    // Number of bytes that can be written.
    uint64_t room() const { return static_cast<uint64_t>(std::max<int64_t>(0, ring_.room(written()))); }

    // Copies as many bytes from the beginning of a part as fit, and returns their number. If `more` is set, the reader
    // sees the copied bytes only after the next `write` without `more`.
    uint64_t write(nanobind::handle content, bool more) {
        const PythonMemory part(content, PyBUF_SIMPLE);
        const uint64_t count = written(), step = std::min({part.nbytes(), room(), ring_.nbytes / 4});
        ring_.put(count, part.begin(), step);
        const uint64_t end = step == part.nbytes() ? ByteRing::padded(count + step) : count + step;
        held_ = more ? held_ + end - count : 0;
        if (!more) ring_.written().store(end, std::memory_order_seq_cst);
        return step;
    }

    // A view of the contiguous bytes that can be read, including padding; they remain in the ring.
    nanobind::object peek() const {
        const uint64_t count = read_count();
        const auto from = static_cast<uint64_t>(ring_.at(count) - memory_->begin());
        return memory_->part(from, ring_.contiguous(count, available()));
    }

    // Removes a part of `nbytes` bytes, and its padding, from the ring.
    void skip(uint64_t nbytes) { advance(ByteRing::padded(read_count() + nbytes)); }

    // Copies the next available bytes to `into`, and returns their number. `into` is the memory for the bytes of a part
    // that are still to be read.
    uint64_t read(nanobind::handle into) {
        const PythonMemory part(into, PyBUF_WRITABLE);
        const uint64_t count = read_count(), step = std::min({part.nbytes(), available(), ring_.nbytes / 4});
        ring_.get(count, part.begin(), step);
        advance(step == part.nbytes() ? ByteRing::padded(count + step) : count + step);
        return step;
    }

  private:
    uint64_t written() const { return ring_.written().load(std::memory_order_relaxed) + held_; }
    uint64_t read_count() const { return ring_.read().load(std::memory_order_relaxed); }
    void advance(uint64_t count) { ring_.read().store(count, std::memory_order_seq_cst); }

    std::shared_ptr<PythonMemory> memory_;
    ByteRing ring_;
    // Bytes written but not yet published.
    uint64_t held_ = 0;
};

// The writing ends of the rings from `rank` to every rank, and the reading ends of the rings from every rank to `rank`.
inline std::pair<std::vector<RingEnd>, std::vector<RingEnd>> ring_ends(const std::shared_ptr<PythonMemory>& memory,
                                                                       const RingMemory& rings, int rank) {
    std::vector<RingEnd> outgoing, incoming;
    for (int peer = 0; peer < rings.size; peer++) {
        outgoing.emplace_back(memory, rings.between(rank, peer));
        incoming.emplace_back(memory, rings.between(peer, rank));
    }
    return {std::move(outgoing), std::move(incoming)};
}

}  // namespace unisono
