// The `Network` of an executor whose frames travel through shared memory inside a host, and over connections to the
// other ranks.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <unistd.h>

#include "shm/byte_ring.hpp"
#include "tcp/sockets.hpp"

namespace unisono {

// The rings between the ranks of one host. Ranks are numbered as in the whole group. A rank sleeps in a poll that also
// watches its sockets, so other ranks wake it through a pipe (its doorbell) instead of a futex.
class HostRings {
  public:
    // `ranks` are the ranks on this host. `memory` has `nbytes(ranks.size())` bytes, which were zero before any rank
    // used them. `bells` are descriptors for writing to the doorbells of `ranks`, and for reading from this rank's own.
    HostRings(char* memory, int rank, const std::vector<int>& ranks, const std::vector<int>& bells)
        : rank_(rank), ranks_(ranks), bells_(bells), flags_(memory),
          rings_{memory + flag_bytes(ranks.size()), static_cast<int>(ranks.size()), kRingBytes} {}

    static uint64_t nbytes(size_t ranks) {
        return flag_bytes(ranks) + RingMemory::nbytes(static_cast<int>(ranks), kRingBytes);
    }

    int rank() const { return rank_; }
    bool has(int peer) const { return place_of(peer) < ranks_.size(); }
    ByteRing between(int from, int to) const {
        return rings_.between(static_cast<int>(place_of(from)), static_cast<int>(place_of(to)));
    }

    // Stores a ring's counter, and wakes the peer if it is asleep. A peer that is about to sleep sets its flag and then
    // checks its rings once more, so either this rank sees the flag or the peer sees the new count.
    void publish(Word& counter, uint64_t value, int peer) const {
        counter.store(value, std::memory_order_release);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        Word& sleeping = flag(peer);
        // If several ranks move bytes at the same time, only one of them rings the doorbell.
        if (!sleeping.load(std::memory_order_relaxed) || !sleeping.exchange(0)) return;
        const char ring = 1;
        [[maybe_unused]] const ssize_t written = write(bell(peer), &ring, 1);
    }

    // Announces that this rank is about to sleep.
    void begin_sleep() const {
        flag(rank_).store(1, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_seq_cst);
    }
    // A peer that saw the flag may still ring after this call; the next sleep then ends too early.
    void end_sleep() const {
        flag(rank_).store(0, std::memory_order_relaxed);
        char rings[64];
        [[maybe_unused]] const ssize_t emptied = read(bell(rank_), rings, sizeof rings);
    }
    int own_bell() const { return bell(rank_); }

  private:
    static constexpr uint64_t kRingBytes = 1 << 20, kPageBytes = 4096;

    static uint64_t flag_bytes(size_t ranks) {
        return (ranks * ByteRing::kCacheLine + kPageBytes - 1) & ~(kPageBytes - 1);
    }
    size_t place_of(int peer) const {
        return static_cast<size_t>(std::find(ranks_.begin(), ranks_.end(), peer) - ranks_.begin());
    }
    int bell(int peer) const { return bells_[place_of(peer)]; }
    // Whether a rank is asleep.
    Word& flag(int peer) const { return *reinterpret_cast<Word*>(flags_ + place_of(peer) * ByteRing::kCacheLine); }

    const int rank_;
    const std::vector<int> ranks_, bells_;
    char* const flags_;
    const RingMemory rings_;
};

class Links {
  public:
    class Stream {
      public:
        Stream(const Sockets::Stream& socket, const HostRings* rings, int peer) : socket_(socket) {
            if (rings) ring_.emplace(*rings, peer);
        }

        size_t read_ahead_bytes() const {
            return ring_ ? RingStream<HostRings>::read_ahead_bytes() : Sockets::Stream::read_ahead_bytes();
        }
        size_t direct_bytes() const {
            return ring_ ? RingStream<HostRings>::direct_bytes() : Sockets::Stream::direct_bytes();
        }
        bool lost() const { return socket_.lost(); }
        size_t send(const iovec* parts, size_t count) {
            return ring_ ? ring_->send(parts, count) : socket_.send(parts, count);
        }
        size_t receive(char* to, size_t nbytes) {
            return ring_ ? ring_->receive(to, nbytes) : socket_.receive(to, nbytes);
        }

      private:
        Sockets::Stream socket_;
        std::optional<RingStream<HostRings>> ring_;
    };

    // `sockets` contains a socket for each rank, but -1 for this rank and for ranks that it reaches through `rings`.
    // `rings` is null if this rank reaches all others over sockets.
    explicit Links(const std::vector<int>& sockets, std::shared_ptr<const HostRings> rings = nullptr)
        : rings_(std::move(rings)), sockets_(sockets, rings_ ? rings_->own_bell() : -1) {}

    Stream stream(int peer) const { return {sockets_.stream(peer), is_near(peer) ? rings_.get() : nullptr, peer}; }

    // Like `Sockets::sleep`.
    bool sleep(const std::vector<Wanted>& wanted, double deadline, WaitCallbacks& callbacks) {
        if (!rings_) return sockets_.sleep(wanted, deadline, callbacks);
        const auto is_ready = [&](const Wanted& one) {
            return is_near(one.peer) && RingStream<HostRings>(*rings_, one.peer).is_ready(one);
        };
        rings_->begin_sleep();
        const bool ready = std::any_of(wanted.begin(), wanted.end(), is_ready);
        const bool stop = ready ? callbacks.interrupted_lately() : sockets_.sleep(wanted, deadline, callbacks);
        rings_->end_sleep();
        return stop;
    }

    void wake() const { sockets_.wake(); }

  private:
    bool is_near(int peer) const { return rings_ && rings_->has(peer); }

    const std::shared_ptr<const HostRings> rings_;
    Sockets sockets_;
};

}  // namespace unisono
