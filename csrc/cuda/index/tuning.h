// Tuned sizes of the kernels that build indices.

#pragma once

namespace ds_sparse::index {

constexpr int kThreads = 256, kWarps = kThreads / 32;  // of a thread block

// Words of a layout that a warp makes, whose reads are under way together.
constexpr int kAtOnce = 8;

// Items of a thread block, one a lane, whose places in an order are found: each warp compares them with an eighth of
// all.
constexpr int kItems = 32;

}  // namespace ds_sparse::index
