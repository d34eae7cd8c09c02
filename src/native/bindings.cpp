// Python bindings of the native core: `unisono._native`. Python checks the tensors of a call, and passes addresses.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "call.hpp"
#include "gradient_copy.hpp"
#include "shm/byte_ring.hpp"
#include "shm/collectives.hpp"
#include "shm/p2p_ring.hpp"
#include "shm/ring_end.hpp"
#include "shm/shared_words.hpp"
#include "steps/executor.hpp"
#include "tcp/messages.hpp"
#include "tcp/sockets.hpp"

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

// The first word of a signature of a call that ranks compare by a hash: without kernels, or with an algorithm's steps.
constexpr uint64_t kGeneralCall = uint64_t{0xFF} << 56, kStepsCall = uint64_t{0xFE} << 56;

char* pointer(uintptr_t address) { return reinterpret_cast<char*>(address); }

// Operations as Python names them. Their numbers are the places here, 0 for none; an average is a divided sum.
struct NamedOp {
    const char* name;
    std::optional<ReduceOp> op;
};
constexpr int kAverage = 2;
constexpr NamedOp kReduceOps[] = {
    {"", std::nullopt},        {"sum", ReduceOp::sum},   {"avg", ReduceOp::sum},
    {"product", ReduceOp::product}, {"min", ReduceOp::min},   {"max", ReduceOp::max},
    {"band", ReduceOp::band},  {"bor", ReduceOp::bor},   {"bxor", ReduceOp::bxor}};

// Properties of a dtype. Its number is its index in a list common to all ranks.
struct DType {
    int64_t width = 1;
    std::array<Reduction, std::size(kReduceOps)> reductions{};

    DType() = default;
    DType(const std::string& name, int64_t width) : width(width) {
        for (size_t n = 0; n < std::size(kReduceOps); n++)
            if (kReduceOps[n].op) reductions[n] = reduction_of(name, *kReduceOps[n].op);
    }
};

// Runs a native call, during which other threads run if it is long or waits.
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

// Calls as Python passes them to a core: with the numbers of their collective, operation and dtype.
class Calls {
  public:
    Calls(int rank, int size, const std::vector<std::pair<std::string, int64_t>>& dtypes) : rank_(rank), size_(size) {
        dtypes_.emplace_back();
        for (const auto& [name, width] : dtypes) dtypes_.emplace_back(name, width);
    }
    virtual ~Calls() = default;

