// Connections between ranks that are threads of one program: a full mesh of socket pairs. Optionally a thread forwards
// the bytes of each pair, in pieces of random length, and shows them to a recorder.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

using Random = std::mt19937_64;

inline int64_t below(Random& random, int64_t limit) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
}

inline void open_pair(int (&ends)[2]) {
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends)) std::abort();
}

// Forwards bytes between two sockets. Odd lengths cut headers and elements anywhere.
class Forwarder {
  public:
    using Recorder = std::function<void(const char*, size_t)>;

    Forwarder(int from, int to, uint64_t seed, size_t longest, Recorder recorder)
        : from_(from), to_(to), longest_(longest), random_(seed), recorder_(std::move(recorder)) {}

    // Returns whether anything has moved.
    bool move() {
        if (at_ == held_.size()) {
            held_.resize(1 + random_() % longest_);
            const ssize_t got = recv(from_, held_.data(), held_.size(), MSG_DONTWAIT);
            held_.resize(got > 0 ? static_cast<size_t>(got) : 0);
            at_ = 0;
            if (got > 0 && recorder_) recorder_(held_.data(), held_.size());
            if (got == 0) shutdown(to_, SHUT_WR);
            if (got <= 0) return false;
        }
        const ssize_t sent = send(to_, held_.data() + at_, held_.size() - at_, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent > 0) at_ += static_cast<size_t>(sent);
        return sent > 0;
    }

  private:
    const int from_, to_;
    const size_t longest_;
    Random random_;
    Recorder recorder_;
    std::vector<char> held_;
    size_t at_ = 0;
};

class SocketMesh {
  public:
    using Recorder = std::function<void(int from, int to, const char* bytes, size_t nbytes)>;

    // Bytes are forwarded in pieces of at most `longest`; 0 for direct connections.
    explicit SocketMesh(int size, size_t longest = 0, uint64_t seed = 0, const Recorder& recorder = nullptr)
        : sockets(static_cast<size_t>(size), std::vector<int>(static_cast<size_t>(size), -1)) {
        for (int a = 0; a < size; a++)
            for (int b = a + 1; b < size; b++) connect(a, b, longest, seed, recorder);
        if (!forwarders_.empty()) thread_ = std::thread([this] { forward(); });
    }
    ~SocketMesh() {
        stopped_ = true;
        if (thread_.joinable()) thread_.join();
        for (const int fd : all_) close(fd);
    }
    SocketMesh(const SocketMesh&) = delete;
    SocketMesh& operator=(const SocketMesh&) = delete;

    // As a killed process does. The descriptors stay valid, because an executor may still use them.
    void leave(int rank) const {
        for (const int fd : sockets[static_cast<size_t>(rank)])
            if (fd >= 0) shutdown(fd, SHUT_RDWR);
    }

    // By rank: the sockets to the others, -1 for its own.
    std::vector<std::vector<int>> sockets;

  private:
    void connect(int a, int b, size_t longest, uint64_t seed, const Recorder& recorder) {
        int ends[2], far[2];
        open_pair(ends);
        all_.insert(all_.end(), ends, ends + 2);
        int& at_a = sockets[static_cast<size_t>(a)][static_cast<size_t>(b)];
        int& at_b = sockets[static_cast<size_t>(b)][static_cast<size_t>(a)];
        at_a = ends[0], at_b = ends[1];
        if (!longest) return;
        open_pair(far);
        all_.insert(all_.end(), far, far + 2);
        at_b = far[0];
        const auto add = [&](int from, int to, int sender, int receiver) {
            Forwarder::Recorder record;
            if (recorder)
                record = [=](const char* bytes, size_t nbytes) { recorder(sender, receiver, bytes, nbytes); };
            forwarders_.emplace_back(from, to, seed++, longest, std::move(record));
        };
        add(ends[1], far[1], a, b);
        add(far[1], ends[1], b, a);
    }

    void forward() {
        while (!stopped_) {
            bool moved = false;
            for (Forwarder& forwarder : forwarders_) moved |= forwarder.move();
            if (!moved) usleep(50);
        }
    }

    std::vector<int> all_;
    std::vector<Forwarder> forwarders_;
    std::atomic<bool> stopped_{false};
    std::thread thread_;
};
