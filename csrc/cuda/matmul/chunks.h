// Cutting the list of live blocks into equal windows, one thread block's work each, so that a dense row of the layout
// does not set the time.
//
// "Line" is a block row of the layout, or a block column where the transposed lists are walked; lines of all layout
// heads are numbered through. Window w has the lines that start among entries [w * size, (w + 1) * size). A line of at
// most `size` entries is done whole, past the end of its window if need be. A longer one is cut where windows end: each
// window that it reaches has one part of it. A window thus meets at most one part of a line that started before it (part
// kContinued) and one of a line that goes on after it (part kStarted).

#pragma once

#include <cstdint>

namespace ds_sparse {

enum Part { kWhole, kContinued, kStarted };

struct Lists {
  const int32_t* offsets;  // (lines + 1)
  int lines;               // of all layout heads together
  int entries;             // N
  int size;                // entries in a window

  __host__ __device__ int windows() const { return entries / size + 1; }
};

// Entries in a window: tokens enough to keep a thread block busy, few enough to give every multiprocessor some windows.
inline int window_size(
    int64_t entries_of_all_heads, int64_t block, int64_t tiles_an_entry, int64_t multiprocessors) {
  constexpr int64_t most = 2048, fewest = 256, windows_a_multiprocessor = 8;
  int64_t tokens = most;
  const int64_t all = entries_of_all_heads * block * tiles_an_entry;
  while (tokens > fewest && all / tokens < multiprocessors * windows_a_multiprocessor) {
    tokens /= 2;
  }
  return static_cast<int>(tokens > block ? tokens / block : 1);
}

// The first of `count` ascending numbers that is at least `value`, or count; by a whole warp.
__device__ __forceinline__ int first_at_least(const int32_t* numbers, int count, int value) {
  const int lane = threadIdx.x % 32;
  int low = 0, high = count;
  while (low < high) {
    const int step = (high - low + 31) / 32;
    const int probe = low + lane * step;
    const int smaller = __popc(__ballot_sync(0xffffffffu, probe < high && numbers[probe] < value));
    high = min(high, low + smaller * step);
    low = smaller == 0 ? low : low + (smaller - 1) * step + 1;
  }
  return low;
}

// What a window holds.
struct Window {
  int begin, end;                // its entries
  int first_line, line_after;    // the lines that start in it
  int first_entry, entry_after;  // all entries that its lines and parts have
  bool continues;                // it begins with a part of the line before first_line

  // By a whole warp; each gets the same.
  __device__ Window(const Lists& lists, int window) {
    begin = window * lists.size;
    end = min(begin + lists.size, lists.entries);
    first_line = min(first_at_least(lists.offsets, lists.lines + 1, begin), lists.lines);
    line_after = min(first_at_least(lists.offsets, lists.lines + 1, begin + lists.size), lists.lines);
    const int start = lists.offsets[first_line];
    continues = first_line > 0 && start > begin && start - lists.offsets[first_line - 1] > lists.size;
    first_entry = continues ? begin : start;
    entry_after = lists.offsets[line_after];
    if (last_is_long(lists)) {
      entry_after = end;
    } else if (first_line == line_after) {
      entry_after = continues ? min(start, end) : first_entry;
    }
  }

  // Whether the last line that starts here goes on in the windows after this one.
  __device__ bool last_is_long(const Lists& lists) const {
    return first_line < line_after && lists.offsets[line_after] - lists.offsets[line_after - 1] > lists.size;
  }
};

// Walks a window in steps: the tokens of each line's entries, `step` at a time, and `chunks` steps for each of those. A
// line without an entry has one step without a token.
struct Walk {
  int line, line_after;
  int begin;       // the first of the line's entries that belong to the window
  int tokens;      // in all of those
  int number = 0;  // lines so far
  int token = 0;   // first token of the step, counted from the first token of entry `begin`
  int chunk = 0;
  Part part;

  __device__ Walk(const Lists& lists, const Window& window, int log_block)
      : line(window.first_line - (window.continues ? 1 : 0)), line_after(window.line_after) {
    enter(lists, window, log_block);
  }

  __device__ bool valid() const { return line < line_after; }
  __device__ bool line_begins() const { return token == 0 && chunk == 0; }
  __device__ bool line_ends(int step, int chunks) const { return chunk + 1 == chunks && token + step >= tokens; }

  __device__ void next(const Lists& lists, const Window& window, int log_block, int step, int chunks) {
    if (++chunk < chunks) {
      return;
    }
    chunk = 0;
    token += step;
    if (token >= tokens) {
      next_line(lists, window, log_block);
    }
  }

  __device__ void next_line(const Lists& lists, const Window& window, int log_block) {
    token = 0;
    ++line;
    ++number;
    enter(lists, window, log_block);
  }

 private:
  __device__ void enter(const Lists& lists, const Window& window, int log_block) {
    if (!valid()) {
      return;
    }
    begin = lists.offsets[line];
    int end = lists.offsets[line + 1];
    part = kWhole;
    if (end - begin > lists.size) {
      part = begin < window.begin ? kContinued : kStarted;
      begin = max(begin, window.begin);
      end = min(end, window.end);
    }
    tokens = (end - begin) << log_block;
  }
};

}  // namespace ds_sparse
