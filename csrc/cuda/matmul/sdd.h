// Dense @ dense on the live blocks: its way on Hopper.

#pragma once

#include "../common/launch.h"
#include "product_tiles.h"

namespace ds_sparse {

// sdd_sm90.cu. Whether it takes these operands, which have been checked; and the product into `out`.
bool takes_sdd_on_hopper(const Launcher& launch, const Tensor& a, const Tensor& b);
void sdd_on_hopper(
    const Launcher& launch, const Tensor& a, const Tensor& b, const Tensor& out, const ProductTileLists& lists,
    int64_t block);

}  // namespace ds_sparse
