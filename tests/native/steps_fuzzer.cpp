// A mutating fuzzer of what the executor of src/native/steps receives. Real ranks make some calls, and what they send to
// one rank is recorded; then that rank makes the calls again with peers that send the recorded frames, mutated. One
// thread does both: peers send whenever the executor is about to sleep. A seed gives the same bytes again.
//
// It must neither crash, nor use much time or memory, nor succeed if a frame is not the expected one. Payloads are not
// authenticated: other payloads may be accepted.
//
// Arguments: seconds; number of the first script, or of the script to repeat with a duration of 0.
#include <csignal>
#include <cstdio>
#include <thread>

#include <sys/ioctl.h>

#include "steps_cases.hpp"

#ifdef __SANITIZE_ADDRESS__
extern "C" {
size_t __sanitizer_get_current_allocated_bytes();
// An allocation that a frame's header asks for ends the program.
const char* __asan_default_options() { return "max_allocation_size_mb=64"; }
}
#else
static size_t __sanitizer_get_current_allocated_bytes() { return 0; }
#endif

namespace {

constexpr int kRunsPerScript = 60;
constexpr size_t kMostBytes = 4 << 20;
constexpr double kMostCpuS = 2;

struct Frame {
    FrameHeader header;
    Bytes payload;
    // The call in which it was recorded.
    uint32_t call;
};
using Frames = std::vector<Frame>;

// Calls of a group, and what the others send to one rank, by sender.
struct Script {
    uint64_t number;
    int size, rank;
    std::vector<Case> cases;
    std::vector<Frames> frames;
    // By call: the contributions of all ranks, and the signature.
    std::vector<std::vector<Bytes>> contributions;
    std::vector<uint64_t> signatures;

