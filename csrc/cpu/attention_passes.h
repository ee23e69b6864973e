// The passes of attention over the block lists of a layout or of a window: what their operators give to attention.cpp.
#pragma once

#include <initializer_list>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "../dropout.h"
#include "../implementation.h"
#include "arguments.h"
#include "operands.h"

namespace ds_sparse::cpu {

// A call of attention, without its lists.
struct Attention {
  const Tensor &query, &key, &value;
  std::vector<BiasView> biases;
  std::optional<Dropout> dropout;
  int64_t block;
  double scale;
  bool causal;
  // What limits live blocks token by token, (1 or H, T, 2) and (1 or H, T), and num_global; see AttentionRowStrip.
  const Tensor *limits = nullptr, *places = nullptr;
  int64_t num_global = 0;

  int64_t batch = query.size(0), heads = query.size(1), tokens = query.size(2), depth = query.size(3),
          key_heads = key.size(1), keys = key.size(2);
  int64_t rows = blocks_of(tokens, block), columns = blocks_of(keys, block);
  int64_t strip_rows = attention_rows(block);

  // biases: rpe, attn_mask, key_bias, those that there are.
  Attention(
      const Tensor& query, const Tensor& key, const Tensor& value,
      std::initializer_list<const std::optional<Tensor>*> biases_given, int64_t block, double scale, bool causal)
      : query(query), key(key), value(value), block(block), scale(scale), causal(causal) {
    for (const auto* bias : biases_given)
      if (*bias) biases.emplace_back(**bias, query.scalar_type());
  }

  void drop(const std::optional<Tensor>& seed, double dropout_p) {
    uint32_t threshold = Dropout::threshold_of(dropout_p);
    if (threshold == 0) return;
    const int64_t* numbers = pointer<int64_t>(*seed);
    dropout = Dropout{static_cast<uint64_t>(numbers[0]), static_cast<uint32_t>(numbers[1]), threshold};
  }

  int64_t group() const { return heads / key_heads; }

  AttentionRowStrip strip(int64_t b, int64_t head, int64_t first, bool transposed) const {
    auto of_head = [&](const Tensor* x) {
      return x ? pointer<int32_t>(*x) + (x->size(0) == 1 ? 0 : head) * x->stride(0) : nullptr;
    };
    AttentionRowStrip strip{
        transposed,
        block,
        depth,
        first,
        strip_rows,
        transposed ? keys : tokens,
        transposed ? tokens : keys,
        scale,
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

// The gradients of output and lse, and what else backward passes have of the forward one.
struct Gradients {
  const Tensor &grad_output, &output, &rows;
  const std::optional<Tensor>& grad_lse;
};

// Output, lse and rows, as block_attention_forward gives them. lists: by block rows.
std::tuple<Tensor, Tensor, Tensor> attention_forward(const Attention& attention, const BlockLists& lists);

// Gradients of query, key and value. lists: by block columns.
std::tuple<Tensor, Tensor, Tensor> attention_backward(
    const Attention& attention, const Gradients& gradients, const BlockLists& lists);

}  // namespace ds_sparse::cpu
