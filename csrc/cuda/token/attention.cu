// Attention over lists of token pairs: token_attention_forward and token_attention_backward. How lists are walked:
// token.h.
//
// Backward goes over the queries, for their gradients, and over the keys, for theirs and those of values. Both compute
// the probabilities again, with the bits that forward had: kept, they would be two numbers a pair in fp32, written once
// and read in no order, while the rows that they are made of have to be brought for the sums anyway.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "token.h"

namespace ds_sparse::token {
namespace {

// Statistics of a query that backward reads: the maximum that its exponents are taken relative to, 1 over the sum of
// e^(exponent - row_max), and what is taken off the gradients of its probabilities, the sum of grad_output * output
// less the gradient of lse.
template <class A>
struct alignas(16) RowStats {
  A row_max, inverse_sum, delta, unused;

  __device__ A probability(A score) const { return exp_of_difference(score, row_max) * inverse_sum; }
};

template <class ShapeOfRows>
struct TokenForward {
  using RowShape = ShapeOfRows;
  using T = typename RowShape::T;
  using A = typename RowShape::A;
  static constexpr int kThreadBlocks = kForwardThreadBlocks<A>;
  struct Memory {
    A row_max[kWarps], row_sum[kWarps], output[kWarps][RowShape::kHeadDim];
  };
  struct Arguments {
    GatheredRows<T> queries, keys, values;
    A scale;
    T* output;
    A *lse, *row_max_sums;
    int64_t num_lists;
    int head_dim;  // of the output
  };

  Numbers<RowShape> query;
  typename GatheredRows<T>::template Matrix<RowShape> keys, values;
  A scale;
  // The largest score so far, the sum of e^(score - row_max), and that of the same times values.
  A row_max = std::numeric_limits<A>::lowest(), row_sum = 0;
  Numbers<RowShape> output;

  __device__ TokenForward(const Arguments& all, const TokenList& list)
      : query(all.queries.template of<RowShape>(list).load(list.token)),
        keys(all.keys.template of<RowShape>(list)),
        values(all.values.template of<RowShape>(list)),
        scale(all.scale) {}

  __device__ void add(uint32_t, const int (&tokens)[RowShape::kTokens]) {
    constexpr int kTokens = RowShape::kTokens;
    GatheredRow<RowShape> gathered_keys[kTokens], gathered_values[kTokens];
#pragma unroll
    for (int u = 0; u < kTokens; ++u) {
      gathered_keys[u] = keys.load(tokens[u]);
      gathered_values[u] = values.load(tokens[u]);
    }
    A scores[kTokens], new_max = row_max;
#pragma unroll
    for (int u = 0; u < kTokens; ++u) {
      const A score = score_of(query.dot(Numbers<RowShape>(gathered_keys[u])), scale);
      scores[u] = tokens[u] < 0 ? -std::numeric_limits<A>::infinity() : score;
      new_max = max(new_max, scores[u]);
    }
    rescale_to(new_max);
#pragma unroll
    for (int u = 0; u < kTokens; ++u) {
      const A weight = exp_of_difference(scores[u], row_max);
      row_sum += weight;
      output.add(weight, Numbers<RowShape>(gathered_values[u]));
    }
  }

  // Goes on with a larger maximum.
  __device__ void rescale_to(A new_max) {
    const A rescale = exp_of_difference(row_max, new_max);
    row_max = new_max;
    row_sum *= rescale;
    output.scale(rescale);
  }

  __device__ void finish_warp() {
    rescale_to(max_of_groups<RowShape>(row_max));
    row_sum = sum_of_groups<RowShape>(row_sum);
    output.add_groups();
  }

  __device__ void finish_block(Memory& memory) {
    const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
    if (lane == 0) {
      memory.row_max[warp] = row_max;
    }
    __syncthreads();
    A new_max = memory.row_max[0];
    for (int w = 1; w < kWarps; ++w) {
      new_max = max(new_max, memory.row_max[w]);
    }
    rescale_to(new_max);
    if (lane == 0) {
      memory.row_sum[warp] = row_sum;
    }
    output.add_warps(memory.output);
    row_sum = 0;
    for (int w = 0; w < kWarps; ++w) {
      row_sum += memory.row_sum[w];
    }
  }

