// Tuned sizes of the kernels that choose blocks.

#pragma once

#include <cstdint>

namespace ds_sparse::selection {

// Warps of a thread block that chooses, a row each.
constexpr int kWarps = 8;

// A thread chooses for a row where it chooses so few of so few columns, and there are so many rows.
constexpr int kFew = 8, kFewColumns = 64;
constexpr int64_t kManyRows = 1 << 14;

// A row's best are found one by one up to so many; more, by the rank of the last of them.
constexpr int kMostRounds = 16;

// Bits of that rank that a pass over the row finds, where ranks are in registers and where each pass makes them anew.
constexpr int kBitsInRegisters = 1, kBitsAnew = 4;

// Of maxima of products: warps of a thread block, keys of a step, stages of keys on their way; rows of a warp, by
// sixteens, where heads have so many panels of 64 numbers; thread blocks on a multiprocessor, at least.
struct MaximaTuning {
  static constexpr int kWarps = 4, kKeys = 64, kStages = 3;
  static constexpr int sixteens(int panels) { return panels <= 2 ? 2 : 1; }
  static constexpr int thread_blocks(int panels) { return panels <= 2 ? 3 : 2; }
  static constexpr int64_t kLeastKeys = 512;  // of a part, where few queries share a long row of keys out
};

}  // namespace ds_sparse::selection
