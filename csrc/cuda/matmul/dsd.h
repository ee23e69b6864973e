// Sparse @ dense: what its kernels share, and its ways on Hopper.

#pragma once

#include "../common/implementation.h"
#include "../common/mma.h"
#include "product_tiles.h"

namespace ds_sparse {

// The result: dense, or with its last two dimensions swapped.
template <class T>
struct Result {
  T* data;
  int64_t tokens, width;
  bool transposed;

  __device__ T* at(int64_t matrix, int64_t token, int64_t column) const {
    return data + matrix * tokens * width + (transposed ? column * tokens + token : token * width + column);
  }
};

// A product by tiles, but for its operands. What is summed of tiles whose lists are split goes to `splits`, to be added
// up, but for warp tiles of rows that have no block there: mostly it is for the sake of one long block row that a
// tile's list is split.
template <class T>
struct TileProduct {
  ProductTileLists lists;
  Result<T> result;
  int block;
  float* splits;           // (copies, num_splits, kProductTile, width)
  int32_t* has_warp_tile;  // (copies, num_splits, kProductTile / kWarpTileRows), 0 or 1
  int num_splits;
  const int32_t* cuts;
  int num_cuts;

  // The number of a work tile's split among those of all copies; -1: its tile is whole.
  __device__ int split_of_all(const ProductWorkTile& work) const {
    return work.split < 0 ? -1 : work.copy * num_splits + work.split;
  }
  __device__ float* split(int64_t split_of_all, int row) const {
    return splits + (split_of_all * kProductTile + row) * result.width;
  }
  // Tells if a split has the warp tile of a row.
  __device__ int32_t* warp_tile_of_split(int64_t split_of_all, int row) const {
    return has_warp_tile + (split_of_all * kProductTile + row) / kWarpTileRows;
  }
};

// dsd_small_sm90.cu and dsd_large_sm90.cu: the product for blocks of 16 and 32, and of 64 and 128.
// `transposed`: blocks are, and tiles are of columns.
template <class T>
void dsd_of_small_blocks(
    const Launcher& launch, const TileProduct<T>& product, const Tensor& values, const Tensor& dense, const Tensor& out,
    bool transposed);
template <class T>
void dsd_of_large_blocks(
    const Launcher& launch, const TileProduct<T>& product, const Tensor& values, const Tensor& dense, const Tensor& out,
    bool transposed);

}  // namespace ds_sparse