  __device__ void store(const Arguments& all, const TokenList& list) {
    const bool empty = list.begin == list.end;
    const int64_t at = list.matrix * all.num_lists + list.token;
    if (threadIdx.x % kWarpLanes == 0) {
      const A stored_max = empty ? -std::numeric_limits<A>::infinity() : row_max;
      all.row_max_sums[2 * at] = stored_max;
      all.row_max_sums[2 * at + 1] = row_sum;
      all.lse[at] = stored_max + log(row_sum);
    }
    if (RowShape::group() == 0) {
      output.scale(empty ? A(0) : 1 / row_sum);
      output.store(all.output + at * all.head_dim, all.head_dim);
    }
  }
};

// Arguments of the two sweeps of backward; grad_lse may be null.
template <class T>
struct TokenBackwardArguments {
  using A = Compute<T>;
  GatheredRows<T> queries, keys, values, grad_outputs, outputs;
  const A *row_max_sums, *grad_lse;
  RowStats<A>* rows;  // (B, H, T), which the sweep over the queries writes
  A scale;
  T *grad_query, *grad_key, *grad_value;
  int64_t num_queries, num_keys;
  int head_dim, value_head_dim;  // of the gradients
};

template <class ShapeOfRows>
struct OverQueries {
  using RowShape = ShapeOfRows;
  using T = typename RowShape::T;
  using A = typename RowShape::A;
  using Arguments = TokenBackwardArguments<T>;
  static constexpr int kThreadBlocks = kBackwardThreadBlocks<A>;
  struct Memory {
    A grad_query[kWarps][RowShape::kHeadDim];
  };

  Numbers<RowShape> query, grad_output;
  typename GatheredRows<T>::template Matrix<RowShape> keys, values;
  RowStats<A> row;
  A scale;
  Numbers<RowShape> grad_query;

  __device__ OverQueries(const Arguments& all, const TokenList& list)
      : query(all.queries.template of<RowShape>(list).load(list.token)),
        grad_output(all.grad_outputs.template of<RowShape>(list).load(list.token)),
        keys(all.keys.template of<RowShape>(list)),
        values(all.values.template of<RowShape>(list)),
        scale(all.scale) {
    const int64_t at = list.matrix * all.num_queries + list.token;
    const A row_sum = all.row_max_sums[2 * at + 1];
    const A dot = grad_output.dot(Numbers<RowShape>(all.outputs.template of<RowShape>(list).load(list.token)));
    row.row_max = all.row_max_sums[2 * at];
    row.inverse_sum = row_sum > 0 ? 1 / row_sum : A(0);
    row.delta = all.grad_lse == nullptr ? dot : dot - all.grad_lse[at];
    row.unused = 0;
  }

  __device__ void add(uint32_t, const int (&tokens)[RowShape::kTokens]) {
    constexpr int kTokens = RowShape::kTokens;
    GatheredRow<RowShape> gathered_keys[kTokens], gathered_values[kTokens];
#pragma unroll
    for (int u = 0; u < kTokens; ++u) {
      gathered_keys[u] = keys.load(tokens[u]);
      gathered_values[u] = values.load(tokens[u]);
    }
#pragma unroll
    for (int u = 0; u < kTokens; ++u) {
      const Numbers<RowShape> key(gathered_keys[u]);
      const A prob = row.probability(score_of(query.dot(key), scale));
      const A grad = prob * (grad_output.dot(Numbers<RowShape>(gathered_values[u])) - row.delta) * scale;
      grad_query.add(tokens[u] < 0 ? A(0) : grad, key);
    }
  }

