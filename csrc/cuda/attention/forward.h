// What the forward pass of fused attention takes, on every GPU; and its way on Hopper.

#pragma once

#include "../common/launch.h"
#include "attention.h"

namespace ds_sparse::attention {

template <class T>
struct Forward {
  Matrices<const T> query, key, value;
  Matrices<T> output;
  float* lse;
  RowSum* rows;  // (B, H, T)
  Lists lists;
  Scoring scoring;
  int heads, layout_heads, heads_of_group, width;
  Parts part_outputs;  // but for lines whose sum in a part is 0, which are not written
  RowSum* part_rows;  // (copies, parts, sub-tiles, tile)
};

// forward_sm90.cu
template <class T>
void forward_on_hopper(
    const Launcher& launch, const Forward<T>& p, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& output, int64_t copies);

}  // namespace ds_sparse::attention
