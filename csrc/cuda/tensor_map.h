// Descriptions of tensors for Hopper's copy engine.

#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <string>

#include "../checks.h"

namespace ds_sparse {

// Of a 16-bit tensor (B, H, tokens, D), D adjacent: boxes of `box` tokens and 16 or 64 columns, in the swizzle of that
// many bytes; what is outside of the tensor is zeros, and is not stored. A Launcher on the tensor's device lives in the same
// thread.
inline CUtensorMap tensor_map(const Tensor& x, int box, int columns = 64) {
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
  const auto stride = [&](int dim) {
    const int64_t bytes = x.stride(dim) * 2;
    // The stride of a dimension of size 1 says nothing, and may not be what the engine takes.
    return static_cast<cuuint64_t>(x.size(dim) == 1 ? 16 : bytes);
  };
  const auto size = [&](int dim) { return static_cast<cuuint64_t>(x.size(dim)); };
  const cuuint64_t sizes[] = {size(3), size(2), size(1), size(0)}, strides[] = {stride(2), stride(1), stride(0)};
  const cuuint32_t box_sizes[] = {static_cast<cuuint32_t>(columns), static_cast<cuuint32_t>(box), 1, 1}, steps[] = {1, 1, 1, 1};
  const CUtensorMapSwizzle swizzle = columns == 16 ? CU_TENSOR_MAP_SWIZZLE_32B : CU_TENSOR_MAP_SWIZZLE_128B;
  CUtensorMap map;
  const CUresult result = encode(
      &map, x.scalar_type() == ScalarType::Half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
      const_cast<void*>(x.const_data_ptr()), sizes, strides, box_sizes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with " + std::to_string(result) + ".");
  return map;
}

}  // namespace ds_sparse
