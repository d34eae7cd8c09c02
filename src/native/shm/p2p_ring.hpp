// Messages between two ranks: a ring of bytes for each direction of each pair, with the layout of
// transports/shm/byte_ring.py. A message has two parts: its header, as in transports/shm/p2p_ring.py, and its bytes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "shm/barrier.hpp"

namespace unisono {

// Header of a message.
struct Header {
    int64_t tag, count, dtype;
};

class Rings {
  public:
    Rings(Board& board, char* memory)
        : board_(board), controls_(memory), data_(memory + board.size * board.size * kControlBytes) {}

    // Returns when the whole message is in the ring. No other message to that rank may be in flight.
    Status send(int peer, const Header& header, const char* from, int64_t nbytes, double deadline, Patience& patience) {
        const Ring ring = ring_of(board_.rank, peer);
        uint64_t written = ring.written().load(std::memory_order_relaxed);
        const auto room = [&] { return ring.room(written); };
        Status status = board_.wait_until([&] { return room() >= static_cast<int64_t>(kLine); }, peer, deadline, patience);
        if (status != Status::ok) return status;
        std::memcpy(ring.at(written), &header, sizeof header);
        written += kLine;
        for (int64_t sent = 0; sent < nbytes;) {
            // The first bytes are published with the header, if there is room: a short message wakes the reader once.
            if (room() <= 0) publish(ring.written(), written, peer);
            status = board_.wait_until([&] { return room() > 0; }, peer, deadline, patience);
            if (status != Status::ok) return status;
            const uint64_t step = ring.step(written, static_cast<uint64_t>(std::min(room(), nbytes - sent)));
            std::memcpy(ring.at(written), from + sent, step);
            sent += static_cast<int64_t>(step);
            written += sent < nbytes ? step : padded(step, nbytes);
            if (sent < nbytes) publish(ring.written(), written, peer);
        }
        publish(ring.written(), written, peer);
        return Status::ok;
    }

    // Refused, with nothing done, if the next message is not the wanted one.
    Status receive(int peer, const Header& wanted, char* to, int64_t nbytes, double deadline, Patience& patience) {
        const Ring ring = ring_of(peer, board_.rank);
        uint64_t read = ring.read().load(std::memory_order_relaxed);
        const auto there = [&] { return ring.written().load(std::memory_order_acquire) - read; };
        Status status = board_.wait_until([&] { return there() > 0; }, peer, deadline, patience);
        if (status != Status::ok) return status;
        if (std::memcmp(ring.at(read), &wanted, sizeof wanted) != 0) return Status::refused;
        read += kLine;
        for (int64_t taken = 0; taken < nbytes;) {
            status = board_.wait_until([&] { return there() > 0; }, peer, deadline, patience);
            if (status != Status::ok) return status;
            const uint64_t step = ring.step(read, std::min<uint64_t>(there(), static_cast<uint64_t>(nbytes - taken)));
            std::memcpy(to + taken, ring.at(read), step);
            taken += static_cast<int64_t>(step);
            read += taken < nbytes ? step : padded(step, nbytes);
            if (taken < nbytes) publish(ring.read(), read, peer);
        }
        publish(ring.read(), read, peer);
        return Status::ok;
    }

    // Number of moves of bytes without the core by threads of this rank; each move ends with `wake`.
    uint64_t moves() const { return moves_.load(std::memory_order_acquire); }

    // Wakes the peer of a transfer, and other threads of this rank, because their messages may now be done.
    void wake(int peer) {
        moves_.fetch_add(1, std::memory_order_release);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        board_.ring(peer);
        board_.ring(board_.rank);
    }

    // Waits until there is room to some ranks, or there are bytes from others, or another thread of this rank has moved
    // bytes since `moves`, or the deadline has passed.
    Status wait(const std::vector<int>& to, const std::vector<int>& from, uint64_t moves, double deadline, Patience& patience) {
        const auto ready = [&] {
            for (int peer : to) {
                const Ring ring = ring_of(board_.rank, peer);
                if (ring.room(ring.written().load(std::memory_order_relaxed)) > 0) return true;
            }
            for (int peer : from) {
                const Ring ring = ring_of(peer, board_.rank);
                const uint64_t read = ring.read().load(std::memory_order_relaxed);
                if (ring.written().load(std::memory_order_acquire) != read) return true;
            }
            return moves_.load(std::memory_order_acquire) != moves || monotonic_s() > deadline;
        };
        patience.settle();
        for (const double end = monotonic_s() + kYieldS; monotonic_s() < end; sched_yield())
            if (ready()) return Status::ok;
        return board_.wait_until(ready, board_.rank, deadline, patience);
    }

  private:
    static constexpr uint64_t kRingBytes = 128 << 10, kLine = 64;
    static constexpr int kControlBytes = 128;
    // A peer that moves messages in Python takes longer than a call of the core.
    static constexpr double kYieldS = 200e-6;

    // One end of a ring. Both ends count bytes from the beginning; each count has one writer.
    struct Ring {
        char *control, *data;

        Word& written() const { return *reinterpret_cast<Word*>(control); }
        Word& read() const { return *reinterpret_cast<Word*>(control + kLine); }
        char* at(uint64_t count) const { return data + count % kRingBytes; }
        int64_t room(uint64_t count) const {
            return static_cast<int64_t>(kRingBytes - (count - read().load(std::memory_order_acquire)));
        }
        // Up to the end of the memory.
        uint64_t step(uint64_t count, uint64_t most) const { return std::min(most, kRingBytes - count % kRingBytes); }
    };

    Ring ring_of(int from, int to) const {
        const int pair = from * board_.size + to;
        return {controls_ + pair * kControlBytes, data_ + pair * static_cast<int64_t>(kRingBytes)};
    }

    static uint64_t padded(uint64_t step, int64_t total) { return step + (-static_cast<uint64_t>(total) & (kLine - 1)); }

    // Release: earlier writes, or reads, are complete before the other end sees the count.
    void publish(Word& counter, uint64_t value, int peer) {
        counter.store(value, std::memory_order_release);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        board_.ring(peer);
    }

    std::atomic<uint64_t> moves_{0};
    Board& board_;
    char *const controls_, *const data_;
};

}  // namespace unisono
