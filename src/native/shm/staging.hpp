// Building blocks of collectives in shared memory. In each round, a rank copies its data to one of its two staging
// buffers, waits until all ranks have arrived, and reads the data that it needs from the other ranks' buffers. Rounds
// alternate between the two buffers, so one wait per round is enough: a rank that arrives in a round has finished
// reading the data of the previous round.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "shm/barrier.hpp"
#include "kernels/reduce_kernels.hpp"
#include "kernels/stage_writer.hpp"

namespace unisono {

// Length of the next piece: `step`, or less at the end.
inline size_t length_of(int64_t remaining, int64_t step) {
    return static_cast<size_t>(std::max<int64_t>(0, std::min(remaining, step)));
}

inline void copy(char* to, const char* from, size_t nbytes) {
    if (nbytes && to != from) std::memmove(to, from, nbytes);
}

class StagedRounds {
  public:
    const int rank, size;
    const size_t stage_bytes;
    SharedBarrier shared_barrier;
    StageWriter writer;

    StagedRounds(Word* words, char* stages, size_t stage_bytes, int rank, int size, bool oversubscribed)
        : rank(rank),
          size(size),
          stage_bytes(stage_bytes),
          shared_barrier(words, rank, size, oversubscribed),
          stages_(stages) {}

    Outcome barrier(CollectiveCall& call) { return arrive_and_wait(call, true); }

    // Checks that all ranks make the same call, and that each rank sends what its peer expects.
    Outcome check_pairs(CollectiveCall& call, const std::vector<int64_t>& counts) {
        if (const Outcome outcome = arrive_and_wait(call, true); !outcome.ok()) return outcome;
        int64_t longest = 0;
        return compare_counts(call, counts, longest);
    }

    Outcome arrive_and_wait(CollectiveCall& call, bool first) {
        // Check for signals here: if the ranks keep pace during a long call, no wait lasts long enough to check for
        // signals.
        if (!first && call.callbacks->interrupted_lately()) return Status::interrupted;
        return shared_barrier.arrive_and_wait(first ? &call.signature : nullptr, call.deadline, *call.callbacks);
    }

    int next_stage() const { return static_cast<int>((shared_barrier.round() + 1) & 1); }
    char* staging_buffer(int rank, int index) const { return stages_ + (2 * rank + index) * stage_bytes; }

    // Bytes available to each rank if a staging buffer is divided equally among the ranks, rounded down to whole
    // elements.
    int64_t piece_bytes(int64_t width) const {
        return static_cast<int64_t>(stage_bytes) / size / width * width;
    }

    // Stages a piece for each other rank.
    void stage_pieces(const CollectiveCall& call, char* stage, int64_t at, int64_t step) {
        for (int r = 0; r < size; r++) {
            const Buffer& part = call.inputs[r];
            const size_t length = length_of(part.count * call.width - at, step);
            if (r != rank) writer.copy(stage + r * step, part.data + at, length);
        }
    }

    // Checks that each rank sends what its peer expects, and sets `longest` to the largest count. Each rank stages how
    // much it sends to each rank, followed by how much it expects from each rank.
    Outcome compare_counts(CollectiveCall& call, const std::vector<int64_t>& counts, int64_t& longest) {
        const int index = next_stage();
        std::memcpy(staging_buffer(rank, index), counts.data(), counts.size() * sizeof counts[0]);
        if (const Outcome outcome = arrive_and_wait(call, false); !outcome.ok()) return outcome;
        longest = 0;
        bool match = true;
        for (int a = 0; a < size; a++) {
            const auto* sends = reinterpret_cast<const int64_t*>(staging_buffer(a, index));
            for (int b = 0; b < size; b++) {
                const auto* expects = reinterpret_cast<const int64_t*>(staging_buffer(b, index)) + size;
                match = match && sends[b] == expects[a];
                longest = std::max(longest, sends[b]);
            }
        }
        return match ? Status::ok : Status::mismatch;
    }

  private:
    char* const stages_;
};

}  // namespace unisono
