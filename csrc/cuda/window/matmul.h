// The band of a product: its way on Hopper.

#pragma once

#include "../common/launch.h"

namespace ds_sparse {

// matmul_sm90.cu. Whether it takes these operands, (B, H, T, D) both, which have been checked; and the band into
// `out`.
bool takes_window_matmul_on_hopper(const Launcher& launch, const Tensor& a, const Tensor& b, int64_t window);
void window_matmul_on_hopper(
    const Launcher& launch, const Tensor& a, const Tensor& b, const Tensor& out, int64_t window);

}  // namespace ds_sparse
