// Runs collectives over links to other ranks. One native call runs all of this rank's steps of an algorithm. No rank
// writes to its caller's memory or returns before it knows that every rank makes the same call. Each frame contains the
// call's signature, for comparison. If every rank's result depends on all contributions, receiving the data proves that
// the calls match. Short calls receive into internal memory, and copy the result to the caller's memory once the calls
// are known to match. Before long calls, and during the short calls of a rooted collective, ranks confirm their calls
// with a dissemination barrier. In round k of the barrier, each rank sends a "heard" frame to the rank 2^k places after
// it, once it has received the "heard" frames that were sent to it in all earlier rounds. With several ranks on each
// host, the first rounds are inside each host, and the later ones are between ranks with the same place on their hosts.
// Ranks that can compare their calls in another way, such as with a barrier in shared memory, do so before the call.
// Source: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", IJPP 17(1), 1988.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "call.hpp"
#include "kernels/reduce_kernels.hpp"
#include "steps/link.hpp"
#include "steps/program.hpp"
#include "steps/wanted.hpp"
#include "system.hpp"

namespace unisono {

// A chunk of a call's tensors, or a slice of a chunk: where its contents are, and where received data goes.
struct Chunk {
    // This rank's contribution; null if this rank has none.
    const char* own = nullptr;
    // Where the caller wants the result; null to keep the chunk in the executor's own memory.
    char* target = nullptr;
    size_t count = 0;

    // Filled in by the executor.
    char* at = nullptr;
    bool received = false;

    const char* contents() const { return received ? at : own; }
    Chunk slice(size_t begin, size_t length, size_t width) const {
        const size_t first = std::min(begin, count);
        return {own ? own + first * width : nullptr, target ? target + first * width : nullptr,
                std::min(length, count - first)};
    }
};

struct StepsCall {
    // Null for a round without data, in which ranks only compare their calls.
    const Program* program = nullptr;
    std::vector<Chunk> chunks;
    Reduction reduction;
    // Divisor of the sum, for an average.
    int64_t divisor = 1;
    size_t width = 1;
    // Whether every rank's result depends on all ranks' contributions.
    bool hears_all = false;
    // Whether all ranks are known to make the same call.
    bool agreed = false;
    // Lengths of the messages that this rank sends to each rank, and expects from each rank. Empty unless each pair of
    // ranks has its own message length.
    std::vector<int64_t> sends, receives;
    uint64_t signature = 0;
    double deadline = 0;
    WaitCallbacks* callbacks = nullptr;
};

// `Network` provides a byte stream to each other rank, and can sleep until one of these streams can move bytes.
template <class Network>
class Executor {
  public:
    template <class... Arguments>
    Executor(int rank, int size, bool oversubscribed, Arguments&&... network)
        : rank_(rank), size_(size), tries_(oversubscribed ? 1 : kTries), network_(std::forward<Arguments>(network)...) {
        for (int peer = 0; peer < size; peer++) links_.emplace_back(network_.stream(peer));
        for (int peer = 0; peer < size; peer++) {
            if (peer == rank) continue;
            exchange_.sends.push_back({peer, {{peer, peer + 1}}});
            exchange_.receives.push_back({peer, {{size + peer, size + peer + 1}}});
        }
        add_rounds(rank, size, [](int other) { return other; });
    }
    Executor(const Executor&) = delete;
    Executor& operator=(const Executor&) = delete;

    // Runs a call. Every rank must make the same calls in the same order.
    Outcome run(StepsCall& call) {
        const Exclusive held(busy_);
        if (!fits(call)) return Status::unsupported;
        call_ = &call;
        number_++;
        heard_.assign(static_cast<size_t>(size_), false);
        frames_left_.assign(static_cast<size_t>(size_), 0);
        round_ = sent_ = 0;
        // Unsent frames refer to the call's memory, so drop them when this call ends, even if it ends because an
        // allocation failed.
        const Drop drop{links_};
        const double started = monotonic_s();
        Outcome outcome = carry_out(call);
        outcome.waited_s = monotonic_s() - started;
        if (outcome == Status::mismatch) spread_mismatch();
        return outcome;
    }

    // Sets the length of the slices of long calls; it must be the same on all ranks. Each slice runs through all steps
    // before the next slice starts, and so adds the latencies of all steps to the call.
    void set_slice_bytes(size_t nbytes) { slice_bytes_ = nbytes; }

