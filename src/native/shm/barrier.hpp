// Barrier in shared memory: counters and marks, each written by one rank only, and the waits for them.
#pragma once

#include <atomic>
#include <cstdint>

#include "kernels/platform.hpp"

namespace unisono {

using Word = std::atomic<uint64_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 8);

// Layout of each rank's four lines of 64 bytes, as in transports/shm/barrier.py.
inline constexpr int kStride = 32;
enum Place { kArrived = 0, kReduced = 1, kLeft = 2, kMarks = 8, kAsleep = 24, kBell = 25 };

enum class Status { ok, differs, late, left, aborted, interrupted, refused };

// Words that ranks compare in the first round of a call; the last word is published, but not compared.
struct Mark {
    uint64_t words[4];
};

// Callbacks of a waiting thread.
struct Patience {
    // Called before a long wait.
    virtual void settle() {}
    // Whether the caller wants the wait to end, for example because of a signal.
    virtual bool interrupted() { return false; }
    virtual ~Patience() = default;
};

class Board {
  public:
    const int rank, size;

    Board(Word* words, int rank, int size, bool crowded)
        : rank(rank), size(size), words_(words), spin_s_(crowded ? 0 : kSpinS) {}

    // The number of the last round in which this rank arrived. Only this rank's thread writes it.
    uint64_t round() const { return own(kArrived).load(std::memory_order_relaxed); }

    // The rank that the last failed wait waited for, and the duration of that wait.
    int missing() const { return missing_; }
    double waited_s() const { return waited_s_; }

    // From any thread: ends every wait of this rank, now and later.
    void abort() {
        aborted_.store(true, std::memory_order_release);
        ring(rank);
    }

    // Publishes that this rank's part of the next round is staged, and waits for the others' parts. Release and acquire
    // of the counter order the part, and the mark, before it.
    Status arrive(const Mark* mark, double deadline, Patience& patience) {
        const uint64_t number = round() + 1;
        const int place = kMarks + 8 * static_cast<int>(number & 1);
        if (mark)
            for (int n = 0; n < 4; n++) own(place + n).store(mark->words[n], std::memory_order_relaxed);
        tell(kArrived, number);
        const Status status = wait_for_all(kArrived, number, deadline, patience);
        if (status != Status::ok || !mark) return status;
        for (int r = 0; r < size; r++)
            for (int n = 0; n < 3; n++)
                if (at(r, place + n).load(std::memory_order_relaxed) != mark->words[n]) return Status::differs;
        return Status::ok;
    }

    // The last word of a rank's mark in this round. It stays until that rank arrives in the round after the next one,
    // which requires that this rank arrives in the next one.
    uint64_t extra(int of) const {
        return at(of, kMarks + 8 * static_cast<int>(round() & 1) + 3).load(std::memory_order_relaxed);
    }

    // Publishes that this rank's share is reduced.
    uint64_t tell_reduced() {
        const uint64_t number = own(kReduced).load(std::memory_order_relaxed) + 1;
        tell(kReduced, number);
        return number;
    }

    Status wait_for_all(Place counter, uint64_t number, double deadline, Patience& patience) {
        for (int r = 0; r < size; r++) {
            if (r == rank) continue;
            const Word& word = at(r, counter);
            const auto ready = [&] { return word.load(std::memory_order_acquire) >= number; };
            const Status status = wait_until(ready, r, deadline, patience);
            if (status != Status::ok) return status;
        }
        return Status::ok;
    }

    // Waits until a condition holds that depends on one rank: polls for a moment, yields the processor some times,
    // and then sleeps until woken, 2 ms at most, so that nothing depends on the wake-up.
    template <class Ready>
    Status wait_until(const Ready& ready, int on, double deadline, Patience& patience) {
        if (ready()) return Status::ok;
        if (spin_s_ > 0) {
            const double end = monotonic_s() + spin_s_;
            do {
                for (int n = 0; n < kSpins; n++, pause_processor())
                    if (ready()) return Status::ok;
                // The other rank may be waiting for this processor.
                sched_yield();
            } while (monotonic_s() < end);
        }
        const double began = monotonic_s();
        patience.settle();
        for (int n = 0; n < kYields; n++) {
            sched_yield();
            if (ready()) return Status::ok;
        }
        while (!ready()) {
            if (aborted_.load(std::memory_order_acquire)) return Status::aborted;
            // The rank may have arrived before it left.
            if (at(on, kLeft).load(std::memory_order_acquire) && !ready()) return failed(Status::left, on, began);
            if (monotonic_s() > deadline) return failed(Status::late, on, began);
            if (patience.interrupted()) return Status::interrupted;
            sleep(ready);
        }
        return Status::ok;
    }

    // Wakes a rank if it sleeps.
    void ring(int of) {
        if (!at(of, kAsleep).load(std::memory_order_relaxed)) return;
        Word& bell = at(of, kBell);
        bell.store((bell.load(std::memory_order_relaxed) + 1) & UINT32_MAX, std::memory_order_release);
        futex_wake(&bell);
    }

  private:
    static constexpr double kSpinS = 20e-6;
    static constexpr int kSpins = 64, kYields = 100;
    static constexpr long kNapNs = 2'000'000;

    Word& at(int of, int place) const { return words_[of * kStride + place]; }
    Word& own(int place) const { return at(rank, place); }

    void tell(Place counter, uint64_t number) {
        own(counter).store(number, std::memory_order_release);
        // A rank that falls asleep sets its flag, and then reads the counter; this one writes the counter, and then
        // reads the flag. Without a full fence on both sides each could miss the other, for the length of a nap.
        std::atomic_thread_fence(std::memory_order_seq_cst);
        for (int r = 0; r < size; r++)
            if (r != rank) ring(r);
    }

    Status failed(Status status, int on, double began) {
        missing_ = on;
        waited_s_ = monotonic_s() - began;
        return status;
    }

    template <class Ready>
    void sleep(const Ready& ready) {
        Word& bell = own(kBell);
        const uint64_t heard = bell.load(std::memory_order_relaxed);
        own(kAsleep).store(1, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (!ready() && !aborted_.load(std::memory_order_acquire))
            futex_wait(&bell, static_cast<uint32_t>(heard), kNapNs);
        own(kAsleep).store(0, std::memory_order_relaxed);
    }

    Word* const words_;
    const double spin_s_;
    std::atomic<bool> aborted_{false};
    int missing_ = -1;
    double waited_s_ = 0;
};

}  // namespace unisono
