// Access to the memory of Python objects.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace unisono {

// A Python object's memory, which is neither moved nor freed while the PythonMemory exists.
class PythonMemory {
  public:
    PythonMemory(nanobind::handle object, int flags, uint64_t least = 0) {
        if (PyObject_GetBuffer(object.ptr(), &buffer_, flags)) throw nanobind::python_error();
        if (nbytes() >= least) return;
        PyBuffer_Release(&buffer_);
        throw nanobind::value_error("this memory is too short");
    }
    ~PythonMemory() { PyBuffer_Release(&buffer_); }
    PythonMemory(const PythonMemory&) = delete;

    char* begin() const { return static_cast<char*>(buffer_.buf); }
    uint64_t nbytes() const { return static_cast<uint64_t>(buffer_.len); }

    // Returns a memoryview of `nbytes` bytes, beginning at byte `from`.
    nanobind::object part(uint64_t from, uint64_t nbytes) const {
        const auto whole = nanobind::steal(PyMemoryView_FromObject(buffer_.obj));
        const auto start = static_cast<Py_ssize_t>(from), stop = static_cast<Py_ssize_t>(from + nbytes);
        return whole[nanobind::slice(start, stop)];
    }

  private:
    Py_buffer buffer_;
};

}  // namespace unisono