    Work work(size_t call) const { return {cases[call], rank, size, contributions[call]}; }
};

uint64_t script_number = 0, run_number = 0;
int failures_found = 0;

void expect(bool holds, const char* what, Status status, size_t call) {
    if (holds) return;
    std::printf("failed: %s: status %d of call %zu in script %llu, run %llu\n", what, static_cast<int>(status), call,
                static_cast<unsigned long long>(script_number), static_cast<unsigned long long>(run_number));
    failures_found++;
}

void on_alarm(int) {
    std::printf("failed: hangs in script %llu, run %llu\n", static_cast<unsigned long long>(script_number),
                static_cast<unsigned long long>(run_number));
    std::fflush(stdout);
    _exit(2);
}

double cpu_s() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// -- recording -----------------------------------------------------------------------------------
// The frames at the beginning of a stream of bytes, up to one that is cut.
Frames parse(const Bytes& bytes) {
    Frames found;
    for (size_t at = 0; bytes.size() - at >= sizeof(FrameHeader);) {
        FrameHeader header;
        std::memcpy(&header, bytes.data() + at, sizeof header);
        at += sizeof header;
        if (header.nbytes > bytes.size() - at) break;
        const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(at);
        found.push_back({header, Bytes(begin, begin + static_cast<std::ptrdiff_t>(header.nbytes)), header.call});
        at += header.nbytes;
    }
    return found;
}

Bytes flatten(const Frames& frames) {
    Bytes found;
    for (const Frame& frame : frames) {
        const auto* header = reinterpret_cast<const char*>(&frame.header);
        found.insert(found.end(), header, header + sizeof frame.header);
        found.insert(found.end(), frame.payload.begin(), frame.payload.end());
    }
    return found;
}

Script record(uint64_t number) {
    Random random(number);
    Script script{number, 2 + static_cast<int>(below(random, 3)), 0, {}, {}, {}, {}};
    script.rank = static_cast<int>(below(random, script.size));
    const int64_t longest = below(random, 8) ? 3000 : below(random, 4) ? 40'000 : 500'000;
    for (int64_t n = 1 + below(random, 4); n > 0; n--)
        script.cases.push_back(random_case(random, script.size, longest));
    for (size_t call = 0; call < script.cases.size(); call++) {
        script.contributions.push_back(contributions(script.cases[call], script.size));
        script.signatures.push_back(script.work(call).call.signature);
    }
    std::vector<Bytes> streams(static_cast<size_t>(script.size));
    {
        const SocketMesh mesh(script.size, 64 << 10, number, [&](int from, int to, const char* bytes, size_t nbytes) {
            Bytes& stream = streams[static_cast<size_t>(from)];
            if (to == script.rank) stream.insert(stream.end(), bytes, bytes + nbytes);
        });
        std::vector<std::thread> threads;
        for (int rank = 0; rank < script.size; rank++)
            threads.emplace_back([&, rank] {
                Executor<Links> executor(rank, script.size, true, mesh.sockets[static_cast<size_t>(rank)]);
                for (const Case& made : script.cases) {
                    Work work(made, rank, script.size);
                    if (!executor.run(work.call).ok()) std::abort();
                }
            });
        for (std::thread& thread : threads) thread.join();
    }
    for (const Bytes& stream : streams) {
        script.frames.push_back(parse(stream));
        // News may be anywhere within a call, depending on the speed of threads: they are moved to its beginning.
        std::stable_sort(script.frames.back().begin(), script.frames.back().end(), [](const Frame& a, const Frame& b) {
            if (a.header.call != b.header.call) return a.header.call < b.header.call;
            return a.header.kind == FrameKind::heard && b.header.kind != FrameKind::heard;
        });
    }
    return script;
}

// -- mutation ------------------------------------------------------------------------------------
void flip(Random& random, void* bytes, size_t nbytes) {
    if (nbytes) static_cast<uint8_t*>(bytes)[random() % nbytes] ^= static_cast<uint8_t>(1 << random() % 8);
}

void mutate_header(Random& random, FrameHeader& header) {
    const uint64_t own = header.nbytes;
    const uint64_t lengths[] = {0,        1,         own + 1,  own - 1,   own + 24,          128 << 10, (128 << 10) + 1,
                                1 << 20, 1u << 31, 1ull << 32, 1ull << 40, ~uint64_t{0} >> 1, ~uint64_t{0}};
    switch (below(random, 5)) {
        case 0: header.nbytes = lengths[below(random, std::size(lengths))]; break;
        case 1: header.kind = static_cast<FrameKind>(below(random, 5)); break;
        case 2: header.call += static_cast<uint32_t>(below(random, 5) - 2); break;
        default: flip(random, &header, sizeof header);
    }
}

void mutate(Random& random, Frames& frames) {
    if (frames.empty()) return;
    const auto any = [&] { return static_cast<std::ptrdiff_t>(random() % frames.size()); };
    const std::ptrdiff_t at = any();
    const auto index = static_cast<size_t>(at);
    switch (below(random, 9)) {
        case 0:
        case 1:
        case 2: mutate_header(random, frames[index].header); break;
        case 3: flip(random, frames[index].payload.data(), frames[index].payload.size()); break;
        case 4: std::swap(frames[index], frames[static_cast<size_t>(any())]); break;
        case 5: frames.erase(frames.begin() + at); break;
        case 6: {
            const Frame copy = frames[index];
            const size_t most = 1 + (4 << 20) / (copy.payload.size() + sizeof(FrameHeader));
            const size_t copies = below(random, 4) ? 1 : std::min<size_t>(most, 5000);
            frames.insert(frames.begin() + any(), copies, copy);
            break;
        }
        case 7: {
            Frame other = frames[index];
            other.header.kind = static_cast<FrameKind>(1 + below(random, 3));
            if (below(random, 2)) other.payload.resize(static_cast<size_t>(below(random, 100)));
            if (below(random, 4)) other.header.nbytes = other.payload.size();
            frames.insert(frames.begin() + at, other);
            break;
        }
        default: frames[index].payload.resize(static_cast<size_t>(below(random, 200)));
    }
}

void mutate(Random& random, Bytes& bytes) {
    if (bytes.empty()) return;
    const auto at = static_cast<std::ptrdiff_t>(random() % bytes.size());
    Bytes noise(static_cast<size_t>(1 + below(random, 60)));
    for (char& byte : noise) byte = static_cast<char>(random());
    switch (below(random, 4)) {
        case 0: bytes.resize(static_cast<size_t>(at)); break;
        case 1: bytes.insert(bytes.begin() + at, noise.begin(), noise.end()); break;
        case 2: bytes.erase(bytes.begin() + at, bytes.begin() + at + std::min(bytes.end() - bytes.begin() - at,
                                                                              std::ptrdiff_t{30})); break;
        default: flip(random, bytes.data(), bytes.size());
    }
}

// -- what may be accepted ------------------------------------------------------------------------
// The number of calls that may succeed after the frames of one peer.
size_t acceptable(const Script& script, const Frames& recorded, const Frames& frames) {
    auto wanted = recorded.begin();
    auto frame = frames.begin();
    const auto same = [](const FrameHeader& a, const FrameHeader& b) {
        return a.signature == b.signature && a.call == b.call && a.kind == b.kind && a.nbytes == b.nbytes;
    };
    for (size_t call = 0; call < script.cases.size(); call++) {
        const auto number = static_cast<uint32_t>(call + 1);
        const FrameHeader news{script.signatures[call], number, FrameKind::heard, 0};
        bool heard = false, hears = false;
        std::vector<FrameHeader> data;
        for (; wanted != recorded.end() && wanted->header.call == number; ++wanted)
            if (wanted->header.kind == FrameKind::heard)
                hears = true;
            else
                data.push_back(wanted->header);
        for (size_t next = 0; next < data.size() || (hears && !heard); ++frame) {
            if (frame == frames.end()) return call;
            if (!heard && same(frame->header, news))
                heard = true;
            else if (next == data.size() || !same(frame->header, data[next++]))
                return call;
        }
        // News that are not needed may be heard or not.
        if (!heard && frame != frames.end() && same(frame->header, news)) ++frame;
    }
    return script.cases.size();
}

// The number of calls for which a peer sends what was recorded.
size_t unchanged(const Script& script, const Frames& recorded, const Bytes& bytes) {
    const Bytes original = flatten(recorded);
    const auto common = std::mismatch(original.begin(), original.end(), bytes.begin(), bytes.end()).first;
    auto at = original.begin();
    for (const Frame& frame : recorded) {
        at += static_cast<std::ptrdiff_t>(sizeof(FrameHeader) + frame.payload.size());
        if (at > common) return frame.header.call - 1;
    }
    return script.cases.size();
}

// -- replay --------------------------------------------------------------------------------------
// What peers do after their last byte: nothing, or send no more, or also receive no more.
enum class Ending { none, leaves, closes };

// What a peer sends: bytes, and how many of them until the end of each call.
struct Stream {
    Stream(const Frames& frames, size_t calls) : bytes(flatten(frames)), ends(calls + 1, 0) {
        size_t at = 0;
        for (const Frame& frame : frames) {
            at += sizeof(FrameHeader) + frame.payload.size();
            for (size_t call = frame.call; call < ends.size(); call++) ends[call] = at;
        }
    }
    Bytes bytes;
    std::vector<size_t> ends;
};

// Peers that send prepared bytes, and drop what they receive. They are at most one call ahead, as executors are.
class Peers : public WaitCallbacks {
  public:
    Peers(const Script& script, const std::vector<Stream>& streams, Random& random, Ending ending)
        : streams_(streams), random_(random), ending_(ending) {
        for (int peer = 0; peer < script.size; peer++) {
            int ends[2] = {-1, -1};
            if (peer != script.rank) open_pair(ends);
            sockets.push_back(ends[0]);
            ends_.push_back(ends[1]);
        }
        sent_.assign(streams.size(), 0);
    }
    ~Peers() override {
        for (const auto* side : {&sockets, &ends_})
            for (const int fd : *side)
                if (fd >= 0) close(fd);
    }

