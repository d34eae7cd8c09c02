// Calls of the executor of src/native/steps: an algorithm's steps, one rank's memory, and the result that one thread
// computes from the inputs of all ranks.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>

#include "socket_mesh.hpp"
#include "steps/executor.hpp"
#include "tcp/links.hpp"

using namespace unisono;

enum class Kind {
    ring_all_reduce,
    direct_all_reduce,
    reduce_scatter,
    all_gather,
    all_to_all,
    tree_broadcast,
    chain_broadcast,
    reduce,
    gather,
    compare,
    compare_lengths
};
constexpr int kKinds = static_cast<int>(Kind::compare_lengths) + 1;
constexpr int kChainChunks = 8;

using Bytes = std::vector<char>;
using Lengths = std::vector<int64_t>;

// A call, on every rank of its group the same.
struct Case {
    Kind kind;
    std::string dtype;
    // Elements of each chunk; for pairs of ranks, of what rank a has for rank b, at a * size + b.
    Lengths lengths;
    int root = 0;
    bool averages = false;
    uint64_t seed = 0;

    bool has_root() const {
        return kind == Kind::tree_broadcast || kind == Kind::chain_broadcast || kind == Kind::reduce ||
               kind == Kind::gather;
    }
    bool has_pairs() const { return kind == Kind::all_to_all || kind == Kind::compare_lengths; }
    int64_t count() const { return std::accumulate(lengths.begin(), lengths.end(), int64_t{0}); }
};

// The number of lengths that a case of a kind has.
inline size_t lengths_of(Kind kind, int size) {
    const auto ranks = static_cast<size_t>(size);
    switch (kind) {
        case Kind::direct_all_reduce:
        case Kind::reduce: return 1;
        case Kind::tree_broadcast: return 3;
        case Kind::chain_broadcast: return kChainChunks;
        case Kind::all_to_all:
        case Kind::compare_lengths: return ranks * ranks;
        case Kind::compare: return 0;
        default: return ranks;
    }
}

inline size_t width_of(const std::string& dtype) { return reduction_of(dtype, ReduceOp::sum).width; }

// A rank's contribution. Sums of these floats depend on the order of the ranks.
inline Bytes contribution(const std::string& dtype, int64_t count, uint64_t seed) {
    const auto elements = static_cast<size_t>(count);
    Bytes found(elements * width_of(dtype));
    uint64_t state = seed;
    const auto next = [&] { return state = state * 6364136223846793005 + 1442695040888963407; };
    std::vector<float> values(dtype.find("float") == std::string::npos ? 0 : elements);
    for (float& value : values) value = static_cast<float>(static_cast<int64_t>(next()) >> 44) / 512;
    auto* halves = reinterpret_cast<uint16_t*>(found.data());
    if (dtype == "float32")
        std::copy(values.begin(), values.end(), reinterpret_cast<float*>(found.data()));
    else if (dtype == "float16")
        Float16::narrow(values.data(), halves, elements);
    else if (dtype == "bfloat16")
        BFloat16::narrow(values.data(), halves, elements);
    else
        for (char& byte : found) byte = static_cast<char>(next() >> 40);
    return found;
}

// What each rank of a group contributes to a call.
inline std::vector<Bytes> contributions(const Case& made, int size) {
    std::vector<Bytes> found;
    for (int rank = 0; rank < size; rank++) {
        const auto row = made.lengths.begin() + rank * size;
        int64_t count = made.count();
        if (made.kind == Kind::all_gather || made.kind == Kind::gather) count = made.lengths[static_cast<size_t>(rank)];
        if (made.has_pairs()) count = std::accumulate(row, row + size, int64_t{0});
        found.push_back(contribution(made.dtype, count, made.seed * 64 + static_cast<uint64_t>(rank)));
    }
    return found;
}

