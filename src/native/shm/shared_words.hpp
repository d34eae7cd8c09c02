// Words of shared memory for Python.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstdint>

#include "shm/barrier.hpp"

namespace unisono {

// Words of shared memory by which ranks synchronize in Python: see `words_of` in transports/shm/segment.py. Processors
// may reorder plain accesses, and those of Python are plain. The buffer keeps the memory mapped.
class SharedWords {
  public:
    explicit SharedWords(nanobind::handle memory) {
        if (PyObject_GetBuffer(memory.ptr(), &buffer_, PyBUF_WRITABLE)) throw nanobind::python_error();
    }
    ~SharedWords() { PyBuffer_Release(&buffer_); }
    SharedWords(const SharedWords&) = delete;

    uint64_t load(size_t index) const { return at(index).load(std::memory_order_seq_cst); }
    void store(size_t index, uint64_t value) { at(index).store(value, std::memory_order_seq_cst); }

  private:
    Word& at(size_t index) const {
        if (index >= static_cast<size_t>(buffer_.len) / sizeof(Word)) throw nanobind::index_error();
        return static_cast<Word*>(buffer_.buf)[index];
    }

    Py_buffer buffer_;
};

}  // namespace unisono
