// The executor of src/native/steps without Python: ranks are threads over socket pairs, or over rings in memory. Each result is compared with one
// computed in one thread. Built with sanitizers by tests/native/test_headers.py; prints the failures. An argument is
// the number of rounds of random calls; with more than one, every length is tried with two numbers of ranks.
#include <cstdio>
#include <functional>
#include <limits>
#include <thread>

#include "host_mesh.hpp"
#include "ring_mesh.hpp"
#include "steps_cases.hpp"
#include "tcp/messages.hpp"

namespace {

std::atomic<int> failures_found{0};

void expect(bool holds, const char* what, int64_t number) {
    if (holds) return;
    std::printf("failed: %s, %lld\n", what, static_cast<long long>(number));
    failures_found++;
}

using TcpExecutor = Executor<Links>;

std::unique_ptr<TcpExecutor> executor_of(const SocketMesh& mesh, int rank) {
    const auto& sockets = mesh.sockets[static_cast<size_t>(rank)];
    return std::make_unique<TcpExecutor>(rank, static_cast<int>(sockets.size()), true, sockets);
}
std::unique_ptr<Executor<RingNetwork>> executor_of(const RingMesh& mesh, int rank) {
    return std::make_unique<Executor<RingNetwork>>(rank, mesh.size, true, mesh.barrier_of(rank), mesh.rings());
}
std::unique_ptr<TcpExecutor> executor_of(const HostMesh& mesh, int rank) {
    auto made = std::make_unique<TcpExecutor>(rank, mesh.size(), true, mesh.sockets_of(rank), mesh.rings_of(rank));
    if (mesh.is_even()) made->set_hosts(mesh.hosts);
    return made;
}
int size_of(const HostMesh& mesh) { return mesh.size(); }
int size_of(const SocketMesh& mesh) { return static_cast<int>(mesh.sockets.size()); }
int size_of(const RingMesh& mesh) { return mesh.size; }

// Executors live until all ranks are done.
template <class Mesh, class Function>
void run_ranks(const Mesh& mesh, const Function& function) {
    const int size = size_of(mesh);
    std::vector<decltype(executor_of(mesh, 0))> executors;
    for (int rank = 0; rank < size; rank++) executors.push_back(executor_of(mesh, rank));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; rank++)
        threads.emplace_back([&, rank] { function(rank, *executors[static_cast<size_t>(rank)]); });
    for (std::thread& thread : threads) thread.join();
}

template <class Network>
void run_work(Work& work, Executor<Network>& executor, int rank, int64_t number) {
    const Outcome outcome = executor.run(work.call);
    if (outcome.ok() && work.is_correct()) return;
    std::printf("rank %d: status %d, waits for %d\n", rank, static_cast<int>(outcome.status), outcome.missing);
    expect(false, "a call", number);
}

void run_case(const Case& made, int rank, int size, TcpExecutor& executor, int64_t number) {
    Work work(made, rank, size);
    run_work(work, executor, rank, number);
}

// As in shared memory: ranks meet before each call, and know what they send each other.
void agree(const SocketMesh&, int, StepsCall&) {}
void agree(const HostMesh&, int, StepsCall&) {}
void agree(const RingMesh& mesh, int rank, StepsCall& call) {
    call.sends.clear();
    call.receives.clear();
    const Outcome met = mesh.barrier_of(rank).arrive_and_wait(nullptr, call.deadline, *call.callbacks);
    expect(met == Status::ok, "a meeting", rank);
}

// Calls one after the other, the same on all ranks. Ranks may have agreed on each before.
template <class Mesh>
void run_cases(const Mesh& mesh, const std::vector<Case>& cases, bool agreed = false) {
    const int size = size_of(mesh);
    std::vector<std::vector<std::unique_ptr<Work>>> works;
    for (const Case& made : cases) {
        const auto all = contributions(made, size);
        works.emplace_back();
        for (int rank = 0; rank < size; rank++) works.back().push_back(std::make_unique<Work>(made, rank, size, all));
    }
    const double deadline = monotonic_s() + 60;
    run_ranks(mesh, [&](int rank, auto& executor) {
        for (size_t n = 0; n < works.size(); n++) {
            Work& work = *works[n][static_cast<size_t>(rank)];
            work.call.deadline = deadline;
            work.call.agreed = agreed;
            if (agreed) agree(mesh, rank, work.call);
            run_work(work, executor, rank, static_cast<int64_t>(n));
        }
    });
}

