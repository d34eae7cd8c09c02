// Building blocks of collectives in shared memory. In a round each rank copies its part to one of its two staging
// buffers, waits until all ranks have arrived, and reads the parts that it needs. The buffers alternate, so one wait
// per round is enough: a rank that arrives in a round has finished reading the data staged for the round before.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "shm/barrier.hpp"
#include "kernels/reduce_kernels.hpp"
#include "kernels/stage_writer.hpp"

namespace unisono {

class StagedRounds {
  public:
    SharedBarrier shared_barrier;

    StagedRounds(Word* words, char* stages, size_t stage_bytes, int rank, int size, bool oversubscribed)
        : shared_barrier(words, rank, size, oversubscribed),
          rank_(rank),
          size_(size),
          stage_bytes_(stage_bytes),
          stages_(stages) {}

    Status barrier(CollectiveCall& call) { return arrive_and_wait(call, true); }

    // Compares what ranks are about to do, and what each rank sends with what its peer expects.
    Status check_pairs(CollectiveCall& call, const std::vector<int64_t>& counts) {
        if (const Status status = arrive_and_wait(call, true); status != Status::ok) return status;
        int64_t longest = 0;
        return compare_counts(call, counts, longest);
    }

  protected:
    const int rank_, size_;
    const size_t stage_bytes_;
    StageWriter writer_;

    Status arrive_and_wait(CollectiveCall& call, bool first) {
        return shared_barrier.arrive_and_wait(first ? &call.signature : nullptr, call.deadline, *call.callbacks);
    }

    int next_stage() const { return static_cast<int>((shared_barrier.round() + 1) & 1); }
    char* staging_buffer(int rank, int index) const { return stages_ + (2 * rank + index) * stage_bytes_; }

    // Number of bytes per rank that fit into a staging buffer.
    int64_t piece_bytes(int64_t width) const {
        return static_cast<int64_t>(stage_bytes_) / size_ / width * width;
    }

    // Length of the next step; 0 if nothing remains.
    static size_t length_of(int64_t remaining, int64_t step) {
        return static_cast<size_t>(std::max<int64_t>(0, std::min(remaining, step)));
    }

    static void copy(char* to, const char* from, size_t nbytes) {
        if (nbytes && to != from) std::memmove(to, from, nbytes);
    }

    // Stages a piece for each other rank.
    void stage_pieces(const CollectiveCall& call, char* stage, int64_t at, int64_t step) {
        for (int r = 0; r < size_; r++) {
            const Buffer& part = call.inputs[r];
            const size_t length = length_of(part.count * call.width - at, step);
            if (r != rank_) writer_.copy(stage + r * step, part.data + at, length);
        }
    }

    // Compares what each rank sends with what its peer expects, and sets `longest` to the largest count. Each rank
    // stages the counts that it sends to each rank, followed by those that it expects.
    Status compare_counts(CollectiveCall& call, const std::vector<int64_t>& counts, int64_t& longest) {
        const int index = next_stage();
        std::memcpy(staging_buffer(rank_, index), counts.data(), counts.size() * sizeof counts[0]);
        if (const Status status = arrive_and_wait(call, false); status != Status::ok) return status;
        longest = 0;
        bool match = true;
        for (int a = 0; a < size_; a++) {
            const auto* sends = reinterpret_cast<const int64_t*>(staging_buffer(a, index));
            for (int b = 0; b < size_; b++) {
                const auto* expects = reinterpret_cast<const int64_t*>(staging_buffer(b, index)) + size_;
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
