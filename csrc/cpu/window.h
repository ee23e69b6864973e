// Products and softmax of windows: bands of 2 * window + 1 numbers for each token, and nothing beside them computed but
// what fills the last vectors.
#pragma once

#include "gemm.h"
#include "rows.h"

namespace ds_sparse::cpu::DS_SPARSE_ISA {

template <class T>
static void zero(T* to, int64_t begin, int64_t end) {
  for (int64_t c = begin; c < end; ++c) to[c] = T{};
}

// Tokens of panels `first` to last - 1 for `tile_rows` rows from m on. A tile's rows have their windows at other places
// of the panels' vectors: what is beyond them is computed and not stored.
template <class T, int V>
static void window_panels(
    const WindowRows& rows, int64_t m, const Compute<T>* a, const Compute<T>* panels, int64_t first, int64_t last,
    int64_t head_dim, T* band) {
  using C = Compute<T>;
  constexpr int W = native_width<C>;
  int64_t p = first;
  for (; p + V <= last; p += V) {
    const C* b[V];
    for (int v = 0; v < V; ++v) b[v] = panels + (p + v) * head_dim * W;
    Tile<C, W, V> tile;
    tile.clear();
    tile.multiply(a + m * head_dim, head_dim, 1, b, W, head_dim);
#pragma GCC unroll 4
    for (int i = 0; i < tile_rows; ++i) {
      if (m + i >= rows.rows) break;
      int64_t token = rows.first + m + i, begin = rows.begin(token), end = rows.end(token);
      T* to = band + (m + i) * (2 * rows.window + 1);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        int64_t t = (p + v) * W, at = t - token + rows.window;
        if (t >= begin && t + W <= end) {
          store<C, W>(to + at, tile.sums[i][v]);
        } else {
          T numbers[W];
          store<C, W>(numbers, tile.sums[i][v]);
          int64_t from = begin > t ? begin - t : 0, until = end - t < W ? end - t : W;
          for (int64_t c = from; c < until; ++c) to[at + c] = numbers[c];
        }
      }
    }
  }
  if constexpr (V > 1) window_panels<T, V - 1>(rows, m, a, panels, p, last, head_dim, band);
}

template <class T>
static void window_matmul(
    const WindowRows& rows, const Compute<T>* a, const Compute<T>* panels, int64_t head_dim, T* band) {
  constexpr int W = native_width<Compute<T>>;
  for (int64_t m = 0; m < rows.rows; m += tile_rows) {
    int64_t left = rows.rows - m, token = rows.first + m, last = token + (left < tile_rows ? left : tile_rows) - 1;
    window_panels<T, tile_vectors>(
        rows, m, a, panels, rows.begin(token) / W, (rows.end(last) + W - 1) / W, head_dim, band);
  }
  int64_t width = 2 * rows.window + 1;
  for (int64_t r = 0; r < rows.rows; ++r, band += width) {
    int64_t token = rows.first + r, shift = rows.window - token;
    zero(band, 0, rows.begin(token) + shift);
    zero(band, rows.end(token) + shift, width);
  }
}

template <class C, int V>
static void unwindow_columns(
    const WindowRows& rows, const Band<C>& band, const C* dense, int64_t head_dim, int64_t first, int64_t last,
    C* output) {
  constexpr int W = native_width<C>;
  int64_t c = first;
  for (; c + V * W <= last; c += V * W) {
    for (int64_t m = 0; m < rows.rows; m += tile_rows) {
      int64_t token = rows.first + m;
      const C* a = band.a + band.offset + m * band.row_stride;
      Tile<C, W, V> tile;
      tile.clear();
      // What all rows of a tile have is a product; the rest, a few tokens on both sides, goes row by row.
      int64_t begin = rows.begin(token + tile_rows - 1), end = rows.end(token);
      bool shared = m + tile_rows <= rows.rows && begin < end;
      if (shared) {
        const C* b[V];
        for (int v = 0; v < V; ++v) b[v] = dense + begin * head_dim + c + v * W;
        const C* from = a + begin * band.token_stride;
        if (band.token_stride == 1)
          tile.multiply(from, band.row_stride, 1, b, head_dim, end - begin);
        else
          tile.multiply(from, 1, band.token_stride, b, head_dim, end - begin);
      }
#pragma GCC unroll 4
      for (int i = 0; i < tile_rows; ++i) {
        if (m + i >= rows.rows) break;
        auto add = [&](int64_t from, int64_t until) {
          for (int64_t t = from; t < until; ++t) {
            C left = a[i * band.row_stride + t * band.token_stride];
            for (int v = 0; v < V; ++v) tile.sums[i][v] += left * load<C, W>(dense + t * head_dim + c + v * W);
          }
        };
        int64_t row_end = rows.end(token + i);
        add(rows.begin(token + i), shared ? begin : row_end);
        add(shared ? end : row_end, row_end);
        for (int v = 0; v < V; ++v) store<C, W>(output + (m + i) * head_dim + c + v * W, tile.sums[i][v]);
      }
    }
  }
  if constexpr (V > 1) unwindow_columns<C, V - 1>(rows, band, dense, head_dim, c, last, output);
}

