// Attention over lists of tokens, one list at a time: a query and the keys it sees, or a key and the queries that see
// it. The other side's tokens are rows of memory, which the list names in any order.
#pragma once

#include "vec.h"

namespace ds_sparse::cpu::DS_SPARSE_ISA {

// Vectors of a row that are kept in registers at a time: beside a vector of sums for each of W rows, or as sums.
constexpr int dot_vectors = 4;
template <class O>
constexpr int sum_vectors = 8 / per_multiplicand<O>;

// Tokens that backward has scores of at a time, so that their rows are still near when they are added up.
constexpr int64_t token_chunk = 32;

// sums[j] += own . rows[j] for the multiplicands from c on, V vectors of them, each lane by itself.
template <class O, int W, int V>
DS_SPARSE_INLINE void add_products(Vec<Compute<O>, W> (&sums)[W], const O* own, const O* const (&rows)[W], int64_t c) {
  Multiplicands<O, W> left[V];
  for (int v = 0; v < V; ++v) left[v] = load_raw<Multiplicands<O, W>>(own + c + v * W);
#pragma GCC unroll 16
  for (int j = 0; j < W; ++j)
    for (int v = 0; v < V; ++v)
      sums[j] = multiply_add(left[v], load_raw<Multiplicands<O, W>>(rows[j] + c + v * W), sums[j]);
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
template <class O, int W>
DS_SPARSE_INLINE Vec<Compute<O>, W> dots_of(const O* own, const O* const (&rows)[W], int64_t head_dim) {
  Vec<Compute<O>, W> sums[W] = {};
  int64_t c = 0;
  for (; c + dot_vectors * W <= head_dim; c += dot_vectors * W) add_products<O, W, dot_vectors>(sums, own, rows, c);
  for (; c < head_dim; c += W) add_products<O, W, 1>(sums, own, rows, c);
  sum_each<Compute<O>, W>(sums);
  return sums[0];
}

// The rows of W tokens of the list, its last one again beyond its end.
template <class O, int W>
DS_SPARSE_INLINE void rows_of(
    const O* rows, int64_t head_dim, const int32_t* list, int64_t left, const O* (&found)[W]) {
  if (left >= W) {
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) found[j] = rows + list[j] * head_dim;
  } else {
    for (int j = 0; j < W; ++j) found[j] = rows + list[j < left ? j : left - 1] * head_dim;
  }
}

template <class O>
static void token_dots(
    const O* own, const O* rows, int64_t head_dim, const int32_t* list, int64_t count, Compute<O>* out) {
  constexpr int W = native_width<Compute<O>>;
  for (int64_t n = 0; n < count; n += W) {
    const O* found[W];
    rows_of<O, W>(rows, head_dim, list + n, count - n, found);
    store<Compute<O>, W>(out + n, dots_of<O, W>(own, found, head_dim));
  }
}

// Sums of the numbers of a vector of multiplicands, of weighted rows: as many rows at a time as a multiplicand has
// numbers.
template <class O>
struct RowSums {
  using C = Compute<O>;
  static constexpr int W = native_width<C>, P = per_multiplicand<O>;

  Vec<C, W> sums[P] = {};

