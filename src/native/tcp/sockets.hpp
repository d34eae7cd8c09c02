// The `Network` of an executor whose frames travel over one rank's connections to the other ranks.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <vector>

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "call.hpp"
#include "steps/wanted.hpp"
#include "system.hpp"

namespace unisono {

class Sockets {
  public:
    // One connection. The socket is non-blocking and owned by the caller.
    class Stream {
      public:
        explicit Stream(int fd) : fd_(fd) { raise_no_signal(fd); }

        // Read ahead, because each read is a system call. Long messages are read directly into their destination.
        static size_t read_ahead_bytes() { return 64 << 10; }
        static size_t direct_bytes() { return 16 << 10; }

        // Whether the connection has ended.
        bool lost() const { return lost_; }

        // Sends as many bytes as the socket accepts; returns their number.
        size_t send(const iovec* parts, size_t count) {
            msghdr message{};
            message.msg_iov = const_cast<iovec*>(parts);
            message.msg_iovlen = count;
            return moved([&] { return sendmsg(fd_, &message, MSG_DONTWAIT | kNoSignal); }, false);
        }
        // Reads the bytes that have arrived; returns their number.
        size_t receive(char* to, size_t nbytes) {
            return moved([&] { return recv(fd_, to, nbytes, MSG_DONTWAIT); }, true);
        }
        // Copies the bytes that have arrived, but leaves them in the socket; returns their number.
        size_t peek(char* to, size_t nbytes) {
            return moved([&] { return recv(fd_, to, nbytes, MSG_DONTWAIT | MSG_PEEK); }, true);
        }

      private:
        template <class Function>
        size_t moved(const Function& function, bool zero_is_end) {
            if (lost_) return 0;
            for (;;) {
                const ssize_t count = function();
                if (count > 0) return static_cast<size_t>(count);
                if (count < 0 && errno == EINTR) continue;
                lost_ = count == 0 ? zero_is_end : errno != EAGAIN && errno != EWOULDBLOCK;
                return 0;
            }
        }

        int fd_;
        bool lost_ = false;
    };

    // `fds` contains a socket per rank; this rank's entry, and negative ones, are ignored. `bell` is another descriptor
    // that ends a sleep when it becomes readable; -1 for none.
    explicit Sockets(const std::vector<int>& fds, int bell = -1) : fds_(fds), bell_(bell) {}

    Stream stream(int peer) const { return Stream(fds_[static_cast<size_t>(peer)]); }

    // Sleeps until a connection can move bytes, for at most 50 ms; returns whether a signal has interrupted the wait. A
    // signal during a poll ends the poll. If every poll finds bytes, `interrupted_lately` notices a signal between two
    // polls.
    bool sleep(const std::vector<Wanted>& wanted, double deadline, WaitCallbacks& callbacks) {
        polled_.clear();
        polled_.push_back({wakeup_.descriptor(), POLLIN, 0});
        polled_.push_back({bell_, POLLIN, 0});
        for (const Wanted& one : wanted) {
            const int events = (one.bytes ? POLLIN : 0) | (one.room ? POLLOUT : 0);
            polled_.push_back({fds_[static_cast<size_t>(one.peer)], static_cast<short>(events), 0});
        }
        callbacks.before_sleep();
        // A double, because the milliseconds until a distant deadline may overflow an int.
        const double left = (deadline - deadline_clock_s()) * 1000 + 1;
        const int slice = static_cast<int>(std::max(0.0, std::min<double>(kSliceMs, left)));
        const int ready = poll(polled_.data(), polled_.size(), slice);
        return ready <= 0 ? callbacks.interrupted() : callbacks.interrupted_lately();
    }

    // Ends the current sleep and all later sleeps. Thread-safe.
    void wake() const { wakeup_.wake(); }

  private:
    static constexpr int kSliceMs = 50;

    const std::vector<int> fds_;
    const int bell_;
    const Wakeup wakeup_;
    std::vector<pollfd> polled_;
};

}  // namespace unisono