// The steps of an algorithm on one rank, as numbers for `Program`.
class Steps {
  public:
    struct Message {
        int peer;
        std::vector<std::pair<int, int>> runs;
    };
    void add(bool reduces, const std::vector<Message>& sends, const std::vector<Message>& receives) {
        for (const size_t number : {size_t{reduces}, sends.size(), receives.size()})
            numbers.push_back(static_cast<int64_t>(number));
        for (const auto* side : {&sends, &receives})
            for (const Message& message : *side) {
                numbers.push_back(message.peer);
                numbers.push_back(static_cast<int64_t>(message.runs.size()));
                for (const auto& [start, stop] : message.runs) numbers.insert(numbers.end(), {start, stop});
            }
    }
    std::vector<int64_t> numbers;
};

inline Steps steps_of(const Case& made, int rank, int size) {
    Steps steps;
    const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
    const int place = (rank - made.root + size) % size;
    const auto chunk = [](int index) { return std::vector<std::pair<int, int>>{{index, index + 1}}; };
    const auto rank_at = [&](int at) { return (at + made.root) % size; };
    std::vector<Steps::Message> sends, receives;
    const auto with_all = [&](bool reduces, const auto& sent, const auto& received) {
        for (int peer = 0; peer < size; peer++) {
            if (peer == rank) continue;
            sends.push_back({peer, chunk(sent(peer))});
            receives.push_back({peer, chunk(received(peer))});
        }
        steps.add(reduces, sends, receives);
    };
    switch (made.kind) {
        case Kind::ring_all_reduce:
            for (int n = 0; n < 2 * size - 2; n++) {
                const int sent = (rank - n + 2 * size) % size, received = (sent + size - 1) % size;
                steps.add(n < size - 1, {{next, chunk(sent)}}, {{previous, chunk(received)}});
            }
            break;
        case Kind::direct_all_reduce: with_all(true, [](int) { return 0; }, [](int) { return 0; }); break;
        case Kind::reduce_scatter: with_all(true, [](int p) { return p; }, [&](int) { return rank; }); break;
        case Kind::all_gather: with_all(false, [&](int) { return rank; }, [](int p) { return p; }); break;
        case Kind::all_to_all: with_all(false, [](int p) { return p; }, [&](int p) { return size + p; }); break;
        case Kind::tree_broadcast:
            // In one message of two runs.
            for (int reach = 1; reach < size; reach *= 2) {
                const std::vector<std::pair<int, int>> runs = {{0, 1}, {1, 3}};
                if (place < reach && place + reach < size) steps.add(false, {{rank_at(place + reach), runs}}, {});
                if (place >= reach && place < 2 * reach) steps.add(false, {}, {{rank_at(place - reach), runs}});
            }
            break;
        case Kind::chain_broadcast:
            for (int n = 0; n < kChainChunks; n++) {
                if (place > 0) steps.add(false, {}, {{previous, chunk(n)}});
                if (place < size - 1) steps.add(false, {{next, chunk(n)}}, {});
            }
            break;
        case Kind::reduce:
            for (int peer = 0; peer < size; peer++)
                if (peer != made.root) receives.push_back({peer, chunk(0)});
            if (place)
                steps.add(false, {{made.root, chunk(0)}}, {});
            else
                steps.add(true, {}, receives);
            break;
        case Kind::gather:
            for (int peer = 0; peer < size; peer++)
                if (peer != made.root) receives.push_back({peer, chunk(peer)});
            if (place)
                steps.add(false, {{made.root, chunk(rank)}}, {});
            else
                steps.add(false, {}, receives);
            break;
        default: break;
    }
    return steps;
}

