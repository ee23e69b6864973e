// Arguments of fused attention's backward pass, on every GPU; and its sweeps.

#pragma once

#include "../common/launch.h"
#include "../common/pass_state.h"
#include "mainloop.h"
#include "row_stats.h"

namespace ds_sparse::attention {

template <class T>
struct Backward {
  Matrices<const T> query, key, value, grad_output;
  RowStatsPlanes row_stats;
  Scoring scoring;
  int heads, heads_of_group, head_dim;
  GradQuerySums grad_query_sums;
  PassState* state;
};

// Results of a sweep: the gradient of its own side's first operand, and of its second where that is values. On Hopper
// the sweep itself takes them as tensors, for the copy engine; those who combine splits and add shares, as they are
// here.
template <class T>
struct Sweep {
  TileLists lists;
  Matrices<T> grad_first, grad_second;
  // In fp32: the splits of long lists, or with grouped heads each query head's share of the gradients, (B, H, S, D).
  SplitResults first_splits, second_splits;
  float *first_shares, *second_shares;
};

// backward_sweep.cu
template <class T>
void sweep_on_any_gpu(
    const Launcher& launch, const Backward<T>& p, const Sweep<T>& sweep, bool by_columns, int64_t copies);

// backward_rows_sm90.cu
template <class T>
void rows_on_hopper(
    const Launcher& launch, const Backward<T>& p, const Sweep<T>& sweep, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& grad_output, const Tensor& grad_query, int64_t copies);

// backward_columns_sm90.cu
template <class T>
void columns_on_hopper(
    const Launcher& launch, const Backward<T>& p, const Sweep<T>& sweep, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& grad_output, const Tensor& grad_key, const Tensor& grad_value, int64_t copies);
template <class T>
void round_grad_query(
    const Launcher& launch, const Backward<T>& p, const Matrices<T>& grad_query, const BlockSpans& spans,
    int64_t batch);

}  // namespace ds_sparse::attention
