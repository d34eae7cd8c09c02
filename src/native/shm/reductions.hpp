// Reductions in shared memory. For short messages, each rank reads and reduces the data of all ranks (one shot). For
// long messages, each rank reduces its share of a tile, and the other ranks copy the result (two shots). Contributions
// are combined in a balanced tree over the ranks.
#pragma once

#include <mutex>
#include <utility>

#include "shm/staging.hpp"

namespace unisono {

// A segment of symmetric memory: every rank maps it, and it has one row per rank. An all_reduce of tensors that have
// the same offset in each row works in place, without staging.
struct Segment {
    uint64_t number;
    char* rows;
    int64_t stride;
};

class Reductions {
  public:
    explicit Reductions(StagedRounds& rounds)
        : rounds_(rounds),
          rank_(rounds.rank),
          size_(rounds.size),
          one_shot_bytes_(std::min(rounds.stage_bytes, size_ <= 2 ? size_t{1} << 20 : size_t{128} << 10)),
          rows_(static_cast<size_t>(size_)) {}

    // From now on, ranks also compare the offsets of their tensors in symmetric memory in short all_reduces of at least
    // kInPlaceBytes. Must be called on every rank before the first segment is allocated.
    void expect_symmetric_memory() { has_symmetric_memory_ = true; }
    // `add_segment` and `remove_segment` are thread-safe.
    void add_segment(const Segment& segment) {
        const std::lock_guard held(lock_);
        segments_.push_back(segment);
    }
    void remove_segment(uint64_t number) {
        const std::lock_guard held(lock_);
        const auto matches = [&](const Segment& segment) { return segment.number == number; };
        segments_.erase(std::remove_if(segments_.begin(), segments_.end(), matches), segments_.end());
    }

    // Memory traffic per rank, in multiples of the message size, for p ranks: 3p - 1 for short messages, at most 7 -
    // 5/p for long messages.
    Outcome all_reduce(CollectiveCall& call) {
        const Buffer& part = call.outputs[0];
        const size_t nbytes = static_cast<size_t>(part.count * call.width);
        const bool is_short = nbytes <= one_shot_bytes_;
        if (size_ == 1) return Status::ok;
        if (call.divisor > 1 && call.reduction.divide_before) {
            call.reduction.divide_before(part.data, static_cast<size_t>(part.count), call.divisor);
            call.divisor = 1;
        }
        if (is_short && !(has_symmetric_memory_ && nbytes >= kInPlaceBytes))
            return one_shot(call, part, {.first = true, .stages = true, .reads = true});
        int64_t stride = 0;
        const uint64_t offset = symmetric_offset(part.data, nbytes, stride);
        const uint64_t averages = call.divisor > 1 ? kAverages : 0;
        call.signature.words[3] = offset | averages;
        if (!offset && !is_short) stage_shares(call, part.data, tile_count(call, part.count));
        if (const Outcome outcome = rounds_.arrive_and_wait(call, true); !outcome.ok()) return outcome;
        bool in_segment = offset != 0, all_staged = true, all_divide = true;
        for (int r = 0; r < size_; r++) {
            const uint64_t payload = rounds_.shared_barrier.payload(r);
            in_segment = in_segment && (payload & ~kAverages) == offset;
            all_staged = all_staged && !(payload & ~kAverages);
            all_divide = all_divide && (payload & kAverages);
        }
        if (!in_segment && is_short) return one_shot(call, part, {.first = false, .stages = true, .reads = true});
        // The rank that reduces a share also divides it, for all ranks. If some rank has not set kAverages, each rank
        // divides its own result instead.
        const int64_t divisor = std::exchange(call.divisor, all_divide ? 1 : call.divisor);
        const int64_t shared_divisor = all_divide ? divisor : 1;
        if (in_segment) return in_place(call, part, stride, shared_divisor);
        // If only some ranks' tensors are in symmetric memory, all ranks use the staging buffers, and stage their first
        // tile again.
        return two_shot(call, part, shared_divisor, true, all_staged);
    }

