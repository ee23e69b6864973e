// matmul_sdd and matmul_dsd on the CPU; schemas and letters in ../library.cpp.

#include <torch/csrc/stable/library.h>

#include <optional>
#include <type_traits>

#include "../implementation.h"
#include "arguments.h"
#include "memory.h"
#include "operands.h"
#include "schedule.h"

namespace ds_sparse::cpu {

namespace {

// The right operand of sdd as panels, packed once for each (batch, head): depth x W multiplicands each, for the W
// columns that one vector of the result holds.
template <class T, class O>
Buffer<O> pack_right_operand(const Tensor& b, int64_t block) {
  int64_t heads = b.size(1), depth = multiplicands_of<T, O>(b.size(2)), columns = b.size(3), blocks = columns / block,
          width = kernels<T>().panel_width(block);
  Buffer<O> panels(b.size(0) * heads * depth * columns);
  int64_t grain = std::max<int64_t>(1, task_cost / 8 / (block * std::max<int64_t>(1, depth)));
  torch::stable::parallel_for(0, b.size(0) * heads * blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t matrix = i / blocks, column = i % blocks * block;
      const T* from =
          pointer<T>(b) + matrix / heads * b.stride(0) + matrix % heads * b.stride(1) + column * b.stride(3);
      products<T, O>().pack_panels(
          from, b.stride(2), b.stride(3), b.size(2), block, width, panels.data() + (matrix * columns + column) * depth);
    }
  });
  return panels;
}

template <class T, class O>
void sdd(
    const Tensor& a, const Tensor& b, const Tensor& row_offsets, const Tensor& columns, int64_t layout_heads,
    int64_t block, Tensor& out) {
  int64_t batch = a.size(0), heads = a.size(1), depth = multiplicands_of<T, O>(a.size(3)), width = b.size(3),
          live = columns.size(0), rows = a.size(2) / block;
  const int32_t *offsets = pointer<int32_t>(row_offsets), *indices = pointer<int32_t>(columns);

  Pieces pieces;
  int64_t block_cost = block * block * std::max<int64_t>(a.size(3), 8),
          step = std::max<int64_t>(1, task_cost / block_cost);
  for (int64_t head = 0; head < layout_heads; ++head)
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t n = offsets[head * rows + row], last = offsets[head * rows + row + 1]; n < last; n += step)
        pieces.add({head, row, n, std::min(n + step, last)}, std::min(step, last - n) * block_cost);

  auto panels = pack_right_operand<T, O>(b, block);
  bool in_place = has_rows<T, O>(a, depth);
  T* values = static_cast<T*>(out.mutable_data_ptr());
  run_pieces(pieces, 0, batch * heads, heads, layout_heads, [&] {
    return [&, packed = Buffer<O>(in_place ? 0 : block * depth)](int64_t b_index, int64_t head, const Piece& piece) {
      int64_t first = piece.row * block;
      const O* left = packed.data();
      if (in_place)
        left = reinterpret_cast<const O*>(tokens_of<T>(a, b_index, head, first));
      else
        pack_tokens<T>(a, b_index, head, first, block, depth, packed.data());
      int64_t entry = b_index * out.size(1) + (layout_heads == 1 ? head * live : 0) + piece.begin;
      products<T, O>().sdd(
          left, depth, block, panels.data() + (b_index * heads + head) * depth * width, indices + piece.begin,
          piece.end - piece.begin, block, depth, values + entry * block * block);
    };
  });
}

