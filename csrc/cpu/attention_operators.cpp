// Registers the operators of attention on blocks and in windows.

#include "../attention_operators.h"

#include <torch/csrc/stable/library.h>

#include <string>

#include "../implementation.h"
#include "attention_passes.h"

namespace ds_sparse::cpu {

namespace {

BlockLists by_block_row(const AttentionCall& call, const TileTensors& rows, const Attention& attention) {
  return lists_by_block_row(
      rows.lines, rows.entries, rows.units, call.layout_heads, attention.rows, attention.columns, call.block,
      call.tile);
}

struct Passes {
  static std::tuple<Tensor, Tensor, Tensor> forward(const AttentionCall& call, const TileTensors& rows) {
    check_implementation(call.implementation, "cpu");
    const Attention attention(call);
    return attention_forward(attention, by_block_row(call, rows, attention));
  }

  // The same sums in the same order always: each call is deterministic.
  static std::tuple<Tensor, Tensor, Tensor> backward(
      const AttentionCall& call, const AttentionResults& results, const TileTensors& /*rows*/,
      const TileTensors& columns, bool /*deterministic*/) {
    check_implementation(call.implementation, "cpu");
    const Attention attention(call);
    const BlockLists lists = lists_by_block_row(
        columns.lines, columns.entries, columns.units, call.layout_heads, attention.columns, attention.rows, call.block,
        call.tile);
    return attention_backward(attention, results, lists);
  }

  static Tensor bias_backward(
      const AttentionCall& call, const AttentionResults& results, const TileTensors& rows,
      const std::vector<int64_t>& shape) {
    const Attention attention(call);
    return attention_bias_backward(attention, results, by_block_row(call, rows, attention), shape);
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
