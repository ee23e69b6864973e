// Matrix products of blocks: tiles of `tile_rows` rows and up to `tile_vectors` vectors stay in registers over the
// whole sum.
#pragma once

#include "vec.h"

namespace ds_sparse::cpu::DS_SPARSE_ISA {

constexpr int tile_rows = 4;
#if defined(__AVX512F__)
constexpr int tile_vectors = 4;
#else
constexpr int tile_vectors = 2;
#endif

// tile += a @ b over `depth`; a[m * m_stride + k * k_stride]; vector v of row k is b[v] + k * b_stride.
template <class C, int W, int V>
DS_SPARSE_INLINE void multiply(
    Vec<C, W> (&tile)[tile_rows][V], const C* a, int64_t m_stride, int64_t k_stride, const C* const (&b)[V],
    int64_t b_stride, int64_t depth) {
#pragma GCC unroll 2
  for (int64_t k = 0; k < depth; ++k) {
    Vec<C, W> right[V];
    for (int v = 0; v < V; ++v) right[v] = load<C, W>(b[v] + k * b_stride);
    for (int m = 0; m < tile_rows; ++m) {
      C left = a[m * m_stride + k * k_stride];
      for (int v = 0; v < V; ++v) tile[m][v] += left * right[v];
    }
  }
}

template <class T>
static int64_t panel_width(int64_t block) {
  constexpr int64_t width = native_width<Compute<T>>;
  return block < width ? block : width;
}

template <class T, int W>
static void pack_panels_of(
    const T* b, int64_t k_stride, int64_t n_stride, int64_t depth, int64_t columns, Compute<T>* panels) {
  using C = Compute<T>;
  for (int64_t n = 0; n < columns; n += W, panels += depth * W, b += W * n_stride) {
    if (k_stride == 1) {
      transpose<C, W>(b, n_stride, W, depth, panels, W);
    } else if (n_stride == 1) {
      for (int64_t k = 0; k < depth; ++k) store<C, W>(panels + k * W, load<C, W>(b + k * k_stride));
    } else {
      for (int64_t k = 0; k < depth; ++k)
        for (int w = 0; w < W; ++w) panels[k * W + w] = load_one<C>(b + k * k_stride + w * n_stride);
    }
  }
}

template <class T>
static void pack_panels(
    const T* b, int64_t k_stride, int64_t n_stride, int64_t depth, int64_t columns, int64_t width, Compute<T>* panels) {
  constexpr int W = native_width<Compute<T>>;
  if (width == W)
    pack_panels_of<T, W>(b, k_stride, n_stride, depth, columns, panels);
  else
    pack_panels_of<T, 8>(b, k_stride, n_stride, depth, columns, panels);
}

template <class T, class C = Compute<T>>
static void pack_rows(
    const T* x, int64_t row_stride, int64_t column_stride, int64_t rows, int64_t columns, C* out, int64_t out_stride) {
  constexpr int W = native_width<C>;
  if (row_stride == 1 && column_stride != 1) {
    transpose<C, W>(x, column_stride, columns, rows, out, out_stride);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = columns; c < out_stride; ++c) out[r * out_stride + c] = 0;
    return;
  }
  for (int64_t r = 0; r < rows; ++r, x += row_stride, out += out_stride) {
    int64_t c = 0;
    if (column_stride == 1)
      for (; c + W <= columns; c += W) store<C, W>(out + c, load<C, W>(x + c));
    for (; c < columns; ++c) out[c] = load_one<C>(x + c * column_stride);
    for (; c < out_stride; ++c) out[c] = 0;
  }
}

// Of numbers that are 0 or NaN.
template <class C, int W>
DS_SPARSE_INLINE bool is_all_zero(Vec<C, W> x) {
  auto words = bit_cast<Vec<uint64_t, W * sizeof(C) / 8>>(x);
  uint64_t any = 0;
  for (int i = 0; i < int(W * sizeof(C) / 8); ++i) any |= words[i];
  return any == 0;
}

template <class C>
static bool are_finite(const C* x, int64_t count) {
  constexpr int W = native_width<C>;
  Vec<C, W> a{}, b{}, c{}, d{};
  int64_t i = 0;
  for (; i + 4 * W <= count; i += 4 * W) {
    a += load<C, W>(x + i) * C(0);
    b += load<C, W>(x + i + W) * C(0);
    c += load<C, W>(x + i + 2 * W) * C(0);
    d += load<C, W>(x + i + 3 * W) * C(0);
  }
  Vec<C, 8> rest{};
  for (; i < count; i += 8) rest += load<C, 8>(x + i) * C(0);
  return is_all_zero<C, W>(a + b + (c + d)) && is_all_zero<C, 8>(rest);
}

// V panels, which may belong to different blocks: panel v is at b[v], its columns of the result at out[v].
template <class T, int W, int V>
static void sdd_panels(
    const Compute<T>* a, int64_t a_stride, int64_t rows, const Compute<T>* const (&b)[V], T* const (&out)[V],
    int64_t block, int64_t depth) {
  using C = Compute<T>;
  for (int64_t m = 0; m < rows; m += tile_rows) {
    Vec<C, W> tile[tile_rows][V] = {};
    multiply<C, W, V>(tile, a + m * a_stride, a_stride, 1, b, W, depth);
    for (int i = 0; i < tile_rows; ++i)
      for (int v = 0; v < V; ++v) store<C, W>(out[v] + (m + i) * block, tile[i][v]);
  }
}

