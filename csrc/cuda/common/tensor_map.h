// Descriptions of tensors for Hopper's copy engine.

#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>

#include "../../checks.h"
#include "../../tensors.h"

namespace ds_sparse {

// Of 16 bits, the last dimension adjacent. Sizes, boxes: of each dimension of the map, the innermost first, and
// strides in bytes, of all but that; `swizzle`: of so many bytes, 32, 64 or 128, the width of a box. What is outside of
// the tensor is zeros, and is not stored. A Launcher on the tensor's device lives in the same thread.
template <int kRank>
CUtensorMap encode_map(
    const void* data, ScalarType type, const cuuint64_t (&sizes)[kRank], const cuuint64_t (&strides)[kRank - 1],
    const cuuint32_t (&boxes)[kRank], int swizzle) {
  using Encode = CUresult (*)(
      CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
      const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  // From the driver that is loaded, so that the library is not linked with one.
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    check(
        function != nullptr && found == cudaDriverEntryPointSuccess,
        "the GPU's driver has no cuTensorMapEncodeTiled; install a driver for CUDA 12 or later.");
    return reinterpret_cast<Encode>(function);
  }();
  cuuint32_t steps[kRank];
  std::fill_n(steps, kRank, 1);
  CUtensorMap map;
  const CUresult result = encode(
      &map, type == ScalarType::Half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kRank,
      const_cast<void*>(data), sizes, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzle == 32   ? CU_TENSOR_MAP_SWIZZLE_32B
      : swizzle == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                      : CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with ", result, ".");
  return map;
}
template <int kRank>
CUtensorMap encode_map(
    const Tensor& x, const cuuint64_t (&sizes)[kRank], const cuuint64_t (&strides)[kRank - 1],
    const cuuint32_t (&boxes)[kRank], int swizzle) {
  return encode_map<kRank>(x.const_data_ptr(), x.scalar_type(), sizes, strides, boxes, swizzle);
}

// Strides of (B, H, tokens, D), in bytes.
inline cuuint64_t map_stride(const Tensor& x, int dim) {
  // The stride of a dimension of size 1 says nothing, and may not be what the engine takes.
  return x.size(dim) == 1 ? 16 : static_cast<cuuint64_t>(x.stride(dim)) * 2;
}

// Describes a tensor (B, H, tokens, D): boxes of `box` tokens and 16 or 64 columns.
inline CUtensorMap tensor_map(const Tensor& x, int box, int columns = 64) {
  const auto size = [&](int dim) { return static_cast<cuuint64_t>(x.size(dim)); };
  return encode_map<4>(
      x, {size(3), size(2), size(1), size(0)}, {map_stride(x, 2), map_stride(x, 1), map_stride(x, 0)},
      {static_cast<cuuint32_t>(columns), static_cast<cuuint32_t>(box), 1, 1}, columns * 2);
}

// Describes a tensor (B, H, tokens, D), or (B, H, tokens, rows of a token, D): boxes of 16 rows or more and 64 columns.
// Where rows are heads it is by head, counted through all, and token.
inline CUtensorMap tensor_map_of_rows(const Tensor& x, int box) {
  if (x.dim() == 4) {
    return tensor_map(x, box);
  }
  const auto size = [&](int dim) { return static_cast<cuuint64_t>(x.size(dim)); };
  const auto rows = static_cast<cuuint32_t>(x.size(3));
  if (has_even_rows(x)) {
    return encode_map<4>(
        x, {size(4), size(2) * rows, size(1), size(0)},
        {map_stride(x, rows == 1 ? 2 : 3), map_stride(x, 1), map_stride(x, 0)},
        {64, static_cast<cuuint32_t>(box), 1, 1}, 128);
  }
  return encode_map<4>(
      x, {size(4), size(1) * rows, size(2), size(0)}, {map_stride(x, 3), map_stride(x, 2), map_stride(x, 0)},
      {64, rows, static_cast<cuuint32_t>(box) / rows, 1}, 128);
}

// Describes a tensor (B, H, tokens, D): boxes of four runs of `run` tokens and 64 columns, in which the first two
// tokens of each run come first, then the next two of each. Where such tokens are a product's columns, a lane's sums,
// of which it has two in every eight, are a run. A box's place is one number, as few dimensions are left: of its first
// token, with what a batch, a head and a token add to it. Strides need not grow from dimension to dimension, whatever
// cuda.h says: driver 580.159.04 takes them in any order.
struct RunsMap {
  CUtensorMap map;
  int batch, head, token;

  // Places have to be numbers of 32 bits.
  static bool takes(const Tensor& x) { return last_place(x) < INT32_MAX; }

  RunsMap(const Tensor& x, int run)
      : map(encode_map<5>(
            x, {static_cast<cuuint64_t>(x.size(3)), 2, 4, static_cast<cuuint64_t>(run / 2), last_place(x) + 1},
            {map_stride(x, 2), map_stride(x, 2) * run, map_stride(x, 2) * 2, granule(x)},
            {64, 2, 4, static_cast<cuuint32_t>(run / 2), 1}, 128)),
        batch(static_cast<int>(places(x, 0))),
        head(static_cast<int>(places(x, 1))),
        token(static_cast<int>(places(x, 2))) {}

 private:
  // Bytes between places.
  static cuuint64_t granule(const Tensor& x) {
    cuuint64_t granule = map_stride(x, 2);
    for (int dim = 0; dim < 2; ++dim) {
      granule = x.size(dim) == 1 ? granule : std::gcd(granule, map_stride(x, dim));
    }
    return granule;
  }
  static cuuint64_t places(const Tensor& x, int dim) { return map_stride(x, dim) / granule(x); }
  static cuuint64_t last_place(const Tensor& x) {
    cuuint64_t last = 0;
    for (int dim = 0; dim < 3; ++dim) {
      last += (x.size(dim) - 1) * places(x, dim);
    }
    return last;
  }
};

}  // namespace ds_sparse