    // Where nothing moves, nothing will, and the deadline has come.
    void before_sleep() override {
        bool moved = false;
        for (size_t peer = 0; peer < streams_.size(); peer++)
            if (ends_[peer] >= 0) moved |= move(peer);
        if (!moved) call->deadline = 0;
        for (int& fd : ends_) {
            if (moved || fd < 0 || ending_ == Ending::none) continue;
            shutdown(fd, SHUT_WR);
            if (ending_ == Ending::leaves) continue;
            close(fd);
            fd = -1;
        }
    }

    std::vector<int> sockets;
    // The present call, and its index.
    StepsCall* call = nullptr;
    size_t index = 0;

  private:
    static constexpr ssize_t kFullBytes = 32 << 10;

    bool move(size_t peer) {
        static Bytes dropped(64 << 10);
        ssize_t got, all = 0;
        while ((got = recv(ends_[peer], dropped.data(), dropped.size(), MSG_DONTWAIT)) > 0) all += got;
        // The executor waits for less only if it waits for bytes.
        const bool received = all >= kFullBytes;
        const auto& [stream, ends] = streams_[peer];
        const size_t most = std::min(stream.size(), index + 2 < ends.size() ? ends[index + 2] : stream.size());
        const size_t piece = in_pieces_ ? 1 + random_() % (size_t{1} << random_() % 18) : stream.size();
        size_t& at = sent_[peer];
        if (at >= most) return received;
        // Nor does it wait for a connection that it leaves unread.
        int unread = 0;
        ioctl(sockets[peer], FIONREAD, &unread);
        const char* from = stream.data() + at;
        const ssize_t sent = send(ends_[peer], from, std::min(piece, most - at), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent > 0) at += static_cast<size_t>(sent);
        return received || (sent > 0 && !unread);
    }