    // Only the root reduces if the message is short or there are two ranks; otherwise every rank reduces a share, as in
    // a long all_reduce.
    Outcome reduce(CollectiveCall& call) {
        const Buffer& part = call.inputs[0];
        const bool is_root = rank_ == call.root;
        if (size_ == 1) return Status::ok;
        if (size_ > 2 && static_cast<size_t>(part.count * call.width) > one_shot_bytes_) {
            stage_shares(call, part.data, tile_count(call, part.count));
            if (const Outcome outcome = rounds_.arrive_and_wait(call, true); !outcome.ok()) return outcome;
            return two_shot(call, part, 1, is_root, true);
        }
        const int64_t step = static_cast<int64_t>(rounds_.stage_bytes) / call.width, divisor = call.divisor;
        for (int64_t n = 0; n == 0 || n < part.count; n += step) {
            const Buffer piece{part.data + n * call.width, std::min(step, part.count - n)};
            call.divisor = divisor;
            const Outcome outcome = one_shot(call, piece, {.first = n == 0, .stages = !is_root, .reads = is_root});
            if (!outcome.ok()) return outcome;
        }
        return Status::ok;
    }

    // In each round, every rank stages a piece of equal size for each other rank, and reduces the pieces that the other
    // ranks have staged for it.
    Outcome reduce_scatter(CollectiveCall& call) {
        const Buffer& target = call.outputs[0];
        const int64_t step = rounds_.piece_bytes(call.width);
        int64_t longest = 1;
        for (const Buffer& part : call.inputs) longest = std::max(longest, part.count);
        for (int64_t at = 0; at < longest * call.width; at += step) {
            const int index = rounds_.next_stage();
            rounds_.stage_pieces(call, rounds_.staging_buffer(rank_, index), at, step);
            if (const Outcome outcome = rounds_.arrive_and_wait(call, at == 0); !outcome.ok()) return outcome;
            const size_t nbytes = length_of(target.count * call.width - at, step);
            for (int r = 0; r < size_; r++)
                rows_[r] = r == rank_ ? call.inputs[r].data + at : rounds_.staging_buffer(r, index) + rank_ * step;
            const size_t count = nbytes / call.width;
            rounds_.writer.reduce(call.reduction, rows_, count, call.divisor, {target.data + at}, nullptr);
        }
        call.divisor = 1;
        return Status::ok;
    }

  private:
    struct OneShotRole {
        bool first, stages, reads;
    };

    // Size of the smallest tensor that is reduced in place. Once symmetric memory is allocated, a tensor of at least
    // this size needs one more round if it is not in symmetric memory.
    static constexpr size_t kInPlaceBytes = 64 << 10;
    // Flag in the payload: this rank's result must be divided. If all ranks set the flag, the rank that reduces a share
    // also divides it.
    static constexpr uint64_t kAverages = 1ull << 63;
    static constexpr int kOffsetBits = 44;

    // A number that encodes a tensor's segment and its offset in this rank's row, for comparison with other ranks; 0 if
    // the tensor is not in a segment.
    uint64_t symmetric_offset(const char* data, size_t nbytes, int64_t& stride) {
        const std::lock_guard held(lock_);
        for (const Segment& segment : segments_) {
            const char* row = segment.rows + rank_ * segment.stride;
            if (data < row || data + nbytes > row + segment.stride) continue;
            stride = segment.stride;
            return segment.number << kOffsetBits | static_cast<uint64_t>(data - row + 1);
        }
        return 0;
    }

    // Each rank with `role.stages` stages its tensor. Each rank with `role.reads` reads its own tensor in place, and
    // reduces it together with the other ranks' staged tensors.
    Outcome one_shot(CollectiveCall& call, const Buffer& part, OneShotRole role) {
        const int index = rounds_.next_stage();
        const auto nbytes = static_cast<size_t>(part.count * call.width);
        if (role.stages) rounds_.writer.copy(rounds_.staging_buffer(rank_, index), part.data, nbytes);
        if (const Outcome outcome = rounds_.arrive_and_wait(call, role.first); !outcome.ok()) return outcome;
        if (role.reads) {
            for (int r = 0; r < size_; r++) rows_[r] = r == rank_ ? part.data : rounds_.staging_buffer(r, index);
            const auto count = static_cast<size_t>(part.count);
            rounds_.writer.reduce(call.reduction, rows_, count, call.divisor, {part.data}, nullptr);
            call.divisor = 1;
        }
        return Status::ok;
    }

