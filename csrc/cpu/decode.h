// Attention of the queries of neighbouring heads to listed keys, which are read where they lie.
#pragma once

#include "token.h"

namespace ds_sparse::cpu::DS_SPARSE_ISA {

// Keys whose rows stay near while heads take turns at them.
constexpr int64_t decode_chunk = 32;

// query . each of W rows, of `columns` numbers; query has zeros up to a multiple of W.
template <class T, int W>
DS_SPARSE_INLINE Vec<Compute<T>, W> dots_in_place(const Compute<T>* query, const T* const (&rows)[W], int64_t columns) {
  using C = Compute<T>;
  Vec<C, W> sums[W] = {};
  int64_t c = 0;
  for (; c + W <= columns; c += W) {
    const Vec<C, W> left = load<C, W>(query + c);
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) sums[j] = multiply_add(left, load<C, W>(rows[j] + c), sums[j]);
  }
  for (; c < columns; ++c)
    for (int j = 0; j < W; ++j) sums[j][0] += query[c] * load_one<C>(rows[j] + c);
  sum_each<C, W>(sums);
  return sums[0];
}

// sum += the weighted rows of `count` tokens, V vectors of columns at a time from column c on; returns where it ends.
template <class T, int V>
DS_SPARSE_INLINE int64_t add_rows_in_place(
    const Compute<T>* weights, const T* rows, int64_t stride, const int32_t* list, int64_t count, int64_t c,
    int64_t columns, Compute<T>* sum) {
  using C = Compute<T>;
  constexpr int W = native_width<C>;
  for (; c + V * W <= columns; c += V * W) {
    Vec<C, W> sums[V];
    for (int v = 0; v < V; ++v) sums[v] = load<C, W>(sum + c + v * W);
    for (int64_t n = 0; n < count; ++n) {
      const T* row = rows + list[n] * stride + c;
      for (int v = 0; v < V; ++v) sums[v] += weights[n] * load<C, W>(row + v * W);
    }
    for (int v = 0; v < V; ++v) store<C, W>(sum + c + v * W, sums[v]);
  }
  if constexpr (V > 1) return add_rows_in_place<T, V / 2>(weights, rows, stride, list, count, c, columns, sum);
  return c;
}

template <class T>
static void decode_attention(const DecodeRows<T>& work) {
  using C = Compute<T>;
  constexpr int W = native_width<C>;
  using V = Vec<C, W>;
  const int64_t width = (work.head_dim + W - 1) / W * W, length = (work.count + W - 1) / W * W;
  C *queries = work.scratch, *all_scores = queries + work.heads * width;
  for (int64_t h = 0; h < work.heads; ++h)
    for (int64_t c = 0; c < width; ++c) {
      queries[h * width + c] = c < work.head_dim ? load_one<C>(work.query + h * work.query_stride + c) : C(0);
      work.output[h * width + c] = 0;
    }
  for (int64_t n = 0; n < work.count; n += W) {
    const T* found[W];
    rows_of<T, W>(work.keys, work.key_stride, work.list + n, work.count - n, found);
    for (int64_t h = 0; h < work.heads; ++h)
      store<C, W>(
          all_scores + h * length + n,
          as_score<C, W>(dots_in_place<T, W>(queries + h * width, found, work.head_dim), work.scale));
  }
  for (int64_t h = 0; h < work.heads; ++h) {
    C* scores = all_scores + h * length;
    // Those beyond the end repeat the last one.
    for (int64_t n = work.count; n < length; ++n) scores[n] = -infinity<C>;
    V maxima = broadcast<C, W>(-infinity<C>), sums{};
    for (int64_t n = 0; n < length; n += W) {
      V x = load<C, W>(scores + n);
      maxima = x > maxima ? x : maxima;
    }
    const C row_max = max_lanes<C, W>(maxima);
    for (int64_t n = 0; n < length; n += W) {
      V e = exp_nonpositive<C, W>(load<C, W>(scores + n) - row_max);
      store<C, W>(scores + n, e);
      sums += e;
    }
    work.row_max_sums[2 * h] = row_max;
    work.row_max_sums[2 * h + 1] = sum_lanes<C, W>(sums);
  }
  for (int64_t done = 0; done < work.count; done += decode_chunk) {
    const int32_t* list = work.list + done;
    const int64_t here = work.count - done < decode_chunk ? work.count - done : decode_chunk;
    for (int64_t h = 0; h < work.heads; ++h) {
      C *weights = all_scores + h * length + done, *sum = work.output + h * width;
      int64_t c = add_rows_in_place<T, 8>(weights, work.values, work.value_stride, list, here, 0, work.head_dim, sum);
      for (; c < work.head_dim; ++c)
        for (int64_t n = 0; n < here; ++n)
          sum[c] += weights[n] * load_one<C>(work.values + list[n] * work.value_stride + c);
    }
  }
}

}  // namespace ds_sparse::cpu::DS_SPARSE_ISA
