// Tuned sizes of the kernels over lists of token pairs, in one place: warps, lists that are shared, rows on their
// way, thread blocks on a multiprocessor. Measurements, and what was tried besides: docs/lab-notebook.md.

#pragma once

#include <cstdint>

namespace ds_sparse::token {

constexpr int kWarps = 4;  // of a thread block

// Tokens that a warp does by itself, so that a list does not set the time.
constexpr uint32_t kLong = 512;

// Tokens of a group of lanes whose rows are on their way together, where each lane has so many runs of a row.
constexpr int tokens_together(int pieces) { return pieces < 4 ? 4 / pieces : 1; }

// Thread blocks on a multiprocessor, at least; C is what sums are in.
constexpr int kProductThreadBlocks = 6;
template <class C>
constexpr int kForwardThreadBlocks = sizeof(C) == 8 ? 3 : 5;
template <class C>
constexpr int kBackwardThreadBlocks = sizeof(C) == 8 ? 3 : 4;

// Of queries among cached keys: heads that a thread block does together, the blocks that it lists at a time, the tokens
// of a share at least, the shares of a query at most, and the thread blocks of a multiprocessor that shares make.
template <class C>
constexpr int kHeadsTogether = sizeof(C) == 8 ? 1 : 2;
constexpr int kListedBlocks = 1024;
constexpr int64_t kLeastShare = 64;
constexpr int64_t kMostShares = 32;
constexpr int64_t kDecodeThreadBlocks = 3;

}  // namespace ds_sparse::token