// One rank's part of a call.
class Work {
  public:
    Work(const Case& made, int rank, int size) : Work(made, rank, size, contributions(made, size)) {}
    // With the contributions of all ranks.
    Work(const Case& made, int rank, int size, const std::vector<Bytes>& all)
        : made_(made), rank_(rank), size_(size), all_(all) {
        width_ = width_of(made.dtype);
        call.width = width_;
        call.reduction = reduction_of(made.dtype, ReduceOp::sum);
        call.divisor = made.averages ? size : 1;
        call.hears_all = !made.has_root();
        call.signature = made.seed * 2654435761 + static_cast<uint64_t>(made.kind);
        call.deadline = monotonic_s() + 60;
        call.callbacks = &callbacks_;
        fill();
        before = output;
        original_ = input;
        if (made.kind != Kind::compare && made.kind != Kind::compare_lengths) {
            const int chunks = static_cast<int>(call.chunks.size());
            program_.emplace(steps_of(made, rank, size).numbers, chunks, size, 0);
            call.program = &*program_;
        }
    }
    Work(const Work&) = delete;
    Work& operator=(const Work&) = delete;

    bool is_correct() const { return output == expected && input == original_; }
    bool is_untouched() const { return output == before && input == original_; }
    // Whether no memory of the caller may be written unless the call succeeds.
    bool is_eager() const { return call.program && call.sends.empty() && made_.count() * width_ <= 128 << 10; }

    StepsCall call;
    Bytes input, output, before, expected;

  private:
    Lengths::const_iterator row(int rank) const { return made_.lengths.begin() + rank * size_; }

    const Bytes& contribution_of(int rank) const { return all_[static_cast<size_t>(rank)]; }

    void add(const char* own, char* target, int64_t count) {
        call.chunks.push_back({own, target, static_cast<size_t>(count)});
    }
    // Consecutive chunks of the lengths of a case.
    void cut(const char* own, char* target) {
        for (const int64_t length : made_.lengths) {
            add(own, target, length);
            const size_t nbytes = static_cast<size_t>(length) * width_;
            if (own) own += nbytes;
            if (target) target += nbytes;
        }
    }

    void fill() {
        input = contribution_of(rank_);
        const bool is_root = rank_ == made_.root;
        switch (made_.kind) {
            case Kind::ring_all_reduce:
                output = input;
                cut(output.data(), output.data());
                expected = rings();
                break;
            case Kind::direct_all_reduce:
                output = input;
                cut(output.data(), output.data());
                expected = sum(0, input.size());
                break;
            case Kind::reduce:
                if (is_root) output.resize(input.size());
                cut(input.data(), is_root ? output.data() : nullptr);
                if (is_root) expected = sum(0, input.size());
                break;
            case Kind::reduce_scatter: fill_reduce_scatter(); break;
            case Kind::all_gather:
            case Kind::gather: fill_gather(made_.kind == Kind::all_gather || is_root); break;
            case Kind::all_to_all: fill_all_to_all(); break;
            case Kind::tree_broadcast:
            case Kind::chain_broadcast:
                if (!is_root) output.resize(input.size());
                cut(is_root ? input.data() : nullptr, is_root ? nullptr : output.data());
                if (!is_root) expected = contribution_of(made_.root);
                break;
            case Kind::compare_lengths: add_pairs(); break;
            case Kind::compare: break;
        }
    }

    void fill_reduce_scatter() {
        cut(input.data(), nullptr);
        Chunk& own = call.chunks[static_cast<size_t>(rank_)];
        output.resize(own.count * width_);
        own.target = output.data();
        const auto begin = static_cast<size_t>(own.own - input.data());
        expected = sum(begin, begin + output.size());
    }

    void fill_gather(bool receives) {
        if (receives) {
            for (int peer = 0; peer < size_; peer++) {
                const Bytes& part = contribution_of(peer);
                expected.insert(expected.end(), part.begin(), part.end());
            }
            output.resize(expected.size());
        }
        cut(nullptr, receives ? output.data() : nullptr);
        call.chunks[static_cast<size_t>(rank_)].own = input.data();
    }

