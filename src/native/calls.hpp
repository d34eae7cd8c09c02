// Collectives as Python passes them to a native core. Python checks the tensors, and passes their addresses.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <atomic>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "call.hpp"
#include "steps/executor.hpp"

namespace unisono {

namespace nb = nanobind;

// A call on more bytes than `kLongBytes` releases the GIL throughout; a shorter call releases it only while it waits.
inline constexpr int64_t kLongBytes = 64 << 10;

// Releases the GIL during long waits and copies, and ends a wait when a signal arrives.
class PythonWaitCallbacks : public WaitCallbacks {
  public:
    ~PythonWaitCallbacks() override {
        if (saved_) PyEval_RestoreThread(saved_);
    }
    void before_sleep() override {
        if (!saved_) saved_ = PyEval_SaveThread();
    }
    bool interrupted() override {
        // If `before_sleep` has not been called, this thread still holds the GIL.
        if (!saved_) return PyErr_CheckSignals() != 0;
        PyEval_RestoreThread(saved_);
        const bool raised = PyErr_CheckSignals() != 0;
        saved_ = PyEval_SaveThread();
        return raised;
    }

  private:
    PyThreadState* saved_ = nullptr;
};

// Values for the first word of a signature whose second word is a hash of the call. kGeneralCall marks rounds that only
// compare calls; kStepsCall marks calls that run an algorithm's steps.
inline constexpr uint64_t kGeneralCall = uint64_t{0xFF} << 56, kStepsCall = uint64_t{0xFE} << 56;

inline char* pointer(uintptr_t address) { return reinterpret_cast<char*>(address); }

// Reduce operations with their Python names. An operation's number is its index in kReduceOps; 0 means no operation. An
// average is a sum that is divided afterwards.
struct NamedOp {
    const char* name;
    std::optional<ReduceOp> op;
};
inline constexpr int kAverage = 2;
inline constexpr NamedOp kReduceOps[] = {
    {"", std::nullopt},        {"sum", ReduceOp::sum},   {"avg", ReduceOp::sum},
    {"product", ReduceOp::product}, {"min", ReduceOp::min},   {"max", ReduceOp::max},
    {"band", ReduceOp::band},  {"bor", ReduceOp::bor},   {"bxor", ReduceOp::bxor}};

// Properties of a dtype. A dtype's number is its index in a list that is the same on all ranks.
struct DType {
    int64_t width = 1;
    std::array<Reduction, std::size(kReduceOps)> reductions{};

    DType() = default;
    DType(const std::string& name, int64_t width) : width(width) {
        for (size_t n = 0; n < std::size(kReduceOps); n++)
            if (kReduceOps[n].op) reductions[n] = reduction_of(name, *kReduceOps[n].op);
    }
};

// How a call failed; empty if it succeeded.
using Failure = std::optional<Outcome>;

// Runs a native call. Releases the GIL if the call is long or has to wait.
template <class Function>
Failure run_interruptible(int64_t nbytes, const Function& function) {
    Outcome outcome;
    {
        PythonWaitCallbacks callbacks;
        if (nbytes > kLongBytes) callbacks.before_sleep();
        outcome = function(callbacks);
    }
    if (outcome == Status::interrupted) throw nb::python_error();
    if (outcome.ok()) return std::nullopt;
    return outcome;
}

// Entry points for Python. The collective, the operation and the dtype are passed as numbers.
class Calls {
  public:
    Calls(int rank, int size, const std::vector<std::pair<std::string, int64_t>>& dtypes) : rank_(rank), size_(size) {
        dtypes_.emplace_back();
        for (const auto& [name, width] : dtypes) dtypes_.emplace_back(name, width);
    }
    virtual ~Calls() = default;