    // Number of elements in the first tile of a tensor that has `count` elements.
    int64_t tile_count(const CollectiveCall& call, int64_t count) const {
        return std::min(count, static_cast<int64_t>(rounds_.stage_bytes) / call.width);
    }

    // First element of a rank's share of `count` elements.
    int64_t share_begin(int rank, int64_t count) const { return rank * count / size_; }

    // Stages a tile for the next round, except for this rank's share, which this rank reads in place.
    void stage_shares(const CollectiveCall& call, const char* data, int64_t count) {
        char* stage = rounds_.staging_buffer(rank_, rounds_.next_stage());
        const int64_t low = share_begin(rank_, count) * call.width, high = share_begin(rank_ + 1, count) * call.width;
        rounds_.writer.copy(stage, data, static_cast<size_t>(low));
        rounds_.writer.copy(stage + high, data + high, static_cast<size_t>(count * call.width - high));
    }

    // Reduces tile by tile, in two shots per tile. While other ranks reduce their shares of a tile, this rank stages
    // the next tile in its other buffer.
    Outcome two_shot(CollectiveCall& call, const Buffer& part, int64_t divisor, bool to_all, bool has_arrived) {
        bool staged = has_arrived;
        for (int64_t n = 0, count; n < part.count; n += count) {
            char* data = part.data + n * call.width;
            count = tile_count(call, part.count - n);
            if (!staged) stage_shares(call, data, count);
            if (!has_arrived)
                if (const Outcome outcome = rounds_.arrive_and_wait(call, false); !outcome.ok()) return outcome;
            const int index = static_cast<int>(rounds_.shared_barrier.round() & 1);
            const int64_t low = share_begin(rank_, count), share = share_begin(rank_ + 1, count) - low;
            for (int r = 0; r < size_; r++)
                rows_[r] = (r == rank_ ? data : rounds_.staging_buffer(r, index)) + low * call.width;
            std::vector<char*> targets;
            if (to_all) targets.push_back(data + low * call.width);
            char* shared_target = rounds_.staging_buffer(rank_, index) + low * call.width;
            rounds_.writer.reduce(call.reduction, rows_, static_cast<size_t>(share), divisor, targets, shared_target);
            const uint64_t number = rounds_.shared_barrier.publish_reduced();
            const int64_t next = tile_count(call, part.count - n - count);
            if (next) stage_shares(call, data + count * call.width, next);
            staged = next != 0, has_arrived = false;
            const Outcome outcome = wait_for_reduced(call, number);
            if (!outcome.ok()) return outcome;
            for (int r = 0; to_all && r < size_; r++) {
                const int64_t from = share_begin(r, count) * call.width, to = share_begin(r + 1, count) * call.width;
                const char* stage = rounds_.staging_buffer(r, index);
                if (r != rank_) copy(data + from, stage + from, static_cast<size_t>(to - from));
            }
        }
        return Status::ok;
    }

    // Each rank reduces its share of the elements, and writes the result to all ranks' rows.
    Outcome in_place(CollectiveCall& call, const Buffer& part, int64_t stride, int64_t divisor) {
        const int64_t low = share_begin(rank_, part.count), share = share_begin(rank_ + 1, part.count) - low;
        std::vector<char*> targets;
        for (int r = 0; r < size_; r++) {
            targets.push_back(part.data + (r - rank_) * stride + low * call.width);
            rows_[r] = targets.back();
        }
        rounds_.writer.reduce(call.reduction, rows_, static_cast<size_t>(share), divisor, targets, nullptr);
        return wait_for_reduced(call, rounds_.shared_barrier.publish_reduced());
    }

    // Waits until every rank has reduced its share of a tile.
    Outcome wait_for_reduced(const CollectiveCall& call, uint64_t number) {
        return rounds_.shared_barrier.wait_for_all(kReduced, number, call.deadline, *call.callbacks);
    }

    StagedRounds& rounds_;
    const int rank_, size_;
    const size_t one_shot_bytes_;
    std::vector<const char*> rows_;
    std::mutex lock_;
    std::vector<Segment> segments_;
    bool has_symmetric_memory_ = false;
};

}  // namespace unisono
