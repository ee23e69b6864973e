// Sparse @ dense: what its kernels share, and its ways on Hopper.

#pragma once

#include "../common/launch.h"
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

// A product by tiles, but for its operands. What is summed of tiles that are cut goes to `parts`, to be added up, but for
// strips of rows that have no block there: mostly it is for the sake of one long line that a tile is cut.
template <class T>
struct TileProduct {
  TileLists lists;
  Result<T> result;
  int block;
  float* parts;        // (copies, num_parts, kProductTile, width)
  int32_t* has_strip;  // (copies, num_parts, kProductTile / kStrip), 0 or 1
  int num_parts;
  const int32_t* cuts;
  int num_cuts;

  // The number of a task's part among those of all copies; -1: its tile is whole.
  __device__ int part_of_all(const TileTask& task) const {
    return task.part < 0 ? -1 : task.copy * num_parts + task.part;
  }
  __device__ float* part(int64_t part_of_all, int row) const {
    return parts + (part_of_all * kProductTile + row) * result.width;
  }
  // Whether a part has the strip of a row.
  __device__ int32_t* strip_of_part(int64_t part_of_all, int row) const {
    return has_strip + (part_of_all * kProductTile + row) / kStrip;
  }
};

// Whether kernels for Hopper take these operands, which have been checked, where there are tiles.
bool takes_dsd_on_hopper(const Launcher& launch, const Tensor& values, const Tensor& dense);
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
