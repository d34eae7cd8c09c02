// The headers of the native core without Python: ranks are threads over one mapping. Each call is compared with what one
// thread makes of all ranks' inputs. Built with sanitizers by tests/native/test_headers.py; prints what is wrong.
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
constexpr double kSoonS = 60;
std::atomic<int> wrong{0};

void expect(bool holds, const char* what, int64_t count) {
    if (holds) return;
    std::printf("wrong: %s of %lld elements\n", what, static_cast<long long>(count));
    wrong++;
}

// Memory of a group, and one rank's view of it.
struct World {
    int size;
    std::vector<Word> words;
    std::vector<char> stages, rings;

    explicit World(int size)
        : size(size),
          words(static_cast<size_t>(size * kStride)),
          stages(static_cast<size_t>(size) * 2 * kStage),
          rings(static_cast<size_t>(size * size) * (128 + (128 << 10)) + 64) {}

    void run(const std::function<void(int, Collectives&, Rings&)>& program) {
        std::vector<std::thread> threads;
        for (int rank = 0; rank < size; rank++)
            threads.emplace_back([&, rank] {
                Collectives own(words.data(), stages.data(), kStage, rank, size, true);
                auto address = reinterpret_cast<uintptr_t>(rings.data());
                Rings messages(own.board, reinterpret_cast<char*>((address + 63) & ~uintptr_t{63}));
                program(rank, own, messages);
            });
        for (std::thread& thread : threads) thread.join();
    }
};

float value(int rank, int64_t index) { return static_cast<float>((rank + 1) * (index % 11 + 1)); }

std::vector<float> given(int rank, int64_t count, int64_t from = 0) {
    std::vector<float> found(static_cast<size_t>(count));
    for (int64_t n = 0; n < count; n++) found[n] = value(rank, from + n);
    return found;
}

Part part(std::vector<float>& of) { return {reinterpret_cast<char*>(of.data()), static_cast<int64_t>(of.size())}; }

Call call_of(Patience& patience, uint64_t number) {
    Call call;
    call.reduction = reduction_of("float32", Op::sum);
    call.width = 4;
    call.mark.words[0] = number;
    call.deadline = monotonic_s() + kSoonS;
    call.patience = &patience;
    return call;
}

bool sums(const std::vector<float>& found, int size, int64_t from = 0) {
    for (size_t n = 0; n < found.size(); n++)
        if (found[n] != value(0, from + static_cast<int64_t>(n)) * static_cast<float>(size * (size + 1) / 2)) return false;
    return true;
}

void reductions(int rank, int size, Collectives& own, int64_t count) {
    Patience patience;
    auto all = given(rank, count);
    Call call = call_of(patience, 1);
    call.outputs = {part(all)};
    expect(own.run(Name::all_reduce, call) == Status::ok && sums(all, size), "all_reduce", count);

    auto mine = given(rank, count);
    const auto before = mine;
    call = call_of(patience, 2);
    call.root = size - 1;
    call.inputs = {part(mine)};
    if (rank == call.root) call.outputs = {part(mine)};
    const bool reduced = own.run(Name::reduce, call) == Status::ok;
    expect(reduced && (rank == size - 1 ? sums(mine, size) : mine == before), "reduce", count);

    std::vector<std::vector<float>> rows;
    std::vector<float> total(static_cast<size_t>(count));
    for (int r = 0; r < size; r++) rows.push_back(given(rank, count, r));
    call = call_of(patience, 3);
    for (auto& row : rows) call.inputs.push_back(part(row));
    call.outputs = {part(total)};
    expect(own.run(Name::reduce_scatter, call) == Status::ok && sums(total, size, rank), "reduce_scatter", count);
}

void movements(int rank, int size, Collectives& own, int64_t count) {
    Patience patience;
    auto sent = given(rank, count);
    auto shown = given(rank, count);
    Call call = call_of(patience, 4);
    call.outputs = {part(shown)};
    expect(own.run(Name::broadcast, call) == Status::ok && shown == given(0, count), "broadcast", count);

    std::vector<std::vector<float>> taken(static_cast<size_t>(size), std::vector<float>(static_cast<size_t>(count)));
    call = call_of(patience, 5);
    call.inputs = {part(sent)};
    for (auto& row : taken) call.outputs.push_back(part(row));
    bool right = own.run(Name::all_gather, call) == Status::ok;
    for (int r = 0; r < size; r++) right = right && taken[r] == given(r, count);
    expect(right, "all_gather", count);

    // Uneven: rank a gives rank b a + b elements more than `count`.
    std::vector<std::vector<float>> gives, takes;
    for (int r = 0; r < size; r++) {
        gives.push_back(given(rank, count + rank + r, r));
        takes.emplace_back(static_cast<size_t>(count + rank + r));
    }
    call = call_of(patience, 6);
    for (auto& row : gives) call.inputs.push_back(part(row));
    for (auto& row : takes) call.outputs.push_back(part(row));
    right = own.run(Name::all_to_all, call) == Status::ok;
    for (int r = 0; r < size; r++) right = right && takes[r] == given(r, count + rank + r, rank);
    expect(right, "all_to_all", count);
}

