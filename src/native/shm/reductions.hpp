// Reductions: for short messages each rank reads the data of all ranks (one shot); for long ones each rank reduces its
// share of a tile, which the others then copy (two shots). Contributions are combined in the order of ranks.
#pragma once

#include <mutex>
#include <utility>

#include "shm/chunks.hpp"

namespace unisono {

// Memory mapped by every rank, with a row for each rank. Tensors at the same place of each row are reduced in place.
struct Arena {
    uint64_t number;
    char* rows;
    int64_t stride;
};

class Reductions : public Rounds {
  public:
    Reductions(Word* words, char* stages, size_t stage_bytes, int rank, int size, bool crowded)
        : Rounds(words, stages, stage_bytes, rank, size, crowded),
          one_shot_bytes_(std::min(stage_bytes, size <= 2 ? size_t{1} << 20 : size_t{128} << 10)),
          rows_(static_cast<size_t>(size)) {}

    // Symmetric memory is about to be allocated on every rank: from now on ranks compare the places of tensors.
    void expect_arenas() { arenas_made_ = true; }
    // From any thread.
    void add_arena(const Arena& arena) {
        const std::lock_guard held(lock_);
        arenas_.push_back(arena);
    }
    void drop_arena(uint64_t number) {
        const std::lock_guard held(lock_);
        const auto gone = [&](const Arena& arena) { return arena.number == number; };
        arenas_.erase(std::remove_if(arenas_.begin(), arenas_.end(), gone), arenas_.end());
    }

    // Traffic, in operands: 3p - 1 for short messages, at most 7 - 5/p for long ones.
    Status all_reduce(Call& call) {
        const Part& part = call.outputs[0];
        const size_t nbytes = static_cast<size_t>(part.count * call.width);
        const bool is_short = nbytes <= one_shot_bytes_;
        if (size_ == 1) return Status::ok;
        if (call.divisor > 1 && call.reduction.divide_before) {
            call.reduction.divide_before(part.data, static_cast<size_t>(part.count), call.divisor);
            call.divisor = 1;
        }
        if (is_short && !(arenas_made_ && nbytes >= kInPlaceBytes))
            return one_shot(call, part, {.first = true, .shows = true, .reads = true});
        int64_t stride = 0;
        const uint64_t place = place_of(part.data, nbytes, stride), divides = call.divisor > 1 ? kDivides : 0;
        call.mark.words[3] = place | divides;
        if (!place && !is_short) lay_shares(call, part.data, tile_of(call, part.count));
        if (const Status status = arrive(call, true); status != Status::ok) return status;
        bool together = place != 0, all_staged = true, all_divide = true;
        for (int r = 0; r < size_; r++) {
            const uint64_t told = board.extra(r);
            together = together && (told & ~kDivides) == place;
            all_staged = all_staged && !(told & ~kDivides);
            all_divide = all_divide && (told & kDivides);
        }
        if (!together && is_short) return one_shot(call, part, {.first = false, .shows = true, .reads = true});
        // The rank that reduces a share divides it for all, unless a rank divides by itself: then each rank does.
        const int64_t divisor = std::exchange(call.divisor, all_divide ? 1 : call.divisor), shared = all_divide ? divisor : 1;
        if (together) return in_place(call, part, stride, shared);
        // If only some ranks' tensors are in shared memory, all use the stages, from the beginning.
        return tiles(call, part, shared, true, all_staged);
    }

    // The root alone reduces if the message is short or there are two ranks; otherwise as the long all_reduce.
    Status reduce(Call& call) {
        const Part& part = call.inputs[0];
        const bool here = rank_ == call.root;
        if (size_ == 1) return Status::ok;
        if (size_ > 2 && static_cast<size_t>(part.count * call.width) > one_shot_bytes_) {
            lay_shares(call, part.data, tile_of(call, part.count));
            if (const Status status = arrive(call, true); status != Status::ok) return status;
            return tiles(call, part, 1, here, true);
        }
        const int64_t step = static_cast<int64_t>(stage_bytes_) / call.width, divisor = call.divisor;
        for (int64_t n = 0; n == 0 || n < part.count; n += step) {
            const Part piece{part.data + n * call.width, std::min(step, part.count - n)};
            call.divisor = divisor;
            const Status status = one_shot(call, piece, {.first = n == 0, .shows = !here, .reads = here});
            if (status != Status::ok) return status;
        }
        return Status::ok;
    }

    // Each round holds an equal piece for every rank; a rank reduces the pieces that all staged for it.
    Status reduce_scatter(Call& call) {
        const Part& target = call.outputs[0];
        const int64_t step = piece_bytes(call.width);
        int64_t longest = 1;
        for (const Part& part : call.inputs) longest = std::max(longest, part.count);
        for (int64_t at = 0; at < longest * call.width; at += step) {
            const int half = next_half();
            lay_pieces(call, stage_of(rank_, half), at, step);
            if (const Status status = arrive(call, at == 0); status != Status::ok) return status;
            const size_t nbytes = length_of(target.count * call.width - at, step);
            for (int r = 0; r < size_; r++)
                rows_[r] = r == rank_ ? call.inputs[r].data + at : stage_of(r, half) + rank_ * step;
            stores_.reduce(call.reduction, rows_, nbytes / call.width, call.divisor, {target.data + at}, nullptr);
        }
        call.divisor = 1;
        return Status::ok;
    }

