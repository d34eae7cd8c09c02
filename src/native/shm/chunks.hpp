// What collectives in shared memory are made of. In a round each rank lays its part ready in one of its two stages, all
// arrive, and each rank reads what it needs. The stages are used in turn, so that one wait a round is enough: a rank that
// has arrived in a round has finished reading what was laid ready for the one before.
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
    // By which the sum is divided; 1 for none.
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

    // Compares what ranks are about to do, and what each gives another one with what that one expects.
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

    // Bytes for each rank that fit into a stage together.
    int64_t piece_bytes(int64_t width) const {
        return static_cast<int64_t>(stage_bytes_) / size_ / width * width;
    }

    // Of what is left, so much as one step takes; 0 if nothing is.
    static size_t length_of(int64_t left, int64_t step) {
        return static_cast<size_t>(std::max<int64_t>(0, std::min(left, step)));
    }

    static void copy(char* to, const char* from, size_t nbytes) {
        if (nbytes && to != from) std::memmove(to, from, nbytes);
    }

    // For each other rank a piece of what is for that one.
    void lay_pieces(const Call& call, char* stage, int64_t at, int64_t step) {
        for (int r = 0; r < size_; r++) {
            const Part& part = call.inputs[r];
            if (r != rank_) stores_.copy(stage + r * step, part.data + at, length_of(part.count * call.width - at, step));
        }
    }

    // The most elements that any rank gives another one, once that was compared. Each rank says how many elements it gives
    // each one, and then how many it expects.
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
