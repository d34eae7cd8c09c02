// Python bindings of the native core: `unisono._native`. Python checks the tensors of a call, and passes addresses.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <optional>
#include <string>
#include <utility>

#include "shm/collectives.hpp"
#include "gradient_copy.hpp"
#include "shm/p2p_ring.hpp"
#include "shm/shared_words.hpp"

namespace nb = nanobind;

namespace unisono {
namespace {

// From this length on, other threads run during the whole call.
constexpr int64_t kLongBytes = 64 << 10;

// Lets other threads run during long waits and copies, and ends waits for signals.
class PythonWaitCallbacks : public WaitCallbacks {
  public:
    ~PythonWaitCallbacks() override {
        if (saved_) PyEval_RestoreThread(saved_);
    }
    void before_sleep() override {
        if (!saved_) saved_ = PyEval_SaveThread();
    }
    bool interrupted() override {
        PyEval_RestoreThread(saved_);
        const bool raised = PyErr_CheckSignals() != 0;
        saved_ = PyEval_SaveThread();
        return raised;
    }

  private:
    PyThreadState* saved_ = nullptr;
};

// The first word of a signature of a non-native call.
constexpr uint64_t kGeneralCall = uint64_t{0xFF} << 56;

char* pointer(uintptr_t address) { return reinterpret_cast<char*>(address); }

// As in types.py: the number of an operation is its index there, from 1 on; an average is a divided sum.
constexpr int kAverage = 2;
constexpr std::optional<ReduceOp> kReduceOps[] = {
    std::nullopt,   ReduceOp::sum, ReduceOp::sum,  ReduceOp::product, ReduceOp::min,
    ReduceOp::max,  ReduceOp::band, ReduceOp::bor, ReduceOp::bxor};

// Properties of a dtype. Its number is its index in a list common to all ranks.
struct DType {
    int64_t width = 1;
    std::array<Reduction, std::size(kReduceOps)> reductions{};

    DType() = default;
    DType(const std::string& name, int64_t width) : width(width) {
        for (size_t n = 0; n < std::size(kReduceOps); n++)
            if (kReduceOps[n]) reductions[n] = reduction_of(name, *kReduceOps[n]);
    }
};

class Core {
  public:
    Core(uintptr_t words, uintptr_t stages, uintptr_t rings, int64_t stage_bytes, int rank, int size,
         bool oversubscribed, const std::vector<std::pair<std::string, int64_t>>& dtypes)
        : collectives_(reinterpret_cast<Word*>(words), pointer(stages), static_cast<size_t>(stage_bytes), rank, size,
                       oversubscribed),
          rings_(collectives_.shared_barrier, pointer(rings)),
          rank_(rank),
          size_(size) {
        dtypes_.emplace_back();
        for (const auto& [name, width] : dtypes) dtypes_.emplace_back(name, width);
    }

    // The tensors to write and to read; if the call exchanges a part per rank, the longer one holds them all.
    int call(int type, int op, int dtype, int root, uintptr_t target, int64_t written, uintptr_t source, int64_t read,
             double deadline) {
        CollectiveCall& call = begin(type, op, dtype, root, deadline);
        switch (OpType{type}) {
            case OpType::barrier: break;
            case OpType::all_reduce: call.outputs.push_back({pointer(target), written}); break;
            case OpType::broadcast: call.outputs.push_back({pointer(target), written}); break;
            case OpType::reduce:
                call.inputs.push_back({pointer(target), written});
                if (root == rank_) call.outputs.push_back({pointer(target), written});
                break;
            case OpType::all_gather:
                if (written != read * size_) return unsupported();
                split(call.outputs, target, read);
                call.inputs.push_back({pointer(source), read});
                break;
            case OpType::reduce_scatter:
                if (read != written * size_) return unsupported();
                call.outputs.push_back({pointer(target), written});
                split(call.inputs, source, written);
                break;
            case OpType::all_to_all:
                if (written != read || read % size_) return unsupported();
                split(call.outputs, target, written / size_);
                split(call.inputs, source, written / size_);
                break;
            default: return unsupported();
        }
        return run(type, op, dtype, true);
    }