    // Runs a collective on one target tensor and one source tensor, given by address and element count. If each rank
    // contributes or receives its own part, the longer of the two tensors contains all ranks' parts. Runs the steps of
    // `program`, or the core's preferred steps if `program` has no chunks.
    Failure call(int type, int op, int dtype, int root, uintptr_t target, int64_t written, uintptr_t source,
                 int64_t read, double deadline, const Program& program) {
        const Exclusive held(busy_);
        CollectiveCall& call = begin(type, op, dtype, root, deadline, program);
        switch (call.type) {
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
        return start(op, dtype, true);
    }

    // Runs a collective on two lists of tensors, one to write and one to read. Each tensor is given by its address and
    // element count. If `divides` is set, the sum for an average is divided by the number of ranks.
    Failure call_lists(int type, int op, int dtype, int root, const std::vector<uintptr_t>& targets,
                       const std::vector<int64_t>& written, const std::vector<uintptr_t>& sources,
                       const std::vector<int64_t>& read, bool divides, double deadline, const Program& program) {
        const Exclusive held(busy_);
        add_buffers(begin(type, op, dtype, root, deadline, program), targets, written, sources, read);
        return start(op, dtype, divides);
    }

    // Runs a call that does not use Python's fast path, with the steps of the algorithm that the caller has chosen. If
    // the ranks' parts differ in length, `lengths` contains the length of each rank's part.
    Failure call_program(const Program& program, int type, int op, int dtype, int root,
                         const std::vector<uintptr_t>& targets, const std::vector<int64_t>& written,
                         const std::vector<uintptr_t>& sources, const std::vector<int64_t>& read,
                         const std::vector<int64_t>& lengths, double deadline) {
        const Exclusive held(busy_);
        CollectiveCall& call = begin(type, op, dtype, root, deadline, program);
        add_buffers(call, targets, written, sources, read);
        call.sign_counts();
        lengths_ = lengths;
        return run();
    }

    // Whether the core has a kernel for this operation and dtype.
    bool has_kernel(int op, int dtype) const { return reduction(op, dtype).kernel != nullptr; }

  protected:
    virtual bool divides_before(const CollectiveCall&) const { return false; }
    virtual void prepare(int, int) {}
    virtual Outcome carry_out(CollectiveCall& call) = 0;

    CollectiveCall& begin(int type, int op, int dtype, int root, double deadline, const Program& program) {
        program_ = program.chunks ? &program : nullptr;
        return begin(type, op, dtype, root, deadline);
    }
    CollectiveCall& begin(int type, int op, int dtype, int root, double deadline) {
        lengths_.clear();
        call_.type = OpType{type};
        call_.inputs.clear();
        call_.outputs.clear();
        call_.width = dtypes_.at(static_cast<size_t>(dtype)).width;
        call_.reduction = reduction(op, dtype);
        call_.divisor = 1;
        call_.root = root;
        call_.deadline = deadline;
        call_.signature.words[0] = static_cast<uint64_t>(type) | static_cast<uint64_t>(op) << 8 |
                                   static_cast<uint64_t>(dtype) << 16 | static_cast<uint64_t>(root + 1) << 32;
        return call_;
    }

    static void add_buffers(CollectiveCall& call, const std::vector<uintptr_t>& targets,
                            const std::vector<int64_t>& written, const std::vector<uintptr_t>& sources,
                            const std::vector<int64_t>& read) {
        for (size_t n = 0; n < targets.size(); n++) call.outputs.push_back({pointer(targets[n]), written.at(n)});
        for (size_t n = 0; n < sources.size(); n++) call.inputs.push_back({pointer(sources[n]), read.at(n)});
    }

    // Runs the current call, whose tensors have been checked. Releases the GIL if the call is long or has to wait.
    Failure run() {
        int64_t nbytes = 0;
        for (const Buffers* side : {&call_.inputs, &call_.outputs})
            for (const Buffer& part : *side) nbytes += part.count * call_.width;
        return run_interruptible(nbytes, [&](WaitCallbacks& callbacks) {
            call_.callbacks = &callbacks;
            return carry_out(call_);
        });
    }

    // Describes the current call for an executor.
    StepsCall& steps_of(const CollectiveCall& call) {
        const bool moves = call.type != OpType::barrier;
        steps_.program = moves ? program_ : nullptr;
        steps_.chunks.clear();
        steps_.sends.clear();
        steps_.receives.clear();
        if (moves) cut(call);
        steps_.reduction = call.reduction;
        steps_.divisor = call.divisor;
        steps_.width = static_cast<size_t>(call.width);
        // If the call has no root, every rank's result depends on all contributions.
        steps_.hears_all = call.root < 0;
        steps_.signature = signature(call);
        steps_.deadline = call.deadline;
        steps_.callbacks = call.callbacks;
        return steps_;
    }

    const CollectiveCall& current() const { return call_; }
    int64_t width_of(int dtype) const { return dtypes_.at(static_cast<size_t>(dtype)).width; }

    const int rank_, size_;
    std::atomic<bool> busy_{false};
    // The steps of the current call; null for the core's preferred steps.
    const Program* program_ = nullptr;
    StepsCall steps_;

  private:
    static Failure unsupported() { return Outcome(Status::unsupported); }

    const Reduction& reduction(int op, int dtype) const {
        return dtypes_.at(static_cast<size_t>(dtype)).reductions.at(static_cast<size_t>(op));
    }

    void split(Buffers& parts, uintptr_t whole, int64_t count) const {
        for (int r = 0; r < size_; r++) parts.push_back({pointer(whole) + r * count * call_.width, count});
    }

    // Returns `unsupported` if the core does not support the call or a tensor is invalid. After `unsupported`, Python
    // leaves its fast path for its general path, which raises an error if a tensor is invalid.
    Failure start(int op, int dtype, bool divides) {
        const OpType type = call_.type;
        call_.divisor = divides && op == kAverage ? size_ : 1;
        if (type == OpType::all_reduce || type == OpType::reduce || type == OpType::reduce_scatter) {
            if (!call_.reduction.kernel) return unsupported();
            if (call_.divisor > 1 && !call_.reduction.divide && !divides_before(call_)) return unsupported();
        }
        if (!call_.has_valid_buffers(rank_, size_)) return unsupported();
        call_.sign_counts();
        prepare(op, dtype);
        return run();
    }

    // A hash that is equal on all ranks that make the same call.
    uint64_t signature(const CollectiveCall& call) const {
        uint64_t mixed = program_ ? program_->label : 0;
        const auto mix = [&](uint64_t word) {
            mixed = (mixed ^ word) * 0x9E3779B97F4A7C15;
            mixed ^= mixed >> 32;
        };
        for (int n = 0; n < 3; n++)
            if (n == 0 || lengths_.empty()) mix(call.signature.words[n]);
        for (const int64_t length : lengths_) mix(static_cast<uint64_t>(length));
        return mixed;
    }

    void add_chunk(const char* own, char* target, int64_t count) {
        steps_.chunks.push_back({own, target, static_cast<size_t>(count)});
    }

    // Cuts the tensors of a call into the chunks of its program.
    void cut(const CollectiveCall& call) {
        const Buffers &read = call.inputs, &written = call.outputs;
        switch (call.type) {
            case OpType::all_reduce:
            case OpType::broadcast:
            case OpType::reduce: return cut_evenly(call);
            case OpType::reduce_scatter:
                for (int r = 0; r < size_; r++)
                    add_chunk(read[r].data, r == rank_ ? written[0].data : nullptr, read[r].count);
                return;
            case OpType::all_to_all:
                for (const Buffer& part : read) {
                    add_chunk(part.data, nullptr, part.count);
                    steps_.sends.push_back(part.count);
                }
                for (int r = 0; r < size_; r++) {
                    add_chunk(r == rank_ ? read[r].data : nullptr, written[r].data, written[r].count);
                    steps_.receives.push_back(written[r].count);
                }
                for (int n = 2 * size_; n < program_->chunks; n++) add_chunk(nullptr, nullptr, read[0].count);
                return;
            default: return cut_by_rank(call);
        }
    }

    // Cuts one tensor into chunks of almost equal length.
    void cut_evenly(const CollectiveCall& call) {
        const Buffer& part = call.outputs.empty() ? call.inputs[0] : call.outputs[0];
        const bool writes = call.root < 0 || (rank_ == call.root) == (call.type == OpType::reduce);
        const int64_t quotient = part.count / program_->chunks, rest = part.count % program_->chunks;
        char* at = part.data;
        for (int64_t n = 0; n < program_->chunks; n++) {
            const int64_t length = quotient + (n < rest);
            add_chunk(at, writes ? at : nullptr, length);
            at += length * call.width;
        }
    }

    // Adds one chunk per rank, beginning with the root's, for a gather or a scatter.
    void cut_by_rank(const CollectiveCall& call) {
        const bool gathers = call.type != OpType::scatter;
        const Buffers &many = gathers ? call.outputs : call.inputs, &one = gathers ? call.inputs : call.outputs;
        for (int place = 0; place < size_; place++) {
            const int r = (place + std::max(0, call.root)) % size_;
            char* here = many.empty() ? nullptr : many[r].data;
            char* mine = r == rank_ ? one[0].data : nullptr;
            // If the ranks' parts differ in length, `lengths_` contains the length of every part, even of a part that
            // this rank only forwards.
            const int64_t count = !many.empty() ? many[r].count : !lengths_.empty() ? lengths_[r] : one[0].count;
            add_chunk(gathers ? mine : here, gathers ? here : mine, count);
        }
    }

    std::vector<DType> dtypes_;
    CollectiveCall call_;
    // Lengths of all ranks' parts if `call_program` has received them; empty otherwise.
    std::vector<int64_t> lengths_;
};

// Binds the methods of `Calls` in each core's class, because a call from Python takes longer if a base class binds the
// method.
template <class Bound>
Bound& add_calls(Bound&& bound) {
    using Type = typename std::decay_t<Bound>::Type;
    return bound.def("call", &Type::call)
        .def("call_lists", &Type::call_lists)
        .def("call_program", &Type::call_program)
        .def("has_kernel", &Type::has_kernel);
}

}  // namespace unisono
