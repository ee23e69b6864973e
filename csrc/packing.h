// How two numbers stand in the 32 bits of one, in the entries of tiles' lists and in row strips; packed by
// ds_sparse/index/packing.py.
#pragma once

#include <cstdint>

namespace ds_sparse {

// Low bits of an entry, which number a block on the other side. The others are its owner bits: one for each block row
// of the tile in which the block is live.
constexpr int kBlockBits = 24;

constexpr uint32_t block_of(uint32_t entry) { return entry & ((1u << kBlockBits) - 1); }
constexpr uint32_t owners_of(uint32_t entry) { return entry >> kBlockBits; }

// Low bits of a row strip's rows, which have the log2 of their number. The others are the first of them within the
// block row.
constexpr int kSizeBits = 5;

constexpr int log_rows_of(int rows) { return rows & ((1 << kSizeBits) - 1); }
constexpr int first_row_of(int rows) { return rows >> kSizeBits; }

}  // namespace ds_sparse