  private:
    struct Shot {
        bool first, shows, reads;
    };

    // Once arenas have been allocated, reducing other tensors of at least this size costs one more round.
    static constexpr size_t kInPlaceBytes = 64 << 10;
    // Sent with the place: this rank's call expects the average in memory, and does not divide the sum itself.
    static constexpr uint64_t kDivides = 1ull << 63;
    static constexpr int kPlaceBits = 44;

    // The same number on each rank for the same offset in an arena; 0 elsewhere.
    uint64_t place_of(const char* data, size_t nbytes, int64_t& stride) {
        const std::lock_guard held(lock_);
        for (const Arena& arena : arenas_) {
            const char* row = arena.rows + rank_ * arena.stride;
            if (data < row || data + nbytes > row + arena.stride) continue;
            stride = arena.stride;
            return arena.number << kPlaceBits | static_cast<uint64_t>(data - row + 1);
        }
        return 0;
    }

    // Some ranks stage their tensor; some read all stages, and their own tensor in place.
    Status one_shot(Call& call, const Part& part, Shot shot) {
        const int half = next_half();
        if (shot.shows) stores_.copy(stage_of(rank_, half), part.data, static_cast<size_t>(part.count * call.width));
        if (const Status status = arrive(call, shot.first); status != Status::ok) return status;
        if (shot.reads) {
            for (int r = 0; r < size_; r++) rows_[r] = r == rank_ ? part.data : stage_of(r, half);
            const auto count = static_cast<size_t>(part.count);
            stores_.reduce(call.reduction, rows_, count, call.divisor, {part.data}, nullptr);
            call.divisor = 1;
        }
        return Status::ok;
    }

    // Number of elements of the first tile of `count` elements.
    int64_t tile_of(const Call& call, int64_t count) const {
        return std::min(count, static_cast<int64_t>(stage_bytes_) / call.width);
    }

    // First element of a rank's share of `count` elements.
    int64_t edge(int of, int64_t count) const { return of * count / size_; }

    // Stages a tile for the next round: all but this rank's share, which is read in place.
    void lay_shares(const Call& call, const char* data, int64_t count) {
        char* stage = stage_of(rank_, next_half());
        const int64_t low = edge(rank_, count) * call.width, high = edge(rank_ + 1, count) * call.width;
        stores_.copy(stage, data, static_cast<size_t>(low));
        stores_.copy(stage + high, data + high, static_cast<size_t>(count * call.width - high));
    }

    // Two shots per tile. While waiting for the others' shares, a rank stages the next tile in the other stage.
    Status tiles(Call& call, const Part& part, int64_t divisor, bool everywhere, bool arrived) {
        bool laid = arrived;
        for (int64_t n = 0, count; n < part.count; n += count) {
            char* data = part.data + n * call.width;
            count = tile_of(call, part.count - n);
            if (!laid) lay_shares(call, data, count);
            if (!arrived)
                if (const Status status = arrive(call, false); status != Status::ok) return status;
            const int half = static_cast<int>(board.round() & 1);
            const int64_t low = edge(rank_, count), own = edge(rank_ + 1, count) - low;
            for (int r = 0; r < size_; r++) rows_[r] = (r == rank_ ? data : stage_of(r, half)) + low * call.width;
            std::vector<char*> targets;
            if (everywhere) targets.push_back(data + low * call.width);
            char* shown = stage_of(rank_, half) + low * call.width;
            stores_.reduce(call.reduction, rows_, static_cast<size_t>(own), divisor, targets, shown);
            const uint64_t number = board.tell_reduced();
            const int64_t next = tile_of(call, part.count - n - count);
            if (next) lay_shares(call, data + count * call.width, next);
            laid = next != 0, arrived = false;
            const Status status = board.wait_for_all(kReduced, number, call.deadline, *call.patience);
            if (status != Status::ok) return status;
            for (int r = 0; everywhere && r < size_; r++) {
                const int64_t from = edge(r, count) * call.width, to = edge(r + 1, count) * call.width;
                if (r != rank_) copy(data + from, stage_of(r, half) + from, static_cast<size_t>(to - from));
            }
        }
        return Status::ok;
    }

    // Each rank reduces its share of the columns into all rows.
    Status in_place(Call& call, const Part& part, int64_t stride, int64_t divisor) {
        const int64_t low = edge(rank_, part.count), own = edge(rank_ + 1, part.count) - low;
        std::vector<char*> targets;
        for (int r = 0; r < size_; r++) {
            targets.push_back(part.data + (r - rank_) * stride + low * call.width);
            rows_[r] = targets.back();
        }
        stores_.reduce(call.reduction, rows_, static_cast<size_t>(own), divisor, targets, nullptr);
        return board.wait_for_all(kReduced, board.tell_reduced(), call.deadline, *call.patience);
    }

    const size_t one_shot_bytes_;
    std::vector<const char*> rows_;
    std::mutex lock_;
    std::vector<Arena> arenas_;
    bool arenas_made_ = false;
};

}  // namespace unisono
