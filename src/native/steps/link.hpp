// This rank's end of a byte stream to and from another rank, and the frames that travel on the stream.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include <sys/uio.h>

namespace unisono {

// Content of a frame. `data`: a message of an algorithm. `heard`: proof that the sender has entered this call, and has
// received the "heard" frames of earlier rounds. `mismatch`: ranks make different calls. `farewell`: the sender makes
// no more calls.
enum class FrameKind : uint32_t { data = 1, heard = 2, mismatch = 3, farewell = 4 };

// The beginning of each frame, sent in native byte order. All ranks have the same byte order, because ranks with
// different builds or architectures refuse to connect.
struct FrameHeader {
    uint64_t signature;
    uint32_t call;
    FrameKind kind;
    uint64_t nbytes;
};
static_assert(sizeof(FrameHeader) == 24);

// `Stream` moves bytes without blocking, and reports whether it has ended.
template <class Stream>
class Link {
  public:
    explicit Link(const Stream& stream) : stream_(stream), buffer_(new char[stream.read_ahead_bytes()]) {}

    // `lost`: the stream has ended or is unusable. `left`: the other rank has sent its farewell.
    bool lost() const { return cut_ || stream_.lost(); }
    bool left() const { return left_; }
    void mark_left() { left_ = true; }

    // Queues a frame. The memory of `parts` must remain valid until the frame is sent.
    void queue(const FrameHeader& header, std::vector<iovec> parts) {
        out_.push_back({header, std::move(parts), 0});
    }
    bool drained() const { return out_.empty(); }

    // Sends queued bytes until the stream accepts no more; returns whether it accepted any.
    bool flush() {
        bool moved = false;
        while (!out_.empty() && !cut_) {
            Outgoing& frame = out_.front();
            const size_t sent = send_some(frame);
            if (!sent) break;
            moved = true;
            frame.sent += sent;
            if (frame.sent == sizeof(FrameHeader) + frame.header.nbytes) out_.pop_front();
        }
        return moved;
    }

    // Drops unsent frames. Dropping a frame that has been sent in part makes the stream unusable.
    void drop() {
        if (!out_.empty() && out_.front().sent) cut_ = true;
        out_.clear();
    }

    // Returns the header of the next frame without consuming it; null if it has not arrived completely.
    const FrameHeader* peek() {
        if (end_ - at_ < sizeof(FrameHeader)) {
            std::memmove(buffer_.get(), buffer_.get() + at_, end_ - at_);
            end_ -= at_;
            at_ = 0;
            fill();
            if (end_ < sizeof(FrameHeader)) return nullptr;
        }
        std::memcpy(&header_, buffer_.get() + at_, sizeof header_);
        return &header_;
    }
    void skip_header() { at_ += sizeof(FrameHeader); }
    // Whether a complete header has arrived.
    bool has_header() const { return end_ - at_ >= sizeof(FrameHeader); }

    // Sets aside the frame whose header `peek` has returned, so that `peek` can return the frames behind it.
    void set_aside() {
        aside_.push_back({header_, std::vector<char>(header_.nbytes), 0, 0});
        skip_header();
    }
    // Reads the bytes that have arrived for frames set aside; returns whether all of these frames are complete.
    bool aside_is_whole() {
        if (aside_.empty()) return true;
        Aside& last = aside_.back();
        while (last.got < last.bytes.size()) {
            const size_t step = receive_buffered(last.bytes.data() + last.got, last.bytes.size() - last.got);
            if (!step) return false;
            last.got += step;
        }
        return true;
    }
    // The header of the first frame set aside; null if there is none.
    const FrameHeader* first_aside() const { return aside_.empty() ? nullptr : &aside_.front().header; }
    // Makes `read` return the payload of the first frame set aside.
    void take_aside() {
        takes_aside_ = aside_.front().header.nbytes > 0;
        if (!takes_aside_) aside_.pop_front();
    }

    // Reads up to `nbytes` bytes of payload; returns the number of bytes read, 0 if none have arrived.
    size_t read(char* to, size_t nbytes) {
        if (!takes_aside_) return receive_buffered(to, nbytes);
        Aside& first = aside_.front();
        const size_t step = std::min(nbytes, first.bytes.size() - first.taken);
        std::memcpy(to, first.bytes.data() + first.taken, step);
        first.taken += step;
        if (first.taken == first.bytes.size()) {
            aside_.pop_front();
            takes_aside_ = false;
        }
        return step;
    }

  private:
    static constexpr size_t kMaxParts = 64;

    struct Aside {
        FrameHeader header;
        std::vector<char> bytes;
        size_t got, taken;
    };

    size_t receive_buffered(char* to, size_t nbytes) {
        if (at_ == end_ && nbytes >= stream_.direct_bytes()) return stream_.receive(to, nbytes);
        if (at_ == end_) {
            at_ = end_ = 0;
            fill();
        }
        const size_t step = std::min(nbytes, end_ - at_);
        std::memcpy(to, buffer_.get() + at_, step);
        at_ += step;
        return step;
    }

    struct Outgoing {
        FrameHeader header;
        std::vector<iovec> parts;
        size_t sent;
    };

    size_t send_some(const Outgoing& frame) {
        std::array<iovec, kMaxParts> parts;
        size_t count = 0, skipped = frame.sent;
        const auto add = [&](const void* from, size_t nbytes) {
            if (skipped >= nbytes) {
                skipped -= nbytes;
            } else if (count < kMaxParts) {
                parts[count++] = {static_cast<char*>(const_cast<void*>(from)) + skipped, nbytes - skipped};
                skipped = 0;
            }
        };
        add(&frame.header, sizeof(FrameHeader));
        for (const iovec& part : frame.parts) add(part.iov_base, part.iov_len);
        return stream_.send(parts.data(), count);
    }

    void fill() { end_ += stream_.receive(buffer_.get() + end_, stream_.read_ahead_bytes() - end_); }

    Stream stream_;
    bool cut_ = false, left_ = false;
    std::deque<Outgoing> out_;
    std::deque<Aside> aside_;
    bool takes_aside_ = false;
    std::unique_ptr<char[]> buffer_;
    size_t at_ = 0, end_ = 0;
    FrameHeader header_{};
};

}  // namespace unisono
