// What matmul.cpp and softmax.cpp ask of an instruction set: the arithmetic of one piece of work, on one thread.
//
// kernels.cpp is compiled once for each instruction set, and kernels<T>() picks at run time. T is what tensors hold;
// arithmetic is in Compute<T>. b is the block size throughout.
#pragma once

#include <cstdint>

#include "../compute.h"

namespace ds_sparse::cpu {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

// What is added to the scores of one (batch, head): rpe, attn_mask or key_padding_mask.
struct Bias {
  const void* data;    // (T, S); T, or bool bytes that keep where not zero
  int64_t row_stride;  // 0: the same for all token rows
  int64_t column_stride;
  bool is_bool;
};

constexpr int max_biases = 3;

template <class T>
struct SoftmaxRows {
  const T* scores;         // the first live block of this block row; `count` blocks follow each other
  T* probs;                // the same of the result
  const int32_t* columns;  // their block columns
  int64_t count;
  int64_t block;
  int64_t row;         // block row
  int64_t begin, end;  // rows of the block to do
  double scale;
  bool causal;
  Bias biases[max_biases];
  int num_biases;
};

template <class T>
struct Kernels {
  using C = Compute<T>;

  // Width of the panels that matmul_sdd's right operand is packed into, and multiple that rows are padded to.
  int64_t (*panel_width)(int64_t block);
  int64_t lanes;

  // b[k, n] for n < columns -> panels[n / width][k][n % width].
  void (*pack_panels)(const T* b, int64_t k_stride, int64_t n_stride, int64_t depth, int64_t columns, int64_t width,
                      C* panels);

  // x[r, c] -> out[r * out_stride + c], zero from `columns` to out_stride.
  void (*pack_rows)(const T* x, int64_t row_stride, int64_t column_stride, int64_t rows, int64_t columns, C* out,
                    int64_t out_stride);

  // out[n] = a @ panels of columns[n], n < count; a (b, depth) with unit column stride.
  void (*sdd)(const C* a, int64_t a_stride, const C* panels, const int32_t* columns, int64_t count, int64_t block,
              int64_t depth, T* out);

  // sum[r - begin, :] = sum over n < count of row r of block n (of its transpose, if slots) times dense rows of block
  // indices[n]; block n is values[slots ? slots[n] : n]. dense and sum have `width` columns, a multiple of lanes.
  // scratch: dsd_scratch of C.
  void (*dsd)(const T* values, const int32_t* slots, const C* dense, int64_t dense_stride, const int32_t* indices,
              int64_t count, int64_t block, int64_t begin, int64_t end, int64_t width, C* sum, int64_t sum_stride,
              C* scratch);

  // sum (rows, columns) -> out[r * out_stride + c], or out[c * out_stride + r] if transpose.
  void (*store_rows)(const C* sum, int64_t sum_stride, int64_t rows, int64_t columns, bool transpose, T* out,
                     int64_t out_stride);

  // scratch: (1 + num_biases) * count * b of C.
  void (*softmax_forward)(const SoftmaxRows<T>& rows, C* scratch);

  // out = scale * probs * (grad - sum of grad * probs over the row), for rows begin to end of a block row of `count`
  // blocks.
  void (*softmax_backward)(const T* grad, const T* probs, T* out, int64_t count, int64_t block, int64_t begin,
                           int64_t end, double scale);

  // sums[r * stride + c] += values[r, c]; stride 0 sums the rows of the block.
  void (*add_block)(const T* values, int64_t block, double* sums, int64_t stride);
};

inline int64_t dsd_scratch(int64_t block, int64_t rows) {
  constexpr int64_t chunk = 16384;
  return block * rows > chunk ? block * rows : chunk;
}

template <class T>
const Kernels<T>& kernels();

}  // namespace ds_sparse::cpu
