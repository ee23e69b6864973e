// What the backward pass of fused attention takes, on every GPU; and its sweeps on Hopper.

#pragma once

#include "attention.h"
#include "attention_rows.h"
#include "launch.h"

namespace ds_sparse::attention {

template <class T>
struct Backward {
  Matrices<const T> query, key, value, grad_output;
  Rows rows;
  Scoring scoring;
  int heads, layout_heads, heads_of_group, width;
};

// What a sweep makes: the gradient of its own side's first operand, and of its second where that is values.
template <class T>
struct Sweep {
  Lists lists;
  Matrices<T> grad_first, grad_second;
  // In fp32: parts of cut tiles, or with grouped heads each query head's share of the gradients, (B, H, S, D).
  Parts first_parts, second_parts;
  float *first_shares, *second_shares;
};

// attention_backward_sm90.cu
template <class T, bool kByColumns>
void sweep_on_hopper(
    const Launcher& launch, const Backward<T>& p, const Sweep<T>& sweep, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& grad_output, int64_t copies);

}  // namespace ds_sparse::attention
