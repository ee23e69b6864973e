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

// Tokens of panels `first` to last - 1 for the rows of a tile from m on. They have their windows at other places of the
// panels' vectors: what is beyond them is computed and not stored.
template <class T, class O, int V>
static void window_panels(
    const WindowRows& rows, int64_t m, const O* a, const O* panels, int64_t first, int64_t last, int64_t depth,
    T* band) {
  using C = Compute<O>;
  constexpr int W = native_width<C>;
  using OneTile = Tile<O, W, V>;
  int64_t p = first;
  for (; p + V <= last; p += V) {
    const O* b[V];
    alignas(64) C sums[OneTile::rows * V * W];
    C* to_sums[V];
    for (int v = 0; v < V; ++v) {
      b[v] = panels + (p + v) * depth * W;
      to_sums[v] = sums + v * W;
    }
    OneTile tile;
    tile.clear();
    tile.multiply(a + m * depth, depth, 1, b, W, depth);
    tile.store(to_sums, V * W);
#pragma GCC unroll 4
    for (int i = 0; i < OneTile::rows; ++i) {
      if (m + i >= rows.rows) break;
      int64_t token = rows.first + m + i, begin = rows.begin(token), end = rows.end(token);
      T* to = band + (m + i) * (2 * rows.window + 1);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        int64_t t = (p + v) * W, at = t - token + rows.window;
        auto sum = load<C, W>(sums + (i * V + v) * W);
        if (t >= begin && t + W <= end) {
          store<C, W>(to + at, sum);
        } else {
          T numbers[W];
          store<C, W>(numbers, sum);
          int64_t from = begin > t ? begin - t : 0, until = end - t < W ? end - t : W;
          for (int64_t c = from; c < until; ++c) to[at + c] = numbers[c];
        }
      }
    }
  }
  if constexpr (V > 1) window_panels<T, O, V - 1>(rows, m, a, panels, p, last, depth, band);
}

template <class T, class O>
static void window_matmul(const WindowRows& rows, const O* a, const O* panels, int64_t depth, T* band) {
  constexpr int W = native_width<Compute<O>>;
  constexpr int64_t step = Tile<O, W, tile_vectors>::rows;
  begin_products<O>();
  for (int64_t m = 0; m < rows.rows; m += step) {
    int64_t left = rows.rows - m, token = rows.first + m, last = token + (left < step ? left : step) - 1;
    window_panels<T, O, tile_vectors>(
        rows, m, a, panels, rows.begin(token) / W, (rows.end(last) + W - 1) / W, depth, band);
  }
  end_products<O>();
  int64_t width = 2 * rows.window + 1;
  for (int64_t r = 0; r < rows.rows; ++r, band += width) {
    int64_t token = rows.first + r, shift = rows.window - token;
    zero(band, 0, rows.begin(token) + shift);
    zero(band, rows.end(token) + shift, width);
  }
}

// Row r's sum over tokens `begin` to end - 1, added to V vectors of it.
template <class O, int V>
DS_SPARSE_INLINE void add_tokens(
    const Band<O>& band, int64_t r, const O* dense, int64_t width, int64_t begin, int64_t end,
    Vec<Compute<O>, native_width<Compute<O>>> (&sums)[V]) {
  using C = Compute<O>;
  constexpr int W = native_width<C>, P = per_multiplicand<O>;
  for (int64_t t = begin; t < end;) {
    int64_t part = t % P;
    const Number<O>* left = band.a + band.offset + r * band.row_stride + t / P * band.multiplicand_stride + part;
    const O* right = dense + t / P * width;
    bool whole = part == 0 && t + P <= end;
    for (int v = 0; v < V; ++v) {
      auto multiplicands = load_raw<Multiplicands<O, W>>(right + v * W);
      sums[v] = whole ? multiply_add(load_raw<O>(left), multiplicands, sums[v])
                      : sums[v] + load_one<C>(left) * numbers<O, W>(multiplicands, part);
    }
    t += whole ? P : 1;
  }
}

template <class O, int V>
static void unwindow_columns(
    const WindowRows& rows, const Band<O>& band, const O* dense, int64_t width, int64_t first, int64_t last,
    Compute<O>* output) {
  using C = Compute<O>;
  constexpr int W = native_width<C>, P = per_multiplicand<O>;
  using OneTile = Tile<O, W, V>;
  constexpr int64_t R = OneTile::rows, multiple = OneTile::depth_multiple;
  int64_t c = first;
  for (; c + V * W <= last; c += V * W) {
    for (int64_t m = 0; m < rows.rows; m += R) {
      // The part that all rows of a tile have is a product, of whole multiplicands; the rest, a few tokens on both
      // sides, goes row by row.
      int64_t token = rows.first + m, begin = (rows.begin(token + R - 1) + P - 1) / P, end = rows.end(token) / P,
              depth = m + R <= rows.rows && begin < end ? (end - begin) / multiple * multiple : 0;
      C* to[V];
      for (int v = 0; v < V; ++v) to[v] = output + m * width + c + v * W;
      OneTile tile;
      tile.clear();
      if (depth > 0) {
        const O* b[V];
        for (int v = 0; v < V; ++v) b[v] = dense + begin * width + c + v * W;
        const auto* from =
            reinterpret_cast<const O*>(band.a + band.offset + m * band.row_stride + begin * band.multiplicand_stride);
        if (band.multiplicand_stride == P)
          tile.multiply(from, band.row_stride / P, 1, b, width, depth);
        else
          tile.multiply(from, 1, band.multiplicand_stride / P, b, width, depth);
      }
      tile.store(to, width);
#pragma GCC unroll 4
      for (int i = 0; i < R; ++i) {
        if (m + i >= rows.rows) break;
        int64_t row_begin = rows.begin(token + i), row_end = rows.end(token + i);
        Vec<C, W> sums[V];
        for (int v = 0; v < V; ++v) sums[v] = load<C, W>(to[v] + i * width);
        add_tokens<O, V>(band, m + i, dense + c, width, row_begin, depth > 0 ? P * begin : row_end, sums);
        add_tokens<O, V>(band, m + i, dense + c, width, depth > 0 ? P * (begin + depth) : row_end, row_end, sums);
        for (int v = 0; v < V; ++v) store<C, W>(to[v] + i * width, sums[v]);
      }
    }
  }
  if constexpr (V > 1) unwindow_columns<O, V - 1>(rows, band, dense, width, c, last, output);
}

template <class O>
static void unwindow_matmul(
    const WindowRows& rows, const Band<O>& band, const O* dense, int64_t width, Compute<O>* output) {
  begin_products<O>();
  unwindow_columns<O, tile_vectors>(rows, band, dense, width, 0, width, output);
  end_products<O>();
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