template <class T, int W, int V>
static void sdd_of(
    const Compute<T>* a, int64_t a_stride, int64_t rows, const Compute<T>* panels, const int32_t* columns,
    int64_t first, int64_t last, int64_t block, int64_t depth, T* out) {
  using C = Compute<T>;
  int64_t per_block = block / W, p = first;
  for (; p + V <= last; p += V) {
    const C* b[V];
    T* to[V];
    for (int v = 0; v < V; ++v) {
      int64_t n = (p + v) / per_block, part = (p + v) % per_block;
      b[v] = panels + (columns[n] * per_block + part) * depth * W;
      to[v] = out + n * rows * block + part * W;
    }
    sdd_panels<T, W, V>(a, a_stride, rows, b, to, block, depth);
  }
  if constexpr (V > 1) sdd_of<T, W, V - 1>(a, a_stride, rows, panels, columns, p, last, block, depth, out);
}

template <class T>
static void sdd(
    const Compute<T>* a, int64_t a_stride, int64_t rows, const Compute<T>* panels, const int32_t* columns,
    int64_t count, int64_t block, int64_t depth, T* out) {
  constexpr int W = native_width<Compute<T>>;
  if (block >= W)
    sdd_of<T, W, tile_vectors>(a, a_stride, rows, panels, columns, 0, count * (block / W), block, depth, out);
  else
    sdd_of<T, 8, tile_vectors>(a, a_stride, rows, panels, columns, 0, count * (block / 8), block, depth, out);
}

// Blocks as the product reads them: element (m, k) of block n at a[n * block_stride + m * m_stride + k * k_stride].
template <class C>
struct Blocks {
  const C* a;
  const int32_t* slots;
  int64_t block_stride;
  int64_t m_stride, k_stride;
};

template <class C, int V>
static void dsd_columns(
    const Blocks<C>& blocks, const C* dense, int64_t dense_stride, const int32_t* indices, int64_t count, int64_t block,
    int64_t rows, int64_t first, int64_t last, bool add, C* sum, int64_t sum_stride) {
  constexpr int W = native_width<C>;
  int64_t c = first;
  for (; c + V * W <= last; c += V * W) {
    for (int64_t m = 0; m < rows; m += tile_rows) {
      C* to = sum + m * sum_stride + c;
      Vec<C, W> tile[tile_rows][V] = {};
      if (add)
        for (int i = 0; i < tile_rows; ++i)
          for (int v = 0; v < V; ++v) tile[i][v] = load<C, W>(to + i * sum_stride + v * W);
      for (int64_t n = 0; n < count; ++n) {
        const C* a = blocks.a + (blocks.slots ? blocks.slots[n] : n) * blocks.block_stride + m * blocks.m_stride;
        const C* b[V];
        for (int v = 0; v < V; ++v) b[v] = dense + indices[n] * block * dense_stride + c + v * W;
        if (blocks.k_stride == 1)
          multiply<C, W, V>(tile, a, blocks.m_stride, 1, b, dense_stride, block);
        else
          multiply<C, W, V>(tile, a, 1, blocks.k_stride, b, dense_stride, block);
      }
      for (int i = 0; i < tile_rows; ++i)
        for (int v = 0; v < V; ++v) store<C, W>(to + i * sum_stride + v * W, tile[i][v]);
    }
  }
  if constexpr (V > 1)
    dsd_columns<C, V - 1>(blocks, dense, dense_stride, indices, count, block, rows, c, last, add, sum, sum_stride);
}

template <class T>
static void dsd(
    const T* values, const int32_t* slots, const Compute<T>* dense, int64_t dense_stride, const int32_t* indices,
    int64_t count, int64_t block, int64_t begin, int64_t end, int64_t width, Compute<T>* sum, int64_t sum_stride,
    Compute<T>* scratch) {
  using C = Compute<T>;
  int64_t rows = end - begin;
  if constexpr (sizeof(T) == sizeof(C)) {
    Blocks<C> blocks = slots ? Blocks<C>{values + begin, slots, block * block, 1, block}
                             : Blocks<C>{values + begin * block, nullptr, block * block, block, 1};
    dsd_columns<C, tile_vectors>(
        blocks, dense, dense_stride, indices, count, block, rows, 0, width, false, sum, sum_stride);
  } else {
    // As many blocks at a time are widened as fit the scratch; the sum goes on in fp32.
    int64_t chunk = dsd_scratch(block, rows) / (block * rows), done = 0;
    do {
      int64_t here = count - done < chunk ? count - done : chunk;
      for (int64_t n = 0; n < here; ++n) {
        C* to = scratch + n * block * rows;
        if (slots)
          pack_rows<T>(values + slots[done + n] * block * block + begin, block, 1, block, rows, to, rows);
        else
          pack_rows<T>(values + (done + n) * block * block + begin * block, block, 1, rows, block, to, block);
      }
      Blocks<C> blocks{scratch, nullptr, block * rows, slots ? 1 : block, slots ? rows : 1};
      dsd_columns<C, tile_vectors>(
          blocks, dense, dense_stride, indices + done, here, block, rows, 0, width, done > 0, sum, sum_stride);
      done += here;
    } while (done < count);
  }
}

template <class T>
static void store_rows(
    const Compute<T>* sum, int64_t sum_stride, int64_t rows, int64_t columns, bool transposed, T* out,
    int64_t out_stride) {
  using C = Compute<T>;
  constexpr int W = native_width<C>;
  if (transposed) {
    transpose<C, W>(sum, sum_stride, rows, columns, out, out_stride);
    return;
  }
  for (int64_t r = 0; r < rows; ++r, sum += sum_stride, out += out_stride) {
    int64_t c = 0;
    for (; c + W <= columns; c += W) store<C, W>(out + c, load<C, W>(sum + c));
    for (; c < columns; ++c) store_one<C>(out + c, sum[c]);
  }
}

}  // namespace ds_sparse::cpu::DS_SPARSE_ISA