    void fill_all_to_all() {
        add_pairs();
        const char* from = input.data();
        const char* mine = nullptr;
        for (int peer = 0; peer < size_; peer++) {
            if (peer == rank_) mine = from;
            add(from, nullptr, row(rank_)[peer]);
            from += static_cast<size_t>(row(rank_)[peer]) * width_;
        }
        for (int peer = 0; peer < size_; peer++) {
            const Bytes& theirs = contribution_of(peer);
            const auto begin = theirs.begin() + std::accumulate(row(peer), row(peer) + rank_, int64_t{0}) *
                                                    static_cast<int64_t>(width_);
            expected.insert(expected.end(), begin, begin + row(peer)[rank_] * static_cast<int64_t>(width_));
        }
        output.resize(expected.size());
        char* to = output.data();
        for (int peer = 0; peer < size_; peer++) {
            add(peer == rank_ ? mine : nullptr, to, row(peer)[rank_]);
            to += static_cast<size_t>(row(peer)[rank_]) * width_;
        }
    }
    void add_pairs() {
        for (int peer = 0; peer < size_; peer++) {
            call.sends.push_back(row(rank_)[peer]);
            call.receives.push_back(row(peer)[rank_]);
        }
    }

    Bytes combined(const Bytes& a, const Bytes& b) const {
        Bytes both(a.size());
        call.reduction.kernel(a.data(), b.data(), both.data(), a.size() / width_);
        return both;
    }
    Bytes divided(Bytes all) const {
        if (made_.averages) call.reduction.divide(all.data(), all.size() / width_, size_);
        return all;
    }

    // The sum of bytes of all contributions, in a balanced tree over the ranks.
    Bytes sum(size_t begin, size_t end) const { return divided(tree(0, size_, begin, end)); }
    Bytes tree(int first, int last, size_t begin, size_t end) const {
        if (last - first == 1) {
            const Bytes& all = contribution_of(first);
            return {all.begin() + static_cast<std::ptrdiff_t>(begin), all.begin() + static_cast<std::ptrdiff_t>(end)};
        }
        const int middle = first + (last - first + 1) / 2;
        return combined(tree(first, middle, begin, end), tree(middle, last, begin, end));
    }

    // Chunk c is summed from rank c on, around the ring.
    Bytes rings() const {
        Bytes found;
        auto begin = std::ptrdiff_t{0};
        for (int chunk = 0; chunk < size_; chunk++) {
            const auto end = begin + made_.lengths[static_cast<size_t>(chunk)] * static_cast<int64_t>(width_);
            Bytes total;
            for (int n = 0; n < size_; n++) {
                const Bytes& theirs = contribution_of((chunk + n) % size_);
                const Bytes part(theirs.begin() + begin, theirs.begin() + end);
                total = n ? combined(total, part) : part;
            }
            found.insert(found.end(), total.begin(), total.end());
            begin = end;
        }
        return divided(found);
    }

    const Case made_;
    const int rank_, size_;
    // Only while the work is made.
    const std::vector<Bytes>& all_;
    Bytes original_;
    size_t width_ = 1;
    std::optional<Program> program_;
    WaitCallbacks callbacks_;
};

// A case that depends on nothing but the state of `random`; chunks have up to `longest` bytes.
inline Case random_case(Random& random, int size, int64_t longest) {
    static const char* const dtypes[] = {"float32", "bfloat16", "float16", "int64", "uint8"};
    Case made;
    made.kind = static_cast<Kind>(below(random, kKinds));
    made.dtype = dtypes[below(random, 5)];
    made.root = static_cast<int>(below(random, size));
    made.seed = random() >> 16;
    const bool reduces = made.kind == Kind::ring_all_reduce || made.kind == Kind::direct_all_reduce ||
                         made.kind == Kind::reduce || made.kind == Kind::reduce_scatter;
    made.averages = made.kind != Kind::reduce_scatter && reduces && made.dtype == "float32" && below(random, 2);
    const auto width = static_cast<int64_t>(width_of(made.dtype));
    const int64_t limits[] = {1, 16, 4096, longest};
    const int64_t limit = limits[below(random, 4)] / width;
    for (size_t n = lengths_of(made.kind, size); n > 0; n--)
        made.lengths.push_back(below(random, 4) ? below(random, limit + 1) : 0);
    return made;
}
