// Collectives that move data between ranks, as bytes; and one entry point for all collectives.
#pragma once

#include "shm/reductions.hpp"

namespace unisono {

// As numbered in core/collective.py.
enum class Name { all_gather = 1, all_reduce, all_to_all, barrier, broadcast, gather, reduce, reduce_scatter, scatter };

class Collectives : public Reductions {
  public:
    using Reductions::Reductions;

    // Whether the tensors have the required lengths, and no written tensor overlaps another one.
    bool fits(Name name, const Call& call) const {
        const Parts &read = call.inputs, &written = call.outputs;
        const bool lists = name == Name::all_gather || name == Name::gather || name == Name::scatter ||
                           name == Name::reduce_scatter || name == Name::all_to_all;
        if (!lists) return true;
        const auto size = static_cast<size_t>(size_), rank = static_cast<size_t>(rank_);
        const bool here = rank_ == call.root;
        switch (name) {
            case Name::all_gather:
                if (written.size() != size || read.size() != 1 || read[0].count != written[rank].count) return false;
                break;
            case Name::gather:
                if (read.size() != 1 || written.size() != (here ? size : 0) || !all_are(written, read[0].count)) return false;
                break;
            case Name::scatter:
                if (written.size() != 1 || read.size() != (here ? size : 0) || !all_are(read, written[0].count)) return false;
                break;
            case Name::reduce_scatter:
                if (read.size() != size || written.size() != 1 || written[0].count != read[rank].count) return false;
                break;
            default:
                if (read.size() != size || written.size() != size || read[rank].count != written[rank].count) return false;
        }
        return apart(name, call);
    }

    // Runs a call on tensors that fit.
    Status run(Name name, Call& call) {
        const Status status = perform(name, call);
        if (status == Status::ok && call.divisor > 1 && !call.outputs.empty()) {
            const Part& part = call.outputs[0];
            call.reduction.divide(part.data, static_cast<size_t>(part.count), call.divisor);
        }
        return status;
    }

  private:
    Status perform(Name name, Call& call) {
        switch (name) {
            case Name::all_gather: return collect(call, true);
            case Name::all_reduce: return all_reduce(call);
            case Name::all_to_all: return all_to_all(call);
            case Name::barrier: return barrier(call);
            case Name::broadcast: return broadcast(call);
            case Name::gather: return collect(call, rank_ != call.root);
            case Name::reduce: return reduce(call);
            case Name::reduce_scatter: return reduce_scatter(call);
            case Name::scatter: return scatter(call);
        }
        return Status::refused;
    }

    static bool all_are(const Parts& parts, int64_t count) {
        return std::all_of(parts.begin(), parts.end(), [&](const Part& part) { return part.count == count; });
    }

    // Except for a rank's own entry, if it is the other tensor itself.
    bool apart(Name name, const Call& call) const {
        const bool moved = name != Name::reduce_scatter && name != Name::all_to_all;
        const auto end = [&](const Part& part) { return part.data + part.count * call.width; };
        const auto meet = [&](const Part& a, const Part& b) {
            return a.count && b.count && a.data < end(b) && b.data < end(a);
        };
        for (size_t n = 0; n < call.outputs.size(); n++) {
            for (size_t m = 0; m < n; m++)
                if (meet(call.outputs[n], call.outputs[m])) return false;
            for (size_t m = 0; m < call.inputs.size(); m++) {
                const size_t entry = name == Name::scatter ? m : n;
                const bool own =
                    moved && entry == static_cast<size_t>(rank_) && call.outputs[n].data == call.inputs[m].data;
                if (!own && meet(call.outputs[n], call.inputs[m])) return false;
            }
        }
        return true;
    }

