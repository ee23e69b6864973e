// softmax_forward, softmax_backward and softmax_bias_backward on the CPU; schemas and letters in ../library.cpp.

#include <torch/csrc/stable/library.h>

#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#include "arguments.h"
#include "memory.h"
#include "schedule.h"

namespace ds_sparse::cpu {

namespace {

// An exponential, and what stands around it, in multiply-adds.
constexpr int64_t softmax_cost = 16;

// Numbers of a bias's gradient that a task of bias_backward sums at a time: what a core's own cache holds in fp64.
constexpr int64_t stripe_size = 1 << 15;

template <class T>
void forward(
    const Tensor& scores, const std::vector<BiasView>& biases, const Tensor& row_offsets, const Tensor& columns,
    int64_t layout_heads, int64_t heads, int64_t block, double scale, bool causal, Tensor& probs) {
  using C = Compute<T>;
  int64_t rows = (row_offsets.size(0) - 1) / layout_heads, live = columns.size(0), longest = 0;
  const int32_t* offsets = pointer<int32_t>(row_offsets);
  for (int64_t i = 0; i < layout_heads * rows; ++i) longest = std::max<int64_t>(longest, offsets[i + 1] - offsets[i]);
  auto pieces = cut_token_rows(
      offsets, layout_heads, rows, block, [&](int64_t count) { return (count * block + 8) * softmax_cost; });
  run_pieces(pieces, 0, scores.size(0) * heads, heads, layout_heads, [&] {
    return [&, scratch = Buffer<C>((1 + biases.size()) * longest * block)](
               int64_t batch, int64_t head, const Piece& piece) {
      int64_t first = offsets[piece.head * rows + piece.row],
              count = offsets[piece.head * rows + piece.row + 1] - first;
      int64_t at = (batch * scores.size(1) + (layout_heads == 1 ? head * live : 0) + first) * block * block;
      SoftmaxRows<T> work{
          pointer<T>(scores) + at,
          static_cast<T*>(probs.mutable_data_ptr()) + at,
          pointer<int32_t>(columns) + first,
          count,
          block,
          piece.row,
          piece.begin,
          piece.end,
          scale,
          causal,
          {},
          0};
      for (const BiasView& bias : biases) work.biases[work.num_biases++] = bias.at(batch, head);
      kernels<T>().softmax_forward(work, scratch.data());
    };
  });
}

template <class T>
void backward(
    const Tensor& grad, const Tensor& probs, const Tensor& row_offsets, int64_t layout_heads, int64_t heads,
    int64_t block, double scale, Tensor& out) {
  int64_t rows = (row_offsets.size(0) - 1) / layout_heads;
  const int32_t* offsets = pointer<int32_t>(row_offsets);
  int64_t live = offsets[layout_heads * rows];
  auto pieces = cut_token_rows(
      offsets, layout_heads, rows, block, [&](int64_t count) { return (count * block + 8) * softmax_cost / 4; });
  run_pieces(pieces, 0, probs.size(0) * heads, heads, layout_heads, [&] {
    return [&](int64_t batch, int64_t head, const Piece& piece) {
      int64_t first = offsets[piece.head * rows + piece.row],
              count = offsets[piece.head * rows + piece.row + 1] - first;
      int64_t at = (batch * probs.size(1) + (layout_heads == 1 ? head * live : 0) + first) * block * block;
      kernels<T>().softmax_backward(
          pointer<T>(grad) + at, pointer<T>(probs) + at, static_cast<T*>(out.mutable_data_ptr()) + at, count, block,
          piece.begin, piece.end, scale);
    };
  });
}

// A task owns a stripe of columns of one output matrix, of one block row of it or of all summed into one row. It adds
// in the order batch, head, row, column, and in fp64: the terms are many, one after the other, and may cancel.
template <class T>
void bias_backward(
    const Tensor& values, const Tensor& row_offsets, const Tensor& columns, int64_t layout_heads, int64_t heads,
    int64_t block, Tensor& out) {
  using C = Compute<T>;
  int64_t batch = values.size(0), live = columns.size(0), rows = (row_offsets.size(0) - 1) / layout_heads;
  int64_t out_batch = out.size(0), out_heads = out.size(1), out_rows = out.size(2), width = out.size(3),
          blocks = width / block;
  bool sum_rows = out_rows == 1;
  int64_t height = sum_rows ? 1 : block, lines = sum_rows ? 1 : rows;
  int64_t stripe = sum_rows ? (blocks + 31) / 32 : std::max<int64_t>(1, stripe_size / (block * block)),
          stripes = (blocks + stripe - 1) / stripe;
  const int32_t *offsets = pointer<int32_t>(row_offsets), *indices = pointer<int32_t>(columns);
  C* result = static_cast<C*>(out.mutable_data_ptr());
  run_tasks(out_batch * out_heads * lines * stripes, [&] {
    return [&, scratch = Buffer<double>(height * stripe * block)](int64_t task) {
      int64_t part = task % stripes, line = task / stripes % lines, head = task / stripes / lines % out_heads,
              b = task / stripes / lines / out_heads;
      int64_t first_column = part * stripe, last_column = std::min(first_column + stripe, blocks),
              span = (last_column - first_column) * block;
      double* sums = scratch.data();
      std::fill(sums, sums + height * span, 0.0);
      for (int64_t from_b = out_batch == 1 ? 0 : b; from_b < (out_batch == 1 ? batch : b + 1); ++from_b)
        for (int64_t h = out_heads == 1 ? 0 : head; h < (out_heads == 1 ? heads : head + 1); ++h)
          for (int64_t row = sum_rows ? 0 : line; row < (sum_rows ? rows : line + 1); ++row) {
            const int32_t* offset = offsets + (layout_heads == 1 ? 0 : h) * rows + row;
            const int32_t* last = indices + offset[1];
            const T* head_values =
                pointer<T>(values) + (from_b * values.size(1) + (layout_heads == 1 ? h * live : 0)) * block * block;
            for (const int32_t* n = std::lower_bound(indices + offset[0], last, first_column);
                 n != last && *n < last_column; ++n)
              kernels<T>().add_block(
                  head_values + (n - indices) * block * block, block, sums + (*n - first_column) * block,
                  sum_rows ? 0 : span);
          }
      C* to = result + ((b * out_heads + head) * out_rows + line * height) * width + first_column * block;
      for (int64_t r = 0; r < height; ++r)
        for (int64_t c = 0; c < span; ++c) to[r * width + c] = static_cast<C>(sums[r * span + c]);
    };
  });
}

Tensor softmax_forward(
    Tensor scores, std::optional<Tensor> rpe, std::optional<Tensor> key_padding_mask, std::optional<Tensor> attn_mask,
    Tensor row_offsets, Tensor columns, std::optional<Tensor>, int64_t, int64_t layout_heads, int64_t block,
    double scale, bool causal) {
  check_block(block);
  check_values(scores, block, "scores");
  check_list(columns, scores, "columns");
  Tensor probs = fresh(empty_on(scores, scores.sizes()));
  if (probs.numel() == 0) return probs;
  int64_t heads = heads_of(scores.size(1), columns.size(0), layout_heads);
  check_lists(row_offsets, layout_heads, heads, scores);
  int64_t rows = (row_offsets.size(0) - 1) / layout_heads * block;
  std::vector<BiasView> biases;
  int64_t width = std::numeric_limits<int32_t>::max();
  for (auto [bias, name] :
       {std::pair{&rpe, "rpe"}, {&attn_mask, "attn_mask"}, {&key_padding_mask, "key_padding_mask"}}) {
    if (!*bias) continue;
    check_dim(**bias, bias == &key_padding_mask ? 2 : 4, name);
    check_bias(**bias, scores, heads, rows, name);
    width = std::min(width, (*bias)->size((*bias)->dim() - 1));
    biases.emplace_back(**bias, scores.scalar_type());
  }
  check_entries(row_offsets, columns, width / block);
  for_dtype(scores.scalar_type(), [&](auto* type) {
    forward<std::remove_pointer_t<decltype(type)>>(
        scores, biases, row_offsets, columns, layout_heads, heads, block, scale, causal, probs);
  });
  return probs;
}

Tensor softmax_backward(
    Tensor grad, Tensor probs, Tensor row_offsets, Tensor columns, std::optional<Tensor>, int64_t, int64_t layout_heads,
    int64_t block, double scale) {
  check_block(block);
  check_values(probs, block, "probs");
  check_values_like(grad, probs, block, "grad");
  check_list(columns, probs, "columns");
  Tensor out = fresh(empty_on(probs, probs.sizes()));
  if (out.numel() == 0) return out;
  int64_t heads = heads_of(probs.size(1), columns.size(0), layout_heads);
  check_lists(row_offsets, layout_heads, heads, probs);
  check_offsets(row_offsets, columns.size(0));
  for_dtype(probs.scalar_type(), [&](auto* type) {
    backward<std::remove_pointer_t<decltype(type)>>(grad, probs, row_offsets, layout_heads, heads, block, scale, out);
  });
  return out;
}

Tensor softmax_bias_backward(
    Tensor values, Tensor row_offsets, Tensor columns, int64_t layout_heads, int64_t heads, int64_t block,
    std::vector<int64_t> shape) {
  check_bias_backward(values, row_offsets, columns, layout_heads, heads, block, shape);
  check_entries(row_offsets, columns, shape[3] / block);
  Tensor out = fresh(
      empty_on(values, shape, values.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float));
  if (out.numel() == 0) return out;
  for_dtype(values.scalar_type(), [&](auto* type) {
    bias_backward<std::remove_pointer_t<decltype(type)>>(values, row_offsets, columns, layout_heads, heads, block, out);
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CPU, m) {
  m.impl("softmax_forward", TORCH_BOX(&softmax_forward));
  m.impl("softmax_backward", TORCH_BOX(&softmax_backward));
  m.impl("softmax_bias_backward", TORCH_BOX(&softmax_bias_backward));
}

}  // namespace ds_sparse::cpu