  __device__ void finish_warp() { grad_query.add_groups(); }
  __device__ void finish_block(Memory& memory) { grad_query.add_warps(memory.grad_query); }
  __device__ void store(const Arguments& all, const TokenList& list) const {
    const int64_t at = list.matrix * all.num_queries + list.token;
    if (threadIdx.x % kWarpLanes == 0) {
      all.rows[at] = row;
    }
    if (RowShape::group() == 0) {
      grad_query.store(all.grad_query + at * all.head_dim, all.head_dim);
    }
  }
};

template <class ShapeOfRows>
struct OverKeys {
  using RowShape = ShapeOfRows;
  using T = typename RowShape::T;
  using A = typename RowShape::A;
  using Arguments = TokenBackwardArguments<T>;
  static constexpr int kThreadBlocks = kBackwardThreadBlocks<A>;
  struct Memory {
    A keys[kWarps][RowShape::kHeadDim], values[kWarps][RowShape::kHeadDim];
  };

  Numbers<RowShape> key, value;
  typename GatheredRows<T>::template Matrix<RowShape> queries, grad_outputs;
  const RowStats<A>* rows;  // of the matrix
  A scale;
  Numbers<RowShape> grad_key, grad_value;

  __device__ OverKeys(const Arguments& all, const TokenList& list)
      : key(all.keys.template of<RowShape>(list).load(list.token)),
        value(all.values.template of<RowShape>(list).load(list.token)),
        queries(all.queries.template of<RowShape>(list)),
        grad_outputs(all.grad_outputs.template of<RowShape>(list)),
        rows(all.rows + list.matrix * all.num_queries),
        scale(all.scale) {}

  __device__ void add(uint32_t, const int (&tokens)[RowShape::kTokens]) {
    constexpr int kTokens = RowShape::kTokens;
    GatheredRow<RowShape> gathered_queries[kTokens], gathered_grads[kTokens];
    RowStats<A> of_tokens[kTokens];
#pragma unroll
    for (int u = 0; u < kTokens; ++u) {
      gathered_queries[u] = queries.load(tokens[u]);
      gathered_grads[u] = grad_outputs.load(tokens[u]);
      of_tokens[u] = tokens[u] < 0 ? RowStats<A>{} : rows[tokens[u]];
    }
#pragma unroll
    for (int u = 0; u < kTokens; ++u) {
      const Numbers<RowShape> query(gathered_queries[u]), grad_output(gathered_grads[u]);
      const A prob = of_tokens[u].probability(score_of(query.dot(key), scale));
      const A grad = prob * (grad_output.dot(value) - of_tokens[u].delta) * scale;
      grad_value.add(tokens[u] < 0 ? A(0) : prob, grad_output);
      grad_key.add(tokens[u] < 0 ? A(0) : grad, query);
    }
  }

  __device__ void finish_warp() {
    grad_key.add_groups();
    grad_value.add_groups();
  }

  __device__ void finish_block(Memory& memory) {
    grad_key.add_warps(memory.keys);
    grad_value.add_warps(memory.values);
  }

