// Operating system services for the native cores: clocks, putting threads to sleep and waking them, and sockets that
// don't raise SIGPIPE.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <system_error>

#include <fcntl.h>
#include <sched.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

// Futexes and eventfd exist only on Linux; shared memory transport needs futexes. UNISONO_PORTABLE disables futexes and
// eventfd, so that the code for other systems can be tested on Linux.
#if defined(__linux__) && !defined(UNISONO_PORTABLE)
#define UNISONO_LINUX 1
#include <linux/futex.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#else
#define UNISONO_LINUX 0
#endif

namespace unisono {

// A word of memory that processes share.
using Word = std::atomic<uint64_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 8);

// Time in seconds on the clock of Python's time.monotonic(). On macOS, Python's clock stops while the machine sleeps,
// unlike CLOCK_MONOTONIC.
inline double monotonic_s() {
#if defined(__APPLE__)
    constexpr clockid_t kClock = CLOCK_UPTIME_RAW;
#else
    constexpr clockid_t kClock = CLOCK_MONOTONIC;
#endif
    timespec now;
    clock_gettime(kClock, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Set by a debugger that stops the ranks of this process. `stood_s`: total seconds for which the deadline clock has
// been stopped. `stopped_at_s`: time at which the current stop began; negative while the clock is running.
inline std::atomic<double> stood_s{0};
inline std::atomic<double> stopped_at_s{-1};

// Time in seconds on the clock that deadlines refer to.
inline double deadline_clock_s() {
    const double stopped = stopped_at_s.load(std::memory_order_relaxed);
    return (stopped < 0 ? monotonic_s() : stopped) - stood_s.load(std::memory_order_relaxed);
}

#if UNISONO_LINUX
inline void futex_wait(const void* word, uint32_t expected, long nanoseconds) {
    const timespec limit{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
    syscall(SYS_futex, word, FUTEX_WAIT, expected, &limit, nullptr, 0);
}

inline void futex_wake(const void* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }
#endif

// A descriptor that any thread can make permanently readable, to end the current `poll` and all later ones.
class Wakeup {
  public:
    Wakeup() {
#if UNISONO_LINUX
        ends_[0] = ends_[1] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        if (ends_[0] < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
#else
        if (pipe(ends_)) throw std::system_error(errno, std::generic_category(), "pipe");
        for (const int end : ends_) {
            fcntl(end, F_SETFD, FD_CLOEXEC);
            fcntl(end, F_SETFL, O_NONBLOCK);
        }
#endif
    }
    ~Wakeup() {
        close(ends_[0]);
        if (ends_[1] != ends_[0]) close(ends_[1]);
    }
    Wakeup(const Wakeup&) = delete;
    Wakeup& operator=(const Wakeup&) = delete;

    int descriptor() const { return ends_[0]; }
    // Thread-safe. Writing fails only if the descriptor is already readable.
    void wake() const {
        const uint64_t one = 1;
        [[maybe_unused]] const ssize_t written = write(ends_[1], &one, sizeof one);
    }

  private:
    int ends_[2];
};

// Writing to a closed connection must fail instead of raising SIGPIPE, which would terminate the process. On Linux, a
// flag passed to each send prevents SIGPIPE; on macOS, where only the latest versions have the flag, a socket option
// does.
#if defined(__APPLE__)
inline constexpr int kNoSignal = 0;
inline void raise_no_signal(int socket) {
    const int on = 1;
    setsockopt(socket, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on);
}
#else
inline constexpr int kNoSignal = MSG_NOSIGNAL;
inline void raise_no_signal(int) {}
#endif

}  // namespace unisono
