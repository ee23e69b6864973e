// Products on lists of token pairs: token_matmul_sdd and token_matmul_dsd. How lists are walked: token.h.

#include <torch/csrc/stable/library.h>

#include "token.h"

namespace ds_sparse::token {
namespace {

// One product a pair.
template <class ShapeOfRows>
struct PairProducts {
  using RowShape = ShapeOfRows;
  using T = typename RowShape::T;
  using A = typename RowShape::A;
  static constexpr int kThreadBlocks = kProductThreadBlocks;
  struct Memory {};
  struct Arguments {
    GatheredRows<T> queries, keys;
    T* values;
    int64_t num_entries;
  };

  Numbers<RowShape> query;
  typename GatheredRows<T>::template Matrix<RowShape> keys;
  T* values;  // of the list

  __device__ PairProducts(const Arguments& all, const TokenList& list)
      : query(all.queries.template of<RowShape>(list).load(list.token)),
        keys(all.keys.template of<RowShape>(list)),
        values(all.values + list.repeat * all.num_entries) {}

  __device__ void add(uint32_t n, const int (&tokens)[RowShape::kTokens]) {
    GatheredRow<RowShape> gathered[RowShape::kTokens];
#pragma unroll
    for (int u = 0; u < RowShape::kTokens; ++u) {
      gathered[u] = keys.load(tokens[u]);
    }
    // Each of the first lanes of the group writes one, so that they are written together.
    A mine = 0;
    int live = 0;
#pragma unroll
    for (int u = 0; u < RowShape::kTokens; ++u) {
      const A product = query.dot(Numbers<RowShape>(gathered[u]));
      mine = RowShape::lane() == u ? product : mine;
      live |= (tokens[u] >= 0) << u;
    }
    if (live >> RowShape::lane() & 1) {
      values[n + RowShape::lane() * RowShape::kGroups] = static_cast<T>(mine);
    }
  }

  __device__ void finish_warp() {}
  __device__ void finish_block(Memory&) {}
  __device__ void store(const Arguments&, const TokenList&) const {}
};

// The sum of a list's tokens, each times its value.
template <class ShapeOfRows>
struct WeightedSum {
  using RowShape = ShapeOfRows;
  using T = typename RowShape::T;
  using A = typename RowShape::A;
  static constexpr int kThreadBlocks = kProductThreadBlocks;
  struct Memory {
    A sums[kWarps][RowShape::kHeadDim];
  };
  struct Arguments {
    const T* values;
    const int32_t* slots;
    int64_t num_entries;
    GatheredRows<T> rows;
    T* out;
    int64_t num_lists;
    int head_dim;  // of out
  };

  typename GatheredRows<T>::template Matrix<RowShape> rows;
  const T* values;  // of the list
  const int32_t* slots;
  Numbers<RowShape> sums;

  __device__ WeightedSum(const Arguments& all, const TokenList& list)
      : rows(all.rows.template of<RowShape>(list)),
        values(all.values + list.repeat * all.num_entries),
        slots(all.slots) {}

  __device__ void add(uint32_t n, const int (&tokens)[RowShape::kTokens]) {
    GatheredRow<RowShape> gathered[RowShape::kTokens];
    A weights[RowShape::kTokens];
#pragma unroll
    for (int u = 0; u < RowShape::kTokens; ++u) {
      const uint32_t at = n + u * RowShape::kGroups;
      gathered[u] = rows.load(tokens[u]);
      weights[u] = tokens[u] < 0 ? A(0) : static_cast<A>(values[slots == nullptr ? at : slots[at]]);
    }
#pragma unroll
    for (int u = 0; u < RowShape::kTokens; ++u) {
      sums.add(weights[u], Numbers<RowShape>(gathered[u]));
    }
  }

  __device__ void finish_warp() { sums.add_groups(); }
  __device__ void finish_block(Memory& memory) { sums.add_warps(memory.sums); }
  __device__ void store(const Arguments& all, const TokenList& list) const {
    if (RowShape::group() == 0) {
      sums.store(all.out + (list.matrix * all.num_lists + list.token) * all.head_dim, all.head_dim);
    }
  }
};

Tensor token_matmul_sdd(
    const Tensor& query, const Tensor& key, const Tensor& row_offsets, const Tensor& columns, int64_t list_batch,
    int64_t list_heads) {
  check_token_operands({{&query, "query"}, {&key, "key"}});
  check_size(key, 3, query.size(3), "key");
  const TokenLists lists(row_offsets, columns, std::nullopt, list_batch, list_heads, query, query.size(2));
  Tensor out = empty_on(query, {lists.repeats(), lists.num_entries});
  if (out.numel() == 0) {
    return out;
  }
  const Launcher launch(query);
  with_shape(query, query.size(3), [&](auto shape) {
    using S = decltype(shape);
    using T = typename S::T;
    const RowsOperand<T> queries(query), keys(key);
    const typename PairProducts<S>::Arguments arguments{
        queries.rows(), keys.rows(), static_cast<T*>(out.mutable_data_ptr()), lists.num_entries};
    launch(lists_kernel<PairProducts<S>>, lists.work_tiles(), kThreads, lists, arguments);
  });
  return out;
}

Tensor token_matmul_dsd(
    const Tensor& values, const Tensor& dense, const Tensor& offsets, const Tensor& indices,
    const std::optional<Tensor>& slots, int64_t list_batch, int64_t list_heads) {
  check_token_operands({{&dense, "dense"}});
  const int64_t num_lists = lines_of(offsets, list_batch, list_heads, dense), head_dim = dense.size(3);
  const TokenLists lists(offsets, indices, slots, list_batch, list_heads, dense, num_lists);
  check_dim(values, 2, "values");
  check_like(values, dense, "values");
  check_contiguous(values, "values");
  check_size(values, 0, lists.repeats(), "values");
  check_size(values, 1, lists.num_entries, "values");
  Tensor out = empty_on(dense, {dense.size(0), dense.size(1), num_lists, head_dim});
  if (out.numel() == 0) {
    return out;
  }
  const Launcher launch(dense);
  with_shape(dense, head_dim, [&](auto shape) {
    using S = decltype(shape);
    using T = typename S::T;
    const RowsOperand<T> rows(dense);
    const typename WeightedSum<S>::Arguments arguments{
        static_cast<const T*>(values.const_data_ptr()), lists.slots, lists.num_entries,         rows.rows(),
        static_cast<T*>(out.mutable_data_ptr()),        num_lists,   static_cast<int>(head_dim)};
    launch(lists_kernel<WeightedSum<S>>, lists.work_tiles(), kThreads, lists, arguments);
  });
  return out;
}

}  // namespace
}  // namespace ds_sparse::token

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("token_matmul_sdd", TORCH_BOX(&ds_sparse::token::token_matmul_sdd));
  m.impl("token_matmul_dsd", TORCH_BOX(&ds_sparse::token::token_matmul_dsd));
}