template <class T, class O>
void dsd(
    const Tensor& values, const Tensor& dense, const Tensor& offsets, const Tensor& indices,
    const std::optional<Tensor>& slots, int64_t layout_heads, int64_t block, bool transpose_result, Tensor& out) {
  using C = Compute<T>;
  constexpr bool same = std::is_same_v<T, O>;
  int64_t batch = dense.size(0), heads = dense.size(1), columns = dense.size(3), live = indices.size(0),
          lines = (offsets.size(0) - 1) / layout_heads, width = padded<T>(columns);

  auto pieces = cut_token_rows(pointer<int32_t>(offsets), layout_heads, lines, block, [&](int64_t count) {
    return (count * block + 8) * width;
  });

  bool dense_in_place = same && has_rows<T, O>(dense, width);
  Buffer<O> packed = dense_in_place ? Buffer<O>(0) : pack_all<T, O>(dense, block, width, Form::dense);
  bool sum_in_place = same && width == columns && !transpose_result;
  T* result = static_cast<T*>(out.mutable_data_ptr());
  int64_t out_stride = transpose_result ? lines * block : columns;
  run_pieces(pieces, 0, batch * heads, heads, layout_heads, [&] {
    return [&, sums = Buffer<C>(sum_in_place ? 0 : block * width),
            scratch = Buffer<O>(same ? 0 : dsd_scratch(block, block))](int64_t b, int64_t head, const Piece& piece) {
      int64_t line = piece.head * lines + piece.row, first = pointer<int32_t>(offsets)[line],
              count = pointer<int32_t>(offsets)[line + 1] - first;
      const T* blocks =
          pointer<T>(values) +
          (b * values.size(1) + (layout_heads == 1 ? head * live : 0) + (slots ? 0 : first)) * block * block;
      const O* right = packed.data() + (b * heads + head) * dense.size(2) / per_multiplicand<O> * width;
      int64_t row = piece.row * block + piece.begin, rows = piece.end - piece.begin;
      T* to = result + (b * heads + head) * lines * block * columns + (transpose_result ? row : row * columns);
      C* sum = sums.data();
      if constexpr (same) {
        if (dense_in_place) right = tokens_of<T>(dense, b, head, 0);
        if (sum_in_place) sum = to;
      }
      products<T, O>().dsd(
          blocks, slots ? pointer<int32_t>(*slots) + first : nullptr, right, width, pointer<int32_t>(indices) + first,
          count, block, piece.begin, piece.end, width, sum, width, scratch.data());
      if (!sum_in_place) kernels<T>().store_rows(sum, width, rows, columns, transpose_result, to, out_stride);
    };
  });
}

Tensor matmul_sdd(
    Tensor a, Tensor b, Tensor row_offsets, Tensor columns, std::optional<Tensor> tile_lines,
    std::optional<Tensor> tile_entries, std::optional<Tensor> tile_units, std::optional<Tensor> tile_slots,
    int64_t layout_heads, int64_t block, bool /*allow_tf32*/, std::string implementation) {
  check_implementation(implementation, "cpu");
  check_sdd(a, b, row_offsets, columns, layout_heads, block);
  check_product_tiles(
      {sdd_tile(block), tile_lines, tile_entries, tile_units, tile_slots}, row_offsets, a, layout_heads, block);
  check_entries(row_offsets, columns, b.size(3) / block);
  Tensor out = fresh(empty_on(a, {a.size(0), columns.size(0) * a.size(1) / layout_heads, block, block}));
  for_dtype(a.scalar_type(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for_multiplicands<T>(block, [&](auto* multiplicand) {
      sdd<T, std::remove_pointer_t<decltype(multiplicand)>>(a, b, row_offsets, columns, layout_heads, block, out);
    });
  });
  return out;
}

Tensor matmul_dsd(
    Tensor values, Tensor dense, Tensor offsets, Tensor indices, std::optional<Tensor> slots,
    std::optional<Tensor> tile_lines, std::optional<Tensor> tile_entries, std::optional<Tensor> tile_units,
    std::optional<Tensor> tile_cuts, std::optional<Tensor> tile_slots, int64_t layout_heads, int64_t block,
    bool transpose_result, bool /*allow_tf32*/, std::string implementation) {
  check_implementation(implementation, "cpu");
  check_dsd(values, dense, offsets, indices, slots, layout_heads, block);
  check_product_tiles(
      {kProductTile, tile_lines, tile_entries, tile_units, tile_slots, &tile_cuts}, offsets, values, layout_heads,
      block);
  check_entries(offsets, indices, dense.size(2) / block);
  if (slots) check_slots(*slots);
  int64_t rows = (offsets.size(0) - 1) / layout_heads * block, width = dense.size(3);
  Tensor out = fresh(empty_on(
      dense, {dense.size(0), dense.size(1), transpose_result ? width : rows, transpose_result ? rows : width}));
  if (out.numel() == 0) return out;
  for_dtype(values.scalar_type(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for_multiplicands<T>(block, [&](auto* multiplicand) {
      dsd<T, std::remove_pointer_t<decltype(multiplicand)>>(
          values, dense, offsets, indices, slots, layout_heads, block, transpose_result, out);
    });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CPU, m) {
  m.impl("matmul_sdd", TORCH_BOX(&matmul_sdd));
  m.impl("matmul_dsd", TORCH_BOX(&matmul_dsd));
}

}  // namespace ds_sparse::cpu
