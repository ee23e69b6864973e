// Matrix products of blocks: tiles of some rows and up to `tile_vectors` vectors stay in registers over the whole sum.
//
// Operands are multiplicands of O (kernels.h): depths, and the strides between them, are counted in these.
#pragma once

#include "vec.h"

namespace ds_sparse::cpu::DS_SPARSE_ISA {

constexpr int tile_rows = 4;
#if defined(__AVX512F__)
constexpr int tile_vectors = 4;
#else
constexpr int tile_vectors = 2;
#endif

// A tile of the result: `rows` rows of V vectors of W numbers, in registers while multiplicands of O are multiplied.
template <class O, int W, int V>
struct Tile {
  using C = Compute<O>;
  static constexpr int rows = tile_rows, depth_multiple = 1;

  Vec<C, W> sums[rows][V];

  DS_SPARSE_INLINE_MEMBER void clear() {
    for (int m = 0; m < rows; ++m)
      for (int v = 0; v < V; ++v) sums[m][v] = Vec<C, W>{};
  }

  DS_SPARSE_INLINE_MEMBER void load(const C* from, int64_t stride) {
    for (int m = 0; m < rows; ++m)
      for (int v = 0; v < V; ++v) sums[m][v] = cpu::DS_SPARSE_ISA::load<C, W>(from + m * stride + v * W);
  }

  // += a @ b over `depth` multiplicands; a[m * m_stride + k * k_stride]; vector v of row k is b[v] + k * b_stride.
  DS_SPARSE_INLINE_MEMBER void multiply(
      const O* a, int64_t m_stride, int64_t k_stride, const O* const (&b)[V], int64_t b_stride, int64_t depth) {
#pragma GCC unroll 2
    for (int64_t k = 0; k < depth; ++k) {
      Multiplicands<O, W> right[V];
      for (int v = 0; v < V; ++v) right[v] = load_raw<Multiplicands<O, W>>(b[v] + k * b_stride);
      for (int m = 0; m < rows; ++m) {
        // Pairs may lie at any address of a number.
        O left = load_raw<O>(a + m * m_stride + k * k_stride);
        for (int v = 0; v < V; ++v) sums[m][v] = multiply_add(left, right[v], sums[m][v]);
      }
    }
  }

  // Vector v of row m to out[v] + m * stride.
  template <class T>
  DS_SPARSE_INLINE_MEMBER void store(T* const (&out)[V], int64_t stride) const {
    for (int m = 0; m < rows; ++m)
      for (int v = 0; v < V; ++v) cpu::DS_SPARSE_ISA::store<C, W>(out[v] + m * stride, sums[m][v]);
  }
};

// Around products, which a machine with tiles makes ready for and cleans up after.
template <class O>
static inline void begin_products() {}
template <class O>
static inline void end_products() {}

// to[c * to_stride + r] = pair c of row r for c < columns, zero for r from `rows` to 15; both at most 16.
DS_SPARSE_INLINE void transpose_pairs(
    const BFloat16* from, int64_t stride, int64_t rows, int64_t columns, BFloat16Pair* to, int64_t to_stride) {
  Vec<float, 16> square[16] = {};
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r)
    if (r < rows) square[r] = load_raw<Vec<float, 16>>(from + r * stride);
  transpose_square<float, 16>(square);
#pragma GCC unroll 16
  for (int c = 0; c < 16; ++c)
    if (c < columns) memcpy(to + c * to_stride, &square[c], sizeof(square[c]));
}

}  // namespace ds_sparse::cpu::DS_SPARSE_ISA

#if defined(DS_SPARSE_TILES)
#include "tiles.h"
#endif

