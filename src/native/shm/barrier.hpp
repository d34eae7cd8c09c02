// Barrier in shared memory. Each rank has counters and signatures that only that rank writes; the other ranks poll the
// counters.
#pragma once

#include <atomic>
#include <cstdint>

#include "call.hpp"
#include "kernels/platform.hpp"
#include "system.hpp"

namespace unisono {

// Word offsets in each rank's four 64-byte cache lines.
inline constexpr int kWordsPerRank = 32;
enum Field { kArrived = 0, kReduced = 1, kLeft = 2, kSignatures = 8, kSleeping = 24, kWakeups = 25 };

class SharedBarrier {
  public:
    const int rank, size;

    SharedBarrier(Word* words, int rank, int size, bool oversubscribed)
        : rank(rank), size(size), words_(words), spin_s_(oversubscribed ? 0 : kSpinS) {}

    // Last round in which this rank arrived; written only by this rank's thread.
    uint64_t round() const { return own(kArrived).load(std::memory_order_relaxed); }

    // Ends every current and future wait of this rank. Thread-safe.
    void abort() {
        aborted_.store(true, std::memory_order_release);
        wake(rank);
    }

    // Publishes that this rank's data for the next round is staged, and waits until the other ranks' data is staged.
    // The counter is stored with release semantics and loaded with acquire semantics, so a rank that sees the new count
    // also sees the staged data and the signature.
    Outcome arrive_and_wait(const Signature* signature, double deadline, WaitCallbacks& callbacks) {
        const uint64_t number = round() + 1;
        const int field = kSignatures + 8 * static_cast<int>(number & 1);
        if (signature)
            for (int n = 0; n < 4; n++) own(field + n).store(signature->words[n], std::memory_order_relaxed);
        publish(kArrived, number);
        const Outcome outcome = wait_for_all(kArrived, number, deadline, callbacks);
        if (!outcome.ok() || !signature) return outcome;
        for (int r = 0; r < size; r++)
            for (int n = 0; n < 3; n++)
                if (at(r, field + n).load(std::memory_order_relaxed) != signature->words[n]) return Status::mismatch;
        return Status::ok;
    }

    // The last word of the given rank's signature in the current round; valid until this rank arrives in the next
    // round. A rank overwrites its signature of round n in round n + 2, which it begins only after all ranks have
    // arrived in round n + 1.
    uint64_t payload(int rank) const {
        return at(rank, kSignatures + 8 * static_cast<int>(round() & 1) + 3).load(std::memory_order_relaxed);
    }

    // Publishes that this rank will make no more calls.
    void leave() { publish(kLeft, 1); }
    bool has_left(int rank) const { return at(rank, kLeft).load(std::memory_order_seq_cst) != 0; }

    // Signals that this rank has reduced its share.
    uint64_t publish_reduced() {
        const uint64_t number = own(kReduced).load(std::memory_order_relaxed) + 1;
        publish(kReduced, number);
        return number;
    }

    Outcome wait_for_all(Field counter, uint64_t number, double deadline, WaitCallbacks& callbacks) {
        for (int r = 0; r < size; r++) {
            if (r == rank) continue;
            const Word& word = at(r, counter);
            const auto ready = [&] { return word.load(std::memory_order_acquire) >= number; };
            const Outcome outcome = wait_until(ready, r, deadline, callbacks);
            if (!outcome.ok()) return outcome;
        }
        return Status::ok;
    }

    // Waits for a condition that depends on one rank: polls for a moment, yields the processor a few times, and then
    // sleeps. Each sleep ends after 2 ms at most, so a lost wake-up does no harm.
    template <class Ready>
    Outcome wait_until(const Ready& ready, int peer, double deadline, WaitCallbacks& callbacks) {
        if (ready()) return Status::ok;
        if (spin_s_ > 0) {
            const double end = monotonic_s() + spin_s_;
            do {
                for (int n = 0; n < kSpins; n++, cpu_relax())
                    if (ready()) return Status::ok;
                // Yield: the peer may be waiting for this processor.
                sched_yield();
            } while (monotonic_s() < end);
        }
        const double start = monotonic_s();
        callbacks.before_sleep();
        for (int n = 0; n < kYields; n++) {
            sched_yield();
            if (ready()) return Status::ok;
        }
        while (!ready()) {
            if (aborted_.load(std::memory_order_acquire)) return Status::aborted;
            // Check the condition again: the peer may have made it true before leaving.
            if (at(peer, kLeft).load(std::memory_order_acquire) && !ready())
                return Outcome(Status::peer_left, peer, monotonic_s() - start);
            if (deadline_clock_s() > deadline) return Outcome(Status::timeout, peer, monotonic_s() - start);
            if (callbacks.interrupted()) return Status::interrupted;
            sleep(ready);
        }
        return Status::ok;
    }

    // Wakes a rank if it is asleep.
    void wake(int rank) {
        if (!at(rank, kSleeping).load(std::memory_order_relaxed)) return;
        Word& wakeups = at(rank, kWakeups);
        wakeups.store((wakeups.load(std::memory_order_relaxed) + 1) & UINT32_MAX, std::memory_order_release);
        futex_wake(&wakeups);
    }

  private:
    static constexpr double kSpinS = 20e-6;
    static constexpr int kSpins = 64, kYields = 100;
    static constexpr long kSleepNs = 2'000'000;

    Word& at(int rank, int field) const { return words_[rank * kWordsPerRank + field]; }
    Word& own(int field) const { return at(rank, field); }

    void publish(Field counter, uint64_t number) {
        own(counter).store(number, std::memory_order_release);
        // A rank that is about to sleep sets its flag and then reads the counter; this rank writes the counter and then
        // reads the flag. Without a full fence in both ranks, each could miss the other's write, and the waiting rank
        // would sleep for the full `kSleepNs`.
        std::atomic_thread_fence(std::memory_order_seq_cst);
        for (int r = 0; r < size; r++)
            if (r != rank) wake(r);
    }

    template <class Ready>
    void sleep(const Ready& ready) {
        Word& wakeups = own(kWakeups);
        const uint64_t seen = wakeups.load(std::memory_order_relaxed);
        own(kSleeping).store(1, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (!ready() && !aborted_.load(std::memory_order_acquire))
            futex_wait(&wakeups, static_cast<uint32_t>(seen), kSleepNs);
        own(kSleeping).store(0, std::memory_order_relaxed);
    }

    Word* const words_;
    const double spin_s_;
    std::atomic<bool> aborted_{false};
};

}  // namespace unisono