  __device__ void store(const Arguments& all, const TokenList& list) const {
    const int64_t at = list.matrix * all.num_keys + list.token;
    if (RowShape::group() == 0) {
      grad_key.store(all.grad_key + at * all.head_dim, all.head_dim);
      grad_value.store(all.grad_value + at * all.value_head_dim, all.value_head_dim);
    }
  }
};

template <class T>
T* written(Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}

std::tuple<Tensor, Tensor, Tensor> token_attention_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& row_offsets, const Tensor& columns,
    int64_t list_batch, int64_t list_heads, double scale) {
  check_token_operands({{&query, "query"}, {&key, "key"}, {&value, "value"}});
  check_size(key, 3, query.size(3), "key");
  check_size(value, 2, key.size(2), "value");
  const int64_t batch = query.size(0), heads = query.size(1), tokens = query.size(2), head_dim = value.size(3);
  const TokenLists lists(row_offsets, columns, std::nullopt, list_batch, list_heads, query, tokens);
  Tensor output = empty_on(query, {batch, heads, tokens, head_dim}),
         lse = empty_on(query, {batch, heads, tokens}, lse_type(query)),
         statistics = empty_on(query, {batch, heads, tokens, 2}, lse_type(query));
  if (lse.numel() == 0) {
    return {output, lse, statistics};
  }
  const Launcher launch(query);
  with_shape(query, std::max(query.size(3), head_dim), [&](auto shape) {
    using S = decltype(shape);
    using T = typename S::T;
    using A = typename S::A;
    const RowsOperand<T> queries(query), keys(key), values(value);
    const typename TokenForward<S>::Arguments arguments{
        queries.rows(),
        keys.rows(),
        values.rows(),
        static_cast<A>(scale),
        written<T>(output),
        written<A>(lse),
        written<A>(statistics),
        tokens,
        static_cast<int>(head_dim)};
    launch(lists_kernel<TokenForward<S>>, lists.work_tiles(), kThreads, lists, arguments);
  });
  return {output, lse, statistics};
}

std::tuple<Tensor, Tensor, Tensor> token_attention_backward(
    const Tensor& grad_output, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& output, const Tensor& statistics, const Tensor& row_offsets,
    const Tensor& columns, const Tensor& column_offsets, const Tensor& column_rows, const Tensor& slots,
    int64_t list_batch, int64_t list_heads, double scale) {
  check_token_operands(
      {{&query, "query"}, {&key, "key"}, {&value, "value"}, {&grad_output, "grad_output"}, {&output, "output"}});
  check_size(key, 3, query.size(3), "key");
  check_size(value, 2, key.size(2), "value");
  check_size(output, 2, query.size(2), "output");
  check_size(output, 3, value.size(3), "output");
  check_attention_backward(grad_output, grad_lse, output, output, statistics);
  if (grad_lse) {
    check_contiguous(*grad_lse, "grad_lse");
  }
  const int64_t batch = query.size(0), heads = query.size(1), tokens = query.size(2), num_keys = key.size(2);
  const TokenLists by_query(row_offsets, columns, std::nullopt, list_batch, list_heads, query, tokens),
      by_key(column_offsets, column_rows, slots, list_batch, list_heads, query, num_keys);
  check_size(column_rows, 0, by_query.num_entries, "column_rows");
  const auto contiguous = [](const Tensor& x) { return empty_on(x, x.sizes()); };
  Tensor grad_query = contiguous(query), grad_key = contiguous(key), grad_value = contiguous(value);
  if (batch * heads == 0) {
    return {grad_query, grad_key, grad_value};
  }
  const Launcher launch(query);
  Tensor rows = empty_on(query, {batch, heads, tokens, 4}, lse_type(query));
  with_shape(query, std::max(query.size(3), value.size(3)), [&](auto shape) {
    using S = decltype(shape);
    using T = typename S::T;
    using A = typename S::A;
    const RowsOperand<T> queries(query), keys(key), values(value), grad_outputs(grad_output), outputs(output);
    const TokenBackwardArguments<T> arguments{
        queries.rows(),
        keys.rows(),
        values.rows(),
        grad_outputs.rows(),
        outputs.rows(),
        static_cast<const A*>(statistics.const_data_ptr()),
        grad_lse ? static_cast<const A*>(grad_lse->const_data_ptr()) : nullptr,
        static_cast<RowStats<A>*>(rows.mutable_data_ptr()),
        static_cast<A>(scale),
        written<T>(grad_query),
        written<T>(grad_key),
        written<T>(grad_value),
        tokens,
        num_keys,
        static_cast<int>(query.size(3)),
        static_cast<int>(value.size(3))};
    launch(lists_kernel<OverQueries<S>>, by_query.work_tiles(), kThreads, by_query, arguments);
    launch(lists_kernel<OverKeys<S>>, by_key.work_tiles(), kThreads, by_key, arguments);
  });
  return {grad_query, grad_key, grad_value};
}

}  // namespace
}  // namespace ds_sparse::token

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("token_attention_forward", TORCH_BOX(&ds_sparse::token::token_attention_forward));
  m.impl("token_attention_backward", TORCH_BOX(&ds_sparse::token::token_attention_backward));
}
