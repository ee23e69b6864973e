// Attention over lists of tokens, one list at a time: a query and the keys it sees, or a key and the queries that see
// it. The other side's tokens are rows of memory, which the list names in any order.
#pragma once

#include "vec.h"

namespace ds_sparse::cpu::DS_SPARSE_ISA {

// Vectors of a row that are kept in registers at a time: beside a vector of sums for each of W rows, or as sums.
constexpr int dot_vectors = 4;
constexpr int sum_vectors = 8;

// Tokens that backward has scores of at a time, so that their rows are still near when they are added up.
constexpr int64_t token_chunk = 32;

// sums[j] += own . rows[j] for the numbers from c on, V vectors of them, each lane by itself.
template <class C, int W, int V>
DS_SPARSE_INLINE void add_products(Vec<C, W> (&sums)[W], const C* own, const C* const (&rows)[W], int64_t c) {
  Vec<C, W> left[V];
  for (int v = 0; v < V; ++v) left[v] = load<C, W>(own + c + v * W);
#pragma GCC unroll 16
  for (int j = 0; j < W; ++j)
    for (int v = 0; v < V; ++v) sums[j] += left[v] * load<C, W>(rows[j] + c + v * W);
}

// Halves the number of vectors until lane j of the first is the sum over the lanes of vector j.
template <class C, int W, int S = W / 2>
DS_SPARSE_INLINE void sum_each(Vec<C, W> (&x)[W]) {
  if constexpr (S > 0) {
#pragma GCC unroll 8
    for (int i = 0; i < S; ++i) {
      exchange<C, W, S>(x[i], x[i + S], typename MakeLanes<W>::type{});
      x[i] += x[i + S];
    }
    sum_each<C, W, S / 2>(x);
  }
}

// own . each of W rows.
template <class C, int W>
DS_SPARSE_INLINE Vec<C, W> dots_of(const C* own, const C* const (&rows)[W], int64_t head_dim) {
  Vec<C, W> sums[W] = {};
  int64_t c = 0;
  for (; c + dot_vectors * W <= head_dim; c += dot_vectors * W) add_products<C, W, dot_vectors>(sums, own, rows, c);
  for (; c < head_dim; c += W) add_products<C, W, 1>(sums, own, rows, c);
  sum_each<C, W>(sums);
  return sums[0];
}

// The rows of W tokens of the list, its last one again beyond its end.
template <class C, int W>
DS_SPARSE_INLINE void rows_of(
    const C* rows, int64_t head_dim, const int32_t* list, int64_t left, const C* (&found)[W]) {
  if (left >= W) {
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) found[j] = rows + list[j] * head_dim;
  } else {
    for (int j = 0; j < W; ++j) found[j] = rows + list[j < left ? j : left - 1] * head_dim;
  }
}

template <class C>
static void token_dots(const C* own, const C* rows, int64_t head_dim, const int32_t* list, int64_t count, C* out) {
  constexpr int W = native_width<C>;
  for (int64_t n = 0; n < count; n += W) {
    const C* found[W];
    rows_of<C, W>(rows, head_dim, list + n, count - n, found);
    store<C, W>(out + n, dots_of<C, W>(own, found, head_dim));
  }
}

// sum (+)= the sum over the list of weight(n) times its rows, V vectors at a time from number c on.
template <class C, int V, class Weight>
DS_SPARSE_INLINE void sum_columns(
    const Weight& weight, const C* rows, int64_t head_dim, const int32_t* list, int64_t count, int64_t c, bool add,
    C* sum) {
  constexpr int W = native_width<C>;
  for (; c + V * W <= head_dim; c += V * W) {
    Vec<C, W> sums[V] = {};
    if (add)
      for (int v = 0; v < V; ++v) sums[v] = load<C, W>(sum + c + v * W);
#pragma GCC unroll 2
    for (int64_t n = 0; n < count; ++n) {
      const C* row = rows + list[n] * head_dim + c;
      C factor = weight(n);
      for (int v = 0; v < V; ++v) sums[v] += factor * load<C, W>(row + v * W);
    }
    for (int v = 0; v < V; ++v) store<C, W>(sum + c + v * W, sums[v]);
  }
  if constexpr (V > 1) sum_columns<C, V / 2>(weight, rows, head_dim, list, count, c, add, sum);
}

template <class C>
static void token_sum(
    const C* weights, const int32_t* slots, int64_t slot_stride, const C* rows, int64_t head_dim, const int32_t* list,
    int64_t count, C* sum) {
  if (slots) {
    auto weight = [&](int64_t n) { return weights[int64_t{slots[n]} * slot_stride]; };
    sum_columns<C, sum_vectors>(weight, rows, head_dim, list, count, 0, false, sum);
  } else {
    auto weight = [&](int64_t n) { return weights[n]; };
    sum_columns<C, sum_vectors>(weight, rows, head_dim, list, count, 0, false, sum);
  }
}

