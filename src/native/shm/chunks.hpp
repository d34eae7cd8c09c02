// Building blocks of collectives in shared memory. In a round each rank copies its part to one of its two stages, all
// arrive, and each rank reads what it needs. The stages are used in turn, so that one wait per round is enough: a rank
// that has arrived in a round has finished reading what was staged for the round before.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "shm/barrier.hpp"
#include "kernels/kernels.hpp"
#include "kernels/stores.hpp"

namespace unisono {

// A tensor of a call: where it begins, and how many elements it has.
struct Part {
    char* data;
    int64_t count;
};
using Parts = std::vector<Part>;

struct Call {
    Parts inputs, outputs;
    Reduction reduction;
    int64_t width = 1;
    int root = 0;
    // Divisor of the sum; 1 for none.
    int64_t divisor = 1;
    Mark mark{};
    double deadline = 0;
    Patience* patience = nullptr;
};

class Rounds {
  public:
    Board board;

    Rounds(Word* words, char* stages, size_t stage_bytes, int rank, int size, bool crowded)
        : board(words, rank, size, crowded), rank_(rank), size_(size), stage_bytes_(stage_bytes), stages_(stages) {}

    Status barrier(Call& call) { return arrive(call, true); }

    // Compares what ranks are about to do, and what each rank sends with what its peer expects.
    Status pairs(Call& call, const std::vector<int64_t>& counts) {
        if (const Status status = arrive(call, true); status != Status::ok) return status;
        int64_t longest = 0;
        return longest_row(call, counts, longest);
    }

  protected:
    const int rank_, size_;
    const size_t stage_bytes_;
    Stores stores_;

    Status arrive(Call& call, bool first) {
        return board.arrive(first ? &call.mark : nullptr, call.deadline, *call.patience);
    }

    int next_half() const { return static_cast<int>((board.round() + 1) & 1); }
    char* stage_of(int of, int half) const { return stages_ + (2 * of + half) * stage_bytes_; }

    // Number of bytes per rank that fit together into a stage.
    int64_t piece_bytes(int64_t width) const {
        return static_cast<int64_t>(stage_bytes_) / size_ / width * width;
    }

    // Length of the next step of the rest; 0 if there is no rest.
    static size_t length_of(int64_t left, int64_t step) {
        return static_cast<size_t>(std::max<int64_t>(0, std::min(left, step)));
    }

    static void copy(char* to, const char* from, size_t nbytes) {
        if (nbytes && to != from) std::memmove(to, from, nbytes);
    }

    // Stages a piece for each other rank.
    void lay_pieces(const Call& call, char* stage, int64_t at, int64_t step) {
        for (int r = 0; r < size_; r++) {
            const Part& part = call.inputs[r];
            if (r != rank_) stores_.copy(stage + r * step, part.data + at, length_of(part.count * call.width - at, step));
        }
    }

    // The largest number of elements that any rank sends to another one, after comparing. Each rank publishes the
    // counts that it sends to each rank, and then those that it expects.
    Status longest_row(Call& call, const std::vector<int64_t>& counts, int64_t& longest) {
        const int half = next_half();
        std::memcpy(stage_of(rank_, half), counts.data(), counts.size() * sizeof counts[0]);
        if (const Status status = arrive(call, false); status != Status::ok) return status;
        longest = 0;
        bool fits = true;
        for (int a = 0; a < size_; a++) {
            const auto* gives = reinterpret_cast<const int64_t*>(stage_of(a, half));
            for (int b = 0; b < size_; b++) {
                const auto* expects = reinterpret_cast<const int64_t*>(stage_of(b, half)) + size_;
                fits = fits && gives[b] == expects[a];
                longest = std::max(longest, gives[b]);
            }
        }
        return fits ? Status::ok : Status::differs;
    }

  private:
    char* const stages_;
};

}  // namespace unisono
