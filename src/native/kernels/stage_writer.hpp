// Copies and reductions that write to memory that other ranks read.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/reduce_kernels.hpp"
#include "kernels/platform.hpp"
#include "system.hpp"

namespace unisono {

// Chooses between ordinary and non-temporal stores. If the reader's core shares no cache with this one, ordinary stores
// to cache lines that the reader has read take ten times as long as non-temporal stores. If the writer's and the
// reader's cores share a cache, non-temporal stores cost the reader more than they save the writer. The operating
// system moves ranks from core to core, so each rank keeps timing its copies.
class StageWriter {
  public:
    void copy(char* to, const char* from, size_t nbytes) {
        if (nbytes < kMinTimedBytes) {
            if (nbytes) std::memcpy(to, from, nbytes);
            return;
        }
        const unsigned count = ++count_;
        // Try the currently slower kind of store at the 1st, 2nd, 4th, 8th, ... copy, and at every 256th copy.
        const bool probe = count % kProbeInterval == 0 || (count & (count - 1)) == 0;
        const bool non_temporal = non_temporal_is_faster() != probe;
        double& cost = non_temporal ? non_temporal_s_ : temporal_s_;
        const double start = monotonic_s();
        (non_temporal ? copy_non_temporal : copy_temporal)(to, from, nbytes);
        const double measured = (monotonic_s() - start) / static_cast<double>(nbytes);
        // Increase the recorded cost at most twofold, because the scheduler may have interrupted this copy.
        cost = cost > 0 && measured > 2 * cost ? 2 * cost : measured;
    }

    // Reduces rows in a balanced binary tree, block by block. Writes the result to all `targets`, which may include
    // some of the rows. Unless `shared_target` is null, also writes the result there, where other ranks read it.
    // Divides the result by `divisor` if that is not 1.
    void reduce(const Reduction& reduction, const std::vector<const char*>& rows, size_t count, int64_t divisor,
                const std::vector<char*>& targets, char* shared_target) const {
        alignas(64) char blocks[kMaxDepth * kBlockBytes];
        const size_t step = kBlockBytes / reduction.width;
        const bool non_temporal = non_temporal_is_faster();
        const bool direct = !shared_target && can_accumulate_in_place(rows, targets);
        for (size_t n = 0; n < count; n += step) {
            const size_t length = std::min(step, count - n);
            const size_t at = n * reduction.width, nbytes = length * reduction.width;
            char* sum = direct ? targets[0] + at : blocks;
            if (rows.size() == 1) std::memmove(sum, rows[0] + at, nbytes);
            reduce_tree(reduction, rows.data(), rows.size(), at, length, sum, blocks + kBlockBytes);
            if (divisor != 1) reduction.divide(sum, length, divisor);
            for (size_t t = direct; t < targets.size(); t++) std::memcpy(targets[t] + at, sum, nbytes);
            if (shared_target) (non_temporal ? copy_non_temporal : copy_temporal)(shared_target + at, sum, nbytes);
        }
    }

  private:
    static constexpr size_t kMinTimedBytes = 1 << 12;
    static constexpr double kSlowdown = 3;
    static constexpr unsigned kProbeInterval = 256;
    // Number of blocks: enough for a reduction tree over any number of ranks.
    static constexpr size_t kMaxDepth = 16;

    // Reduces a block of all rows into `to`, and returns `to`. If there is only one row, returns that row's block
    // without copying it. With an odd number of rows, the first half has one more row than the second half, as in
    // collectives/algorithms/algorithm.py. `spare` has a block for each level of the tree below the root.
    static const char* reduce_tree(const Reduction& reduction, const char* const* rows, size_t count, size_t at,
                                   size_t length, char* to, char* spare) {
        if (count == 1) return rows[0] + at;
        const size_t half = (count + 1) / 2;
        const char* low = reduce_tree(reduction, rows, half, at, length, to, spare);
        const char* high = reduce_tree(reduction, rows + half, count - half, at, length, spare, spare + kBlockBytes);
        reduction.kernel(low, high, to, length);
        return to;
    }

    // Whether partial sums can be written to the first target. If the first target is also the third row or a later
    // row, partial sums would overwrite this row before the tree reads it.
    static bool can_accumulate_in_place(const std::vector<const char*>& rows, const std::vector<char*>& targets) {
        if (targets.empty()) return false;
        return rows.size() < 3 || std::find(rows.begin() + 2, rows.end(), targets[0]) == rows.end();
    }
    static void copy_temporal(char* to, const char* from, size_t nbytes) { std::memcpy(to, from, nbytes); }
    bool non_temporal_is_faster() const { return temporal_s_ > kSlowdown * non_temporal_s_; }

    double temporal_s_ = 0, non_temporal_s_ = 0;
    unsigned count_ = 0;
};

}  // namespace unisono