    // Addresses and counts of the tensors to write, and of those to read. Averages are divided on request.
    int call_lists(int type, int op, int dtype, int root, const std::vector<uintptr_t>& targets,
                   const std::vector<int64_t>& written, const std::vector<uintptr_t>& sources,
                   const std::vector<int64_t>& read, bool divides, double deadline) {
        CollectiveCall& call = begin(type, op, dtype, root, deadline);
        for (size_t n = 0; n < targets.size(); n++) call.outputs.push_back({pointer(targets[n]), written.at(n)});
        for (size_t n = 0; n < sources.size(); n++) call.inputs.push_back({pointer(sources[n]), read.at(n)});
        return run(type, op, dtype, divides);
    }

    // Whether there is a kernel for a reduction.
    bool has_kernel(int op, int dtype) const {
        return dtypes_.at(static_cast<size_t>(dtype)).reductions.at(static_cast<size_t>(op)).kernel != nullptr;
    }

    // A message of this many elements, to or from another rank.
    int send(int peer, int64_t tag, int dtype, uintptr_t address, int64_t count, double deadline) {
        const int64_t nbytes = count * dtypes_.at(static_cast<size_t>(dtype)).width;
        const Header header{tag, count, dtype};
        return run_interruptible(nbytes, [&](WaitCallbacks& callbacks) {
            return rings_.send(peer, header, pointer(address), nbytes, deadline, callbacks);
        });
    }
    int receive(int peer, int64_t tag, int dtype, uintptr_t address, int64_t count, double deadline) {
        const int64_t nbytes = count * dtypes_.at(static_cast<size_t>(dtype)).width;
        const Header header{tag, count, dtype};
        return run_interruptible(nbytes, [&](WaitCallbacks& callbacks) {
            return rings_.receive(peer, header, pointer(address), nbytes, deadline, callbacks);
        });
    }

    // Messages moved by Python, whose waits use the core.
    uint64_t progress() const { return rings_.progress(); }
    void wake(int peer) { rings_.wake(peer); }
    int wait_for_messages(const std::vector<int>& to, const std::vector<int>& from, uint64_t progress,
                          double deadline) {
        return run_interruptible(0, [&](WaitCallbacks& callbacks) {
            return rings_.wait(to, from, progress, deadline, callbacks);
        });
    }

    // A round without data: ranks compare a hash, and, if counts are passed, what they send each other.
    int compare(uint64_t digest, const std::vector<int64_t>& counts, double deadline) {
        CollectiveCall& call = begin(0, 0, 0, -1, deadline);
        call.signature = {kGeneralCall, digest, 0, 0};
        return run_interruptible(0, [&](WaitCallbacks& callbacks) {
            call.callbacks = &callbacks;
            return counts.empty() ? collectives_.barrier(call) : collectives_.check_pairs(call, counts);
        });
    }

    void abort() { collectives_.shared_barrier.abort(); }
    int missing() const { return collectives_.shared_barrier.missing(); }
    double waited_s() const { return collectives_.shared_barrier.waited_s(); }

    void expect_symmetric_memory() { collectives_.expect_symmetric_memory(); }
    void add_segment(uint64_t number, uintptr_t rows, int64_t stride) {
        collectives_.add_segment({number, pointer(rows), stride});
    }
    void remove_segment(uint64_t number) { collectives_.remove_segment(number); }

  private:
    static int unsupported() { return static_cast<int>(Status::unsupported); }

    CollectiveCall& begin(int type, int op, int dtype, int root, double deadline) {
        call_.inputs.clear();
        call_.outputs.clear();
        call_.width = dtypes_.at(static_cast<size_t>(dtype)).width;
        call_.root = root;
        call_.deadline = deadline;
        call_.signature.words[0] = static_cast<uint64_t>(type) | static_cast<uint64_t>(op) << 8 |
                                   static_cast<uint64_t>(dtype) << 16 | static_cast<uint64_t>(root + 1) << 32;
        return call_;
    }

    void split(Buffers& parts, uintptr_t whole, int64_t count) const {
        for (int r = 0; r < size_; r++) parts.push_back({pointer(whole) + r * count * call_.width, count});
    }

