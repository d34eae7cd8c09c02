// Links between ranks that are threads, placed on hosts: rings and doorbells inside a host, sockets between hosts.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include "socket_mesh.hpp"
#include "tcp/links.hpp"

namespace unisono {

using Hosts = std::vector<std::vector<int>>;

class HostMesh {
  public:
    explicit HostMesh(const Hosts& hosts) : hosts(hosts), sockets_(size()) {
        for (const std::vector<int>& ranks : hosts) {
            memory_.emplace_back(HostRings::nbytes(ranks.size()) / sizeof(Line));
            bells_.emplace_back();
            for (size_t n = 0; n < ranks.size(); n++) bells_.back().push_back(open_bell());
        }
    }
    ~HostMesh() {
        for (const int fd : pipes_) close(fd);
    }
    HostMesh(const HostMesh&) = delete;

    int size() const {
        size_t ranks = 0;
        for (const std::vector<int>& its : hosts) ranks += its.size();
        return static_cast<int>(ranks);
    }
    bool is_even() const {
        return std::all_of(hosts.begin(), hosts.end(), [&](const auto& ranks) { return ranks.size() == hosts[0].size(); });
    }
    std::vector<int> sockets_of(int rank) const {
        std::vector<int> found = sockets_.sockets[static_cast<size_t>(rank)];
        for (const int near : hosts[host_of(rank)]) found[static_cast<size_t>(near)] = -1;
        return found;
    }
    std::shared_ptr<HostRings> rings_of(int rank) const {
        const size_t host = host_of(rank);
        if (hosts[host].size() == 1) return nullptr;
        return std::make_shared<HostRings>(memory_[host].data()->bytes, rank, hosts[host], bells_[host]);
    }

    const Hosts hosts;

  private:
    struct alignas(64) Line {
        mutable char bytes[64]{};
    };

    // Returns an end that can be read and written, as the library opens it.
    int open_bell() {
        int ends[2];
        if (pipe(ends)) std::abort();
        const std::string path = "/proc/self/fd/" + std::to_string(ends[0]);
        const int bell = open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
        if (bell < 0) std::abort();
        pipes_.insert(pipes_.end(), {ends[0], ends[1], bell});
        return bell;
    }
    size_t host_of(int rank) const {
        const auto has = [&](const auto& ranks) { return std::find(ranks.begin(), ranks.end(), rank) != ranks.end(); };
        return static_cast<size_t>(std::find_if(hosts.begin(), hosts.end(), has) - hosts.begin());
    }

    SocketMesh sockets_;
    std::vector<std::vector<Line>> memory_;
    std::vector<std::vector<int>> bells_;
    std::vector<int> pipes_;
};

}  // namespace unisono
