// Dense @ dense on the live blocks: its way on Hopper.

#pragma once

#include "launch.h"
#include "matmul_tiles.h"

namespace ds_sparse {

// matmul_sdd_sm90.cu. Whether it takes these operands, which have been checked; and the product into `out`.
bool takes_sdd_on_hopper(const Launcher& launch, const Tensor& a, const Tensor& b);
void sdd_on_hopper(
    const Launcher& launch, const Tensor& a, const Tensor& b, const Tensor& out, const TileLists& lists,
    int64_t block);

}  // namespace ds_sparse