    Status broadcast(Call& call) {
        const Part& part = call.outputs[0];
        const int64_t nbytes = part.count * call.width, step = static_cast<int64_t>(stage_bytes_);
        for (int64_t at = 0; at == 0 || at < nbytes; at += step) {
            char* stage = stage_of(call.root, next_half());
            const size_t length = length_of(nbytes - at, step);
            if (rank_ == call.root) stores_.copy(stage, part.data + at, length);
            if (const Status status = arrive(call, at == 0); status != Status::ok) return status;
            if (rank_ != call.root) copy(part.data + at, stage, length);
        }
        return Status::ok;
    }

    // Ranks with a tensor that others read stage it chunk by chunk; ranks with outputs copy the chunks out.
    Status collect(Call& call, bool shows) {
        const Part& given = call.inputs[0];
        const int64_t step = static_cast<int64_t>(stage_bytes_);
        int64_t longest = given.count;
        for (const Part& part : call.outputs) longest = std::max(longest, part.count);
        for (int64_t at = 0; at == 0 || at < longest * call.width; at += step) {
            const int half = next_half();
            if (shows)
                stores_.copy(stage_of(rank_, half), given.data + at, length_of(given.count * call.width - at, step));
            if (const Status status = arrive(call, at == 0); status != Status::ok) return status;
            for (int r = 0; r < static_cast<int>(call.outputs.size()); r++) {
                const Part& part = call.outputs[r];
                const char* from = r == rank_ ? given.data + at : stage_of(r, half);
                copy(part.data + at, from, length_of(part.count * call.width - at, step));
            }
        }
        return Status::ok;
    }

    Status scatter(Call& call) {
        const Part& part = call.outputs[0];
        const int64_t step = piece_bytes(call.width), nbytes = part.count * call.width;
        for (int64_t at = 0; at == 0 || at < nbytes; at += step) {
            char* stage = stage_of(call.root, next_half());
            if (rank_ == call.root) lay_pieces(call, stage, at, step);
            if (const Status status = arrive(call, at == 0); status != Status::ok) return status;
            const char* from = rank_ == call.root ? call.inputs[rank_].data + at : stage + rank_ * step;
            copy(part.data + at, from, length_of(nbytes - at, step));
        }
        return Status::ok;
    }

    // Rows may be uneven. If all rows of all ranks are equally long, the first round already has their first pieces.
    Status all_to_all(Call& call) {
        const int64_t step = piece_bytes(call.width), count = call.inputs[0].count;
        bool even = true;
        std::vector<int64_t> counts;
        for (const Parts* side : {&call.inputs, &call.outputs})
            for (const Part& part : *side) {
                counts.push_back(part.count);
                even = even && part.count == count;
            }
        const uint64_t level = even ? static_cast<uint64_t>(count) + 1 : 0;
        call.mark.words[3] = level;
        const int half = next_half();
        if (even) lay_pieces(call, stage_of(rank_, half), 0, step);
        if (const Status status = arrive(call, true); status != Status::ok) return status;
        for (int r = 0; r < size_; r++) even = even && board.extra(r) == level;
        if (even) {
            take_pieces(call, half, 0, step);
            return exchange(call, step, count * call.width);
        }
        int64_t longest = 0;
        if (const Status status = longest_row(call, counts, longest); status != Status::ok) return status;
        return exchange(call, 0, longest * call.width);
    }

    // Exchanges the pieces of all pairs of ranks, from byte `at` on.
    Status exchange(Call& call, int64_t at, int64_t nbytes) {
        const int64_t step = piece_bytes(call.width);
        for (; at < nbytes; at += step) {
            const int half = next_half();
            lay_pieces(call, stage_of(rank_, half), at, step);
            if (const Status status = arrive(call, false); status != Status::ok) return status;
            take_pieces(call, half, at, step);
        }
        return Status::ok;
    }

    void take_pieces(Call& call, int half, int64_t at, int64_t step) {
        for (int r = 0; r < size_; r++) {
            const Part& part = call.outputs[r];
            const char* from = r == rank_ ? call.inputs[r].data + at : stage_of(r, half) + rank_ * step;
            copy(part.data + at, from, length_of(part.count * call.width - at, step));
        }
    }
};

}  // namespace unisono
