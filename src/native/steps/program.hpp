// An algorithm's steps on one rank, decoded from the integers that its file in collectives/algorithms produces.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

namespace unisono {

// A message to or from another rank: one or more runs of consecutive chunks.
struct Move {
    int peer;
    std::vector<std::pair<int, int>> runs;
    // Whether a received message can be reduced as it arrives: true unless one of its chunks is also sent in the same
    // step, or belongs to another message received in that step.
    bool streams = false;

    template <class Function>
    void for_each_chunk(const Function& function) const {
        for (const auto& [start, stop] : runs)
            for (int chunk = start; chunk < stop; chunk++) function(chunk);
    }
};

struct Step {
    bool reduces;
    std::vector<Move> sends, receives;
};

class Program {
  public:
    // `numbers` describes the steps, one after another. A step is encoded as a flag (1 if the step reduces, 0 if not),
    // its number of sends, its number of receives, and its messages. A message is encoded as its peer, its number of
    // runs and, for each run, the first chunk and the chunk after the last. Chunk numbers are less than `chunks`, and
    // peers less than `size`. `label` identifies the algorithm when ranks compare their calls.
    Program(const std::vector<int64_t>& numbers, int chunks, int size, uint64_t label)
        : chunks(chunks), label(label), frames(static_cast<size_t>(size)) {
        size_t at = 0;
        const auto next = [&](int64_t limit) {
            if (at == numbers.size() || numbers[at] < 0 || numbers[at] > limit)
                throw std::invalid_argument("these are no steps of an algorithm");
            return static_cast<int>(numbers[at++]);
        };
        const auto moves = [&](int count) {
            std::vector<Move> found;
            for (int n = 0; n < count; n++) {
                Move move{next(size - 1), {}};
                for (int runs = next(INT32_MAX); runs > 0; runs--) {
                    const int start = next(chunks), stop = next(chunks);
                    move.runs.emplace_back(start, stop);
                }
                found.push_back(std::move(move));
            }
            return found;
        };
        while (at < numbers.size()) {
            Step step;
            step.reduces = next(1);
            const int sends = next(INT32_MAX), receives = next(INT32_MAX);
            step.sends = moves(sends);
            step.receives = moves(receives);
            mark_streams(step);
            for (const Move& move : step.receives) frames[static_cast<size_t>(move.peer)]++;
            steps.push_back(std::move(step));
        }
    }

    const int chunks;
    const uint64_t label;
    std::vector<Step> steps;
    // For each rank, the number of messages that this rank receives from it.
    std::vector<int64_t> frames;

  private:
    void mark_streams(Step& step) const {
        std::vector<int> uses(static_cast<size_t>(chunks));
        const auto count = [&](int chunk) { uses[static_cast<size_t>(chunk)]++; };
        for (const Move& move : step.sends) move.for_each_chunk(count);
        for (const Move& move : step.receives) move.for_each_chunk(count);
        for (Move& move : step.receives) {
            move.streams = true;
            move.for_each_chunk([&](int chunk) { move.streams &= uses[static_cast<size_t>(chunk)] == 1; });
        }
    }
};

}  // namespace unisono
