// Tuned sizes of the kernels that choose blocks.

#pragma once

namespace ds_sparse::selection {

// Warps of a thread block that chooses, a row each.
constexpr int kWarps = 8;

// A row's best are found one by one up to so many; more, by the rank of the last of them.
constexpr int kMostRounds = 16;

// Bits of that rank that a pass over the row finds, where ranks are in registers and where each pass makes them anew.
constexpr int kBitsInRegisters = 1, kBitsAnew = 4;

}  // namespace ds_sparse::selection
