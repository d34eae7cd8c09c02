// Collectives that move bytes between ranks without reducing them, and the entry point for all collectives in shared
// memory.
#pragma once

#include "shm/reductions.hpp"

namespace unisono {

class Collectives {
  public:
    StagedRounds rounds;
    Reductions reductions{rounds};

    Collectives(Word* words, char* stages, size_t stage_bytes, int rank, int size, bool oversubscribed)
        : rounds(words, stages, stage_bytes, rank, size, oversubscribed), rank_(rank), size_(size) {}

    // Runs a call whose tensors have the required lengths.
    Outcome run(CollectiveCall& call) {
        const Outcome outcome = dispatch(call);
        if (outcome.ok() && call.divisor > 1 && !call.outputs.empty()) {
            const Buffer& part = call.outputs[0];
            call.reduction.divide(part.data, static_cast<size_t>(part.count), call.divisor);
        }
        return outcome;
    }

  private:
    Outcome dispatch(CollectiveCall& call) {
        switch (call.type) {
            case OpType::all_gather: return gather_chunks(call, true);
            case OpType::all_reduce: return reductions.all_reduce(call);
            case OpType::all_to_all: return all_to_all(call);
            case OpType::barrier: return rounds.barrier(call);
            case OpType::broadcast: return broadcast(call);
            case OpType::gather: return gather_chunks(call, rank_ != call.root);
            case OpType::reduce: return reductions.reduce(call);
            case OpType::reduce_scatter: return reductions.reduce_scatter(call);
            case OpType::scatter: return scatter(call);
        }
        return Status::unsupported;
    }

    Outcome broadcast(CollectiveCall& call) {
        const Buffer& part = call.outputs[0];
        const int64_t nbytes = part.count * call.width, step = static_cast<int64_t>(rounds.stage_bytes);
        for (int64_t at = 0; at == 0 || at < nbytes; at += step) {
            char* stage = rounds.staging_buffer(call.root, rounds.next_stage());
            const size_t length = length_of(nbytes - at, step);
            if (rank_ == call.root) rounds.writer.copy(stage, part.data + at, length);
            if (const Outcome outcome = rounds.arrive_and_wait(call, at == 0); !outcome.ok()) return outcome;
            if (rank_ != call.root) copy(part.data + at, stage, length);
        }
        return Status::ok;
    }

    // If `stages` is set, this rank stages its tensor piece by piece. A rank that has outputs copies all ranks' pieces
    // into them.
    Outcome gather_chunks(CollectiveCall& call, bool stages) {
        const Buffer& input = call.inputs[0];
        const int64_t step = static_cast<int64_t>(rounds.stage_bytes);
        int64_t longest = input.count;
        for (const Buffer& part : call.outputs) longest = std::max(longest, part.count);
        for (int64_t at = 0; at == 0 || at < longest * call.width; at += step) {
            const int index = rounds.next_stage();
            const size_t length = length_of(input.count * call.width - at, step);
            if (stages) rounds.writer.copy(rounds.staging_buffer(rank_, index), input.data + at, length);
            if (const Outcome outcome = rounds.arrive_and_wait(call, at == 0); !outcome.ok()) return outcome;
            for (int r = 0; r < static_cast<int>(call.outputs.size()); r++) {
                const Buffer& part = call.outputs[r];
                const char* from = r == rank_ ? input.data + at : rounds.staging_buffer(r, index);
                copy(part.data + at, from, length_of(part.count * call.width - at, step));
            }
        }
        return Status::ok;
    }

    Outcome scatter(CollectiveCall& call) {
        const Buffer& part = call.outputs[0];
        const int64_t step = rounds.piece_bytes(call.width), nbytes = part.count * call.width;
        for (int64_t at = 0; at == 0 || at < nbytes; at += step) {
            char* stage = rounds.staging_buffer(call.root, rounds.next_stage());
            if (rank_ == call.root) rounds.stage_pieces(call, stage, at, step);
            if (const Outcome outcome = rounds.arrive_and_wait(call, at == 0); !outcome.ok()) return outcome;
            const char* from = rank_ == call.root ? call.inputs[rank_].data + at : stage + rank_ * step;
            copy(part.data + at, from, length_of(nbytes - at, step));
        }
        return Status::ok;
    }

    // Rows may differ in length. If all rows of all ranks are equally long, the round in which ranks compare their
    // calls also moves the rows' first pieces.
    Outcome all_to_all(CollectiveCall& call) {
        const int64_t step = rounds.piece_bytes(call.width), count = call.inputs[0].count;
        bool even = true;
        std::vector<int64_t> counts;
        for (const Buffers* side : {&call.inputs, &call.outputs})
            for (const Buffer& part : *side) {
                counts.push_back(part.count);
                even = even && part.count == count;
            }
        const uint64_t payload = even ? static_cast<uint64_t>(count) + 1 : 0;
        call.signature.words[3] = payload;
        const int index = rounds.next_stage();
        if (even) rounds.stage_pieces(call, rounds.staging_buffer(rank_, index), 0, step);
        if (const Outcome outcome = rounds.arrive_and_wait(call, true); !outcome.ok()) return outcome;
        for (int r = 0; r < size_; r++) even = even && rounds.shared_barrier.payload(r) == payload;
        if (even) {
            copy_out_pieces(call, index, 0, step);
            return exchange_pieces(call, step, count * call.width);
        }
        int64_t longest = 0;
        if (const Outcome outcome = rounds.compare_counts(call, counts, longest); !outcome.ok()) return outcome;
        return exchange_pieces(call, 0, longest * call.width);
    }

    // Exchanges the rows of all pairs of ranks from byte `at` on, one piece of each row per round.
    Outcome exchange_pieces(CollectiveCall& call, int64_t at, int64_t nbytes) {
        const int64_t step = rounds.piece_bytes(call.width);
        for (; at < nbytes; at += step) {
            const int index = rounds.next_stage();
            rounds.stage_pieces(call, rounds.staging_buffer(rank_, index), at, step);
            if (const Outcome outcome = rounds.arrive_and_wait(call, false); !outcome.ok()) return outcome;
            copy_out_pieces(call, index, at, step);
        }
        return Status::ok;
    }

    void copy_out_pieces(CollectiveCall& call, int index, int64_t at, int64_t step) {
        for (int r = 0; r < size_; r++) {
            const Buffer& part = call.outputs[r];
            const char* from = r == rank_ ? call.inputs[r].data + at : rounds.staging_buffer(r, index) + rank_ * step;
            copy(part.data + at, from, length_of(part.count * call.width - at, step));
        }
    }

    const int rank_, size_;
};

}  // namespace unisono