    // Makes "heard" frames travel inside each host first, and then between hosts. `hosts` contains the ranks on each
    // host, equally many per host.
    void set_hosts(const std::vector<std::vector<int>>& hosts) {
        const auto count = static_cast<int>(hosts.size()), each = static_cast<int>(hosts[0].size());
        heard_rounds_.clear();
        for (int host = 0; host < count; host++) {
            const std::vector<int>& ranks = hosts[static_cast<size_t>(host)];
            const auto own = std::find(ranks.begin(), ranks.end(), rank_);
            if (own == ranks.end()) continue;
            const auto place = static_cast<int>(own - ranks.begin());
            add_rounds(place, each, [&](int other) { return ranks[static_cast<size_t>(other)]; });
            const auto rail = [&](int other) { return hosts[static_cast<size_t>(other)][static_cast<size_t>(place)]; };
            add_rounds(host, count, rail);
        }
    }

    // Tells the other ranks that this one makes no more calls. Does nothing while a call is in progress.
    void leave() {
        if (busy_.exchange(true, std::memory_order_acquire)) return;
        for (int peer = 0; peer < size_; peer++) {
            if (peer == rank_) continue;
            Link& link = links_[static_cast<size_t>(peer)];
            link.queue({0, 0, FrameKind::farewell, 0}, {});
            link.flush();
        }
        busy_.store(false, std::memory_order_release);
    }

    // Ends every current and future wait of this executor. Thread-safe.
    void abort() {
        aborted_.store(true, std::memory_order_release);
        network_.wake();
    }

    uint32_t number() const { return number_; }

  private:
    using Link = unisono::Link<typename Network::Stream>;

    static constexpr int kTries = 50;
    static constexpr size_t kPieceBytes = 32 << 10;
    static constexpr size_t kEagerBytes = 128 << 10;
    static constexpr double kFarewellS = 0.01;
    // Number of loop passes between two checks of the clock while bytes are moving.
    static constexpr int kBusyPasses = 64;

    // How ranks find out that all of them make the same call. Data must not reach the caller's memory until all ranks
    // are known to make the same call, so a short call keeps received data in the executor's own memory until the call
    // ends.
    enum class Agreement {
        // Ranks compared their calls in shared memory before this call.
        known,
        // Ranks are exchanging the lengths of their messages. A peer sends data only after the lengths that it received
        // have matched, so its data frames can remain unread on the link until this rank has received all lengths.
        lengths,
        // A long call, or a round without data: ranks exchange all "heard" frames before the first byte of data.
        before_data,
        // A short call in which every rank's result needs all contributions: receiving the data proves that the calls
        // match.
        by_data,
        // A short call in which receiving the data would not prove that all calls match: ranks exchange "heard" frames
        // while they exchange the data.
        beside_data,
    };
    Agreement agreement_of(const StepsCall& call, size_t nbytes) const {
        if (call.agreed) return Agreement::known;
        if (!call.program || nbytes > kEagerBytes) return Agreement::before_data;
        return call.hears_all && call.sends.empty() ? Agreement::by_data : Agreement::beside_data;
    }
    bool is_short() const { return agreement_ == Agreement::by_data || agreement_ == Agreement::beside_data; }
    bool spreads() const { return agreement_ == Agreement::before_data || agreement_ == Agreement::beside_data; }

    // Drops the frames that are still queued when a call ends; after a successful call, no frames are queued.
    struct Drop {
        std::vector<Link>& links;
        ~Drop() {
            for (Link& link : links) link.drop();
        }
    };

    struct Part {
        int chunk;
        size_t nbytes;
    };
    // A message that is being received.
    struct Incoming {
        const Move* move = nullptr;
        std::vector<Part> parts;
        size_t total = 0, got = 0;
        bool begun = false;
        // Index of the part that is arriving, and how many of its bytes have been processed.
        size_t part = 0, done = 0;
        // Memory for the whole message, if the message cannot be reduced before the end of its step.
        std::unique_ptr<char[]> aside;
        // The first bytes of an element whose remaining bytes have not arrived.
        char cut[16];
        size_t held = 0;

        bool complete() const { return begun && got == total; }
    };

    // Whether a call has all chunks that its program refers to, and message lengths either for every rank or for none.
    bool fits(const StepsCall& call) const {
        const size_t chunks = call.chunks.size(), lengths = call.sends.size();
        if (lengths != call.receives.size() || (lengths && lengths != links_.size())) return false;
        if (!call.program) return true;
        return chunks && chunks >= static_cast<size_t>(call.program->chunks) &&
               call.program->frames.size() == links_.size();
    }

