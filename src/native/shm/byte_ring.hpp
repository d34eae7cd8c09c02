// Byte rings in shared memory: one for each direction of each pair of ranks. Each ring has one writer and one reader.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include <sys/uio.h>

#include "steps/link.hpp"
#include "steps/wanted.hpp"
#include "system.hpp"

namespace unisono {

// One end of a ring. The writer counts the bytes that it has written so far, and the reader counts the bytes that it
// has read; each end stores only its own count.
struct ByteRing {
    static constexpr uint64_t kBytes = 128 << 10, kCacheLine = 64;

    char *control, *data;
    // Capacity of the ring; a power of two, so that `at` can use a mask.
    uint64_t nbytes = kBytes;

    Word& written() const { return *reinterpret_cast<Word*>(control); }
    Word& read() const { return *reinterpret_cast<Word*>(control + kCacheLine); }
    char* at(uint64_t count) const { return data + (count & (nbytes - 1)); }
    int64_t room(uint64_t count) const {
        return static_cast<int64_t>(nbytes - (count - read().load(std::memory_order_acquire)));
    }
    // Number of bytes that can be read; called only by the reader.
    uint64_t available() const {
        return written().load(std::memory_order_acquire) - read().load(std::memory_order_relaxed);
    }
    // Number of bytes from the position of `count` to the end of the ring, but at most `limit`.
    uint64_t contiguous(uint64_t count, uint64_t limit) const {
        return std::min(limit, nbytes - (count & (nbytes - 1)));
    }
    // Returns where the next part of a message begins if a part ends at `count`: `count` rounded up to a cache line.
    static uint64_t padded(uint64_t count) { return (count + kCacheLine - 1) & ~(kCacheLine - 1); }

    // Copy bytes into the ring (put) or out of it (get), starting at the position of `count` and wrapping at the end.
    void put(uint64_t count, const char* from, uint64_t length) const {
        if (!length) return;
        const uint64_t first = contiguous(count, length);
        std::memcpy(at(count), from, first);
        std::memcpy(data, from + first, length - first);
    }
    void get(uint64_t count, char* to, uint64_t length) const {
        if (!length) return;
        const uint64_t first = contiguous(count, length);
        std::memcpy(to, at(count), first);
        std::memcpy(to + first, data, length - first);
    }
};

// The rings between all ranks, in one block of memory: first the counts of all rings, then their bytes.
struct RingMemory {
    char* begin;
    int size;
    uint64_t ring_bytes = ByteRing::kBytes;

    static uint64_t nbytes(int size, uint64_t ring_bytes) {
        return static_cast<uint64_t>(size) * static_cast<uint64_t>(size) * (kControlBytes + ring_bytes);
    }

    ByteRing between(int from, int to) const {
        const auto pair = static_cast<uint64_t>(from * size + to), pairs = static_cast<uint64_t>(size * size);
        return {begin + pair * kControlBytes, begin + pairs * kControlBytes + pair * ring_bytes, ring_bytes};
    }

  private:
    // A cache line for each of a ring's two counts.
    static constexpr uint64_t kControlBytes = 2 * ByteRing::kCacheLine;
};

// A link's stream over the two rings (one per direction) between this rank and one peer. `Rings` finds the rings of
// each pair of ranks, and wakes the rank at the other end of a ring.
template <class Rings>
class RingStream {
  public:
    RingStream(const Rings& rings, int peer)
        : rings_(&rings),
          peer_(peer),
          out_(rings.between(rings.rank(), peer)),
          in_(rings.between(peer, rings.rank())) {}

    // Use the read-ahead buffer only for headers, because it costs an extra copy.
    static size_t read_ahead_bytes() { return sizeof(FrameHeader); }
    static size_t direct_bytes() { return 0; }

    // A ring cannot detect a lost peer. The control plane detects ranks that have exited, and aborts the calls that
    // wait for them.
    bool lost() const { return false; }

    // Copies as many bytes as fit into the ring; returns their number.
    size_t send(const iovec* parts, size_t count) {
        const uint64_t begin = out_.written().load(std::memory_order_relaxed);
        uint64_t written = begin, room = static_cast<uint64_t>(out_.room(begin));
        for (size_t n = 0; n < count && room; n++) {
            const uint64_t length = std::min<uint64_t>(room, parts[n].iov_len);
            out_.put(written, static_cast<const char*>(parts[n].iov_base), length);
            written += length;
            room -= length;
        }
        if (written != begin) rings_->publish(out_.written(), written, peer_);
        return written - begin;
    }
    // Copies the bytes that have arrived; returns their number.
    size_t receive(char* to, size_t nbytes) {
        const uint64_t begin = in_.read().load(std::memory_order_relaxed);
        const uint64_t length = std::min<uint64_t>(in_.available(), nbytes);
        in_.get(begin, to, length);
        if (length) rings_->publish(in_.read(), begin + length, peer_);
        return length;
    }

    // Whether a `wanted` transfer can move bytes: bytes can be read, or there is room to write.
    bool is_ready(const Wanted& wanted) const {
        return (wanted.bytes && in_.available()) ||
               (wanted.room && out_.room(out_.written().load(std::memory_order_relaxed)) > 0);
    }

  private:
    const Rings* rings_;
    int peer_;
    ByteRing out_, in_;
};

}  // namespace unisono
