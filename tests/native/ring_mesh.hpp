// Memory of rings between ranks that are threads.
#pragma once

#include <memory>
#include <vector>

#include "shm/ring_network.hpp"

namespace unisono {

struct RingMesh {
    explicit RingMesh(int size)
        : size(size), words_(static_cast<size_t>(size * kWordsPerRank)),
          lines_(RingMemory::nbytes(size, ByteRing::kBytes) / sizeof(Line)) {
        for (int rank = 0; rank < size; rank++)
            barriers_.push_back(std::make_unique<SharedBarrier>(words_.data(), rank, size, true));
    }

    SharedBarrier& barrier_of(int rank) const { return *barriers_[static_cast<size_t>(rank)]; }
    char* rings() const { return const_cast<char*>(lines_.data()->bytes); }

    const int size;

  private:
    struct alignas(64) Line {
        char bytes[64]{};
    };

    std::vector<Word> words_;
    std::vector<Line> lines_;
    std::vector<std::unique_ptr<SharedBarrier>> barriers_;
};

}  // namespace unisono
