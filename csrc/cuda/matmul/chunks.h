// Cutting the list of live blocks into equal chunks, one thread block's work each, so that a dense row of the layout
// does not set the time.
//
// A list has the live blocks of a block row of the layout, or of a block column where the transposed lists are walked;
// lists of all layout heads are numbered through. Chunk c has the lists that start among entries [c * size, (c + 1) *
// size). A list of at most `size` entries is done whole, past the end of its chunk if need be. A longer one is cut
// where chunks end: each chunk that it reaches has one split of it. A chunk thus meets at most one split of a list that
// started before it (split kContinued) and one of a list that goes on after it (split kStarted).

#pragma once

#include <cstdint>

#include "tuning.h"

namespace ds_sparse {

enum Split { kWhole, kContinued, kStarted };

struct BlockLists {
  const int32_t* offsets;  // (lists + 1)
  int num_lists;           // of all layout heads together
  int entries;             // N
  int chunk_size;          // entries in a chunk

  __host__ __device__ int chunks() const { return entries / chunk_size + 1; }
};

// Entries in a chunk.
inline int chunk_size_of(int64_t entries_of_all_heads, int64_t block, int64_t tiles_an_entry, int64_t multiprocessors) {
  int64_t tokens = ChunkTuning::kMostTokens;
  const int64_t all = entries_of_all_heads * block * tiles_an_entry;
  while (tokens > ChunkTuning::kFewestTokens && all / tokens < multiprocessors * ChunkTuning::kChunksOnMultiprocessor) {
    tokens /= 2;
  }
  return static_cast<int>(tokens > block ? tokens / block : 1);
}

// Entries that the lists of a chunk may have, with blocks of 8: its own, those of the last list beyond its end, and
// those that the last tile would have had room for.
constexpr int kMostListed = 2 * ChunkTuning::kMostTokens / 8 + SddTuning::kTokens / 8;

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

// The contents of a chunk.
struct Chunk {
  int begin, end;                // its entries
  int first_list, list_after;    // the lists that start in it
  int first_entry, entry_after;  // all entries that its lists and splits have
  bool continues;                // it begins with a split of the list before first_list

  // By a whole warp; each gets the same.
  __device__ Chunk(const BlockLists& lists, int chunk) {
    begin = chunk * lists.chunk_size;
    end = min(begin + lists.chunk_size, lists.entries);
    first_list = min(first_at_least(lists.offsets, lists.num_lists + 1, begin), lists.num_lists);
    list_after = min(first_at_least(lists.offsets, lists.num_lists + 1, begin + lists.chunk_size), lists.num_lists);
    const int start = lists.offsets[first_list];
    continues = first_list > 0 && start > begin && start - lists.offsets[first_list - 1] > lists.chunk_size;
    first_entry = continues ? begin : start;
    entry_after = lists.offsets[list_after];
    if (last_is_long(lists)) {
      entry_after = end;
    } else if (first_list == list_after) {
      entry_after = continues ? min(start, end) : first_entry;
    }
  }

  // True where the last list that starts here goes on in the chunks after this one.
  __device__ bool last_is_long(const BlockLists& lists) const {
    return first_list < list_after && lists.offsets[list_after] - lists.offsets[list_after - 1] > lists.chunk_size;
  }
};

// Walks a chunk in steps: the tokens of each list's entries, `step` at a time, and `k_blocks` steps for each of those.
// A list without an entry has one step without a token.
struct Walk {
  int list, list_after;
  int begin;       // the first of the list's entries that belong to the chunk
  int tokens;      // in all of those
  int number = 0;  // lists so far
  int token = 0;   // first token of the step, counted from the first token of entry `begin`
  int k_block = 0;
  Split split;

  __device__ Walk(const BlockLists& lists, const Chunk& chunk, int log_block)
      : list(chunk.first_list - (chunk.continues ? 1 : 0)), list_after(chunk.list_after) {
    enter(lists, chunk, log_block);
  }

  __device__ bool valid() const { return list < list_after; }
  __device__ bool list_begins() const { return token == 0 && k_block == 0; }
  __device__ bool list_ends(int step, int k_blocks) const { return k_block + 1 == k_blocks && token + step >= tokens; }

  __device__ void next(const BlockLists& lists, const Chunk& chunk, int log_block, int step, int k_blocks) {
    if (++k_block < k_blocks) {
      return;
    }
    k_block = 0;
    token += step;
    if (token >= tokens) {
      next_list(lists, chunk, log_block);
    }
  }

  __device__ void next_list(const BlockLists& lists, const Chunk& chunk, int log_block) {
    token = 0;
    ++list;
    ++number;
    enter(lists, chunk, log_block);
  }

 private:
  __device__ void enter(const BlockLists& lists, const Chunk& chunk, int log_block) {
    if (!valid()) {
      return;
    }
    begin = lists.offsets[list];
    int end = lists.offsets[list + 1];
    split = kWhole;
    if (end - begin > lists.chunk_size) {
      split = begin < chunk.begin ? kContinued : kStarted;
      begin = max(begin, chunk.begin);
      end = min(end, chunk.end);
    }
    tokens = (end - begin) << log_block;
  }
};

}  // namespace ds_sparse