    // Runs a long call slice by slice, so that each slice's results are sent on while they are still in the cache.
    Outcome carry_out(StepsCall& call) {
        if (!call.sends.empty()) {
            agreement_ = Agreement::lengths;
            const Outcome outcome = compare_lengths(call);
            if (!outcome.ok()) return outcome;
        }
        size_t total = 0, longest = 0;
        for (const Chunk& chunk : call.chunks) {
            total += chunk.count * call.width;
            longest = std::max(longest, chunk.count);
        }
        // In an all_to_all, ranks forward little data, so slices would only add latencies.
        const size_t share = slice_bytes_ / call.width / std::max<size_t>(1, call.chunks.size());
        const size_t length = call.sends.empty() ? std::max<size_t>(1, share) : SIZE_MAX;
        agreement_ = agreement_of(call, total);
        if (call.program) {
            call_bytes_ = total;
            frames_left_ = call.program->frames;
            for (int64_t& frames : frames_left_) frames *= 1 + static_cast<int64_t>(longest / length);
        }
        incoming_.clear();
        if (agreement_ == Agreement::before_data) {
            const Outcome outcome = advance([&] { return all_heard() && all_drained(); });
            if (!outcome.ok()) return outcome;
        }
        if (!call.program) return Status::ok;
        width_ = call.width;
        for (size_t begin = 0; begin == 0 || begin < longest; begin += length) {
            slice_.clear();
            for (const Chunk& chunk : call.chunks) slice_.push_back(chunk.slice(begin, length, call.width));
            first_slice_ = begin == 0;
            const Outcome outcome = carry_out_slice();
            if (!outcome.ok()) return outcome;
        }
        return Status::ok;
    }

    Outcome carry_out_slice() {
        prepare_memory();
        for (const Step& step : call_->program->steps) {
            const Outcome outcome = take_step(step);
            if (!outcome.ok()) return outcome;
        }
        incoming_.clear();
        const Outcome outcome = advance([&] { return (!spreads() || all_heard()) && all_drained(); });
        if (outcome.ok()) store_results();
        return outcome;
    }

    // Returns `mismatch` unless every other rank sends the length that this rank expects. After a mismatch, `run`
    // notifies the other ranks.
    Outcome compare_lengths(const StepsCall& call) {
        std::vector<int64_t> theirs(call.sends.size());
        slice_.clear();
        for (const int64_t& length : call.sends) slice_.push_back({reinterpret_cast<const char*>(&length), nullptr, 1});
        for (int64_t& length : theirs) slice_.push_back({nullptr, nullptr, 1, reinterpret_cast<char*>(&length)});
        width_ = sizeof theirs[0];
        first_slice_ = true;
        if (const Outcome outcome = take_step(exchange_); !outcome.ok()) return outcome;
        for (size_t peer = 0; peer < theirs.size(); peer++)
            if (static_cast<int>(peer) != rank_ && theirs[peer] != call.receives[peer]) return Status::mismatch;
        return Status::ok;
    }

    // Chooses the memory of each chunk. In a short call, received data remains in the executor's own memory until all
    // ranks are known to make the same call.
    void prepare_memory() {
        size_t needed = 0;
        for (const Chunk& chunk : slice_)
            if (is_short() || !chunk.target) needed += chunk.count * width_;
        if (needed > arena_bytes_) {
            arena_.reset(new char[needed]);
            arena_bytes_ = needed;
        }
        char* next = arena_.get();
        for (Chunk& chunk : slice_) {
            chunk.at = chunk.target;
            if (!is_short() && chunk.target) continue;
            chunk.at = next;
            next += chunk.count * width_;
        }
    }

    void store_results() {
        for (const Chunk& chunk : slice_) {
            const char* contents = chunk.contents();
            if (chunk.target && chunk.received && call_->divisor != 1)
                call_->reduction.divide(chunk.at, chunk.count, call_->divisor);
            if (chunk.target && contents && contents != chunk.target)
                std::memcpy(chunk.target, contents, chunk.count * width_);
        }
    }