// Every collective at lengths around the limits of short calls (128 KiB), of pieces (32 KiB) and of slices (1 MiB).
std::vector<Case> cases_of_length(int size, int64_t nbytes) {
    std::vector<Case> cases;
    for (int n = 0; n < kKinds; n++) {
        const Kind kind{n};
        const char* const dtype = n % 2 ? "bfloat16" : "float16";
        const auto parts = static_cast<int64_t>(lengths_of(kind, size));
        Lengths even, uneven(static_cast<size_t>(parts));
        for (int64_t part = 0; part < parts; part++) even.push_back(nbytes / 2 / parts + (part < nbytes / 2 % parts));
        cases.push_back({kind, dtype, even, size - 1, false, cases.size() + 1});
        // All elements in one chunk, and the others empty.
        if (parts) uneven[static_cast<size_t>(std::min<int64_t>(parts, size) - 1)] = nbytes / 2;
        cases.push_back({kind, dtype, uneven, 0, false, cases.size() + 1});
    }
    return cases;
}
void lengths(int size, int64_t nbytes) {
    const auto cases = cases_of_length(size, nbytes);
    run_cases(SocketMesh(size), cases);
    for (const bool agreed : {false, true}) run_cases(RingMesh(size), cases, agreed);
}

// Hosts whose ranks are linked by rings: even ones, also with ranks that are no neighbours in number, and uneven ones.
const std::vector<Hosts> kHosts = {{{0, 1}, {2, 3}}, {{0, 2, 4}, {1, 3, 5}}, {{3, 0}, {1}, {2, 4}}, {{0, 1, 2}}};

std::vector<Case> random_cases(int size, uint64_t seed, int calls, int64_t longest) {
    Random random(seed);
    std::vector<Case> cases;
    for (int n = 0; n < calls; n++) cases.push_back(random_case(random, size, longest));
    return cases;
}
// Bytes are forwarded in pieces of random length, so that headers and elements are cut anywhere.
void random_calls(int size, uint64_t seed, int calls, int64_t longest, size_t piece) {
    run_cases(SocketMesh(size, piece, seed), random_cases(size, seed, calls, longest));
}

