// Dense @ dense on the live blocks: its way on Hopper.

#pragma once

#include "launch.h"
#include "matmul_tiles.h"
#include "windows.h"

namespace ds_sparse {

// Whether the ways below take these operands, which have been checked, for blocks of 16 and more.
bool takes_sdd_on_hopper(const Launcher& launch, const Tensor& a, const Tensor& b);
// The product into `out`, with blocks of 64 and more. matmul_sdd_sm90.cu
void sdd_on_hopper(
    const Launcher& launch, const Tensor& a, const Tensor& b, const Tensor& out, const Lists& lists,
    const int32_t* columns, int64_t layout_heads, int64_t block);
// The same with blocks of 16 and 32, in tiles. matmul_sdd_tiles_sm90.cu
void sdd_of_tiles_on_hopper(
    const Launcher& launch, const Tensor& a, const Tensor& b, const Tensor& out, const TileLists& lists, int64_t block);

}  // namespace ds_sparse
