// Products on lists of token pairs: token_matmul_sdd and token_matmul_dsd. How lists are walked: token.h.

#include <torch/csrc/stable/library.h>

#include "token.h"

namespace ds_sparse::token {
namespace {

// One product a pair.
template <class ShapeOfRows>
struct Products {
  using Shape = ShapeOfRows;
  using T = typename Shape::T;
  using A = typename Shape::A;
  static constexpr int kBlocks = 6;
  struct Memory {};
  struct Arguments {
    Rows<T> queries, keys;
    T* values;
    int64_t num_entries;
  };

  Numbers<Shape> query;
  typename Rows<T>::template Matrix<Shape> keys;
  T* values;  // of the list

  __device__ Products(const Arguments& all, const Line& line)
      : query(all.queries.template of<Shape>(line).load(line.token)),
        keys(all.keys.template of<Shape>(line)),
        values(all.values + line.repeat * all.num_entries) {}

  __device__ void add(uint32_t n, const int (&tokens)[Shape::kTokens]) {
    Part<Shape> parts[Shape::kTokens];
#pragma unroll
    for (int u = 0; u < Shape::kTokens; ++u) {
      parts[u] = keys.load(tokens[u]);
    }
    // Each of the first lanes of the group writes one, so that they are written together.
    A mine = 0;
    int live = 0;
#pragma unroll
    for (int u = 0; u < Shape::kTokens; ++u) {
      const A product = query.dot(Numbers<Shape>(parts[u]));
      mine = Shape::lane() == u ? product : mine;
      live |= (tokens[u] >= 0) << u;
    }
    if (live >> Shape::lane() & 1) {
      values[n + Shape::lane() * Shape::kGroups] = static_cast<T>(mine);
    }
  }

  __device__ void finish_warp() {}
  __device__ void finish_block(Memory&) {}
  __device__ void store(const Arguments&, const Line&) const {}
};

// The sum of a line's tokens, each times its value.
template <class ShapeOfRows>
struct WeightedSum {
  using Shape = ShapeOfRows;
  using T = typename Shape::T;
  using A = typename Shape::A;
  static constexpr int kBlocks = 6;
  struct Memory {
    A sums[kWarps][Shape::kWidth];
  };
  struct Arguments {
    const T* values;
    const int32_t* slots;
    int64_t num_entries;
    Rows<T> rows;
    T* out;
    int64_t lines;
    int width;  // of out
  };

  typename Rows<T>::template Matrix<Shape> rows;
  const T* values;  // of the list
  const int32_t* slots;
  Numbers<Shape> sums;

  __device__ WeightedSum(const Arguments& all, const Line& line)
      : rows(all.rows.template of<Shape>(line)), values(all.values + line.repeat * all.num_entries), slots(all.slots) {}

  __device__ void add(uint32_t n, const int (&tokens)[Shape::kTokens]) {
    Part<Shape> parts[Shape::kTokens];
    A weights[Shape::kTokens];
#pragma unroll
    for (int u = 0; u < Shape::kTokens; ++u) {
      const uint32_t at = n + u * Shape::kGroups;
      parts[u] = rows.load(tokens[u]);
      weights[u] = tokens[u] < 0 ? A(0) : static_cast<A>(values[slots == nullptr ? at : slots[at]]);
    }
#pragma unroll
    for (int u = 0; u < Shape::kTokens; ++u) {
      sums.add(weights[u], Numbers<Shape>(parts[u]));
    }
  }

  __device__ void finish_warp() { sums.add_groups(); }
  __device__ void finish_block(Memory& memory) { sums.add_warps(memory.sums); }
  __device__ void store(const Arguments& all, const Line& line) const {
    if (Shape::group() == 0) {
      sums.store(all.out + (line.matrix * all.lines + line.token) * all.width, all.width);
    }
  }
};

Tensor token_matmul_sdd(
    const Tensor& query, const Tensor& key, const Tensor& row_offsets, const Tensor& columns, int64_t list_batch,
    int64_t list_heads) {
  check_token_operands({{&query, "query"}, {&key, "key"}});
  check_size(key, 3, query.size(3), "key");
  const Lists lists(row_offsets, columns, std::nullopt, list_batch, list_heads, query, query.size(2));
  Tensor out = torch::stable::new_empty(query, {lists.repeats(), lists.num_entries});
  if (out.numel() == 0) {
    return out;
  }
  const Launcher launch(query);
  with_shape(query, query.size(3), [&](auto shape) {
    using S = decltype(shape);
    using T = typename S::T;
    const Operand<T> queries(query), keys(key);
    const typename Products<S>::Arguments arguments{
        queries.rows(), keys.rows(), static_cast<T*>(out.mutable_data_ptr()), lists.num_entries};
    launch(lines_kernel<Products<S>>, lists.tasks(), kThreads, lists, arguments);
  });
  return out;
}

Tensor token_matmul_dsd(
    const Tensor& values, const Tensor& dense, const Tensor& offsets, const Tensor& indices,
    const std::optional<Tensor>& slots, int64_t list_batch, int64_t list_heads) {
  check_token_operands({{&dense, "dense"}});
  check(
      list_batch > 0 && list_heads > 0 && (offsets.size(0) - 1) % (list_batch * list_heads) == 0,
      "offsets has to have one entry a line of each list, and one.");
  const int64_t lines = (offsets.size(0) - 1) / (list_batch * list_heads), width = dense.size(3);
  const Lists lists(offsets, indices, slots, list_batch, list_heads, dense, lines);
  check_dim(values, 2, "values");
  check_like(values, dense, "values");
  check_contiguous(values, "values");
  check_size(values, 0, lists.repeats(), "values");
  check_size(values, 1, lists.num_entries, "values");
  Tensor out = torch::stable::new_empty(dense, {dense.size(0), dense.size(1), lines, width});
  if (out.numel() == 0) {
    return out;
  }
  const Launcher launch(dense);
  with_shape(dense, width, [&](auto shape) {
    using S = decltype(shape);
    using T = typename S::T;
    const Operand<T> rows(dense);
    const typename WeightedSum<S>::Arguments arguments{
        static_cast<const T*>(values.const_data_ptr()), lists.slots, lists.num_entries, rows.rows(),
        static_cast<T*>(out.mutable_data_ptr()), lines, static_cast<int>(width)};
    launch(lines_kernel<WeightedSum<S>>, lists.tasks(), kThreads, lists, arguments);
  });
  return out;
}

}  // namespace
}  // namespace ds_sparse::token

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("token_matmul_sdd", TORCH_BOX(&ds_sparse::token::token_matmul_sdd));
  m.impl("token_matmul_dsd", TORCH_BOX(&ds_sparse::token::token_matmul_dsd));
}
