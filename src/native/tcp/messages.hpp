// Messages between two ranks over a dedicated connection, in the format of transports/tcp/messages.py: the same header
// as in shared memory, followed by the contents. This code never reads ahead, because Python code may receive the next
// message.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include <sys/uio.h>

#include "call.hpp"
#include "message_header.hpp"
#include "steps/wanted.hpp"
#include "system.hpp"
#include "tcp/sockets.hpp"

namespace unisono {

class SocketMessages {
  public:
    // `sockets` contains a non-blocking socket per rank, owned by the caller; this rank's entry is ignored.
    SocketMessages(const std::vector<int>& sockets, bool oversubscribed)
        : network_(sockets), tries_(oversubscribed ? 1 : kTries) {
        for (int peer = 0; peer < static_cast<int>(sockets.size()); peer++) streams_.push_back(network_.stream(peer));
    }

    // Returns when the connection has accepted the whole message.
    Outcome send(int peer, const Header& header, const char* from, int64_t nbytes, double deadline,
                WaitCallbacks& callbacks) {
        constexpr size_t head = sizeof header;
        const size_t total = head + static_cast<size_t>(nbytes);
        const char* const first = reinterpret_cast<const char*>(&header);
        size_t sent = 0;
        const auto move = [&] {
            const size_t skipped = sent < head ? 0 : sent - head;
            const iovec rest{const_cast<char*>(from) + skipped, total - head - skipped};
            const iovec parts[2] = {{const_cast<char*>(first) + sent, sent < head ? head - sent : 0}, rest};
            const size_t step = sent < head ? stream(peer).send(parts, 2) : stream(peer).send(&rest, 1);
            sent += step;
            return step > 0;
        };
        return move_until([&] { return sent == total; }, move, {peer, false, true}, deadline, callbacks);
    }

    // Returns `unsupported`, without consuming anything, if the next message is not the expected one, or if its header
    // has arrived only in part.
    Outcome receive(int peer, const Header& expected, char* to, int64_t nbytes, double deadline,
                   WaitCallbacks& callbacks) {
        Header header;
        size_t there = 0;
        const auto peek = [&] {
            there = stream(peer).peek(reinterpret_cast<char*>(&header), sizeof header);
            return there > 0;
        };
        const Wanted wanted{peer, true, false};
        Outcome outcome = move_until([&] { return there > 0; }, peek, wanted, deadline, callbacks);
        if (!outcome.ok()) return outcome == Status::peer_lost ? Status::unsupported : outcome;
        if (there < sizeof header || std::memcmp(&header, &expected, sizeof header) != 0) return Status::unsupported;
        stream(peer).receive(reinterpret_cast<char*>(&header), sizeof header);
        size_t received = 0;
        const auto move = [&] {
            const size_t step = stream(peer).receive(to + received, static_cast<size_t>(nbytes) - received);
            received += step;
            return step > 0;
        };
        return move_until([&] { return received == static_cast<size_t>(nbytes); }, move, wanted, deadline, callbacks);
    }

    // Ends every current and future wait. Thread-safe.
    void abort() {
        aborted_.store(true, std::memory_order_release);
        network_.wake();
    }

  private:
    static constexpr int kTries = 50;
    // Number of transfers between two checks of the clock while bytes are moving.
    static constexpr int kBusyMoves = 64;

    Sockets::Stream& stream(int peer) { return streams_[static_cast<size_t>(peer)]; }

    template <class Done, class Move>
    Outcome move_until(const Done& done, const Move& move, const Wanted& wanted, double deadline,
                      WaitCallbacks& callbacks) {
        const double started = monotonic_s();
        const auto ended = [&](Status status) { return Outcome(status, wanted.peer, monotonic_s() - started); };
        for (int idle = 0, busy = 0; !done();) {
            if (move()) {
                idle = 0;
                if (++busy % kBusyMoves == 0 && callbacks.interrupted_lately()) return Status::interrupted;
                continue;
            }
            if (stream(wanted.peer).lost()) return ended(Status::peer_lost);
            if (aborted_.load(std::memory_order_acquire)) return ended(Status::aborted);
            if (++idle < tries_) continue;
            if (deadline_clock_s() > deadline) return ended(Status::timeout);
            if (network_.sleep({wanted}, deadline, callbacks)) return Status::interrupted;
        }
        return Status::ok;
    }

    Sockets network_;
    const int tries_;
    std::vector<Sockets::Stream> streams_;
    std::atomic<bool> aborted_{false};
};

}  // namespace unisono