    // Unsupported if the core does not support the call, or its tensors are invalid; the general path raises the error.
    int run(int number, int op, int dtype, bool divides) {
        const OpType type{number};
        CollectiveCall& call = call_;
        call.reduction = dtypes_[static_cast<size_t>(dtype)].reductions.at(static_cast<size_t>(op));
        call.divisor = divides && op == kAverage ? size_ : 1;
        if (type == OpType::all_reduce || type == OpType::reduce || type == OpType::reduce_scatter) {
            const Reduction& reduction = call.reduction;
            // Read-only tensors must not be divided before.
            const bool divided_before = reduction.divide_before && type == OpType::all_reduce;
            if (!reduction.kernel || (call.divisor > 1 && !reduction.divide && !divided_before)) return unsupported();
        }
        if (!collectives_.has_valid_buffers(type, call)) return unsupported();
        sign_counts(type);
        int64_t nbytes = 0;
        for (const Buffers* side : {&call.inputs, &call.outputs})
            for (const Buffer& part : *side) nbytes += part.count * call.width;
        return run_interruptible(nbytes, [&](WaitCallbacks& callbacks) {
            call.callbacks = &callbacks;
            return collectives_.run(type, call);
        });
    }

    // The sum of the counts, and of several, their FNV-1a hash (Fowler, Noll, Vo) over numbers instead of bytes.
    void sign_counts(OpType type) {
        uint64_t total = 0, uneven = 0;
        const bool by_inputs = type == OpType::reduce || type == OpType::reduce_scatter || type == OpType::gather;
        const Buffers& parts = by_inputs ? call_.inputs : call_.outputs;
        if (type != OpType::all_to_all) {
            if (parts.size() > 1) uneven = 0xCBF29CE484222325;
            for (const Buffer& part : parts) {
                total += static_cast<uint64_t>(part.count);
                if (parts.size() > 1) uneven = (uneven ^ static_cast<uint64_t>(part.count)) * 0x100000001B3;
            }
        }
        call_.signature.words[1] = total, call_.signature.words[2] = uneven, call_.signature.words[3] = 0;
    }

    template <class Function>
    int run_interruptible(int64_t nbytes, const Function& function) {
        Status status;
        {
            PythonWaitCallbacks callbacks;
            if (nbytes > kLongBytes) callbacks.before_sleep();
            status = function(callbacks);
        }
        if (status == Status::interrupted) throw nb::python_error();
        return static_cast<int>(status);
    }

    Collectives collectives_;
    MessageRings rings_;
    std::vector<DType> dtypes_;
    CollectiveCall call_;
    const int rank_, size_;
};

// Addresses and lengths of the memory to write, and addresses of the memory to copy from.
void copy_gradients(const std::vector<uintptr_t>& destinations, const std::vector<uintptr_t>& sources,
                    const std::vector<int64_t>& lengths) {
    int64_t total = 0;
    for (const int64_t length : lengths) total += length;
    PythonWaitCallbacks callbacks;
    if (total > kLongBytes) callbacks.before_sleep();
    for (size_t n = 0; n < lengths.size(); n++)
        copy_gradient(pointer(destinations.at(n)), pointer(sources.at(n)), static_cast<size_t>(lengths[n]),
                      total >= kNonTemporalBytes);
}

}  // namespace
}  // namespace unisono

NB_MODULE(_native, module) {
    using namespace unisono;
    // An uncaught exception keeps frames, and with them communicators, until the interpreter has gone.
    nb::set_leak_warnings(false);
    module.doc() = "Collectives in shared memory; see src/native.";
    module.attr("BUILD") = UNISONO_BUILD;
    module.def("copy_gradients", &copy_gradients);
    nb::class_<SharedWords>(module, "SharedWords")
        .def(nb::init<nb::handle>())
        .def("__getitem__", &SharedWords::load)
        .def("__setitem__", &SharedWords::store);
    nb::class_<Core>(module, "Core")
        .def(nb::init<uintptr_t, uintptr_t, uintptr_t, int64_t, int, int, bool,
                      const std::vector<std::pair<std::string, int64_t>>&>())
        .def("call", &Core::call)
        .def("call_lists", &Core::call_lists)
        .def("has_kernel", &Core::has_kernel)
        .def("send", &Core::send)
        .def("receive", &Core::receive)
        .def("wait_for_messages", &Core::wait_for_messages)
        .def("wake", &Core::wake)
        .def("compare", &Core::compare)
        .def("abort", &Core::abort)
        .def("add_segment", &Core::add_segment)
        .def("expect_symmetric_memory", &Core::expect_symmetric_memory)
        .def("remove_segment", &Core::remove_segment)
        .def_prop_ro("progress", &Core::progress)
        .def_prop_ro("missing", &Core::missing)
        .def_prop_ro("waited_s", &Core::waited_s);
}