    Outcome take_step(const Step& step) {
        step_ = &step;
        incoming_.clear();
        for (const Move& move : step.receives) {
            Incoming in;
            in.move = &move;
            move.for_each_chunk([&](int chunk) {
                const size_t nbytes = slice_[static_cast<size_t>(chunk)].count * width_;
                in.parts.push_back({chunk, nbytes});
                in.total += nbytes;
            });
            if (is_left_out(in.total)) continue;
            if (step.reduces && !move.streams) in.aside.reset(new char[in.total]);
            incoming_.push_back(std::move(in));
        }
        for (const Move& move : step.sends) {
            std::vector<iovec> parts;
            size_t nbytes = 0;
            move.for_each_chunk([&](int index) {
                const Chunk& chunk = slice_[static_cast<size_t>(index)];
                const size_t length = chunk.count * width_;
                if (!length) return;
                char* from = const_cast<char*>(chunk.contents());
                nbytes += length;
                // Send chunks that are adjacent in memory as one part.
                if (!parts.empty() && static_cast<char*>(parts.back().iov_base) + parts.back().iov_len == from)
                    parts.back().iov_len += length;
                else
                    parts.push_back({from, length});
            });
            if (!is_left_out(nbytes)) send(move.peer, FrameKind::data, nbytes, std::move(parts));
        }
        const Outcome outcome = advance([&] { return all_received() && all_drained(); });
        if (outcome.ok() && step.reduces) reduce_aside();
        return outcome;
    }
    // After the first slice, empty messages are skipped: sender and receiver both know the lengths.
    bool is_left_out(size_t nbytes) const { return !nbytes && !first_slice_; }

    void send(int peer, FrameKind kind, size_t nbytes, std::vector<iovec> parts) {
        Link& link = links_[static_cast<size_t>(peer)];
        link.queue({call_->signature, number_, kind, nbytes}, std::move(parts));
        link.flush();
    }

    bool all_received() const {
        return std::all_of(incoming_.begin(), incoming_.end(), [](const Incoming& in) { return in.complete(); });
    }
    bool all_drained() const {
        return std::all_of(links_.begin(), links_.end(), [](const Link& link) { return link.drained(); });
    }
    bool all_heard() const { return round_ == heard_rounds_.size(); }

    // -- waiting ----------------------------------------------------------------------------------
    // Sends and receives until a condition holds.
    template <class Condition>
    Outcome advance(const Condition& done) {
        for (int idle = 0, busy = 0;;) {
            spread();
            bool moved = false;
            for (int peer = 0; peer < size_; peer++) {
                if (peer == rank_) continue;
                Link& link = links_[static_cast<size_t>(peer)];
                if (!link.drained()) moved |= link.flush();
                const Outcome outcome = receive(link, peer, moved);
                if (!outcome.ok()) return outcome;
            }
            spread();
            if (done()) return Status::ok;
            for (int peer = 0; peer < size_; peer++)
                if (const Link& link = links_[static_cast<size_t>(peer)]; (link.left() || link.lost()) && awaits(peer))
                    return Outcome(link.left() ? Status::peer_left : Status::peer_lost, peer);
            if (aborted_.load(std::memory_order_acquire)) return Outcome(Status::aborted, first_awaited());
            // Check the deadline now and then even while bytes are moving, so that a peer that keeps sending a few
            // bytes cannot delay the timeout.
            if (moved ? ++busy % kBusyPasses : ++idle < tries_) {
                if (moved) idle = 0;
                continue;
            }
            if (deadline_clock_s() > call_->deadline) return Outcome(Status::timeout, first_awaited());
            if (moved ? call_->callbacks->interrupted_lately() : sleep()) return Status::interrupted;
            idle = 0;
        }
    }

    // Whether this rank is waiting for frames from a peer, or for room to send frames to that peer.
    bool awaits(int peer) const {
        if (peer == rank_) return false;
        if (!links_[static_cast<size_t>(peer)].drained()) return true;
        for (const Incoming& in : incoming_)
            if (in.move->peer == peer && !in.complete()) return true;
        return spreads() && heard_from() == peer && !heard_[static_cast<size_t>(peer)];
    }
    int first_awaited() const {
        for (int peer = 0; peer < size_; peer++)
            if (awaits(peer)) return peer;
        return -1;
    }

    // Sleeps until a link can move bytes; returns whether a signal has interrupted the wait.
    bool sleep() {
        wanted_.clear();
        for (int peer = 0; peer < size_; peer++) {
            const Link& link = links_[static_cast<size_t>(peer)];
            if (peer == rank_ || link.lost()) continue;
            // Don't wait for bytes behind a complete header: its frame belongs to a later step or call, or is the
            // peer's last frame.
            const Wanted wanted{peer, !link.has_header(), !link.drained()};
            if (wanted.bytes || wanted.room) wanted_.push_back(wanted);
        }
        return network_.sleep(wanted_, call_->deadline, *call_->callbacks);
    }

