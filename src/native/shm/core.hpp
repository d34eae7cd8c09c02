// The native core of one rank for transport over shared memory, with its Python bindings.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "calls.hpp"
#include "python_memory.hpp"
#include "shm/collectives.hpp"
#include "shm/p2p_ring.hpp"
#include "shm/ring_end.hpp"
#include "shm/ring_network.hpp"
#include "shm/shared_words.hpp"

namespace unisono {

// One rank's collectives and messages in shared memory.
class Core : public Calls {
  public:
    // `memory` has at least `nbytes(size)` bytes, which were zero before any rank used them.
    Core(nb::handle memory, int rank, int size, bool oversubscribed,
         const std::vector<std::pair<std::string, int64_t>>& dtypes)
        : Calls(rank, size, dtypes),
          memory_(std::make_shared<PythonMemory>(memory, PyBUF_WRITABLE, nbytes(size))),
          places_(size),
          collectives_(reinterpret_cast<Word*>(memory_->begin()), memory_->begin() + places_.stages, kStageBytes, rank,
                       size, oversubscribed),
          rings_(collectives_.rounds.shared_barrier, memory_->begin() + places_.rings),
          executor_(rank, size, oversubscribed, collectives_.rounds.shared_barrier, memory_->begin() + places_.steps) {}

    static uint64_t nbytes(int size) { return Places(size).end; }

    // Sends or receives a message of `count` elements.
    Failure send(int peer, int64_t tag, int dtype, uintptr_t address, int64_t count, double deadline) {
        const int64_t nbytes = count * width_of(dtype);
        const Header header{tag, count, dtype};
        return run_interruptible(nbytes, [&](WaitCallbacks& callbacks) {
            return rings_.send(peer, header, pointer(address), nbytes, deadline, callbacks);
        });
    }
    Failure receive(int peer, int64_t tag, int dtype, uintptr_t address, int64_t count, double deadline) {
        const int64_t nbytes = count * width_of(dtype);
        const Header header{tag, count, dtype};
        return run_interruptible(nbytes, [&](WaitCallbacks& callbacks) {
            return rings_.receive(peer, header, pointer(address), nbytes, deadline, callbacks);
        });
    }

    // Methods for messages that Python code copies to and from the rings, instead of the core.
    auto rings() const { return ring_ends(memory_, {memory_->begin() + places_.rings, size_}, rank_); }
    uint64_t progress() const { return rings_.progress(); }
    void wake(int peer) { rings_.wake(peer); }
    Failure wait_for_messages(const std::vector<int>& to, const std::vector<int>& from, uint64_t progress,
                              double deadline) {
        return run_interruptible(0, [&](WaitCallbacks& callbacks) {
            return rings_.wait(to, from, progress, deadline, callbacks);
        });
    }

    // Runs a round without data, in which ranks compare hashes of their calls. If counts are passed, also checks that
    // each rank sends as much as its peer expects.
    Failure compare(uint64_t digest, const std::vector<int64_t>& counts, double deadline) {
        const Exclusive held(busy_);
        CollectiveCall& call = begin(0, 0, 0, -1, deadline);
        call.signature = {kGeneralCall, digest, 0, 0};
        return run_interruptible(0, [&](WaitCallbacks& callbacks) {
            call.callbacks = &callbacks;
            return counts.empty() ? collectives_.rounds.barrier(call) : collectives_.rounds.check_pairs(call, counts);
        });
    }

    void abort() {
        executor_.abort();
        collectives_.rounds.shared_barrier.abort();
    }
    void leave() { collectives_.rounds.shared_barrier.leave(); }
    bool has_left(int rank) const { return collectives_.rounds.shared_barrier.has_left(rank); }
    uint64_t round() const { return collectives_.rounds.shared_barrier.round(); }

    void expect_symmetric_memory() { collectives_.reductions.expect_symmetric_memory(); }
    void add_segment(uint64_t number, uintptr_t rows, int64_t stride) {
        collectives_.reductions.add_segment({number, pointer(rows), stride});
    }
    void remove_segment(uint64_t number) { collectives_.reductions.remove_segment(number); }

  private:
    static constexpr uint64_t kStageBytes = 1 << 20, kPageBytes = 4096;

    // Offsets in the shared memory, which contains the barrier's counters, two staging buffers per rank, the rings for
    // messages, and the rings for algorithms' steps, in this order.
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

    // Only all_reduce, which works in place, can divide its input before the sum; reduce and reduce_scatter must not
    // write to their input.
    bool divides_before(const CollectiveCall& call) const override {
        return !program_ && call.reduction.divide_before && call.type == OpType::all_reduce;
    }

    Outcome carry_out(CollectiveCall& call) override {
        return program_ ? carry_out_steps(call) : collectives_.run(call);
    }

    // Ranks first compare their calls in a barrier round, so that even the first bytes can be written directly to the
    // caller's memory.
    Outcome carry_out_steps(CollectiveCall& call) {
        StepsCall& steps = steps_of(call);
        call.signature = {kStepsCall, steps.signature, 0, 0};
        std::vector<int64_t> counts(std::move(steps.sends));
        counts.insert(counts.end(), steps.receives.begin(), steps.receives.end());
        steps.sends.clear();
        steps.receives.clear();
        StagedRounds& rounds = collectives_.rounds;
        const Outcome outcome = counts.empty() ? rounds.barrier(call) : rounds.check_pairs(call, counts);
        if (!outcome.ok()) return outcome;
        steps.agreed = true;
        return executor_.run(steps);
    }

    const std::shared_ptr<PythonMemory> memory_;
    const Places places_;
    Collectives collectives_;
    MessageRings rings_;
    Executor<RingNetwork> executor_;
};

inline void bind_shared_memory(nb::module_& module) {
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
        .def_prop_ro("progress", &Core::progress);
}

}  // namespace unisono