template <class C>
static bool are_below(const int32_t* x, int64_t count, int32_t limit) {
  bool fits = true;
  for (int64_t n = 0; n < count; ++n) fits &= static_cast<uint32_t>(x[n]) < static_cast<uint32_t>(limit);
  return fits;
}

// a and b in turns.
template <class C, int W, int... I>
DS_SPARSE_INLINE void store_in_turns(C* to, Vec<C, W> a, Vec<C, W> b, Lanes<I...>) {
#if defined(__clang__)
  store<C, W>(to, __builtin_shufflevector(a, b, (I % 2 * W + I / 2)...));
  store<C, W>(to + W, __builtin_shufflevector(a, b, (I % 2 * W + I / 2 + W / 2)...));
#else
  using Index = Vec<typename Bits<C>::Int, W>;
  store<C, W>(to, __builtin_shuffle(a, b, Index{(I % 2 * W + I / 2)...}));
  store<C, W>(to + W, __builtin_shuffle(a, b, Index{(I % 2 * W + I / 2 + W / 2)...}));
#endif
}

template <class C>
DS_SPARSE_INLINE void scale_row(C* row, int64_t head_dim, C factor) {
  constexpr int W = native_width<C>;
  for (int64_t c = 0; c < head_dim; c += W) store<C, W>(row + c, Vec<C, W>(load<C, W>(row + c) * factor));
}

// A score that has become -inf is not masked.
template <class C, int W>
DS_SPARSE_INLINE Vec<C, W> as_score(Vec<C, W> dots, C scale) {
  auto x = dots * scale;
  return x < lowest<C> ? broadcast<C, W>(lowest<C>) : x;
}

template <class C>
static void token_attention_forward(const TokenForward<C>& work) {
  constexpr int W = native_width<C>;
  using V = Vec<C, W>;
  V row_maxima = broadcast<C, W>(-infinity<C>);
  for (int64_t n = 0; n < work.count; n += W) {
    const C* found[W];
    rows_of<C, W>(work.keys, work.head_dim, work.list + n, work.count - n, found);
    V x = as_score<C, W>(dots_of<C, W>(work.query, found, work.head_dim), work.scale);
    store<C, W>(work.scratch + n, x);
    row_maxima = x > row_maxima ? x : row_maxima;
  }
  C row_max = max_lanes<C, W>(row_maxima);
  // Scores beyond the end repeat the last one; they may set the maximum but not the sum.
  for (int64_t n = work.count; n % W != 0; ++n) work.scratch[n] = -infinity<C>;
  V row_sums{};
  for (int64_t n = 0; n < work.count; n += W) {
    V e = exp_nonpositive<C, W>(load<C, W>(work.scratch + n) - row_max);
    store<C, W>(work.scratch + n, e);
    row_sums += e;
  }
  C row_sum = sum_lanes<C, W>(row_sums);
  token_sum<C>(work.scratch, nullptr, 0, work.values, work.value_head_dim, work.list, work.count, work.output);
  scale_row<C>(work.output, work.value_head_dim, work.count == 0 ? C(0) : 1 / row_sum);
  work.row_max_sum[0] = row_max;
  work.row_max_sum[1] = row_sum;
}

template <class C>
static void token_attention_backward(const TokenBackward<C>& work) {
  constexpr int W = native_width<C>;
  using V = Vec<C, W>;
  C grads[token_chunk];
  auto weight = [&](int64_t n) { return grads[n]; };
  for (int64_t done = 0; done < work.count || done == 0; done += token_chunk) {
    const int32_t* list = work.list + done;
    C* pairs = work.pairs + 2 * done;
    int64_t here = work.count - done < token_chunk ? work.count - done : token_chunk;
    for (int64_t n = 0; n < here; n += W) {
      const C* found[W];
      rows_of<C, W>(work.keys, work.head_dim, list + n, here - n, found);
      V x = as_score<C, W>(dots_of<C, W>(work.query, found, work.head_dim), work.scale);
      rows_of<C, W>(work.values, work.value_head_dim, list + n, here - n, found);
      V grad = dots_of<C, W>(work.grad_output, found, work.value_head_dim);
      V prob = exp_nonpositive<C, W>(x - work.row_max) * work.inverse_sum;
      grad = prob * (grad - work.delta) * work.scale;
      store<C, W>(grads + n, grad);
      if (n + W <= here) {
        store_in_turns<C, W>(pairs + 2 * n, prob, grad, typename MakeLanes<W>::type{});
      } else {
        for (int j = 0; j < here - n; ++j) {
          pairs[2 * (n + j)] = prob[j];
          pairs[2 * (n + j) + 1] = grad[j];
        }
      }
    }
    sum_columns<C, sum_vectors>(weight, work.keys, work.head_dim, list, here, 0, done > 0, work.grad_query);
  }
}

}  // namespace ds_sparse::cpu::DS_SPARSE_ISA