// -- failures ------------------------------------------------------------------------------------
void fill_socket(int fd) {
    const Bytes zeros(4096);
    while (send(fd, zeros.data(), zeros.size(), MSG_DONTWAIT | MSG_NOSIGNAL) > 0) {
    }
}
void empty_socket(int fd) {
    Bytes bytes(4096);
    while (recv(fd, bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) {
    }
}

Case case_of(Kind kind, int64_t count, int size) {
    return {kind, "float32", Lengths(lengths_of(kind, size), count), 0, false, 77};
}

void mismatches(int size, int odd, Kind kind, int64_t count) {
    const SocketMesh mesh(size);
    run_ranks(mesh, [&](int rank, TcpExecutor& executor) {
        run_case(case_of(Kind::compare, 0, size), rank, size, executor, rank);
        Work work(case_of(kind, count, size), rank, size);
        if (rank == odd) work.call.signature++;
        if (rank == odd) usleep(2000);
        expect(executor.run(work.call) == Status::mismatch, "a mismatch", count);
        expect(work.is_untouched(), "a call without agreement writes nothing", count);
    });
}

void unequal_pairs(int size, Kind kind) {
    const SocketMesh mesh(size);
    run_ranks(mesh, [&](int rank, TcpExecutor& executor) {
        Work work(case_of(kind, 100, size), rank, size);
        if (rank == 0) work.call.sends[1]++;
        expect(executor.run(work.call) == Status::mismatch, "a mismatch of pairs", rank);
        expect(work.is_untouched(), "unequal pairs write nothing", rank);
    });
}

// A rank does not make the call.
void timeouts(Kind kind, int64_t count) {
    const int size = 3, absent = 2;
    const SocketMesh mesh(size);
    run_ranks(mesh, [&](int rank, TcpExecutor& executor) {
        if (rank == absent) return;
        Work work(case_of(kind, count, size), rank, size);
        // Long enough for the other rank to begin: on a busy machine a thread may stand still for a tenth of a second.
        const double started = monotonic_s();
        work.call.deadline = started + 1;
        const Outcome outcome = executor.run(work.call);
        expect(outcome == Status::timeout && outcome.missing == absent, "a timeout", count);
        expect(monotonic_s() - started >= 1 && outcome.waited_s >= 0.5, "a timeout before its deadline", count);
        expect(work.is_untouched(), "a call at its deadline writes nothing", count);
    });
}

void closed_peers(Kind kind, int64_t count) {
    const int size = 3, absent = 2;
    const SocketMesh mesh(size);
    run_ranks(mesh, [&](int rank, TcpExecutor& executor) {
        run_case(case_of(Kind::compare, 0, size), rank, size, executor, rank);
        if (rank == absent) return mesh.leave(rank);
        Work work(case_of(kind, count, size), rank, size);
        const Outcome outcome = executor.run(work.call);
        expect(outcome == Status::peer_lost && outcome.missing == absent, "a closed peer", count);
    });
}

// Another thread aborts a call that waits; later ones end too.
void aborts() {
    const SocketMesh mesh(2);
    run_ranks(mesh, [&](int rank, TcpExecutor& executor) {
        if (rank) return;
        Work work(case_of(Kind::compare, 0, 2), rank, 2), later(case_of(Kind::ring_all_reduce, 10, 2), rank, 2);
        std::thread other([&] {
            usleep(20'000);
            executor.abort();
        });
        const double started = monotonic_s();
        expect(executor.run(work.call) == Status::aborted && monotonic_s() - started < 30, "an abort", 0);
        expect(executor.run(later.call) == Status::aborted && later.is_untouched(), "a call after an abort", 0);
        other.join();
    });
}

// Rank 0 is a call ahead of others, which have not yet received the frames of the present one.
void ranks_ahead(int64_t count) {
    const int size = 4;
    const SocketMesh mesh(size);
    run_ranks(mesh, [&](int rank, TcpExecutor& executor) {
        for (int n = 0; n < 12; n++) {
            if (rank == n % size) usleep(300);
            const Kind kind = n % 3 ? Kind::chain_broadcast : Kind::direct_all_reduce;
            run_case(case_of(kind, count, size), rank, size, executor, n);
        }
    });
}

// Interrupted by the caller: memory that frames are read from may be freed, and later calls do not send it.
void interruptions() {
    struct Interrupts : WaitCallbacks {
        explicit Interrupts(bool throws) : throws(throws) {}
        void before_sleep() override {
            if (throws) throw std::bad_alloc();
        }
        bool interrupted() override { return true; }
        const bool throws;
    };
    for (const bool throws : {false, true}) {
        const SocketMesh mesh(2);
        TcpExecutor executor(0, 2, true, mesh.sockets[0]);
        fill_socket(mesh.sockets[0][1]);
        Interrupts callbacks(throws);
        for (int n = 0; n < 2; n++) {
            Work work(case_of(Kind::direct_all_reduce, 1000, 2), 0, 2);
            work.call.callbacks = &callbacks;
            Outcome outcome = Status::interrupted;
            try {
                outcome = executor.run(work.call);
            } catch (const std::bad_alloc&) {
                expect(throws, "an exception", n);
            }
            expect(outcome == Status::interrupted && work.is_untouched(), "an interrupted call", throws);
            if (n == 0) empty_socket(mesh.sockets[1][0]);
        }
    }
}

// A second thread is refused while a call waits, which then goes on.
void second_threads() {
    const SocketMesh mesh(2);
    TcpExecutor executor(0, 2, true, mesh.sockets[0]), other(1, 2, true, mesh.sockets[1]);
    std::atomic<bool> waits{false};
    struct Announces : WaitCallbacks {
        explicit Announces(std::atomic<bool>& waits) : waits(waits) {}
        void before_sleep() override { waits = true; }
        std::atomic<bool>& waits;
    } callbacks(waits);
    const Case made = case_of(Kind::direct_all_reduce, 1000, 2);
    Work first(made, 0, 2), second(made, 0, 2), peer(made, 1, 2);
    first.call.callbacks = &callbacks;
    std::thread caller([&] { run_work(first, executor, 0, 0); });
    while (!waits) usleep(100);
    bool refused = false;
    try {
        executor.run(second.call);
    } catch (const std::logic_error&) {
        refused = second.is_untouched();
    }
    expect(refused, "a second thread in a call", 0);
    run_work(peer, other, 1, 0);
    caller.join();
}

// Calls that a wrong algorithm leads to: steps with chunks or ranks that the call does not have.
void misfits() {
    const SocketMesh mesh(2);
    TcpExecutor executor(0, 2, true, mesh.sockets[0]);
    const auto check = [&](Kind kind, const std::function<void(StepsCall&)>& change) {
        Work work(case_of(kind, 10, 2), 0, 2);
        change(work.call);
        expect(executor.run(work.call) == Status::unsupported, "a call that does not fit", static_cast<int>(kind));
    };
    const Program empty({}, 0, 2, 0), larger({}, 2, 3, 0);
    check(Kind::ring_all_reduce, [](StepsCall& call) { call.chunks.pop_back(); });
    check(Kind::ring_all_reduce, [&](StepsCall& call) { call.program = &larger; });
    check(Kind::ring_all_reduce, [&](StepsCall& call) { call.program = &empty, call.chunks.clear(); });
    check(Kind::compare_lengths, [](StepsCall& call) { call.receives.pop_back(); });
    check(Kind::compare_lengths, [](StepsCall& call) { call.sends.pop_back(), call.receives.pop_back(); });
    expect(executor.number() == 0, "a call that does not fit is none", 0);
}

// A deadline far away is no reason to look at sockets without a pause.
void far_deadlines() {
    struct Counts : WaitCallbacks {
        void before_sleep() override { sleeps++; }
        int sleeps = 0;
    };
    for (const double left : {1e9, std::numeric_limits<double>::infinity()}) {
        const SocketMesh mesh(2);
        TcpExecutor executor(0, 2, true, mesh.sockets[0]);
        Counts callbacks;
        Work work(case_of(Kind::compare, 0, 2), 0, 2);
        work.call.callbacks = &callbacks;
        work.call.deadline = monotonic_s() + left;
        std::thread other([&] {
            usleep(100'000);
            executor.abort();
        });
        expect(executor.run(work.call) == Status::aborted && callbacks.sleeps < 20, "a deadline far away", 0);
        other.join();
    }
}

// -- peers that are no executors -------------------------------------------------------------------
// Rank 0 of a group whose other ranks send what a test says.
struct Alone {
    explicit Alone(int size) : mesh(size), executor(0, size, true, mesh.sockets[0]) {}

    void send(int from, const void* bytes, size_t nbytes) const {
        const ssize_t sent = ::send(mesh.sockets[static_cast<size_t>(from)][0], bytes, nbytes, MSG_NOSIGNAL);
        expect(sent == static_cast<ssize_t>(nbytes), "bytes of a peer", from);
    }
    // With zeros as its payload.
    void send(int from, const FrameHeader& header, size_t payload = 0) const {
        const Bytes zeros(payload);
        send(from, &header, sizeof header);
        if (payload) send(from, zeros.data(), payload);
    }

    SocketMesh mesh;
    TcpExecutor executor;
};

struct Sent {
    FrameHeader header;
    size_t payload;
};

// Whether rank 0 of two ends its first call with a status, and a second call is not ok, after these frames.
bool ends_with(Status expected, const Case& made, const std::function<std::vector<Sent>(uint64_t)>& frames) {
    Alone alone(2);
    Work work(made, 0, 2), next(made, 0, 2);
    for (const auto& [header, payload] : frames(work.call.signature)) alone.send(1, header, payload);
    work.call.deadline = monotonic_s() + (expected == Status::timeout ? 0.05 : 5);
    const Status status = alone.executor.run(work.call).status;
    if (status != expected) std::printf("status %d\n", static_cast<int>(status));
    if (status != Status::ok && !work.is_untouched()) return false;
    next.call.deadline = monotonic_s() + 0.05;
    return status == expected && !alone.executor.run(next.call).ok();
}

void refused_frames() {
    const FrameKind data = FrameKind::data, heard = FrameKind::heard;
    const Case reduces = case_of(Kind::direct_all_reduce, 2, 2), compares = case_of(Kind::compare, 2, 2);
    const Case sends = case_of(Kind::chain_broadcast, 2, 2);
    Case receives = sends;
    receives.root = 1;
    using Frames = std::vector<Sent>;
    const auto check = [](const char* what, Status status, const Case& made, auto frames) {
        expect(ends_with(status, made, frames), what, static_cast<int>(made.kind));
    };
    check("a frame", Status::ok, reduces, [&](uint64_t s) { return Frames{{{s, 1, data, 8}, 8}}; });
    check("news", Status::ok, compares, [&](uint64_t s) { return Frames{{{s, 1, heard, 0}, 0}}; });
    for (const Case& made : {reduces, compares}) {
        check("another signature", Status::mismatch, made, [&](uint64_t s) {
            return Frames{{{s + 1, 1, data, 8}, 8}};
        });
        check("an earlier call", Status::mismatch, made, [&](uint64_t s) { return Frames{{{s, 0, data, 8}, 8}}; });
        check("the next call", Status::timeout, made, [&](uint64_t s) { return Frames{{{s + 1, 2, data, 8}, 8}}; });
        check("a later call", Status::mismatch, made, [&](uint64_t s) { return Frames{{{s, 3, data, 8}, 8}}; });
        check("another kind", Status::mismatch, made, [&](uint64_t s) {
            return Frames{{{s, 1, FrameKind{5}, 0}, 0}};
        });
        check("a farewell", Status::peer_left, made, [&](uint64_t) {
            return Frames{{{0, 0, FrameKind::farewell, 0}, 0}};
        });
        check("a mismatch", Status::mismatch, made, [&](uint64_t s) {
            return Frames{{{s, 1, FrameKind::mismatch, 0}, 0}};
        });
        check("news with a payload", Status::mismatch, made, [&](uint64_t s) {
            return Frames{{{s, 1, heard, 24}, 0}};
        });
        check("news that come again", Status::mismatch, made, [&](uint64_t s) {
            return Frames{{{s, 1, heard, 0}, 0}, {{s, 1, heard, 0}, 0}};
        });
    }
    for (const uint64_t nbytes : {uint64_t{0}, uint64_t{7}, uint64_t{9}, uint64_t{1} << 40, ~uint64_t{0}})
        check("another length", Status::mismatch, reduces, [&](uint64_t s) {
            return Frames{{{s, 1, data, nbytes}, 8}};
        });
    check("a frame too many", Status::mismatch, reduces, [&](uint64_t s) {
        return Frames{{{s, 1, data, 8}, 8}, {{s, 1, data, 8}, 8}};
    });
    check("a long frame of a later step", Status::mismatch, receives, [&](uint64_t s) {
        return Frames{{{s, 1, data, 8}, 8}, {{s, 1, data, 60'000}, 0}};
    });
    // The root receives nothing, but waits for news.
    check("a frame without a receiver", Status::mismatch, sends, [&](uint64_t s) { return Frames{{{s, 1, data, 8}, 8}}; });
}

// -- bytes that never stop -------------------------------------------------------------------------
// While rank 0 reduces what rank 1 has sent, rank 2 sends the next element, and so on.
struct Stream {
    const Alone* alone = nullptr;
    int64_t limit = 0, sent = 0, aborts_at = -1;
    int turn = 1;

    void feed() {
        if (sent == aborts_at) const_cast<TcpExecutor&>(alone->executor).abort();
        if (sent++ >= limit) return;
        turn = 3 - turn;
        alone->send(turn, &sent, sizeof(float));
    }
} stream;

void feeding_kernel(const char*, const char*, char*, size_t) { stream.feed(); }

Status run_stream(double seconds, int64_t aborts_at, WaitCallbacks* callbacks = nullptr,
                  int64_t elements = 120'000) {
    Alone alone(3);
    // All in one slice.
    alone.executor.set_slice_bytes(static_cast<size_t>(3 * elements) * sizeof(float));
    Work work(case_of(Kind::compare, 0, 3), 0, 3);
    Steps steps;
    steps.add(true, {}, {{1, {{0, 1}}}, {2, {{1, 2}}}});
    const Program program(steps.numbers, 2, 3, 0);
    std::vector<float> memory(2 * elements);
    work.call.program = &program;
    work.call.width = sizeof(float);
    work.call.reduction.kernel = feeding_kernel;
    for (const size_t at : {int64_t{0}, elements}) {
        char* part = reinterpret_cast<char*>(&memory[at]);
        work.call.chunks.push_back({part, part, static_cast<size_t>(elements)});
    }
    work.call.deadline = monotonic_s() + seconds;
    if (callbacks) work.call.callbacks = callbacks;
    for (const int peer : {1, 2}) {
        alone.send(peer, FrameHeader{work.call.signature, 1, FrameKind::heard, 0});
        alone.send(peer, FrameHeader{work.call.signature, 1, FrameKind::data, elements * sizeof(float)});
    }
    stream = {&alone, 2 * elements, 0, aborts_at};
    stream.feed();
    return alone.executor.run(work.call).status;
}

void streams() {
    struct Interrupts : WaitCallbacks {
        bool interrupted() override { return true; }
    } callbacks;
    expect(run_stream(60, -1) == Status::ok, "a stream", stream.sent);
    expect(run_stream(0.02, -1) == Status::timeout && stream.sent < 200'000, "a late stream", stream.sent);
    expect(run_stream(60, 1000) == Status::aborted && stream.sent < 20'000, "an aborted stream", stream.sent);
    const bool interrupted = run_stream(60, -1, &callbacks, 4'000'000) == Status::interrupted;
    expect(interrupted && stream.sent < 8'000'000, "an interrupted stream", stream.sent);
}

// -- messages ------------------------------------------------------------------------------------
void messages(uint64_t seed) {
    const SocketMesh mesh(2);
    SocketMessages near(mesh.sockets[0], true), far(mesh.sockets[1], true);
    WaitCallbacks callbacks;
    const double deadline = monotonic_s() + 60;
    Random lengths(seed);
    std::vector<Bytes> sent;
    for (int n = 0; n < 60; n++) sent.emplace_back(lengths() % (n % 4 ? 300 : 300'000), static_cast<char>(n));
    std::thread sender([&] {
        // Each call has its own.
        WaitCallbacks callbacks;
        for (size_t n = 0; n < sent.size(); n++) {
            const auto nbytes = static_cast<int64_t>(sent[n].size());
            const Header header{static_cast<int64_t>(n), nbytes, 1};
            expect(near.send(1, header, sent[n].data(), nbytes, deadline, callbacks) == Status::ok, "a send", nbytes);
        }
    });
    for (size_t n = 0; n < sent.size(); n++) {
        Bytes got(sent[n].size());
        const auto nbytes = static_cast<int64_t>(got.size());
        const Header header{static_cast<int64_t>(n), nbytes, 1}, other{static_cast<int64_t>(n), nbytes + 1, 1};
        Bytes untouched(got.size() + 1, 'u');
        const Outcome refused = far.receive(0, other, untouched.data(), nbytes + 1, deadline, callbacks);
        expect(refused == Status::unsupported && untouched == Bytes(got.size() + 1, 'u'), "another message", nbytes);
        const Outcome status = far.receive(0, header, got.data(), nbytes, deadline, callbacks);
        expect(status == Status::ok && got == sent[n], "a message", nbytes);
    }
    sender.join();
}

void messages_that_fail() {
    const SocketMesh mesh(2);
    SocketMessages near(mesh.sockets[0], true), far(mesh.sockets[1], true);
    WaitCallbacks callbacks;
    Bytes bytes(10);
    const Header header{1, 10, 1};
    const auto receive = [&](SocketMessages& end, int peer, double seconds) {
        return end.receive(peer, header, bytes.data(), 10, monotonic_s() + seconds, callbacks);
    };
    const Outcome late = receive(far, 0, 0.05);
    expect(late == Status::timeout && late.missing == 0 && late.waited_s >= 0.05, "a late message", 0);
    const ssize_t part = ::send(mesh.sockets[0][1], &header, 10, MSG_NOSIGNAL);
    expect(part == 10 && receive(far, 0, 0.05) == Status::unsupported, "a part of a header", 0);
    std::thread other([&] {
        usleep(20'000);
        near.abort();
    });
    const double started = monotonic_s();
    expect(receive(near, 1, 60) == Status::aborted && monotonic_s() - started < 30, "an abort", 0);
    other.join();
    mesh.leave(0);
    expect(far.send(0, header, bytes.data(), 10, monotonic_s() + 5, callbacks) == Status::peer_lost, "a lost peer", 0);
}

void all_failures() {
    messages_that_fail();
    for (const int64_t count : {0, 10, 17'000}) {
        for (const Kind kind : {Kind::ring_all_reduce, Kind::chain_broadcast, Kind::gather, Kind::all_gather})
            for (const int size : {2, 4})
                for (const int odd : {0, size - 1}) mismatches(size, odd, kind, count);
        timeouts(Kind::direct_all_reduce, count);
        closed_peers(Kind::direct_all_reduce, count);
        closed_peers(Kind::all_gather, count);
    }
    mismatches(4, 1, Kind::compare, 0);
    timeouts(Kind::compare, 0);
    timeouts(Kind::ring_all_reduce, 17'000);
    for (const Kind kind : {Kind::all_to_all, Kind::compare_lengths})
        for (const int size : {2, 4}) unequal_pairs(size, kind);
    aborts();
    interruptions();
    second_threads();
    misfits();
    far_deadlines();
    refused_frames();
    streams();
}

}  // namespace

int main(int count, char** arguments) {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    const int rounds = count > 1 ? std::atoi(arguments[1]) : 1;
    const int64_t eager = 128 << 10, slice = 1 << 20;
    for (const int64_t nbytes : {int64_t{0}, int64_t{2}, eager - 2, eager, eager + 2})
        for (const int size : {2, 3})
            if (rounds > 1 || size == 3 || nbytes == eager + 2) lengths(size, nbytes);
    lengths(2, slice + 2);
    for (int round = 0; round < rounds; round++) {
        const auto seed = static_cast<uint64_t>(round);
        const int size = 2 + round % 4;
        random_calls(size, seed, 300, 20'000, 0);
        random_calls(size, seed + 1000, 20, 300'000, 0);
        random_calls(size, seed + 2000, 40, 100'000, 4001);
        random_calls(size, seed + 3000, 40, 2'000, 7);
        messages(seed);
        for (const Hosts& hosts : kHosts) {
            const int ranks = HostMesh(hosts).size();
            run_cases(HostMesh(hosts), random_cases(ranks, seed + 5000, 100, 100'000));
            run_cases(HostMesh(hosts), random_cases(ranks, seed + 6000, 20, 2'000'000));
        }
        for (const bool agreed : {false, true})
            run_cases(RingMesh(size), random_cases(size, seed + 4000 + agreed, 200, 100'000), agreed);
    }
    for (const int64_t elements : {100, 9'000}) ranks_ahead(elements);
    all_failures();
    std::printf("%d failed\n", failures_found.load());
    return failures_found.load() != 0;
}
