// Sparse @ dense: what its kernels share, and its way on Hopper.

#pragma once

#include "../compute.h"
#include "launch.h"
#include "windows.h"

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

// The sums of the parts of cut lines: (batch, heads or 1, windows, 2, block, width).
template <class C>
struct PartSums {
  C* data;

  __device__ C* at(int64_t window_of_all, Part part, int64_t block, int64_t width) const {
    return data + (2 * window_of_all + (part == kStarted)) * block * width;
  }
};

// A product, but for how its operands are read.
template <class T>
struct Product {
  Result<T> result;
  PartSums<Compute<T>> parts;
  Lists lists;
  const int32_t* indices;
  const int32_t* slots;  // null: entries are numbered as values are
  int layout_heads, heads, rows;
  int64_t values_of_batch, batch;
  int log_block;

  __host__ __device__ int64_t heads_apart() const { return layout_heads == 1 ? heads : 1; }
  __host__ __device__ int64_t windows_of_all() const { return batch * heads_apart() * lists.windows(); }
};

// matmul_dsd_sm90.cu. Whether it takes these operands, which have been checked; and the product, but for adding up
// parts.
bool takes_dsd_on_hopper(const Launcher& launch, const Tensor& values, const Tensor& dense, int64_t block);
template <class T>
void dsd_on_hopper(
    const Launcher& launch, const Product<T>& product, const Tensor& values, const Tensor& dense, const Tensor& out);

}  // namespace ds_sparse