  DS_SPARSE_INLINE_MEMBER void load(const C* from) {
    for (int p = 0; p < P; ++p) sums[p] = cpu::DS_SPARSE_ISA::load<C, W>(from + p * W);
    if constexpr (P > 1) order_columns(sums, false);
  }
  DS_SPARSE_INLINE_MEMBER void add(Multiplicands<O, W> weights, const Multiplicands<O, W> (&rows)[P]) {
    if constexpr (P > 1)
      add_two_rows(weights, rows, sums);
    else
      sums[0] = multiply_add(weights, rows[0], sums[0]);
  }
  DS_SPARSE_INLINE_MEMBER void store(C* to) {
    if constexpr (P > 1) order_columns(sums, true);
    for (int p = 0; p < P; ++p) cpu::DS_SPARSE_ISA::store<C, W>(to + p * W, sums[p]);
  }
};

// The weights of as many tokens as a multiplicand has numbers, 0 for one that is not there.
template <class O, class Weight>
DS_SPARSE_INLINE O multiplicand_of_weights(const Weight& weight, int64_t n, bool whole) {
  if constexpr (per_multiplicand<O> > 1)
    return {uint32_t{weight(n).bits} | (whole ? uint32_t{weight(n + 1).bits} << 16 : 0)};
  else
    return weight(n);
}

// sum (+)= the sum over the list of weight(n) times its rows, V vectors at a time from multiplicand c on.
template <class O, int V, class Weight>
DS_SPARSE_INLINE void sum_columns(
    const Weight& weight, const O* rows, int64_t head_dim, const int32_t* list, int64_t count, int64_t c, bool add,
    Compute<O>* sum) {
  constexpr int W = native_width<Compute<O>>, P = per_multiplicand<O>;
  for (; c + V * W <= head_dim; c += V * W) {
    RowSums<O> sums[V];
    auto add_rows = [&](int64_t n, bool whole) {
      Multiplicands<O, W> weights = broadcast_multiplicand<O, W>(multiplicand_of_weights<O>(weight, n, whole));
      for (int v = 0; v < V; ++v) {
        Multiplicands<O, W> found[P] = {};
        for (int p = 0; p < (whole ? P : 1); ++p)
          found[p] = load_raw<Multiplicands<O, W>>(rows + list[n + p] * head_dim + c + v * W);
        sums[v].add(weights, found);
      }
    };
    if (add)
      for (int v = 0; v < V; ++v) sums[v].load(sum + P * (c + v * W));
    int64_t n = 0;
#pragma GCC unroll 2
    for (; n + P <= count; n += P) add_rows(n, true);
    if (n < count) add_rows(n, false);
    for (int v = 0; v < V; ++v) sums[v].store(sum + P * (c + v * W));
  }
  if constexpr (V > 1) sum_columns<O, V / 2>(weight, rows, head_dim, list, count, c, add, sum);
}

template <class O>
static void token_sum(
    const Number<O>* weights, const int32_t* slots, int64_t slot_stride, const O* rows, int64_t head_dim,
    const int32_t* list, int64_t count, Compute<O>* sum) {
  if (slots) {
    auto weight = [&](int64_t n) { return weights[int64_t{slots[n]} * slot_stride]; };
    sum_columns<O, sum_vectors<O>>(weight, rows, head_dim, list, count, 0, false, sum);
  } else {
    auto weight = [&](int64_t n) { return weights[n]; };
    sum_columns<O, sum_vectors<O>>(weight, rows, head_dim, list, count, 0, false, sum);
  }
}

template <class C>
static bool are_below(const int32_t* x, int64_t count, int32_t limit) {
  bool fits = true;
  for (int64_t n = 0; n < count; ++n) fits &= static_cast<uint32_t>(x[n]) < static_cast<uint32_t>(limit);
  return fits;
}

// a and b in turns.
template <class O, int W, int... I>
DS_SPARSE_INLINE void store_in_turns(Number<O>* to, Vec<Compute<O>, W> a, Vec<Compute<O>, W> b, Lanes<I...>) {
  using C = Compute<O>;
  if constexpr (per_multiplicand<O> > 1) {
    auto pairs = pair_halves(narrow(a, b));
    memcpy(to, &pairs, sizeof(pairs));
  } else {
#if defined(__clang__)
    store<C, W>(to, __builtin_shufflevector(a, b, (I % 2 * W + I / 2)...));
    store<C, W>(to + W, __builtin_shufflevector(a, b, (I % 2 * W + I / 2 + W / 2)...));
#else
    using Index = Vec<typename Bits<C>::Int, W>;
    store<C, W>(to, __builtin_shuffle(a, b, Index{(I % 2 * W + I / 2)...}));
    store<C, W>(to + W, __builtin_shuffle(a, b, Index{(I % 2 * W + I / 2 + W / 2)...}));
#endif
  }
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

template <class O>
static void token_attention_forward(const TokenForward<O>& work) {
  using C = Compute<O>;
  constexpr int W = native_width<C>;
  using V = Vec<C, W>;
  V row_maxima = broadcast<C, W>(-infinity<C>);
  for (int64_t n = 0; n < work.count; n += W) {
    const O* found[W];
    rows_of<O, W>(work.keys, work.head_dim, work.list + n, work.count - n, found);
    V x = as_score<C, W>(dots_of<O, W>(work.query, found, work.head_dim), work.scale);
    store<C, W>(work.scratch + n, x);
    row_maxima = x > row_maxima ? x : row_maxima;
  }
  C row_max = max_lanes<C, W>(row_maxima);
  // Scores beyond the end repeat the last one; they may set the maximum but not the sum.
  for (int64_t n = work.count; n % W != 0; ++n) work.scratch[n] = -infinity<C>;
  V row_sums{};
  for (int64_t n = 0; n < work.count; n += W) {
    V e = exp_nonpositive<C, W>(load<C, W>(work.scratch + n) - row_max);
    store_weights<O, W>(work.scratch, n, e);
    row_sums += e;
  }
  C row_sum = sum_lanes<C, W>(row_sums);
  const auto* weights = reinterpret_cast<const Number<O>*>(work.scratch);
  token_sum<O>(weights, nullptr, 0, work.values, work.value_head_dim, work.list, work.count, work.output);
  scale_row<C>(work.output, work.value_head_dim * per_multiplicand<O>, work.count == 0 ? C(0) : 1 / row_sum);
  work.row_max_sum[0] = row_max;
  work.row_max_sum[1] = row_sum;
}

template <class O>
static void token_attention_backward(const TokenBackward<O>& work) {
  using C = Compute<O>;
  constexpr int W = native_width<C>;
  using V = Vec<C, W>;
  Number<O> grads[token_chunk];
  auto weight = [&](int64_t n) { return grads[n]; };
  for (int64_t done = 0; done < work.count || done == 0; done += token_chunk) {
    const int32_t* list = work.list + done;
    Number<O>* pairs = work.pairs + 2 * done;
    int64_t here = work.count - done < token_chunk ? work.count - done : token_chunk;
    for (int64_t n = 0; n < here; n += W) {
      const O* found[W];
      rows_of<O, W>(work.keys, work.head_dim, list + n, here - n, found);
      V x = as_score<C, W>(dots_of<O, W>(work.query, found, work.head_dim), work.scale);
      rows_of<O, W>(work.values, work.value_head_dim, list + n, here - n, found);
      V grad = dots_of<O, W>(work.grad_output, found, work.value_head_dim);
      V prob = exp_nonpositive<C, W>(x - work.row_max) * work.inverse_sum;
      grad = prob * (grad - work.delta) * work.scale;
      store<C, W>(grads + n, grad);
      if (n + W <= here) {
        store_in_turns<O, W>(pairs + 2 * n, prob, grad, typename MakeLanes<W>::type{});
      } else {
        Number<O> probs[W];
        store<C, W>(probs, prob);
        for (int j = 0; j < here - n; ++j) {
          pairs[2 * (n + j)] = probs[j];
          pairs[2 * (n + j) + 1] = grads[n + j];
        }
      }
    }
    sum_columns<O, sum_vectors<O>>(weight, work.keys, work.head_dim, list, here, 0, done > 0, work.grad_query);
  }
}

}  // namespace ds_sparse::cpu::DS_SPARSE_ISA