namespace ds_sparse::cpu::DS_SPARSE_ISA {

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

// Rows as they are.
static inline void copy_rows(
    const BFloat16* x, int64_t row_stride, int64_t column_stride, int64_t rows, int64_t columns, BFloat16* out,
    int64_t out_stride) {
  for (int64_t r = 0; r < rows; ++r, out += out_stride) {
    const BFloat16* from = x + r * row_stride;
    if (column_stride == 1)
      memcpy(out, from, columns * sizeof(*out));
    else
      for (int64_t c = 0; c < columns; ++c) out[c] = from[c * column_stride];
    memset(out + columns, 0, (out_stride - columns) * sizeof(*out));
  }
}

// Columns whose numbers follow each other, 16 at a time: the first `columns` / 16 * 16, of rows r and r + 1 side by
// side.
static inline void pair_rows_of_columns(
    const BFloat16* x, int64_t column_stride, int64_t rows, int64_t columns, BFloat16Pair* out, int64_t out_stride) {
  for (int64_t c = 0; c + 16 <= columns; c += 16, x += 16 * column_stride) {
    int64_t r = 0;
    for (; r + 32 <= rows; r += 32)
      transpose_pairs(x + r, column_stride, 16, 16, out + r / 2 * out_stride + c, out_stride);
    if (r == rows) continue;
    BFloat16 rest[16 * 32];
    copy_rows(x + r, column_stride, 1, 16, rows - r, rest, 32);
    transpose_pairs(rest, 32, 16, (rows - r + 1) / 2, out + r / 2 * out_stride + c, out_stride);
  }
}

// Rows r and r + 1 side by side; 0 beyond the columns, and for a row that is not there.
static inline void pair_rows(
    const BFloat16* x, int64_t row_stride, int64_t column_stride, int64_t rows, int64_t columns, BFloat16Pair* out,
    int64_t out_stride) {
  constexpr int W = native_width<float>;
  using V = Vec<uint32_t, W>;
  bool by_columns = row_stride == 1 && column_stride != 1;
  if (by_columns) pair_rows_of_columns(x, column_stride, rows, columns, out, out_stride);
  for (int64_t r = 0; r < rows; r += 2, x += 2 * row_stride, out += out_stride) {
    uint32_t both = r + 1 < rows ? 0xffffffff : 0xffff;
    const BFloat16* next = r + 1 < rows ? x + row_stride : x;
    int64_t c = by_columns ? columns / 16 * 16 : 0;
    for (; column_stride == 1 && c + W <= columns; c += W) {
      auto low = __builtin_convertvector((load_raw<Vec<uint16_t, W>>(x + c)), V),
           high = __builtin_convertvector((load_raw<Vec<uint16_t, W>>(next + c)), V);
      V pairs = (low | high << 16) & both;
      memcpy(out + c, &pairs, sizeof(pairs));
    }
    for (; c < columns; ++c) {
      uint32_t low = x[c * column_stride].bits, high = next[c * column_stride].bits;
      out[c].bits = (low | high << 16) & both;
    }
    memset(out + c, 0, (out_stride - c) * sizeof(*out));
  }
}

// Panels of 16 columns, with multiplicands up to a multiple of 16 numbers.
static inline void pack_pair_panels(
    const BFloat16* b, int64_t k_stride, int64_t n_stride, int64_t depth, int64_t columns, int64_t width,
    BFloat16Pair* panels) {
  int64_t multiplicands = (depth + 15) / 16 * 8, written = (depth + 1) / 2;
  for (int64_t n = 0; n < columns; n += width, b += width * n_stride, panels += multiplicands * width) {
    pair_rows(b, k_stride, n_stride, depth, width, panels, width);
    memset(panels + written * width, 0, (multiplicands - written) * width * sizeof(*panels));
  }
}

// Tells if all numbers, which are 0 or NaN, are 0.
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

static inline bool are_finite_bf16(const BFloat16* x, int64_t count) {
  constexpr int W = 32;
  Vec<uint16_t, W> found{};
  for (int64_t i = 0; i < count; i += W) {
    auto exponents = load_raw<Vec<uint16_t, W>>(x + i) & 0x7f80;
    found |= exponents == 0x7f80 ? Vec<uint16_t, W>{} + 1 : Vec<uint16_t, W>{};
  }
  auto words = bit_cast<Vec<uint64_t, W / 4>>(found);
  uint64_t any = 0;
  for (int i = 0; i < W / 4; ++i) any |= words[i];
  return any == 0;
}

// V panels, which may belong to different blocks: panel v is at b[v], its columns of the result at out[v].
template <class O, class T, int W, int V>
static void sdd_panels(
    const O* a, int64_t a_stride, int64_t rows, const O* const (&b)[V], T* const (&out)[V], int64_t block,
    int64_t depth) {
  using OneTile = Tile<O, W, V>;
  for (int64_t m = 0; m < rows; m += OneTile::rows) {
    OneTile tile;
    tile.clear();
    tile.multiply(a + m * a_stride, a_stride, 1, b, W, depth);
    T* to[V];
    for (int v = 0; v < V; ++v) to[v] = out[v] + m * block;
    tile.store(to, block);
  }
}

template <class O, class T, int W, int V>
static void sdd_of(
    const O* a, int64_t a_stride, int64_t rows, const O* panels, const int32_t* columns, int64_t first, int64_t last,
    int64_t block, int64_t depth, T* out) {
  int64_t per_block = block / W, p = first;
  for (; p + V <= last; p += V) {
    const O* b[V];
    T* to[V];
    for (int v = 0; v < V; ++v) {
      int64_t n = (p + v) / per_block, part = (p + v) % per_block;
      b[v] = panels + (columns[n] * per_block + part) * depth * W;
      to[v] = out + n * rows * block + part * W;
    }
    sdd_panels<O, T, W, V>(a, a_stride, rows, b, to, block, depth);
  }
  if constexpr (V > 1) sdd_of<O, T, W, V - 1>(a, a_stride, rows, panels, columns, p, last, block, depth, out);
}

template <class O, class T>
static void sdd(
    const O* a, int64_t a_stride, int64_t rows, const O* panels, const int32_t* columns, int64_t count, int64_t block,
    int64_t depth, T* out) {
  constexpr int W = native_width<Compute<O>>;
  if (block >= W)
    sdd_of<O, T, W, tile_vectors>(a, a_stride, rows, panels, columns, 0, count * (block / W), block, depth, out);
  else if constexpr (per_multiplicand<O> == 1)
    sdd_of<O, T, 8, tile_vectors>(a, a_stride, rows, panels, columns, 0, count * (block / 8), block, depth, out);
}

// Blocks as the product reads them: multiplicand (m, k) of block n is at
// a[n * block_stride + m * m_stride + k * k_stride].
template <class O>
struct Blocks {
  const O* a;
  const int32_t* slots;
  int64_t block_stride;
  int64_t m_stride, k_stride;
};

// depth: multiplicands of a block.
template <class O, int V>
static void dsd_columns(
    const Blocks<O>& blocks, const O* dense, int64_t dense_stride, const int32_t* indices, int64_t count, int64_t depth,
    int64_t rows, int64_t first, int64_t last, bool add, Compute<O>* sum, int64_t sum_stride) {
  constexpr int W = native_width<Compute<O>>;
  using OneTile = Tile<O, W, V>;
  int64_t c = first;
  for (; c + V * W <= last; c += V * W) {
    for (int64_t m = 0; m < rows; m += OneTile::rows) {
      Compute<O>* to[V];
      for (int v = 0; v < V; ++v) to[v] = sum + m * sum_stride + c + v * W;
      OneTile tile;
      if (add)
        tile.load(to[0], sum_stride);
      else
        tile.clear();
      for (int64_t n = 0; n < count; ++n) {
        const O* a = blocks.a + (blocks.slots ? blocks.slots[n] : n) * blocks.block_stride + m * blocks.m_stride;
        const O* b[V];
        for (int v = 0; v < V; ++v) b[v] = dense + indices[n] * depth * dense_stride + c + v * W;
        if (blocks.k_stride == 1)
          tile.multiply(a, blocks.m_stride, 1, b, dense_stride, depth);
        else
          tile.multiply(a, 1, blocks.k_stride, b, dense_stride, depth);
      }
      tile.store(to, sum_stride);
    }
  }
  if constexpr (V > 1)
    dsd_columns<O, V - 1>(blocks, dense, dense_stride, indices, count, depth, rows, c, last, add, sum, sum_stride);
}

// The products of matmul.cpp, whole.
template <class T, class O>
static void matmul_sdd(
    const O* a, int64_t a_stride, int64_t rows, const O* panels, const int32_t* columns, int64_t count, int64_t block,
    int64_t depth, T* out) {
  begin_products<O>();
  sdd(a, a_stride, rows, panels, columns, count, block, depth, out);
  end_products<O>();
}

// Rows of blocks as they lie in memory are multiplicands of it, and columns where a multiplicand is one number.
template <class T, class O>
constexpr bool has_multiplicands(bool by_columns) {
  return sizeof(T) == sizeof(Number<O>) && !(by_columns && per_multiplicand<O> > 1);
}

// Some rows of a block, or of its transpose, as multiplicands of O.
template <class T, class O>
static void pack_block(const T* block_values, int64_t block, int64_t begin, int64_t rows, bool by_columns, O* to) {
  if constexpr (per_multiplicand<O> > 1)
    pair_rows(block_values + begin, block, 1, block, rows, to, rows);
  else if (by_columns)
    pack_rows<T>(block_values + begin, block, 1, block, rows, to, rows);
  else
    pack_rows<T>(block_values + begin * block, block, 1, rows, block, to, block);
}

template <class T, class O>
static void matmul_dsd(
    const T* values, const int32_t* slots, const O* dense, int64_t dense_stride, const int32_t* indices, int64_t count,
    int64_t block, int64_t begin, int64_t end, int64_t width, Compute<O>* sum, int64_t sum_stride, O* scratch) {
  int64_t rows = end - begin, depth = block / per_multiplicand<O>, size = block * depth;
  auto add = [&](const Blocks<O>& blocks, int64_t done, int64_t here) {
    dsd_columns<O, tile_vectors>(
        blocks, dense, dense_stride, indices + done, here, depth, rows, 0, width, done > 0, sum, sum_stride);
  };
  begin_products<O>();
  if (has_multiplicands<T, O>(slots)) {
    const O* multiplicands = reinterpret_cast<const O*>(values);
    add(slots ? Blocks<O>{multiplicands + begin, slots, size, 1, block}
              : Blocks<O>{multiplicands + begin * depth, nullptr, size, depth, 1},
        0, count);
  } else {
    // As many blocks at a time are packed as fit the scratch; the sum goes on in C.
    int64_t chunk = dsd_scratch(block, rows) / (depth * rows), done = 0;
    do {
      int64_t here = count - done < chunk ? count - done : chunk;
      for (int64_t n = 0; n < here; ++n) {
        int64_t number = slots ? slots[done + n] : done + n;
        pack_block<T, O>(values + number * block * block, block, begin, rows, slots, scratch + n * depth * rows);
      }
      add({scratch, nullptr, depth * rows, slots ? 1 : depth, slots ? rows : 1}, done, here);
      done += here;
    } while (done < count);
  }
  end_products<O>();
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
