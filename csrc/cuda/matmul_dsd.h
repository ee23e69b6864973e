// Sparse @ dense: what its kernels share, and its way on Hopper.

#pragma once

#include "../compute.h"
#include "launch.h"
#include "matmul_tiles.h"
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

// Numbers that a thread adds up, where parts are, at once: to find out whether there is anything to add takes longer than
// most additions.
constexpr int kAddedTogether = 4;

template <class T>
struct alignas(16) AddedTogether {
  Compute<T> number[kAddedTogether];
};

// Of `count` parts, first part first; at(part) is where its numbers begin.
template <class T, class F>
__device__ __forceinline__ AddedTogether<T> sum_of_parts(int64_t count, const F& at) {
  AddedTogether<T> sums = *reinterpret_cast<const AddedTogether<T>*>(at(0));
#pragma unroll 8
  for (int64_t part = 1; part < count; ++part) {
    const auto next = *reinterpret_cast<const AddedTogether<T>*>(at(part));
#pragma unroll
    for (int e = 0; e < kAddedTogether; ++e) {
      sums.number[e] += next.number[e];
    }
  }
  return sums;
}

// Whether the kernels for Hopper take these operands, which have been checked. Blocks of 16 and 32 need tiles, too.
bool takes_dsd_on_hopper(const Launcher& launch, const Tensor& values, const Tensor& dense, int64_t block);
// matmul_dsd_sm90.cu: the product for blocks of 64 and more, but for adding up parts.
template <class T>
void dsd_on_hopper(
    const Launcher& launch, const Product<T>& product, const Tensor& values, const Tensor& dense, const Tensor& out);
// matmul_dsd_tiles_sm90.cu: the product for blocks of 16 and 32. `transposed`: tiles are of columns.
void dsd_of_tiles_on_hopper(
    const Launcher& launch, const TileLists& lists, const Tensor& cuts, const Tensor& values, const Tensor& dense,
    const Tensor& out, bool transposed, bool transpose_result);

}  // namespace ds_sparse
