// The passes of fused attention, as operators call them that have checked what they were given.

#pragma once

#include <functional>
#include <tuple>
#include <vector>

#include "../../attention_call.h"

namespace ds_sparse::attention {

struct RowsOfBackward;  // row_stats.h
struct RowsWanted;

// Output, lse and rows. forward.cu
std::tuple<Tensor, Tensor, Tensor> attention_forward(const AttentionCall& call, const TileTensors& rows);

// Gradients of query, key and value. backward.cu
std::tuple<Tensor, Tensor, Tensor> attention_backward(
    const AttentionCall& call, const AttentionResults& results, const TileTensors& rows, const TileTensors& columns,
    bool deterministic);

// The same where statistics of rows are made otherwise, by `make_rows`.
std::tuple<Tensor, Tensor, Tensor> attention_gradients(
    const AttentionCall& call, const Tensor& grad_output,
    const std::function<RowsOfBackward(const RowsWanted&)>& make_rows, const TileTensors& rows,
    const TileTensors& columns, bool deterministic);

// The gradient of rpe. backward_bias.cu
Tensor attention_bias_backward(
    const AttentionCall& call, const AttentionResults& results, const TileTensors& rows,
    const std::vector<int64_t>& shape);

}  // namespace ds_sparse::attention