    const std::vector<Stream>& streams_;
    Random& random_;
    const Ending ending_;
    // In a few runs, because the executor does not poll a connection whose next frame is for later.
    const bool in_pieces_ = random_() % 8 == 0;
    std::vector<int> ends_;
    std::vector<size_t> sent_;
};

void replay(const Script& script, Random& random, bool mutates) {
    const size_t count = script.cases.size();
    std::vector<Stream> streams;
    size_t accepted = count, same = count;
    const int64_t target = below(random, script.size - 1);
    for (int peer = 0, other = 0; peer < script.size; peer++) {
        const Frames& recorded = script.frames[static_cast<size_t>(peer)];
        Frames frames = recorded;
        const bool chosen = mutates && peer != script.rank && (other++ == target || !below(random, 4));
        for (int64_t n = chosen ? below(random, 3) + 1 : 0; n > 0; n--) mutate(random, frames);
        Stream stream(frames, count);
        if (chosen && !below(random, 3)) mutate(random, stream.bytes);
        if (peer != script.rank) {
            accepted = std::min(accepted, acceptable(script, recorded, parse(stream.bytes)));
            same = std::min(same, unchanged(script, recorded, stream.bytes));
        }
        streams.push_back(std::move(stream));
    }
    const size_t allocated = __sanitizer_get_current_allocated_bytes();
    const bool ends = mutates && below(random, 8);
    const Ending ending = !ends ? Ending::none : below(random, 2) ? Ending::closes : Ending::leaves;
    Peers peers(script, streams, random, ending);
    Executor<Links> executor(script.rank, script.size, true, peers.sockets);
    bool failed = false;
    for (size_t call = 0; call < count; call++) {
        Work work = script.work(call);
        work.call.callbacks = &peers;
        peers.call = &work.call;
        peers.index = call;
        const double started = cpu_s();
        const Status status = executor.run(work.call).status;
        const bool ok = status == Status::ok;
        expect(cpu_s() - started < kMostCpuS, "takes long", status, call);
        expect(ok || !work.is_eager() || work.is_untouched(), "writes without agreement", status, call);
        if (!failed) {
            expect(!ok || call < accepted, "accepts a frame that is not expected", status, call);
            expect(!ok || call >= same || work.is_correct(), "has a wrong result", status, call);
        }
        expect(mutates || ok, "fails", status, call);
        failed = failed || !ok;
        const size_t own = work.output.size() * 4 + work.input.size() * 3;
        expect(__sanitizer_get_current_allocated_bytes() < allocated + kMostBytes + own, "takes memory", status, call);
    }
}

}  // namespace

int main(int count, char** arguments) {
    const double seconds = count > 1 ? std::atof(arguments[1]) : 10;
    script_number = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 0;
    std::signal(SIGALRM, on_alarm);
    uint64_t runs = 0;
    for (const double end = monotonic_s() + seconds; failures_found < 20; script_number++) {
        alarm(60);
        const Script script = record(script_number);
        Random random(script_number + (uint64_t{1} << 32));
        for (run_number = 0; run_number < kRunsPerScript; run_number++, runs++) {
            alarm(60);
            replay(script, random, run_number > 0);
            if (seconds > 0 && monotonic_s() >= end) break;
        }
        if (monotonic_s() >= end) break;
    }
    std::fprintf(stderr, "%llu runs\n", static_cast<unsigned long long>(runs));
    std::printf("%d failed\n", failures_found);
    return failures_found != 0;
}
