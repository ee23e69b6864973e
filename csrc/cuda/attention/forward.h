// Arguments of fused attention's forward pass, on every GPU; and its way on Hopper.

#pragma once

#include "../common/launch.h"
#include "../common/pass_state.h"
#include "mainloop.h"
#include "scoring.h"
#include "softmax.h"

namespace ds_sparse::attention {

template <class T>
struct Forward {
  Matrices<const T> query, key, value;
  Matrices<T> output;
  float* lse;
  RowMaxSum* row_max_sums;  // (B, H, T)
  TileLists lists;
  Scoring scoring;
  int heads, heads_of_group, head_dim;
  SplitResults split_outputs;     // but for rows whose sum in a split is 0, which are not written
  RowMaxSum* split_row_max_sums;  // (copies, splits, sub-tiles, tile)
  PassState* state;
};

// forward_sm90.cu
template <class T>
void forward_on_hopper(
    const Launcher& launch, const Forward<T>& p, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& output, int64_t copies, bool rows_differ);

}  // namespace ds_sparse::attention