    // The tensors to write and to read; if the call exchanges a part per rank, the longer one holds them all. With the
    // steps at an address, or, if it is 0, as the core prefers.
    int call(int type, int op, int dtype, int root, uintptr_t target, int64_t written, uintptr_t source, int64_t read,
             double deadline, uintptr_t program) {
        CollectiveCall& call = begin(type, op, dtype, root, deadline, program_of(program));
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

    // Addresses and counts of the tensors to write, and of those to read. Averages are divided on request.
    int call_lists(int type, int op, int dtype, int root, const std::vector<uintptr_t>& targets,
                   const std::vector<int64_t>& written, const std::vector<uintptr_t>& sources,
                   const std::vector<int64_t>& read, bool divides, double deadline, uintptr_t program) {
        add_buffers(begin(type, op, dtype, root, deadline, program_of(program)), targets, written, sources, read);
        return start(op, dtype, divides);
    }

    // A call of the general path, with the steps of the caller's algorithm. `lengths` are those of all ranks' parts,
    // where they differ.
    int call_program(const Program& program, int type, int op, int dtype, int root,
                     const std::vector<uintptr_t>& targets, const std::vector<int64_t>& written,
                     const std::vector<uintptr_t>& sources, const std::vector<int64_t>& read,
                     const std::vector<int64_t>& lengths, double deadline) {
        CollectiveCall& call = begin(type, op, dtype, root, deadline, &program);
        add_buffers(call, targets, written, sources, read);
        call.sign_counts();
        lengths_ = lengths;
        return run();
    }

    // Whether there is a kernel for a reduction.
    bool has_kernel(int op, int dtype) const { return reduction(op, dtype).kernel != nullptr; }

  protected:
    virtual bool divides_before(const CollectiveCall&) const { return false; }
    virtual void prepare(int, int) {}
    virtual Status carry_out(CollectiveCall& call) = 0;

    CollectiveCall& begin(int type, int op, int dtype, int root, double deadline, const Program* program = nullptr) {
        program_ = program;
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

    // Runs a call whose tensors are valid, without Python's lock where it is long or waits.
    int run() {
        int64_t nbytes = 0;
        for (const Buffers* side : {&call_.inputs, &call_.outputs})
            for (const Buffer& part : *side) nbytes += part.count * call_.width;
        return run_interruptible(nbytes, [&](WaitCallbacks& callbacks) {
            call_.callbacks = &callbacks;
            return carry_out(call_);
        });
    }

    // Describes the present call to an executor.
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
        // Where there is no root, each rank's result depends on all contributions.
        steps_.hears_all = call.root < 0;
        steps_.signature = signature(call);
        steps_.deadline = call.deadline;
        steps_.callbacks = call.callbacks;
        return steps_;
    }

    const CollectiveCall& current() const { return call_; }
    int64_t width_of(int dtype) const { return dtypes_.at(static_cast<size_t>(dtype)).width; }

    const int rank_, size_;
    // The steps of the present call; null for none.
    const Program* program_ = nullptr;
    StepsCall steps_;

  private:
    static const Program* program_of(uintptr_t address) { return reinterpret_cast<const Program*>(address); }
    static int unsupported() { return static_cast<int>(Status::unsupported); }

    const Reduction& reduction(int op, int dtype) const {
        return dtypes_.at(static_cast<size_t>(dtype)).reductions.at(static_cast<size_t>(op));
    }

    void split(Buffers& parts, uintptr_t whole, int64_t count) const {
        for (int r = 0; r < size_; r++) parts.push_back({pointer(whole) + r * count * call_.width, count});
    }

    // Unsupported if the core does not support the call, or its tensors are invalid; the general path raises the error.
    int start(int op, int dtype, bool divides) {
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

    // What stands for a call on every rank that makes it.
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

    // One tensor, in chunks of almost equal length.
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

    // One part of each rank, beginning with the root's: gathered, or scattered by the root.
    void cut_by_rank(const CollectiveCall& call) {
        const bool gathers = call.type != OpType::scatter;
        const Buffers &many = gathers ? call.outputs : call.inputs, &one = gathers ? call.inputs : call.outputs;
        for (int place = 0; place < size_; place++) {
            const int r = (place + std::max(0, call.root)) % size_;
            char* here = many.empty() ? nullptr : many[r].data;
            char* mine = r == rank_ ? one[0].data : nullptr;
            // A rank that only passes on a part of another length knows that length.
            const int64_t count = !many.empty() ? many[r].count : !lengths_.empty() ? lengths_[r] : one[0].count;
            add_chunk(gathers ? mine : here, gathers ? here : mine, count);
        }
    }

    std::vector<DType> dtypes_;
    CollectiveCall call_;
    // The lengths of all ranks' parts, where a call of the general path has them.
    std::vector<int64_t> lengths_;
};

// Collectives and messages in shared memory.
class Core : public Calls {
  public:
    // In memory of `nbytes(size)`, zeroed by the first rank.
    Core(nb::handle memory, int rank, int size, bool oversubscribed,
         const std::vector<std::pair<std::string, int64_t>>& dtypes)
        : Calls(rank, size, dtypes),
          memory_(std::make_shared<PythonMemory>(memory, PyBUF_WRITABLE, nbytes(size))),
          places_(size),
          collectives_(reinterpret_cast<Word*>(memory_->begin()), memory_->begin() + places_.stages, kStageBytes, rank,
                       size, oversubscribed),
          rings_(collectives_.shared_barrier, memory_->begin() + places_.rings),
          executor_(rank, size, oversubscribed, collectives_.shared_barrier, memory_->begin() + places_.steps) {}

    static uint64_t nbytes(int size) { return Places(size).end; }

    // A message of this many elements, to or from another rank.
    int send(int peer, int64_t tag, int dtype, uintptr_t address, int64_t count, double deadline) {
        const int64_t nbytes = count * width_of(dtype);
        const Header header{tag, count, dtype};
        return run_interruptible(nbytes, [&](WaitCallbacks& callbacks) {
            return rings_.send(peer, header, pointer(address), nbytes, deadline, callbacks);
        });
    }
    int receive(int peer, int64_t tag, int dtype, uintptr_t address, int64_t count, double deadline) {
        const int64_t nbytes = count * width_of(dtype);
        const Header header{tag, count, dtype};
        return run_interruptible(nbytes, [&](WaitCallbacks& callbacks) {
            return rings_.receive(peer, header, pointer(address), nbytes, deadline, callbacks);
        });
    }

    // Messages moved by Python, whose waits use the core.
    auto rings() const { return ring_ends(memory_, {memory_->begin() + places_.rings, size_}, rank_); }
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

    void abort() {
        executor_.abort();
        collectives_.shared_barrier.abort();
    }
    void leave() { collectives_.shared_barrier.leave(); }
    bool has_left(int rank) const { return collectives_.shared_barrier.has_left(rank); }
    uint64_t round() const { return collectives_.shared_barrier.round(); }
    int missing() const { return collectives_.shared_barrier.missing(); }
    double waited_s() const { return collectives_.shared_barrier.waited_s(); }

    void expect_symmetric_memory() { collectives_.expect_symmetric_memory(); }
    void add_segment(uint64_t number, uintptr_t rows, int64_t stride) {
        collectives_.add_segment({number, pointer(rows), stride});
    }
    void remove_segment(uint64_t number) { collectives_.remove_segment(number); }

  private:
    static constexpr uint64_t kStageBytes = 1 << 20, kPageBytes = 4096;

    // Where things begin in the memory: after the counters, two staging buffers for each rank, the rings of messages, and
    // those of algorithms' steps.
    struct Places {
        uint64_t stages, rings, steps, end;

        explicit Places(int size) {
            const auto ranks = static_cast<uint64_t>(size);
            const uint64_t rings_bytes = RingMemory::nbytes(size, ByteRing::kBytes);
            stages = (ranks * kWordsPerRank * sizeof(Word) + kPageBytes - 1) & ~(kPageBytes - 1);
            rings = stages + ranks * 2 * kStageBytes;
            steps = rings + rings_bytes;
            end = steps + rings_bytes;
        }
    };

    // Read-only tensors must not be divided before.
    bool divides_before(const CollectiveCall& call) const override {
        return !program_ && call.reduction.divide_before && call.type == OpType::all_reduce;
    }

    Status carry_out(CollectiveCall& call) override { return program_ ? carry_out_steps(call) : collectives_.run(call); }

    // Ranks agree in a round of the barrier, so that the first bytes may already be written to where they belong.
    Status carry_out_steps(CollectiveCall& call) {
        StepsCall& steps = steps_of(call);
        call.signature = {kStepsCall, steps.signature, 0, 0};
        std::vector<int64_t> counts(std::move(steps.sends));
        counts.insert(counts.end(), steps.receives.begin(), steps.receives.end());
        steps.sends.clear();
        steps.receives.clear();
        Status status = counts.empty() ? collectives_.barrier(call) : collectives_.check_pairs(call, counts);
        if (status != Status::ok) return status;
        steps.agreed = true;
        status = executor_.run(steps);
        if (status != Status::ok) collectives_.shared_barrier.record_failure(executor_.missing(), executor_.waited_s());
        return status;
    }

    const std::shared_ptr<PythonMemory> memory_;
    const Places places_;
    Collectives collectives_;
    MessageRings rings_;
    Executor<RingNetwork> executor_;
};

// Collectives over the sockets of one rank: an algorithm's steps in one call.
class TcpCore : public Calls {
  public:
    // The sockets of collectives, and those of messages. `choose` returns the program for a collective, an operation, a
    // dtype, a root or -1, and a number of bytes.
    TcpCore(int rank, const std::vector<int>& sockets, const std::vector<int>& messages, bool oversubscribed,
            size_t slice_bytes, const std::vector<std::pair<std::string, int64_t>>& dtypes, nb::callable choose)
        : Calls(rank, static_cast<int>(sockets.size()), dtypes),
          executor_(rank, static_cast<int>(sockets.size()), oversubscribed, sockets),
          messages_(messages, oversubscribed),
          choose_(std::move(choose)) {
        executor_.set_slice_bytes(slice_bytes);
    }

    // A round without data: ranks compare a hash, and, if counts are passed, what they send each other.
    int compare(uint64_t digest, const std::vector<int64_t>& counts, double deadline) {
        steps_.program = nullptr;
        steps_.chunks.clear();
        const auto half = counts.begin() + static_cast<std::ptrdiff_t>(counts.size() / 2);
        steps_.sends.assign(counts.begin(), half);
        steps_.receives.assign(half, counts.end());
        steps_.signature = digest;
        steps_.deadline = deadline;
        return run_interruptible(0, [&](WaitCallbacks& callbacks) {
            steps_.callbacks = &callbacks;
            return executor_.run(steps_);
        });
    }

    // A message of this many elements, to or from another rank.
    int send(int peer, int64_t tag, int dtype, uintptr_t address, int64_t count, double deadline) {
        const int64_t nbytes = count * width_of(dtype);
        return run_message(peer, nbytes, [&](WaitCallbacks& callbacks) {
            return messages_.send(peer, {tag, count, dtype}, pointer(address), nbytes, deadline, callbacks);
        });
    }
    int receive(int peer, int64_t tag, int dtype, uintptr_t address, int64_t count, double deadline) {
        const int64_t nbytes = count * width_of(dtype);
        return run_message(peer, nbytes, [&](WaitCallbacks& callbacks) {
            return messages_.receive(peer, {tag, count, dtype}, pointer(address), nbytes, deadline, callbacks);
        });
    }

    void abort() {
        executor_.abort();
        messages_.abort();
    }
    uint32_t number() const { return executor_.number(); }
    int missing() const { return executor_.missing(); }
    double waited_s() const { return executor_.waited_s(); }

  private:
    // Programs are kept by the first word of a call's signature, and its size class.
    using Key = std::pair<uint64_t, int>;

    void prepare(int op, int dtype) override {
        const CollectiveCall& call = current();
        if (call.type == OpType::barrier || program_) return;
        int64_t nbytes = static_cast<int64_t>(call.signature.words[1]) * call.width;
        if (call.type == OpType::gather || call.type == OpType::scatter) nbytes *= size_;
        int bits = 0;
        while (bits < 62 && int64_t{1} << bits < nbytes) bits++;
        nb::object& kept = programs_[Key{call.signature.words[0], bits}];
        if (!kept.is_valid()) kept = choose_(static_cast<int>(call.type), op, dtype, call.root, int64_t{1} << bits);
        program_ = nb::cast<const Program*>(kept);
    }

    Status carry_out(CollectiveCall& call) override { return executor_.run(steps_of(call)); }

    template <class Function>
    int run_message(int peer, int64_t nbytes, const Function& function) {
        const int status = run_interruptible(nbytes, function);
        if (status != static_cast<int>(Status::ok)) executor_.record_failure(peer, messages_.waited_s());
        return status;
    }

    Executor<Sockets> executor_;
    SocketMessages messages_;
    nb::callable choose_;
    std::map<Key, nb::object> programs_;
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

// The numbers of an enumeration, by their names in Python.
template <class Enum>
nb::dict numbers(std::initializer_list<std::pair<const char*, Enum>> names) {
    nb::dict found;
    for (const auto& [name, number] : names) found[name] = static_cast<int>(number);
    return found;
}

// As methods of each core: those of a bound base class take longer to call.
template <class Bound>
Bound& add_calls(Bound&& bound) {
    using Type = typename std::decay_t<Bound>::Type;
    return bound.def("call", &Type::call)
        .def("call_lists", &Type::call_lists)
        .def("call_program", &Type::call_program)
        .def("has_kernel", &Type::has_kernel);
}

}  // namespace
}  // namespace unisono

NB_MODULE(_native, module) {
    using namespace unisono;
    // An uncaught exception keeps frames, and with them communicators, until the interpreter has gone.
    nb::set_leak_warnings(false);
    module.doc() = "Collectives in shared memory and over connections; see src/native.";
    module.attr("BUILD") = UNISONO_BUILD;
    module.attr("STATUSES") = numbers<Status>({{"OK", Status::ok},
                                              {"MISMATCH", Status::mismatch},
                                              {"TIMEOUT", Status::timeout},
                                              {"PEER_LEFT", Status::peer_left},
                                              {"ABORTED", Status::aborted},
                                              {"INTERRUPTED", Status::interrupted},
                                              {"UNSUPPORTED", Status::unsupported},
                                              {"PEER_LOST", Status::peer_lost}});
    module.attr("COLLECTIVES") = numbers<OpType>({{"all_gather", OpType::all_gather},
                                                 {"all_reduce", OpType::all_reduce},
                                                 {"all_to_all", OpType::all_to_all},
                                                 {"barrier", OpType::barrier},
                                                 {"broadcast", OpType::broadcast},
                                                 {"gather", OpType::gather},
                                                 {"reduce", OpType::reduce},
                                                 {"reduce_scatter", OpType::reduce_scatter},
                                                 {"scatter", OpType::scatter}});
    nb::dict reduce_ops;
    for (size_t n = 1; n < std::size(kReduceOps); n++) reduce_ops[kReduceOps[n].name] = n;
    module.attr("REDUCE_OPS") = reduce_ops;
    module.attr("MESSAGE_HEADER") = kHeaderFormat;
    const FrameHeader farewell{0, 0, FrameKind::farewell, 0};
    module.attr("FAREWELL") = nb::bytes(&farewell, sizeof farewell);
    module.def("copy_gradients", &copy_gradients);
    module.def("stop_deadlines", [](double stood, double stopped_at) {
        stood_s.store(stood);
        stopped_at_s.store(stopped_at);
    });
    module.def("rings_nbytes", &RingMemory::nbytes);
    module.def("rings", [](nb::handle memory, int rank, int size, uint64_t ring_bytes) {
        const uint64_t nbytes = RingMemory::nbytes(size, ring_bytes);
        const auto held = std::make_shared<PythonMemory>(memory, PyBUF_WRITABLE, nbytes);
        return ring_ends(held, {held->begin(), size, ring_bytes}, rank);
    });
    nb::class_<RingEnd>(module, "Ring")
        .def_prop_ro("available", &RingEnd::available)
        .def_prop_ro("room", &RingEnd::room)
        .def("write", &RingEnd::write, nb::arg("content"), nb::arg("more") = false)
        .def("peek", &RingEnd::peek, nb::sig("def peek(self) -> memoryview"))
        .def("skip", &RingEnd::skip)
        .def("read", &RingEnd::read);
    nb::class_<SharedWords>(module, "SharedWords")
        .def(nb::init<nb::handle>())
        .def("__getitem__", &SharedWords::load)
        .def("__setitem__", &SharedWords::store)
        .def("wait", &SharedWords::wait)
        .def("wake", &SharedWords::wake);
    nb::class_<Program>(module, "Program")
        .def(nb::init<const std::vector<int64_t>&, int, int, uint64_t>())
        .def_prop_ro("address", [](const Program& program) { return reinterpret_cast<uintptr_t>(&program); });
    add_calls(nb::class_<Core>(module, "Core"))
        .def(nb::init<nb::handle, int, int, bool, const std::vector<std::pair<std::string, int64_t>>&>())
        .def_static("nbytes", &Core::nbytes)
        .def("rings", &Core::rings)
        .def("send", &Core::send)
        .def("receive", &Core::receive)
        .def("wait_for_messages", &Core::wait_for_messages)
        .def("wake", &Core::wake)
        .def("compare", &Core::compare)
        .def("abort", &Core::abort)
        .def("leave", &Core::leave)
        .def("has_left", &Core::has_left)
        .def_prop_ro("round", &Core::round)
        .def("add_segment", &Core::add_segment)
        .def("expect_symmetric_memory", &Core::expect_symmetric_memory)
        .def("remove_segment", &Core::remove_segment)
        .def_prop_ro("progress", &Core::progress)
        .def_prop_ro("missing", &Core::missing)
        .def_prop_ro("waited_s", &Core::waited_s);
    add_calls(nb::class_<TcpCore>(module, "TcpCore"))
        .def(nb::init<int, const std::vector<int>&, const std::vector<int>&, bool, size_t,
                      const std::vector<std::pair<std::string, int64_t>>&, nb::callable>())
        .def("send", &TcpCore::send)
        .def("receive", &TcpCore::receive)
        .def("compare", &TcpCore::compare)
        .def("abort", &TcpCore::abort)
        .def_prop_ro("number", &TcpCore::number)
        .def_prop_ro("missing", &TcpCore::missing)
        .def_prop_ro("waited_s", &TcpCore::waited_s);
}
