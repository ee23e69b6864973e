// The passes of attention over the block lists of a layout or of a window: what attention_operators.cpp gives to
// attention.cpp.
#pragma once

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "../attention_call.h"
#include "../dropout.h"
#include "arguments.h"
#include "operands.h"

namespace ds_sparse::cpu {

// A call of attention, without its lists.
struct Attention {
  const Tensor &query, &key, &value;
  std::vector<BiasView> biases;
  std::optional<Dropout> dropout;
  int64_t block;
  double scale, softcap;
  bool causal;
  // Limits of live blocks token by token, (1 or H, T, 2) and (1 or H, T), and num_global; see AttentionRowStrip.
  const Tensor *limits = nullptr, *places = nullptr;
  int64_t num_global = 0;

  int64_t batch = query.size(0), heads = query.size(1), tokens = query.size(2), depth = query.size(3),
          key_heads = key.size(1), keys = key.size(2);
  int64_t rows = blocks_of(tokens, block), columns = blocks_of(keys, block);
  int64_t strip_rows = attention_rows(block);

  explicit Attention(const AttentionCall& call)
      : query(call.query),
        key(call.key),
        value(call.value),
        block(call.block),
        scale(call.scale),
        softcap(call.softcap),
        causal(call.causal) {
    for (const auto* bias : {&call.rpe, &call.attn_mask, &call.key_bias})
      if (*bias) biases.emplace_back(**bias, query.scalar_type(), bias == &call.rpe && (*bias)->dim() == 2);
    if (call.window) {
      limits = &call.window->limits;
      places = call.window->places ? &*call.window->places : nullptr;
      num_global = call.window->num_global;
    }
    uint32_t threshold = Dropout::threshold_of(call.dropout_p);
    if (threshold == 0) return;
    const int64_t* numbers = pointer<int64_t>(*call.dropout_seed);
    dropout = Dropout{static_cast<uint64_t>(numbers[0]), static_cast<uint32_t>(numbers[1]), threshold};
  }

  int64_t group() const { return heads / key_heads; }

  AttentionRowStrip strip(int64_t b, int64_t head, int64_t first, int64_t multiplicands, bool transposed) const {
    auto of_head = [&](const Tensor* x) {
      return x ? pointer<int32_t>(*x) + (x->size(0) == 1 ? 0 : head) * x->stride(0) : nullptr;
    };
    AttentionRowStrip strip{
        transposed,
        block,
        multiplicands,
        first,
        strip_rows,
        transposed ? keys : tokens,
        transposed ? tokens : keys,
        scale,
        softcap,
        causal,
        of_head(limits),
        of_head(places),
        num_global,
        {},
        0,
        dropout ? &*dropout : nullptr,
        static_cast<uint32_t>(b * heads + head)};
    for (const BiasView& view : biases) {
      Bias bias = view.at(b, head);
      if (transposed) std::swap(bias.row_stride, bias.column_stride);
      strip.biases[strip.num_biases++] = bias;
    }
    return strip;
  }
};

// Output, lse and rows, as block_attention_forward gives them. lists: by block rows.
std::tuple<Tensor, Tensor, Tensor> attention_forward(const Attention& attention, const BlockLists& lists);

// Gradients of query, key and value. lists: by block columns.
std::tuple<Tensor, Tensor, Tensor> attention_backward(
    const Attention& attention, const AttentionResults& results, const BlockLists& lists);

// The gradient of rpe. lists: by block rows.
Tensor attention_bias_backward(
    const Attention& attention, const AttentionResults& results, const BlockLists& lists,
    const std::vector<int64_t>& shape);

}  // namespace ds_sparse::cpu
