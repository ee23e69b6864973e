// Dense @ dense on the live blocks: its way on Hopper.

#pragma once

#include "../common/implementation.h"
#include "product_tiles.h"

namespace ds_sparse {

// sdd_sm90.cu. The product into `out`; operands that the copy engine cannot read in place are copied.
void sdd_on_hopper(
    const Launcher& launch, const Tensor& a, const Tensor& b, const Tensor& out, const ProductTileLists& lists,
    int64_t block);

}  // namespace ds_sparse