template <class T>
static void unwindow_matmul(
    const WindowRows& rows, const Band<Compute<T>>& band, const Compute<T>* dense, int64_t head_dim,
    Compute<T>* output) {
  unwindow_columns<Compute<T>, tile_vectors>(rows, band, dense, head_dim, 0, head_dim, output);
}

template <class T>
static void window_softmax_forward(
    const WindowRows& rows, const T* band, const Compute<T>* key_bias, int64_t window, double factor, bool causal,
    T* probs, Compute<T>* row) {
  using C = Compute<T>;
  constexpr int W = native_width<C>;
  using V = Vec<C, W>;
  C scale = C(factor);
  int64_t width = 2 * rows.window + 1;
  for (int64_t r = 0; r < rows.rows; ++r, band += width, probs += width) {
    int64_t token = rows.first + r;
    WindowRows own{rows.tokens, window, token, 1};
    int64_t begin = own.begin(token), end = causal ? token + 1 : own.end(token), shift = rows.window - token,
            count = end - begin, padded = (count + W - 1) / W * W;
    pack_rows<T, C>(band + begin + shift, 0, 1, 1, count, row, padded);
    for (int64_t c = 0; c < padded; c += W) {
      V scaled = scaled_scores<C, W>(load<C, W>(row + c), scale);
      if (key_bias && c + W <= count) {
        scaled = add_bias<C, W>(scaled, load<C, W>(key_bias + begin + c));
      } else if (key_bias) {
        C biases[W] = {};
        for (int64_t i = 0; i < count - c; ++i) biases[i] = key_bias[begin + c + i];
        scaled = add_bias<C, W>(scaled, load<C, W>(biases));
      }
      store<C, W>(row + c, scaled);
    }
    for (int64_t c = count; c < padded; ++c) row[c] = -infinity<C>;
    C inverse = softmax_in_place<C, W>(row, padded);
    for (int64_t c = 0; c < padded; c += W) store<C, W>(row + c, V(load<C, W>(row + c) * inverse));
    zero(probs, 0, begin + shift);
    store_rows<T>(row, padded, 1, count, false, probs + begin + shift, count);
    zero(probs, end + shift, width);
  }
}

template <class T>
static void window_softmax_backward(
    const T* grad, const T* probs, int64_t count, int64_t width, double factor, T* out) {
  using C = Compute<T>;
  constexpr int W = native_width<C>;
  C scale = C(factor);
  for (int64_t r = 0; r < count; ++r, grad += width, probs += width, out += width) {
    C sum;
    row_dots<T>(grad, width, 1, probs, width, 1, 1, width, &sum);
    if (!is_finite(sum)) {
      spoilt_softmax_backward<T>(grad, probs, out, 1, width, width, factor);
      continue;
    }
    int64_t c = 0;
    for (; c + W <= width; c += W)
      store<C, W>(out + c, Vec<C, W>(scale * load<C, W>(probs + c) * (load<C, W>(grad + c) - sum)));
    for (; c < width; ++c) store_one<C>(out + c, scale * load_one<C>(probs + c) * (load_one<C>(grad + c) - sum));
  }
}

}  // namespace ds_sparse::cpu::DS_SPARSE_ISA
