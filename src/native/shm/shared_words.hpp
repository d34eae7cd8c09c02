// Atomic access to words of shared memory from Python.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstdint>

#include "python_memory.hpp"
#include "shm/barrier.hpp"
#include "system.hpp"

namespace unisono {

// Words of shared memory that Python code uses for synchronization. Plain accesses from Python are not enough, because
// processors may reorder them. A rank that loads a new value also sees everything that the writer of this value stored
// earlier. A rank's reads are complete before its next `store` becomes visible.
class SharedWords {
  public:
    explicit SharedWords(nanobind::handle memory) : memory_(memory, PyBUF_WRITABLE) {}

    uint64_t load(size_t index) const { return at(index).load(std::memory_order_seq_cst); }
    void store(size_t index, uint64_t value) { at(index).store(value, std::memory_order_seq_cst); }

    // Sleeps until `wake` is called for this word, or the timeout passes. Returns immediately if the lower half of the
    // word differs from `expected`.
    void wait(size_t index, uint64_t expected, double timeout_s) const {
        const Word& word = at(index);
        const nanobind::gil_scoped_release released;
        futex_wait(&word, static_cast<uint32_t>(expected), static_cast<long>(timeout_s * 1e9));
    }
    void wake(size_t index) const { futex_wake(&at(index)); }

  private:
    Word& at(size_t index) const {
        if (index >= memory_.nbytes() / sizeof(Word)) throw nanobind::index_error();
        return reinterpret_cast<Word*>(memory_.begin())[index];
    }

    const PythonMemory memory_;
};

}  // namespace unisono
