// The module `unisono._native`: the native cores for shared memory and TCP, and the enumerations and layouts that they
// share with Python.
#include <nanobind/nanobind.h>

#include <initializer_list>
#include <utility>
#include <vector>

#include "calls.hpp"
#include "gradient_copy.hpp"
#include "system.hpp"
#include "tcp/core.hpp"
#if UNISONO_LINUX
#include "shm/core.hpp"
#endif

namespace nb = nanobind;

namespace unisono {
namespace {

// Copies gradients into buckets, given addresses and byte lengths.
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

// Returns an enumeration as a dict from Python names to numbers.
template <class Enum>
nb::dict numbers(std::initializer_list<std::pair<const char*, Enum>> names) {
    nb::dict found;
    for (const auto& [name, number] : names) found[name] = static_cast<int>(number);
    return found;
}

}  // namespace
}  // namespace unisono

NB_MODULE(_native, module) {
    using namespace unisono;
    // After an uncaught exception, the traceback's stack frames keep communicators alive until the interpreter has shut
    // down, and nanobind would report them as leaks.
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
    module.def("copy_gradients", &copy_gradients);
    module.def("stop_deadlines", [](double stood, double stopped_at) {
        stood_s.store(stood);
        stopped_at_s.store(stopped_at);
    });
    nb::class_<Program>(module, "Program").def(nb::init<const std::vector<int64_t>&, int, int, uint64_t>());
    nb::class_<Outcome>(module, "Outcome")
        .def_prop_ro("status", [](const Outcome& outcome) { return static_cast<int>(outcome.status); })
        .def_ro("missing", &Outcome::missing)
        .def_ro("waited_s", &Outcome::waited_s);
#if UNISONO_LINUX
    bind_shared_memory(module);
#endif
    bind_connections(module);
}
