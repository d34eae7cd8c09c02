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
#include "gradients.hpp"
#include "shm/p2p_ring.hpp"

namespace nb = nanobind;

namespace unisono {
namespace {

// From this length on, other threads run during the whole call.
constexpr int64_t kLongBytes = 64 << 10;

// Lets other threads run during long waits and copies, and ends waits for signals.
class PythonPatience : public Patience {
  public:
    ~PythonPatience() override {
        if (saved_) PyEval_RestoreThread(saved_);
    }
    void settle() override {
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

// The first word of a mark of a non-native call.
constexpr uint64_t kNoCollective = uint64_t{0xFF} << 56;

char* at(uintptr_t address) { return reinterpret_cast<char*>(address); }

// As in types.py: the number of an operation is its index there, from 1 on; an average is a divided sum.
constexpr int kAverage = 2;
constexpr std::optional<Op> kOps[] = {std::nullopt, Op::sum, Op::sum, Op::product, Op::min, Op::max,
                                      Op::band,     Op::bor, Op::bxor};

// Properties of a dtype. Its number is its index in a list common to all ranks.
struct DType {
    int64_t width = 1;
    std::array<Reduction, std::size(kOps)> reductions{};

    DType() = default;
    DType(const std::string& name, int64_t width) : width(width) {
        for (size_t n = 0; n < std::size(kOps); n++)
            if (kOps[n]) reductions[n] = reduction_of(name, *kOps[n]);
    }
};

class Core {
  public:
    Core(uintptr_t words, uintptr_t stages, uintptr_t rings, int64_t stage_bytes, int rank, int size, bool crowded,
         const std::vector<std::pair<std::string, int64_t>>& dtypes)
        : collectives_(reinterpret_cast<Word*>(words), reinterpret_cast<char*>(stages), static_cast<size_t>(stage_bytes),
                       rank, size, crowded),
          rings_(collectives_.board, reinterpret_cast<char*>(rings)),
          rank_(rank),
          size_(size) {
        dtypes_.emplace_back();
        for (const auto& [name, width] : dtypes) dtypes_.emplace_back(name, width);
    }

    // The tensors to write and to read; the longer one holds a part for each rank if the call has parts.
    int call(int name, int op, int dtype, int root, uintptr_t target, int64_t written, uintptr_t source, int64_t read,
             double deadline) {
        Call& call = begin(name, op, dtype, root, deadline);
        switch (Name{name}) {
            case Name::barrier: break;
            case Name::all_reduce: call.outputs.push_back({at(target), written}); break;
            case Name::broadcast: call.outputs.push_back({at(target), written}); break;
            case Name::reduce:
                call.inputs.push_back({at(target), written});
                if (root == rank_) call.outputs.push_back({at(target), written});
                break;
            case Name::all_gather:
                if (written != read * size_) return refused();
                split(call.outputs, target, read);
                call.inputs.push_back({at(source), read});
                break;
            case Name::reduce_scatter:
                if (read != written * size_) return refused();
                call.outputs.push_back({at(target), written});
                split(call.inputs, source, written);
                break;
            case Name::all_to_all:
                if (written != read || read % size_) return refused();
                split(call.outputs, target, written / size_);
                split(call.inputs, source, written / size_);
                break;
            default: return refused();
        }
        return run(name, op, dtype, true);
    }

    // Addresses and counts of the tensors to write, and of those to read. Averages are divided on request.
    int call_lists(int name, int op, int dtype, int root, const std::vector<uintptr_t>& targets,
                   const std::vector<int64_t>& written, const std::vector<uintptr_t>& sources,
                   const std::vector<int64_t>& read, bool divides, double deadline) {
        Call& call = begin(name, op, dtype, root, deadline);
        for (size_t n = 0; n < targets.size(); n++) call.outputs.push_back({at(targets[n]), written.at(n)});
        for (size_t n = 0; n < sources.size(); n++) call.inputs.push_back({at(sources[n]), read.at(n)});
        return run(name, op, dtype, divides);
    }

    // A message of this many elements, to or from another rank.
    int send(int peer, int64_t tag, int dtype, uintptr_t address, int64_t count, double deadline) {
        const int64_t nbytes = count * dtypes_.at(static_cast<size_t>(dtype)).width;
        const Header header{tag, count, dtype};
        return within(nbytes, [&](Patience& patience) {
            return rings_.send(peer, header, at(address), nbytes, deadline, patience);
        });
    }
    int receive(int peer, int64_t tag, int dtype, uintptr_t address, int64_t count, double deadline) {
        const int64_t nbytes = count * dtypes_.at(static_cast<size_t>(dtype)).width;
        const Header header{tag, count, dtype};
        return within(nbytes, [&](Patience& patience) {
            return rings_.receive(peer, header, at(address), nbytes, deadline, patience);
        });
    }

    // Messages moved by Python.
    uint64_t moves() const { return rings_.moves(); }
    void wake(int peer) { rings_.wake(peer); }
    int wait_rings(const std::vector<int>& to, const std::vector<int>& from, uint64_t moves, double deadline) {
        return within(0, [&](Patience& patience) { return rings_.wait(to, from, moves, deadline, patience); });
    }

    // A round without data: ranks compare a hash, and, if counts are passed, what they send each other.
    int compare(uint64_t digest, const std::vector<int64_t>& counts, double deadline) {
        Call& call = begin(0, 0, 0, -1, deadline);
        call.mark = {kNoCollective, digest, 0, 0};
        return within(0, [&](Patience& patience) {
            call.patience = &patience;
            return counts.empty() ? collectives_.barrier(call) : collectives_.pairs(call, counts);
        });
    }

    void abort() { collectives_.board.abort(); }
    int missing() const { return collectives_.board.missing(); }
    double waited_s() const { return collectives_.board.waited_s(); }

    void expect_arenas() { collectives_.expect_arenas(); }
    void add_arena(uint64_t number, uintptr_t rows, int64_t stride) {
        collectives_.add_arena({number, at(rows), stride});
    }
    void drop_arena(uint64_t number) { collectives_.drop_arena(number); }

  private:
    static int refused() { return static_cast<int>(Status::refused); }

    Call& begin(int name, int op, int dtype, int root, double deadline) {
        call_.inputs.clear();
        call_.outputs.clear();
        call_.width = dtypes_.at(static_cast<size_t>(dtype)).width;
        call_.root = root;
        call_.deadline = deadline;
        const auto codes = static_cast<uint64_t>(name) | static_cast<uint64_t>(op) << 8 | static_cast<uint64_t>(dtype) << 16;
        call_.mark.words[0] = codes | static_cast<uint64_t>(root + 1) << 32;
        return call_;
    }

    void split(Parts& parts, uintptr_t whole, int64_t count) const {
        for (int r = 0; r < size_; r++) parts.push_back({at(whole) + r * count * call_.width, count});
    }

    // Refused if the core does not support the call, or its tensors do not fit; the general path raises the error.
    int run(int number, int op, int dtype, bool divides) {
        const Name name{number};
        Call& call = call_;
        call.reduction = dtypes_[static_cast<size_t>(dtype)].reductions.at(static_cast<size_t>(op));
        call.divisor = divides && op == kAverage ? size_ : 1;
        if (name == Name::all_reduce || name == Name::reduce || name == Name::reduce_scatter) {
            const Reduction& how = call.reduction;
            // Read-only tensors must not be divided before.
            const bool before = how.divide_before && name == Name::all_reduce;
            if (!how.kernel || (call.divisor > 1 && !how.divide && !before)) return refused();
        }
        if (!collectives_.fits(name, call)) return refused();
        mark_counts(name);
        int64_t nbytes = 0;
        for (const Parts* side : {&call.inputs, &call.outputs})
            for (const Part& part : *side) nbytes += part.count * call.width;
        return within(nbytes, [&](Patience& patience) {
            call.patience = &patience;
            return collectives_.run(name, call);
        });
    }

    // The sum of the counts, and of several, their FNV-1a hash (Fowler, Noll, Vo) over numbers instead of bytes.
    void mark_counts(Name name) {
        uint64_t total = 0, uneven = 0;
        const bool by_inputs = name == Name::reduce || name == Name::reduce_scatter || name == Name::gather;
        const Parts& parts = by_inputs ? call_.inputs : call_.outputs;
        if (name != Name::all_to_all) {
            if (parts.size() > 1) uneven = 0xCBF29CE484222325;
            for (const Part& part : parts) {
                total += static_cast<uint64_t>(part.count);
                if (parts.size() > 1) uneven = (uneven ^ static_cast<uint64_t>(part.count)) * 0x100000001B3;
            }
        }
        call_.mark.words[1] = total, call_.mark.words[2] = uneven, call_.mark.words[3] = 0;
    }

    template <class Calling>
    int within(int64_t nbytes, const Calling& calling) {
        Status status;
        {
            PythonPatience patience;
            if (nbytes > kLongBytes) patience.settle();
            status = calling(patience);
        }
        if (status == Status::interrupted) throw nb::python_error();
        return static_cast<int>(status);
    }

    Collectives collectives_;
    Rings rings_;
    std::vector<DType> dtypes_;
    Call call_;
    const int rank_, size_;
};

// Addresses and lengths of the memory to write, and addresses of the memory to copy from.
void copy(const std::vector<uintptr_t>& places, const std::vector<uintptr_t>& sources, const std::vector<int64_t>& lengths) {
    int64_t total = 0;
    for (const int64_t length : lengths) total += length;
    PythonPatience patience;
    if (total > kLongBytes) patience.settle();
    for (size_t n = 0; n < lengths.size(); n++)
        copy_gradient(at(places.at(n)), at(sources.at(n)), static_cast<size_t>(lengths[n]), total >= kPastBytes);
}

}  // namespace
}  // namespace unisono

NB_MODULE(_native, module) {
    using namespace unisono;
    module.doc() = "Collectives in shared memory; see src/native.";
    module.attr("BUILD") = UNISONO_BUILD;
    module.def("copy", &copy);
    nb::class_<Core>(module, "Core")
        .def(nb::init<uintptr_t, uintptr_t, uintptr_t, int64_t, int, int, bool, const std::vector<std::pair<std::string, int64_t>>&>())
        .def("call", &Core::call)
        .def("call_lists", &Core::call_lists)
        .def("send", &Core::send)
        .def("receive", &Core::receive)
        .def("wait_rings", &Core::wait_rings)
        .def("wake", &Core::wake)
        .def("compare", &Core::compare)
        .def("abort", &Core::abort)
        .def("add_arena", &Core::add_arena)
        .def("expect_arenas", &Core::expect_arenas)
        .def("drop_arena", &Core::drop_arena)
        .def_prop_ro("moves", &Core::moves)
        .def_prop_ro("missing", &Core::missing)
        .def_prop_ro("waited_s", &Core::waited_s);
}
