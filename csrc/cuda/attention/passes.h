// The passes of fused attention, as operators call them that have checked what they were given.

#pragma once

#include <optional>
#include <string>
#include <tuple>

#include "scoring.h"

namespace ds_sparse::attention {

// A call. Schemas and shapes: csrc/library.cpp.
struct Attention {
  const Tensor &query, &key, &value;
  int64_t layout_heads, block, tile;
  std::string implementation;
  double scale;
  bool causal;
  std::optional<Tensor> key_bias, rpe = {}, attn_mask = {}, dropout_seed = {};
  double dropout_p = 0;
  WindowLimits window = {};
};

// Tiles of one side. pairs: int32 (1 or H, E, tile, 2), a bit for each pair in the blocks of 64 tokens that the entries
// are; on Hopper.
struct TileTensors {
  const Tensor &lines, &entries, &units, &cuts;
  const Tensor* pairs = nullptr;  // null: all of them count
};

// What forward made, and the gradients of it.
struct Results {
  const Tensor& grad_output;
  const std::optional<Tensor>& grad_lse;
  const Tensor &output, &rows;
};

// Output, lse and rows. forward.cu
std::tuple<Tensor, Tensor, Tensor> attention_forward(const Attention& attention, const TileTensors& rows);

// Gradients of query, key and value. backward.cu
std::tuple<Tensor, Tensor, Tensor> attention_backward(
    const Attention& attention, const Results& results, const TileTensors& rows, const TileTensors& columns,
    bool deterministic);

}  // namespace ds_sparse::attention