    // -- receiving --------------------------------------------------------------------------------
    Incoming* next_from(int peer) {
        for (Incoming& in : incoming_)
            if (in.move->peer == peer && !in.complete()) return &in;
        return nullptr;
    }

    Outcome receive(Link& link, int peer, bool& moved) {
        for (;;) {
            Incoming* in = next_from(peer);
            if (!in || !in->begun) {
                if (!link.aside_is_whole()) return Status::ok;
                const bool aside = in && link.first_aside();
                const FrameHeader* header = aside ? link.first_aside() : link.peek();
                // If the peer has already finished this call, the header may belong to the peer's next call or
                // farewell.
                if (!header || header->call == number_ + 1) return Status::ok;
                if (header->kind == FrameKind::farewell) {
                    link.mark_left();
                    return Status::ok;
                }
                const bool heard = header->kind == FrameKind::heard;
                if (header->call != number_ || header->signature != call_->signature ||
                    !(heard || header->kind == FrameKind::data))
                    return Status::mismatch;
                // Set short messages aside, because a mismatch frame may be queued behind them. No mismatch frame of
                // this call can follow a long message, which is sent only after all ranks have agreed.
                const bool waits = header->nbytes > kEagerBytes || agreement_ == Agreement::lengths;
                if (!heard && !in && waits) return Status::ok;
                moved = true;
                if (heard) {
                    // A peer sends one "heard" frame per call, without a payload.
                    if (header->nbytes || heard_[static_cast<size_t>(peer)]) return Status::mismatch;
                    heard_[static_cast<size_t>(peer)] = true;
                    link.skip_header();
                    continue;
                }
                if (!in) {
                    if (header->nbytes > call_bytes_ || frames_left_[static_cast<size_t>(peer)] < 1)
                        return Status::mismatch;
                    frames_left_[static_cast<size_t>(peer)]--;
                    link.set_aside();
                    continue;
                }
                if (header->nbytes != in->total) return Status::mismatch;
                in->begun = true;
                if (aside) {
                    link.take_aside();
                } else {
                    frames_left_[static_cast<size_t>(peer)]--;
                    link.skip_header();
                }
            }
            while (!in->complete()) {
                if (!take(link, *in)) return Status::ok;
                moved = true;
            }
        }
    }

    // Reads bytes of a message; returns false if none have arrived.
    bool take(Link& link, Incoming& in) {
        if (in.aside) {
            const size_t step = link.read(in.aside.get() + in.got, in.total - in.got);
            in.got += step;
            return step > 0;
        }
        while (in.done == in.parts[in.part].nbytes) next_part(in);
        Chunk& chunk = slice_[static_cast<size_t>(in.parts[in.part].chunk)];
        const size_t rest = in.parts[in.part].nbytes - in.done;
        size_t step;
        if (!step_->reduces) {
            step = link.read(chunk.at + in.done, rest);
            in.got += step;
            in.done += step;
        } else {
            std::memcpy(piece_, in.cut, in.held);
            step = link.read(piece_ + in.held, std::min(rest, kPieceBytes) - in.held);
            const size_t whole = (in.held + step) / width_ * width_;
            combine(chunk, in.done, in.move->peer, whole);
            in.held = in.held + step - whole;
            std::memcpy(in.cut, piece_ + whole, in.held);
            in.done += whole;
            in.got += step;
        }
        if (in.done == in.parts[in.part].nbytes) chunk.received = true;
        return step > 0;
    }
    void next_part(Incoming& in) {
        slice_[static_cast<size_t>(in.parts[in.part].chunk)].received = true;
        in.part++;
        in.done = 0;
    }

    // Reduces a chunk with the piece that has arrived. The first operand is the lower rank's data.
    void combine(const Chunk& chunk, size_t offset, int peer, size_t nbytes) {
        const char* mine = chunk.contents() + offset;
        char* to = chunk.at + offset;
        const size_t count = nbytes / width_;
        if (peer < rank_)
            call_->reduction.kernel(piece_, mine, to, count);
        else
            call_->reduction.kernel(mine, piece_, to, count);
    }

    // -- contributions of several ranks to a chunk ------------------------------------------------
    struct Contribution {
        int rank;
        char* from;
        bool ours;
    };

