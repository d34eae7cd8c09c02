// Messages between two ranks through byte rings, one for each direction of each pair. A message has two parts, its
// header and its contents; each part begins on a cache line.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "message_header.hpp"
#include "shm/ring_network.hpp"
#include "system.hpp"

namespace unisono {

class MessageRings {
  public:
    MessageRings(SharedBarrier& barrier, char* memory) : barrier_(barrier), rings_(barrier, memory) {}

    // Returns when the last bytes of the message are in the ring. The caller must not send another message to this peer
    // at the same time.
    Outcome send(int peer, const Header& header, const char* from, int64_t nbytes, double deadline,
                WaitCallbacks& callbacks) {
        const ByteRing ring = rings_.between(barrier_.rank, peer);
        uint64_t written = ring.written().load(std::memory_order_relaxed);
        const auto room = [&] { return ring.room(written); };
        const auto fits_header = [&] { return room() >= static_cast<int64_t>(kCacheLine); };
        Outcome outcome = barrier_.wait_until(fits_header, peer, deadline, callbacks);
        if (!outcome.ok()) return outcome;
        std::memcpy(ring.at(written), &header, sizeof header);
        written += kCacheLine;
        for (int64_t sent = 0; sent < nbytes;) {
            // If there is room, publish the first bytes together with the header, so that a short message wakes the
            // reader only once.
            if (room() <= 0) rings_.publish(ring.written(), written, peer);
            if (sent && callbacks.interrupted_lately()) return Status::interrupted;
            outcome = barrier_.wait_until([&] { return room() > 0; }, peer, deadline, callbacks);
            if (!outcome.ok()) return outcome;
            const uint64_t step = ring.contiguous(written, static_cast<uint64_t>(std::min(room(), nbytes - sent)));
            std::memcpy(ring.at(written), from + sent, step);
            sent += static_cast<int64_t>(step);
            written = sent < nbytes ? written + step : ByteRing::padded(written + step);
            if (sent < nbytes) rings_.publish(ring.written(), written, peer);
        }
        rings_.publish(ring.written(), written, peer);
        return Status::ok;
    }

    // Returns `unsupported`, and leaves the ring unchanged, if the next message is not the expected one.
    Outcome receive(int peer, const Header& expected, char* to, int64_t nbytes, double deadline,
                   WaitCallbacks& callbacks) {
        const ByteRing ring = rings_.between(peer, barrier_.rank);
        uint64_t read = ring.read().load(std::memory_order_relaxed);
        const auto available = [&] { return ring.written().load(std::memory_order_acquire) - read; };
        Outcome outcome = barrier_.wait_until([&] { return available() > 0; }, peer, deadline, callbacks);
        if (!outcome.ok()) return outcome;
        if (std::memcmp(ring.at(read), &expected, sizeof expected) != 0) return Status::unsupported;
        read += kCacheLine;
        for (int64_t received = 0; received < nbytes;) {
            if (received && callbacks.interrupted_lately()) return Status::interrupted;
            outcome = barrier_.wait_until([&] { return available() > 0; }, peer, deadline, callbacks);
            if (!outcome.ok()) return outcome;
            const auto rest = static_cast<uint64_t>(nbytes - received);
            const uint64_t step = ring.contiguous(read, std::min<uint64_t>(available(), rest));
            std::memcpy(to + received, ring.at(read), step);
            received += static_cast<int64_t>(step);
            read = received < nbytes ? read + step : ByteRing::padded(read + step);
            if (received < nbytes) rings_.publish(ring.read(), read, peer);
        }
        rings_.publish(ring.read(), read, peer);
        return Status::ok;
    }

    // Number of calls to `wake`. Python code calls `wake` each time a thread of this rank has moved bytes.
    uint64_t progress() const { return progress_.load(std::memory_order_acquire); }

    // Wakes the peer of a transfer, and other threads of this rank, because a message that they wait for may be
    // complete.
    void wake(int peer) {
        progress_.fetch_add(1, std::memory_order_release);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        barrier_.wake(peer);
        barrier_.wake(barrier_.rank);
    }

    // Waits for the first of these events: a ring to one of the ranks `to` has room; bytes have arrived from one of the
    // ranks `from`; another thread of this rank has moved bytes since `progress` was read; the deadline has passed.
    Outcome wait(const std::vector<int>& to, const std::vector<int>& from, uint64_t progress, double deadline,
                WaitCallbacks& callbacks) {
        const auto ready = [&] {
            for (int peer : to) {
                const ByteRing ring = rings_.between(barrier_.rank, peer);
                if (ring.room(ring.written().load(std::memory_order_relaxed)) > 0) return true;
            }
            for (int peer : from) {
                const ByteRing ring = rings_.between(peer, barrier_.rank);
                const uint64_t read = ring.read().load(std::memory_order_relaxed);
                if (ring.written().load(std::memory_order_acquire) != read) return true;
            }
            return progress_.load(std::memory_order_acquire) != progress || deadline_clock_s() > deadline;
        };
        callbacks.before_sleep();
        for (const double end = monotonic_s() + kYieldS; monotonic_s() < end; sched_yield())
            if (ready()) return Status::ok;
        return barrier_.wait_until(ready, barrier_.rank, deadline, callbacks);
    }

  private:
    static constexpr uint64_t kCacheLine = ByteRing::kCacheLine;
    // Time for which `wait` yields before it sleeps; longer than in the barrier, because moving messages in Python
    // takes longer than in the native core.
    static constexpr double kYieldS = 200e-6;

    std::atomic<uint64_t> progress_{0};
    SharedBarrier& barrier_;
    const ByteRings rings_;
};

}  // namespace unisono
