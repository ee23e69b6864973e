// Dense @ dense on the live blocks: its way on Hopper.

#pragma once

#include "launch.h"
#include "windows.h"

namespace ds_sparse {

// matmul_sdd_sm90.cu. Whether it takes these operands, which have been checked; and the product, into `out`.
bool takes_sdd_on_hopper(const Launcher& launch, const Tensor& a, const Tensor& b, int64_t block);
void sdd_on_hopper(
    const Launcher& launch, const Tensor& a, const Tensor& b, const Tensor& out, const Lists& lists,
    const int32_t* columns, int64_t layout_heads, int64_t block);

}  // namespace ds_sparse
