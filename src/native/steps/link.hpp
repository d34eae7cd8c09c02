// One end of a stream of bytes to and from another rank, and the frames that travel on it.
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

// Content of a frame: bytes of an algorithm's message; the ranks that its sender has received frames from; the notice
// that ranks make different calls; or the end of a sender that makes no more calls.
enum class FrameKind : uint32_t { data = 1, heard = 2, mismatch = 3, farewell = 4 };

// The beginning of each frame. Ranks of one job run the same build on the same architecture, or refuse each other.
struct FrameHeader {
    uint64_t signature;
    uint32_t call;
    FrameKind kind;
    uint64_t nbytes;
};
static_assert(sizeof(FrameHeader) == 24);

// A stream moves bytes without blocking, and knows whether it has ended.
template <class Stream>
class Link {
  public:
    explicit Link(const Stream& stream) : stream_(stream) {}

    // The stream has ended, or the other rank has sent its farewell.
    bool lost() const { return cut_ || stream_.lost(); }
    bool left() const { return left_; }
    void mark_left() { left_ = true; }

    // Appends a frame; its parts are read until it is sent.
    void queue(const FrameHeader& header, std::vector<iovec> parts) {
        out_.push_back({header, std::move(parts), 0});
    }
    bool drained() const { return out_.empty(); }

    // Sends as much as the stream accepts; returns whether it accepted any.
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

    // Drops unsent frames. A frame sent in part leaves the stream unusable.
    void drop() {
        if (!out_.empty() && out_.front().sent) cut_ = true;
        out_.clear();
    }

    // The header of the next frame, if it has arrived completely. Does not consume it.
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

    // Sets aside the frame whose header `peek` has returned, so that the ones behind it can be seen.
    void set_aside() {
        aside_.push_back({header_, std::vector<char>(header_.nbytes), 0, 0});
        skip_header();
    }
    // Whether the frames set aside have arrived completely; reads more if not.
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
    // The header of the first frame set aside, if there is one.
    const FrameHeader* first_aside() const { return aside_.empty() ? nullptr : &aside_.front().header; }
    // Makes that frame the next to be read.
    void take_aside() {
        takes_aside_ = aside_.front().header.nbytes > 0;
        if (!takes_aside_) aside_.pop_front();
    }

    // Reads payload; returns how many bytes have arrived, 0 if none has.
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
        if (at_ == end_ && nbytes >= Stream::kDirectBytes) return stream_.receive(to, nbytes);
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

    void fill() { end_ += stream_.receive(buffer_.get() + end_, Stream::kReadAheadBytes - end_); }

    Stream stream_;
    bool cut_ = false, left_ = false;
    std::deque<Outgoing> out_;
    std::deque<Aside> aside_;
    bool takes_aside_ = false;
    std::unique_ptr<char[]> buffer_{new char[Stream::kReadAheadBytes]};
    size_t at_ = 0, end_ = 0;
    FrameHeader header_{};
};

}  // namespace unisono
