// Copies to memory that other ranks read, and reductions into it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/kernels.hpp"
#include "kernels/platform.hpp"

namespace unisono {

// Lines that another rank has read are slow to write if its core shares no cache with this one: ten times as slow as
// non-temporal stores to memory. If the cores do share a cache, such stores cost the readers more than they save. The
// faster one changes as the system moves ranks from core to core, so each rank times its copies.
class Stores {
  public:
    void copy(char* to, const char* from, size_t nbytes) {
        if (nbytes < kTimed) {
            if (nbytes) std::memcpy(to, from, nbytes);
            return;
        }
        const unsigned count = ++count_;
        // The slower kind of store is tried at the 1st, 2nd, 4th, 8th ... copy, and then seldom.
        const bool seldom = count % kSeldom == 0 || (count & (count - 1)) == 0;
        const bool past = past_is_better() != seldom;
        double& kept = past ? past_s_ : plain_s_;
        const double began = monotonic_s();
        past ? copy_past_caches(to, from, nbytes) : copy_plainly(to, from, nbytes);
        const double each = (monotonic_s() - began) / static_cast<double>(nbytes);
        // A single slow copy may have been interrupted.
        kept = kept > 0 && each > 2 * kept ? 2 * kept : each;
    }

    // Reduces rows in their order, block by block, to any number of targets, which may include rows.
    // `shown` is memory that other ranks read; the result is divided by the divisor, if it is not 1.
    void reduce(const Reduction& how, const std::vector<const char*>& rows, size_t count, int64_t divisor,
                const std::vector<char*>& targets, char* shown) const {
        alignas(64) char block[kBlockBytes];
        const size_t step = kBlockBytes / how.width;
        const bool past = past_is_better(), direct = !shown && is_written_safely(rows, targets);
        for (size_t n = 0; n < count; n += step) {
            const size_t length = std::min(step, count - n), at = n * how.width, nbytes = length * how.width;
            char* sum = direct ? targets[0] + at : block;
            if (rows.size() == 1) std::memmove(sum, rows[0] + at, nbytes);
            for (size_t r = 1; r < rows.size(); r++) how.kernel(r == 1 ? rows[0] + at : sum, rows[r] + at, sum, length);
            if (divisor != 1) how.divide(sum, length, divisor);
            for (size_t t = direct; t < targets.size(); t++) std::memcpy(targets[t] + at, sum, nbytes);
            if (shown) past ? copy_past_caches(shown + at, sum, nbytes) : copy_plainly(shown + at, sum, nbytes);
        }
    }

  private:
    static constexpr size_t kTimed = 1 << 12;
    static constexpr double kSlower = 3;
    static constexpr unsigned kSeldom = 256;

    // Whether the sum may accumulate in the first target: that is not a row read after the first two.
    static bool is_written_safely(const std::vector<const char*>& rows, const std::vector<char*>& targets) {
        return !targets.empty() && (rows.size() < 3 || std::find(rows.begin() + 2, rows.end(), targets[0]) == rows.end());
    }
    static void copy_plainly(char* to, const char* from, size_t nbytes) { std::memcpy(to, from, nbytes); }
    bool past_is_better() const { return plain_s_ > kSlower * past_s_; }

    double plain_s_ = 0, past_s_ = 0;
    unsigned count_ = 0;
};

}  // namespace unisono
