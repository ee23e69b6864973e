// The band of a product: its way on Hopper.

#pragma once

#include "../common/implementation.h"

namespace ds_sparse {

// matmul_sm90.cu. The band of (B, H, T, D) both, which have been checked, into `out`.
void window_matmul_on_hopper(
    const Launcher& launch, const Tensor& a, const Tensor& b, const Tensor& out, int64_t window);

}  // namespace ds_sparse