void messages(int rank, int size, Rings& rings, int64_t count) {
    Patience patience;
    const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
    auto sent = given(rank, count);
    std::vector<float> got(static_cast<size_t>(count));
    const Header header{7, count, 1};
    const int64_t nbytes = count * 4;
    const auto send = [&] {
        return rings.send(next, header, reinterpret_cast<char*>(sent.data()), nbytes, monotonic_s() + kSoonS, patience);
    };
    const auto receive = [&] {
        return rings.receive(previous, header, reinterpret_cast<char*>(got.data()), nbytes, monotonic_s() + kSoonS, patience);
    };
    // Long ones do not fit into a ring: one rank has to begin by receiving.
    const Status first = rank ? send() : receive(), second = rank ? receive() : send();
    expect(first == Status::ok && second == Status::ok && got == given(previous, count), "a message", count);
    std::vector<float> other(1);
    if (rank == 0) expect(send() == Status::ok, "a send", count);
    if (rank == 1) {
        const Header wanted{8, count, 1};
        const Status refused = rings.receive(0, wanted, reinterpret_cast<char*>(got.data()), nbytes, monotonic_s() + 60, patience);
        expect(refused == Status::refused && receive() == Status::ok, "a message of another tag", count);
    }
}

// Waits for messages that are moved elsewhere: ended by bytes, by room, by another thread's move, and by the deadline.
void waits(int rank, Rings& rings, int64_t count) {
    Patience patience;
    std::vector<char> sent(128 << 10, 1), got(128 << 10);
    const int64_t nbytes = static_cast<int64_t>(sent.size()) - 64;
    const Header header{9, nbytes, 1};
    const auto ended = [&](const std::vector<int>& to, const std::vector<int>& from, uint64_t moves, double seconds) {
        return rings.wait(to, from, moves, monotonic_s() + seconds, patience) == Status::ok;
    };
    if (rank == 0) {
        const auto send = [&] { return rings.send(1, header, sent.data(), nbytes, monotonic_s() + kSoonS, patience); };
        expect(send() == Status::ok && ended({1}, {}, rings.moves(), kSoonS) && send() == Status::ok, "a wait for room", count);
    }
    if (rank == 1) {
        bool right = true;
        for (int turn = 0; turn < 2; turn++) {
            right = right && ended({}, {0}, rings.moves(), kSoonS);
            right = right && rings.receive(0, header, got.data(), nbytes, monotonic_s() + kSoonS, patience) == Status::ok;
        }
        expect(right && got[0] == 1, "a wait for bytes", count);
        const uint64_t moves = rings.moves();
        std::thread other([&] { rings.wake(0); });
        right = ended({}, {0}, moves, kSoonS) && rings.moves() == moves + 1;
        other.join();
        expect(right, "a wait for another thread", count);
        const double began = monotonic_s();
        expect(ended({}, {0}, rings.moves(), 0.01) && monotonic_s() - began < kSoonS / 2, "a wait in vain", count);
    }
}

void failures() {
    World world(3);
    std::vector<Collectives*> owns(3);
    std::atomic<int> ready{0};
    world.run([&](int rank, Collectives& own, Rings&) {
        Patience patience;
        owns[rank] = &own;
        ready++;
        while (ready < 3) std::this_thread::yield();
        Call call = call_of(patience, rank == 2 ? 11 : 10);
        expect(own.run(Name::barrier, call) == Status::differs, "a mismatch", rank);
        if (rank == 0) {
            call = call_of(patience, 12);
            call.deadline = monotonic_s() + 0.05;
            expect(own.run(Name::barrier, call) == Status::late && own.board.missing() == 2, "a timeout", rank);
            owns[1]->board.abort();
        }
        if (rank == 1) {
            // Rank 2 does not come.
            call = call_of(patience, 12);
            expect(own.run(Name::barrier, call) == Status::aborted, "an abort", rank);
        }
        ready++;
        while (ready < 6) std::this_thread::yield();
    });
}

}  // namespace

int main() {
    for (int size : {2, 3}) {
        World world(size);
        world.run([size](int rank, Collectives& own, Rings& rings) {
            for (int64_t count : {0, 1, 5, 1000, 4095, 4096, 4097, 13000, 70000}) {
                reductions(rank, size, own, count);
                movements(rank, size, own, count);
                if (count) messages(rank, size, rings, count);
                if (count == 1000) waits(rank, rings, count);
            }
        });
    }
    failures();
    std::printf("%d wrong\n", wrong.load());
    return wrong.load() != 0;
}
