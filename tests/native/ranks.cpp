// The headers of the native core without Python: ranks are threads over one mapping. Each result is compared with
// one computed from all ranks' inputs in one thread. Built with sanitizers by tests/native/test_headers.py; prints the
// failures.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "shm/collectives.hpp"
#include "shm/p2p_ring.hpp"

using namespace unisono;

namespace {

constexpr size_t kStage = 16 << 10;
constexpr double kTimeoutS = 60;
std::atomic<int> failures_found{0};

void expect(bool holds, const char* what, int64_t count) {
    if (holds) return;
    std::printf("failed: %s of %lld elements\n", what, static_cast<long long>(count));
    failures_found++;
}

// Memory of a group, and one rank's view of it.
struct SharedGroup {
    int size;
    std::vector<Word> words;
    std::vector<char> stages, rings;

    explicit SharedGroup(int size)
        : size(size),
          words(static_cast<size_t>(size * kWordsPerRank)),
          stages(static_cast<size_t>(size) * 2 * kStage),
          rings(RingMemory::nbytes(size, ByteRing::kBytes) + 64) {}

    void run(const std::function<void(int, Collectives&, MessageRings&)>& program) {
        std::vector<std::thread> threads;
        for (int rank = 0; rank < size; rank++)
            threads.emplace_back([&, rank] {
                Collectives collectives(words.data(), stages.data(), kStage, rank, size, true);
                const auto address = (reinterpret_cast<uintptr_t>(rings.data()) + 63) & ~uintptr_t{63};
                MessageRings messages(collectives.rounds.shared_barrier, reinterpret_cast<char*>(address));
                program(rank, collectives, messages);
            });
        for (std::thread& thread : threads) thread.join();
    }
};

float value(int rank, int64_t index) { return static_cast<float>((rank + 1) * (index % 11 + 1)); }

std::vector<float> input_of(int rank, int64_t count, int64_t from = 0) {
    std::vector<float> found(static_cast<size_t>(count));
    for (int64_t n = 0; n < count; n++) found[n] = value(rank, from + n);
    return found;
}

Buffer part(std::vector<float>& of) { return {reinterpret_cast<char*>(of.data()), static_cast<int64_t>(of.size())}; }

CollectiveCall call_of(WaitCallbacks& callbacks, OpType type, uint64_t number) {
    CollectiveCall call;
    call.type = type;
    call.reduction = reduction_of("float32", ReduceOp::sum);
    call.width = 4;
    call.signature.words[0] = number;
    call.deadline = monotonic_s() + kTimeoutS;
    call.callbacks = &callbacks;
    return call;
}

bool sums(const std::vector<float>& found, int size, int64_t from = 0) {
    for (size_t n = 0; n < found.size(); n++)
        if (found[n] != value(0, from + static_cast<int64_t>(n)) * static_cast<float>(size * (size + 1) / 2))
            return false;
    return true;
}

void reductions(int rank, int size, Collectives& collectives, int64_t count) {
    WaitCallbacks callbacks;
    auto all = input_of(rank, count);
    CollectiveCall call = call_of(callbacks, OpType::all_reduce, 1);
    call.outputs = {part(all)};
    expect(collectives.run(call) == Status::ok && sums(all, size), "all_reduce", count);

    auto data = input_of(rank, count);
    const auto before = data;
    call = call_of(callbacks, OpType::reduce, 2);
    call.root = size - 1;
    call.inputs = {part(data)};
    if (rank == call.root) call.outputs = {part(data)};
    const bool reduced = collectives.run(call) == Status::ok;
    expect(reduced && (rank == size - 1 ? sums(data, size) : data == before), "reduce", count);

    std::vector<std::vector<float>> rows;
    std::vector<float> total(static_cast<size_t>(count));
    for (int r = 0; r < size; r++) rows.push_back(input_of(rank, count, r));
    call = call_of(callbacks, OpType::reduce_scatter, 3);
    for (auto& row : rows) call.inputs.push_back(part(row));
    call.outputs = {part(total)};
    const bool scattered = collectives.run(call) == Status::ok;
    expect(scattered && sums(total, size, rank), "reduce_scatter", count);
}

void data_movements(int rank, int size, Collectives& collectives, int64_t count) {
    WaitCallbacks callbacks;
    auto sent = input_of(rank, count);
    auto target = input_of(rank, count);
    CollectiveCall call = call_of(callbacks, OpType::broadcast, 4);
    call.outputs = {part(target)};
    expect(collectives.run(call) == Status::ok && target == input_of(0, count), "broadcast", count);

    std::vector<std::vector<float>> gathered(static_cast<size_t>(size), std::vector<float>(static_cast<size_t>(count)));
    call = call_of(callbacks, OpType::all_gather, 5);
    call.inputs = {part(sent)};
    for (auto& row : gathered) call.outputs.push_back(part(row));
    bool correct = collectives.run(call) == Status::ok;
    for (int r = 0; r < size; r++) correct = correct && gathered[r] == input_of(r, count);
    expect(correct, "all_gather", count);

    // Uneven: rank a sends rank b a + b elements more than `count`.
    std::vector<std::vector<float>> sends, receives;
    for (int r = 0; r < size; r++) {
        sends.push_back(input_of(rank, count + rank + r, r));
        receives.emplace_back(static_cast<size_t>(count + rank + r));
    }
    call = call_of(callbacks, OpType::all_to_all, 6);
    for (auto& row : sends) call.inputs.push_back(part(row));
    for (auto& row : receives) call.outputs.push_back(part(row));
    correct = collectives.run(call) == Status::ok;
    for (int r = 0; r < size; r++) correct = correct && receives[r] == input_of(r, count + rank + r, rank);
    expect(correct, "all_to_all", count);
}

void messages(int rank, int size, MessageRings& rings, int64_t count) {
    WaitCallbacks callbacks;
    const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
    auto sent = input_of(rank, count);
    std::vector<float> received(static_cast<size_t>(count));
    auto* target = reinterpret_cast<char*>(received.data());
    const Header header{7, count, 1};
    const int64_t nbytes = count * 4;
    const auto send = [&] {
        const auto* from = reinterpret_cast<const char*>(sent.data());
        return rings.send(next, header, from, nbytes, monotonic_s() + kTimeoutS, callbacks);
    };
    const auto receive = [&] {
        return rings.receive(previous, header, target, nbytes, monotonic_s() + kTimeoutS, callbacks);
    };
    // Long ones do not fit into a ring: one rank has to begin by receiving.
    const Outcome first = rank ? send() : receive(), second = rank ? receive() : send();
    expect(first == Status::ok && second == Status::ok && received == input_of(previous, count), "a message", count);
    std::vector<float> other(1);
    if (rank == 0) expect(send() == Status::ok, "a send", count);
    if (rank == 1) {
        const Header expected{8, count, 1};
        const double deadline = monotonic_s() + kTimeoutS;
        const Outcome status = rings.receive(0, expected, target, nbytes, deadline, callbacks);
        expect(status == Status::unsupported && receive() == Status::ok, "a message of another tag", count);
    }
}

// Waits for messages that are moved elsewhere: ended by bytes, by room, by another thread's move, and by the deadline.
void waits(int rank, MessageRings& rings, int64_t count) {
    WaitCallbacks callbacks;
    std::vector<char> sent(128 << 10, 1), received(128 << 10);
    const int64_t nbytes = static_cast<int64_t>(sent.size()) - 64;
    const Header header{9, nbytes, 1};
    using Ranks = std::vector<int>;
    const auto ended = [&](const Ranks& to, const Ranks& from, uint64_t progress, double seconds) {
        return rings.wait(to, from, progress, monotonic_s() + seconds, callbacks) == Status::ok;
    };
    if (rank == 0) {
        const auto send = [&] {
            return rings.send(1, header, sent.data(), nbytes, monotonic_s() + kTimeoutS, callbacks);
        };
        bool correct = send() == Status::ok && ended({1}, {}, rings.progress(), kTimeoutS);
        correct = correct && send() == Status::ok;
        expect(correct, "a wait for room", count);
    }
    if (rank == 1) {
        bool correct = true;
        for (int turn = 0; turn < 2; turn++) {
            correct = correct && ended({}, {0}, rings.progress(), kTimeoutS);
            const double deadline = monotonic_s() + kTimeoutS;
            correct = correct && rings.receive(0, header, received.data(), nbytes, deadline, callbacks) == Status::ok;
        }
        expect(correct && received[0] == 1, "a wait for bytes", count);
        const uint64_t progress = rings.progress();
        std::thread other([&] { rings.wake(0); });
        correct = ended({}, {0}, progress, kTimeoutS) && rings.progress() == progress + 1;
        other.join();
        expect(correct, "a wait for another thread", count);
        const double start = monotonic_s();
        correct = ended({}, {0}, rings.progress(), 0.01) && monotonic_s() - start < kTimeoutS / 2;
        expect(correct, "a wait until its deadline", count);
    }
}

void failures() {
    SharedGroup group(3);
    std::vector<Collectives*> all_collectives(3);
    std::atomic<int> ready{0};
    group.run([&](int rank, Collectives& collectives, MessageRings&) {
        WaitCallbacks callbacks;
        all_collectives[rank] = &collectives;
        ready++;
        while (ready < 3) std::this_thread::yield();
        CollectiveCall call = call_of(callbacks, OpType::barrier, rank == 2 ? 11 : 10);
        expect(collectives.run(call) == Status::mismatch, "a mismatch", rank);
        if (rank == 0) {
            call = call_of(callbacks, OpType::barrier, 12);
            call.deadline = monotonic_s() + 0.05;
            const Outcome late = collectives.run(call);
            expect(late == Status::timeout && late.missing == 2 && late.waited_s > 0, "a timeout", rank);
            all_collectives[1]->rounds.shared_barrier.abort();
        }
        if (rank == 1) {
            // Rank 2 does not call.
            call = call_of(callbacks, OpType::barrier, 12);
            expect(collectives.run(call) == Status::aborted, "an abort", rank);
        }
        ready++;
        while (ready < 6) std::this_thread::yield();
    });
}

}  // namespace

int main() {
    for (int size : {2, 3}) {
        SharedGroup group(size);
        group.run([size](int rank, Collectives& collectives, MessageRings& rings) {
            for (int64_t count : {0, 1, 5, 1000, 4095, 4096, 4097, 13000, 70000}) {
                reductions(rank, size, collectives, count);
                data_movements(rank, size, collectives, count);
                if (count) messages(rank, size, rings, count);
                if (count == 1000) waits(rank, rings, count);
            }
        });
    }
    failures();
    std::printf("%d failed\n", failures_found.load());
    return failures_found.load() != 0;
}