    void reduce_aside() {
        for (size_t index = 0; index < slice_.size(); index++) {
            Chunk& chunk = slice_[index];
            contributions_.clear();
            for (Incoming& in : incoming_) {
                size_t offset = 0;
                if (!in.aside) continue;
                for (const Part& part : in.parts) {
                    if (part.chunk == static_cast<int>(index))
                        contributions_.push_back({in.move->peer, in.aside.get() + offset, true});
                    offset += part.nbytes;
                }
            }
            if (contributions_.empty()) continue;
            contributions_.push_back({rank_, const_cast<char*>(chunk.contents()), false});
            std::stable_sort(contributions_.begin(), contributions_.end(),
                             [](const Contribution& a, const Contribution& b) { return a.rank < b.rank; });
            const size_t half = (contributions_.size() + 1) / 2;
            const Contribution low = tree(0, half, chunk), high = tree(half, contributions_.size(), chunk);
            call_->reduction.kernel(low.from, high.from, chunk.at, chunk.count);
            chunk.received = true;
        }
    }
    // Reduces contributions `begin` to `end` in a balanced tree. Writes partial sums over received contributions, never
    // over this rank's own, which may be in the caller's memory.
    Contribution tree(size_t begin, size_t end, const Chunk& chunk) {
        if (end - begin == 1) return contributions_[begin];
        const size_t middle = begin + (end - begin + 1) / 2;
        const Contribution low = tree(begin, middle, chunk), high = tree(middle, end, chunk);
        const Contribution& sum = low.ours ? low : high;
        call_->reduction.kernel(low.from, high.from, sum.from, chunk.count);
        return sum;
    }

    // -- comparing the ranks' calls ---------------------------------------------------------------
    // The rank whose "heard" frame this rank needs in its next round; -1 after the last round.
    int heard_from() const { return all_heard() ? -1 : heard_rounds_[round_].from; }

    // Adds the rounds among `count` ranks, numbered from 0; this rank's number is `own`. `rank_of` maps numbers to
    // ranks.
    template <class Function>
    void add_rounds(int own, int count, const Function& rank_of) {
        for (int distance = 1; distance < count; distance *= 2)
            heard_rounds_.push_back({rank_of((own + distance) % count), rank_of((own - distance + count) % count)});
    }

    void spread() {
        while (spreads() && !all_heard()) {
            if (sent_ == round_) {
                send(heard_rounds_[round_].to, FrameKind::heard, 0, {});
                sent_++;
            }
            if (!heard_[static_cast<size_t>(heard_from())]) return;
            round_++;
        }
    }

    // Notifies every rank of a mismatch, even ranks that have not entered the call. Gives up on a connection that
    // remains full.
    void spread_mismatch() {
        for (int peer = 0; peer < size_; peer++)
            if (peer != rank_) {
                links_[static_cast<size_t>(peer)].drop();
                send(peer, FrameKind::mismatch, 0, {});
            }
        const auto is_full = [](const Link& link) { return !link.drained() && !link.lost(); };
        const auto any_full = [&] { return std::any_of(links_.begin(), links_.end(), is_full); };
        for (const double end = monotonic_s() + kFarewellS; any_full() && monotonic_s() < end; sched_yield())
            for (Link& link : links_) link.flush();
    }

    const int rank_, size_, tries_;
    size_t slice_bytes_ = 1 << 20;
    Network network_;
    std::vector<Link> links_;
    // The step in which ranks exchange the lengths of their messages.
    Step exchange_{};
    // The ranks with which this rank exchanges "heard" frames, one round after another.
    struct HeardRound {
        int to, from;
    };
    std::vector<HeardRound> heard_rounds_;
    std::atomic<bool> aborted_{false};
    std::atomic<bool> busy_{false};
    uint32_t number_ = 0;

    // State of the current call.
    StepsCall* call_ = nullptr;
    std::vector<Chunk> slice_;
    Agreement agreement_ = Agreement::known;
    const Step* step_ = nullptr;
    bool first_slice_ = true;
    size_t width_ = 1;
    std::vector<Incoming> incoming_;
    std::vector<bool> heard_;
    size_t round_ = 0, sent_ = 0;
    // Limits on the frames that this rank sets aside in a short call: their length, and how many may still come from
    // each peer.
    size_t call_bytes_ = 0;
    std::vector<int64_t> frames_left_;
    std::vector<Contribution> contributions_;
    std::vector<Wanted> wanted_;
    std::unique_ptr<char[]> arena_;
    size_t arena_bytes_ = 0;
    alignas(16) char piece_[kPieceBytes];
};

}  // namespace unisono
