// Registers the operators of attention on blocks and in windows.

#include "../attention_operators.h"

#include <torch/csrc/stable/library.h>

#include <string>

#include "../implementation.h"
#include "attention_passes.h"

namespace ds_sparse::cpu {

namespace {

BlockLists by_block_row(const AttentionCall& call, const TileTensors& rows, const Attention& attention) {
  return lists_by_block_row(call, rows, attention.rows, attention.columns);
}

struct Passes {
  static std::tuple<Tensor, Tensor, Tensor> forward(const AttentionCall& call, const TileTensors& rows) {
    check_implementation(call.implementation, "cpu");
    const Attention attention(call);
    const BlockLists lists = by_block_row(call, rows, attention);
    auto results = attention_forward(attention, lists);
    std::apply([&](const auto&... x) { (lists.poison(x, call.block), ...); }, results);
    return results;
  }

  // The same sums in the same order always: each call is deterministic.
  static std::tuple<Tensor, Tensor, Tensor> backward(
      const AttentionCall& call, const AttentionResults& results, const TileTensors& rows, const TileTensors& columns,
      bool /*deterministic*/) {
    check_implementation(call.implementation, "cpu");
    const Attention attention(call);
    const BlockLists of_columns = lists_by_block_row(call, columns, attention.columns, attention.rows);
    auto grads = attention_backward(attention, results, of_columns);
    if (call.bounded) by_block_row(call, rows, attention).poison(std::get<0>(grads), call.block);
    of_columns.poison(std::get<0>(grads), call.block, true);
    of_columns.poison(std::get<1>(grads), call.block);
    of_columns.poison(std::get<2>(grads), call.block);
    return grads;
  }

  static Tensor bias_backward(
      const AttentionCall& call, const AttentionResults& results, const TileTensors& rows,
      const std::vector<int64_t>& shape) {
    const Attention attention(call);
    const BlockLists lists = by_block_row(call, rows, attention);
    const Tensor grad = attention_bias_backward(attention, results, lists, shape);
    lists.poison(grad, call.block);
    return grad;
  }
};
using Operators = AttentionOperators<Passes>;

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CPU, m) {
  m.impl("block_attention_forward", TORCH_BOX(&Operators::block_forward));
  m.impl("block_attention_backward", TORCH_BOX(&Operators::block_backward));
  m.impl("block_attention_bias_backward", TORCH_BOX(&Operators::block_bias_backward));
  m.impl("window_attention_forward", TORCH_BOX(&Operators::window_forward));
  m.impl("window_attention_backward", TORCH_BOX(&Operators::window_backward));
}

}  // namespace ds_sparse::cpu
