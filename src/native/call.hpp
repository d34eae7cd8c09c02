// A collective as both native cores receive it: its tensors, checks of their lengths, and the signature that ranks
// compare.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "kernels/reduce_kernels.hpp"
#include "system.hpp"

namespace unisono {

enum class Status { ok, mismatch, timeout, peer_left, aborted, interrupted, unsupported, peer_lost };

// How a call ended. After a failure, `missing` is the rank that the call waited for (-1 for none), and `waited_s` is
// how long it waited. Each call returns its outcome instead of storing it in the core, because a thread that moves
// messages may fail while another thread runs a collective.
struct Outcome {
    Status status = Status::ok;
    int missing = -1;
    double waited_s = 0;

    Outcome(Status status = Status::ok, int missing = -1, double waited_s = 0)
        : status(status), missing(missing), waited_s(waited_s) {}

    bool ok() const { return status == Status::ok; }
    bool operator==(Status other) const { return status == other; }
};

// Refuses a second thread while a core runs a call, because both threads would use the same fields for tensors and
// progress. The GIL alone does not prevent concurrent calls, because a call releases the GIL while it waits.
class Exclusive {
  public:
    explicit Exclusive(std::atomic<bool>& busy) : busy_(busy) {
        if (busy.exchange(true, std::memory_order_acquire))
            throw std::logic_error("two threads are in one core of a communicator at the same time");
    }
    ~Exclusive() { busy_.store(false, std::memory_order_release); }
    Exclusive(const Exclusive&) = delete;

  private:
    std::atomic<bool>& busy_;
};

// Ranks compare the first three words of their signatures in the first round of a call, and the call fails if they
// differ. The last word of a signature may differ between ranks; each rank can read the other ranks' last words.
struct Signature {
    uint64_t words[4];
};

// Functions that a waiting thread calls.
class WaitCallbacks {
  public:
    // Called by a waiting thread before it may go to sleep.
    virtual void before_sleep() {}
    // Whether the wait should end, for example because of a signal.
    virtual bool interrupted() { return false; }
    virtual ~WaitCallbacks() = default;

    // Like `interrupted`, for a thread that is moving bytes. Calls `interrupted` at most once every 50 ms, because
    // `interrupted` needs the GIL, and must wait for it while another thread computes in Python.
    bool interrupted_lately() {
        const double now = monotonic_s();
        if (now < next_look_s_) return false;
        const bool is_first = next_look_s_ == 0;
        next_look_s_ = now + kLookS;
        return !is_first && interrupted();
    }

  private:
    static constexpr double kLookS = 0.05;
    double next_look_s_ = 0;
};

enum class OpType {
    all_gather = 1,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter
};

// Address and element count of a tensor.
struct Buffer {
    char* data;
    int64_t count;
};
using Buffers = std::vector<Buffer>;

struct CollectiveCall {
    OpType type{};
    Buffers inputs, outputs;
    Reduction reduction;
    int64_t width = 1;
    int root = 0;
    // Divisor of the sum; 1 for none.
    int64_t divisor = 1;
    Signature signature{};
    double deadline = 0;
    WaitCallbacks* callbacks = nullptr;

    // Adds the sum of the tensors' element counts to the signature. If there are several tensors, also adds a hash of
    // their element counts: FNV-1a (Fowler, Noll, Vo) over numbers instead of bytes.
    void sign_counts() {
        uint64_t total = 0, uneven = 0;
        const bool by_inputs = type == OpType::reduce || type == OpType::reduce_scatter || type == OpType::gather;
        const Buffers& parts = by_inputs ? inputs : outputs;
        if (type != OpType::all_to_all) {
            if (parts.size() > 1) uneven = 0xCBF29CE484222325;
            for (const Buffer& part : parts) {
                total += static_cast<uint64_t>(part.count);
                if (parts.size() > 1) uneven = (uneven ^ static_cast<uint64_t>(part.count)) * 0x100000001B3;
            }
        }
        signature.words[1] = total, signature.words[2] = uneven, signature.words[3] = 0;
    }

    // Whether the tensors have the required lengths, and no output overlaps another tensor.
    bool has_valid_buffers(int rank, int size) const {
        const bool lists = type == OpType::all_gather || type == OpType::gather || type == OpType::scatter ||
                           type == OpType::reduce_scatter || type == OpType::all_to_all;
        if (!lists) return true;
        const auto ranks = static_cast<size_t>(size), own = static_cast<size_t>(rank);
        const size_t expected = rank == root ? ranks : 0;
        switch (type) {
            case OpType::all_gather:
                if (outputs.size() != ranks || inputs.size() != 1 || inputs[0].count != outputs[own].count)
                    return false;
                break;
            case OpType::gather:
                if (inputs.size() != 1 || outputs.size() != expected || !all_have(outputs, inputs[0].count))
                    return false;
                break;
            case OpType::scatter:
                if (outputs.size() != 1 || inputs.size() != expected || !all_have(inputs, outputs[0].count))
                    return false;
                break;
            case OpType::reduce_scatter:
                if (inputs.size() != ranks || outputs.size() != 1 || outputs[0].count != inputs[own].count)
                    return false;
                break;
            default:
                if (inputs.size() != ranks || outputs.size() != ranks) return false;
                if (inputs[own].count != outputs[own].count) return false;
        }
        return are_disjoint(own);
    }

  private:
    static bool all_have(const Buffers& parts, int64_t count) {
        return std::all_of(parts.begin(), parts.end(), [&](const Buffer& part) { return part.count == count; });
    }

    // Whether no output overlaps another tensor. Exception: in all_gather, gather and scatter, the call's single tensor
    // may have the same address as this rank's entry in the call's list of tensors.
    bool are_disjoint(size_t own) const {
        const bool may_alias = type != OpType::reduce_scatter && type != OpType::all_to_all;
        const auto end = [&](const Buffer& part) { return part.data + part.count * width; };
        const auto overlap = [&](const Buffer& a, const Buffer& b) {
            return a.count && b.count && a.data < end(b) && b.data < end(a);
        };
        for (size_t n = 0; n < outputs.size(); n++) {
            for (size_t m = 0; m < n; m++)
                if (overlap(outputs[n], outputs[m])) return false;
            for (size_t m = 0; m < inputs.size(); m++) {
                const size_t entry = type == OpType::scatter ? m : n;
                const bool is_own = may_alias && entry == own && outputs[n].data == inputs[m].data;
                if (!is_own && overlap(outputs[n], inputs[m])) return false;
            }
        }
        return true;
    }
};

}  // namespace unisono
