// The native core of one rank for transport over TCP connections, with its Python bindings.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "calls.hpp"
#include "python_memory.hpp"
#include "tcp/links.hpp"
#include "tcp/messages.hpp"
#include "tcp/sockets.hpp"

namespace unisono {

// One rank's collectives and messages over sockets. Each collective runs all steps of an algorithm in one native call.
// Inside a host, collectives may travel through shared memory instead.
class TcpCore : public Calls {
  public:
    // `ranks` lists the ranks on each host, numbered as in the whole group; it is empty if sockets link all ranks.
    // `memory` and `bells` are this host's shared memory and doorbells, which are passed to `HostRings`.
    struct Hosts {
        std::vector<std::vector<int>> ranks;
        std::shared_ptr<const PythonMemory> memory;
        std::vector<int> bells;

        Hosts(const std::vector<std::vector<int>>& ranks, nb::handle memory, const std::vector<int>& bells)
            : ranks(ranks), memory(std::make_shared<PythonMemory>(memory, PyBUF_WRITABLE)), bells(bells) {}
    };

    // `sockets` are for collectives, and `messages` for point-to-point messages. `choose` returns the program for a
    // collective, an operation, a dtype, a root (-1 for none) and a number of bytes.
    TcpCore(int rank, const std::vector<int>& sockets, const std::vector<int>& messages, bool oversubscribed,
            size_t slice_bytes, const std::vector<std::pair<std::string, int64_t>>& dtypes, nb::callable choose,
            const Hosts& hosts)
        : Calls(rank, static_cast<int>(sockets.size()), dtypes),
          hosts_(hosts),
          executor_(rank, static_cast<int>(sockets.size()), oversubscribed, sockets, rings()),
          messages_(messages, oversubscribed),
          choose_(std::move(choose)) {
        executor_.set_slice_bytes(slice_bytes);
        const auto is_even = [&](const std::vector<int>& ranks) { return ranks.size() == hosts.ranks[0].size(); };
        if (!hosts.ranks.empty() && std::all_of(hosts.ranks.begin(), hosts.ranks.end(), is_even))
            executor_.set_hosts(hosts.ranks);
    }

    // Runs a round without data, in which ranks compare hashes of their calls. If counts are passed, also checks that
    // each rank sends as much as its peer expects.
    Failure compare(uint64_t digest, const std::vector<int64_t>& counts, double deadline) {
        const Exclusive held(busy_);
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

    // Sends or receives a message of `count` elements.
    Failure send(int peer, int64_t tag, int dtype, uintptr_t address, int64_t count, double deadline) {
        const int64_t nbytes = count * width_of(dtype);
        return run_interruptible(nbytes, [&](WaitCallbacks& callbacks) {
            return messages_.send(peer, {tag, count, dtype}, pointer(address), nbytes, deadline, callbacks);
        });
    }
    Failure receive(int peer, int64_t tag, int dtype, uintptr_t address, int64_t count, double deadline) {
        const int64_t nbytes = count * width_of(dtype);
        return run_interruptible(nbytes, [&](WaitCallbacks& callbacks) {
            return messages_.receive(peer, {tag, count, dtype}, pointer(address), nbytes, deadline, callbacks);
        });
    }

    void abort() {
        executor_.abort();
        messages_.abort();
    }
    void leave() { executor_.leave(); }
    uint32_t number() const { return executor_.number(); }

  private:
    // Returns the rings to this host's other ranks; null if there are none.
    std::shared_ptr<const HostRings> rings() const {
        for (const std::vector<int>& ranks : hosts_.ranks) {
            if (ranks.size() < 2 || std::find(ranks.begin(), ranks.end(), rank_) == ranks.end()) continue;
            if (hosts_.memory->nbytes() < HostRings::nbytes(ranks.size()) || hosts_.bells.size() != ranks.size())
                throw nb::value_error("these are no rings of a host");
            return std::make_shared<HostRings>(hosts_.memory->begin(), rank_, ranks, hosts_.bells);
        }
        return nullptr;
    }

    // Key of the program cache: the first word of a call's signature and the call's size class (a power of two).
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

    Outcome carry_out(CollectiveCall& call) override { return executor_.run(steps_of(call)); }

    const Hosts hosts_;
    Executor<Links> executor_;
    SocketMessages messages_;
    nb::callable choose_;
    std::map<Key, nb::object> programs_;
};

inline void bind_connections(nb::module_& module) {
    nb::class_<TcpCore::Hosts>(module, "Hosts")
        .def(nb::init<const std::vector<std::vector<int>>&, nb::handle, const std::vector<int>&>())
        .def_static("nbytes", &HostRings::nbytes);
    add_calls(nb::class_<TcpCore>(module, "TcpCore"))
        .def(nb::init<int, const std::vector<int>&, const std::vector<int>&, bool, size_t,
                      const std::vector<std::pair<std::string, int64_t>>&, nb::callable, const TcpCore::Hosts&>())
        .def("send", &TcpCore::send)
        .def("receive", &TcpCore::receive)
        .def("compare", &TcpCore::compare)
        .def("abort", &TcpCore::abort)
        .def("leave", &TcpCore::leave)
        .def_prop_ro("number", &TcpCore::number);
}

}  // namespace unisono
