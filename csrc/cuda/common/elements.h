// From a tensor's dtype to the type that a kernel is made for.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/csrc/stable/tensor.h>

#include <string>

#include "../../checks.h"

// Names the dtypes that a long file makes kernels of: fp16 1, bf16 2, fp32 4. The build compiles it once for each, side
// by side.
#ifndef DS_SPARSE_DTYPES
#define DS_SPARSE_DTYPES 7
#endif

namespace ds_sparse {

// Calls f with a zero of the element type. `operation`: what takes it, as an error names that; kDouble: fp64 too.
template <bool kDouble, class F>
void with_element(const torch::stable::Tensor& x, const char* operation, const F& f) {
  using torch::headeronly::ScalarType;
  switch (x.scalar_type()) {
    case ScalarType::Half:
      return f(__half{});
    case ScalarType::BFloat16:
      return f(__nv_bfloat16{});
    case ScalarType::Float:
      return f(float{});
    case ScalarType::Double:
      if constexpr (kDouble) {
        return f(double{});
      }
      [[fallthrough]];
    default:
      check(
          false, operation, " takes float16, bfloat16", kDouble ? ", float32 and float64" : " and float32",
          " on CUDA.");
  }
}

}  // namespace ds_sparse
