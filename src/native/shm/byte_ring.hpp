// Rings of bytes in shared memory: one for each direction of each pair of ranks, with one writer and one reader.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include <sys/uio.h>

#include "shm/barrier.hpp"
#include "steps/link.hpp"
#include "steps/wanted.hpp"

namespace unisono {

// One end of a ring. Both ends count bytes from the beginning; each count has one writer.
struct ByteRing {
    static constexpr uint64_t kBytes = 128 << 10, kCacheLine = 64;

    char *control, *data;

    Word& written() const { return *reinterpret_cast<Word*>(control); }
    Word& read() const { return *reinterpret_cast<Word*>(control + kCacheLine); }
    char* at(uint64_t count) const { return data + count % kBytes; }
    int64_t room(uint64_t count) const {
        return static_cast<int64_t>(kBytes - (count - read().load(std::memory_order_acquire)));
    }
    // Number of bytes that can be read; only the reader asks.
    uint64_t available() const {
        return written().load(std::memory_order_acquire) - read().load(std::memory_order_relaxed);
    }
    // Number of bytes up to `limit` before the ring wraps.
    uint64_t contiguous(uint64_t count, uint64_t limit) const { return std::min(limit, kBytes - count % kBytes); }
};

// The rings of a group, whose memory begins with their counts.
class ByteRings {
  public:
    static constexpr int kControlBytes = 128;

    ByteRings(SharedBarrier& barrier, char* memory)
        : barrier(barrier), controls_(memory), data_(memory + barrier.size * barrier.size * kControlBytes) {}

    ByteRing between(int from, int to) const {
        const int pair = from * barrier.size + to;
        return {controls_ + pair * kControlBytes, data_ + pair * static_cast<int64_t>(ByteRing::kBytes)};
    }

    // Release: earlier writes, or reads, are complete before the other end sees the count.
    void publish(Word& counter, uint64_t value, int peer) const {
        counter.store(value, std::memory_order_release);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        barrier.wake(peer);
    }

    SharedBarrier& barrier;

  private:
    char *const controls_, *const data_;
};

// Rings as what carries the frames of an executor.
class RingNetwork {
  public:
    // Both directions of one pair of ranks.
    class Stream {
      public:
        // Only headers are copied on their way.
        static constexpr size_t kReadAheadBytes = sizeof(FrameHeader), kDirectBytes = 0;

        Stream(const ByteRings& rings, int peer)
            : rings_(&rings), peer_(peer), out_(rings.between(rings.barrier.rank, peer)),
              in_(rings.between(peer, rings.barrier.rank)) {}

        // The control plane finds ranks that have ended, and aborts calls.
        bool lost() const { return false; }

        // Copies what there is room for; returns the number of bytes.
        size_t send(const iovec* parts, size_t count) {
            const uint64_t begin = out_.written().load(std::memory_order_relaxed);
            uint64_t written = begin, room = static_cast<uint64_t>(out_.room(begin));
            for (size_t n = 0; n < count && room; n++) {
                const uint64_t length = std::min<uint64_t>(room, parts[n].iov_len);
                const char* const from = static_cast<const char*>(parts[n].iov_base);
                for (uint64_t done = 0; done < length;) {
                    const uint64_t step = out_.contiguous(written, length - done);
                    std::memcpy(out_.at(written), from + done, step);
                    done += step;
                    written += step;
                }
                room -= length;
            }
            if (written != begin) rings_->publish(out_.written(), written, peer_);
            return written - begin;
        }
        // Copies what has arrived; returns the number of bytes.
        size_t receive(char* to, size_t nbytes) {
            const uint64_t begin = in_.read().load(std::memory_order_relaxed);
            const uint64_t length = std::min<uint64_t>(in_.available(), nbytes);
            for (uint64_t done = 0; done < length;) {
                const uint64_t step = in_.contiguous(begin + done, length - done);
                std::memcpy(to + done, in_.at(begin + done), step);
                done += step;
            }
            if (length) rings_->publish(in_.read(), begin + length, peer_);
            return length;
        }

      private:
        const ByteRings* rings_;
        int peer_;
        ByteRing out_, in_;
    };

    RingNetwork(SharedBarrier& barrier, char* memory) : rings_(barrier, memory) {}

    Stream stream(int peer) const { return {rings_, peer}; }

    // Sleeps until a ring can move bytes; returns whether the caller has been interrupted.
    bool sleep(const std::vector<Wanted>& wanted, double deadline, WaitCallbacks& callbacks) {
        const int rank = rings_.barrier.rank;
        const auto ready = [&] {
            for (const Wanted& one : wanted) {
                if (one.bytes && rings_.between(one.peer, rank).available()) return true;
                const ByteRing out = rings_.between(rank, one.peer);
                if (one.room && out.room(out.written().load(std::memory_order_relaxed)) > 0) return true;
            }
            return false;
        };
        return rings_.barrier.wait_until(ready, rank, deadline, callbacks) == Status::interrupted;
    }

    // From any thread: nothing, since the barrier's abort ends waits.
    void wake() {}

  private:
    const ByteRings rings_;
};

}  // namespace unisono
