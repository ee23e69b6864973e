// Asked by matmul.cpp, softmax.cpp, attention.cpp, selected.cpp, window.cpp, token.cpp and decode.cpp: the
// arithmetic of one piece of work, on one thread.
//
// kernels.cpp is compiled once for each instruction set, and kernels<T>() picks at run time. T is what tensors hold;
// arithmetic is in Compute<T>. b is the block size throughout.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../compute.h"

namespace ds_sparse {

struct Dropout;

}  // namespace ds_sparse

namespace ds_sparse::cpu {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

// Two neighbouring numbers of a sum, the first in the lower bits: what machines that multiply bf16 take at once.
struct BFloat16Pair {
  uint32_t bits;
};

// Operands of products lie in multiplicands of O, which is Compute<T>, or BFloat16Pair for bf16 where the machine
// multiplies it: how many numbers a multiplicand holds, and of what type. Sums are in Compute<O>.
template <class O>
constexpr int64_t per_multiplicand = 1;
template <>
inline constexpr int64_t per_multiplicand<BFloat16Pair> = 2;
template <class O>
using Number = std::conditional_t<std::is_same_v<O, BFloat16Pair>, BFloat16, O>;

// A byte of a bool mask: what is not zero is kept.
struct Keep {
  uint8_t byte;
};

// The numbers added to the scores of one (batch, head): rpe, attn_mask or a mask of keys.
struct Bias {
  const void* data;    // (T, S); T, Compute<T> or Keep
  int64_t row_stride;  // 0: the same for all token rows
  int64_t column_stride;
  bool is_bool;
  bool is_wide;  // holds Compute<T>
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

// Rows of queries that have chosen for themselves in a row strip; or backward, in a block of the other side.
constexpr int64_t chosen_rows = 16;

// Blocks of keys that queries have chosen for themselves: of query row r, word n / 32 of token r / rows_of_token has
// block n in bit n % 32. Causality goes by positions, the first token's being `offset`.
struct ChosenBlocks {
  const uint32_t* words;
  int64_t words_of_token, rows_of_token, block, offset;

  __attribute__((always_inline)) int64_t position(int64_t row) const { return offset + row / rows_of_token; }
  __attribute__((always_inline)) bool has(int64_t row, int64_t key) const {
    const int64_t number = key / block;
    return words[row / rows_of_token * words_of_token + number / 32] >> number % 32 & 1;
  }
};

// A row strip of attention's scores, of one batch and head: some queries of a block row; or transposed,
// some keys of a block column, and then the rows of its scores are keys and the columns queries.
struct AttentionRowStrip {
  bool transposed;
  int64_t block;
  int64_t depth;                // multiplicands of a query
  int64_t first, rows;          // the first token, and how many; a multiple of 8, perhaps beyond the last
  int64_t row_end, column_end;  // tokens that there are
  double scale, softcap;        // softcap 0: none
  bool causal;
  // Token t sees tokens limits[2 * t] to limits[2 * t + 1] - 1, the first num_global ones see all and are seen by all,
  // and causality goes by the tokens' places; the same for rows and columns. Null: everything, and the tokens' order.
  const int32_t *limits, *places;
  int64_t num_global;
  Bias biases[max_biases];  // strides by the rows and columns here
  int num_biases;
  const Dropout* dropout;  // null: none
  uint32_t matrix;         // dropout's number of the batch and head
  const ChosenBlocks* chosen = nullptr;
};

// Statistics of queries that backward reads, in the order of the row strip's rows or, transposed, of the other side's
// slots: probability = exp(score - row_max) * inverse_sum, and delta is what its gradient has subtracted. With
// inverse_sum and delta 0 a query has no probabilities, whatever its scores are.
template <class C>
struct RowStats {
  const C *row_max, *inverse_sum, *delta;
};

// The operands of a block column's gradients, in multiplicands of O. The other side's blocks lie in slots, each of
// `block` tokens: dense, of `width` numbers that are zero beyond the head's, and as panels of the depth alone. Dense
// rows have multiplicands of neighbouring tokens, other rows of neighbouring numbers.
template <class O>
struct AttentionColumn {
  using C = Compute<O>;

  const O *key, *value;  // the row strip's own, rows of `width` numbers
  const O* dense_key;
  const O *query, *grad_output;  // dense
  const O *query_panels, *grad_output_panels;
  RowStats<C> row_stats;
  int64_t width;
  const int32_t *blocks, *slots;  // the row strip's live blocks, and where they lie
  int64_t count;
  bool spoilt_own;           // whether a number of the row strip's keys or values is not finite
  const bool* spoilt_slots;  // whether one of a slot's queries, of their outputs' gradients or of their deltas is not
  C *grad_key, *grad_value;  // the row strip's own, added to
  C* grad_query;             // by slots, added to
};

// A query and the keys that it sees. Rows here and below have a multiple of `lanes` multiplicands of neighbouring
// numbers, zero where there are none; their sizes are in multiplicands.
template <class O>
struct TokenForward {
  using C = Compute<O>;

  const O *query, *keys, *values;  // values: what is weighted
  int64_t head_dim, value_head_dim;
  const int32_t* list;  // rows of keys and values
  int64_t count;
  C scale;
  C* output;       // (numbers of value_head_dim)
  C* row_max_sum;  // the largest score, -inf without a key, and the sum of exponentials
  C* scratch;      // count, and up to a multiple of lanes
};

// The same query's gradient, and what the keys and values take theirs from.
template <class O>
struct TokenBackward {
  using C = Compute<O>;

  const O *query, *grad_output, *keys, *values;
  int64_t head_dim, value_head_dim;
  const int32_t* list;
  int64_t count;
  C scale;
  C row_max, inverse_sum, delta;  // as in RowStats
  C* grad_query;                  // (numbers of head_dim)
  Number<O>* pairs;               // (count, 2): their probabilities, and the gradients of query . key
};

// Neighbouring heads' queries of one token, and the keys that they see, in place.
template <class T>
struct DecodeRows {
  using C = Compute<T>;

  const T *query, *keys, *values;  // of the first head; of token 0
  int64_t heads, query_stride, key_stride, value_stride, head_dim;
  const int32_t* list;
  int64_t count;
  C scale;
  C *output, *row_max_sums;  // (heads, head_dim up to a multiple of lanes); (heads, 2), as of TokenForward
  C* scratch;                // decode_scratch numbers
};

inline int64_t decode_scratch(int64_t heads, int64_t padded_head_dim, int64_t padded_count) {
  return heads * (padded_head_dim + padded_count);
}

// Scores of a row strip that kernels of attention hold at a time, where its blocks are not larger.
constexpr int64_t attention_tile = 8192;

// Tokens of a block that make a row strip.
constexpr int64_t attention_rows(int64_t block) {
  int64_t rows = block;
  while (rows > 16 && rows * block > attention_tile) rows /= 2;
  return rows;
}

constexpr int64_t attention_scratch(int64_t block) {
  int64_t rows = attention_rows(block);
  return 6 * (rows * block > attention_tile ? rows * block : attention_tile);
}

// Tokens `first` to first + rows - 1 of `tokens`, each with those at most `window` away.
struct WindowRows {
  int64_t tokens, window, first, rows;

  // The tokens that token t is with: begin to end - 1. Inline always, as code of several instruction sets has them.
  __attribute__((always_inline)) int64_t begin(int64_t t) const { return t > window ? t - window : 0; }
  __attribute__((always_inline)) int64_t end(int64_t t) const { return tokens - t > window ? t + window + 1 : tokens; }
};

// A band as a product reads it, in multiplicands of P neighbouring tokens: what row r and token t have lies at
// a[offset + r * row_stride + t / P * multiplicand_stride + t % P]. Both strides are multiples of P.
template <class O>
struct Band {
  const Number<O>* a;
  int64_t offset, row_stride, multiplicand_stride;
};

// Fills in dropout's factors of probabilities, 0 or more than 1: of queries x keys from (query, key) on, to
// out[i * query_stride + j * key_stride]. In attention.cpp, for all instruction sets.
template <class C>
void dropout_factors(
    const Dropout& dropout, uint32_t matrix, int64_t query, int64_t key, int64_t queries, int64_t keys, C* out,
    int64_t query_stride, int64_t key_stride);

// The kernels whose multiplicands are O.
template <class T, class O>
struct Products {
  using C = Compute<T>;

  // x[r, c] -> out[r * out_stride + c], zero from `columns` to out_stride.
  void (*pack_rows)(
      const T* x, int64_t row_stride, int64_t column_stride, int64_t rows, int64_t columns, Number<O>* out,
      int64_t out_stride);

  // The same as dense rows, which have multiplicands of neighbouring rows: out_stride is in multiplicands.
  void (*pack_dense)(
      const T* x, int64_t row_stride, int64_t column_stride, int64_t rows, int64_t columns, O* out, int64_t out_stride);

  // b[k, n] for n < columns -> panels[n / width][k][n % width]: multiplicands of neighbouring k, as many as `depth`
  // numbers fill. b[k, n] is not read, and zero, from `depth` on.
  void (*pack_panels)(
      const T* b, int64_t k_stride, int64_t n_stride, int64_t depth, int64_t columns, int64_t width, O* panels);

  // Tells if all of x[0] to x[count - 1] are finite; count is a multiple of 8, or of 32 for bf16.
  bool (*are_finite)(const Number<O>* x, int64_t count);

  // Before and after calls of the attention_ kernels below, on the thread that makes them.
  void (*begin_attention)();
  void (*end_attention)();

  // The row strip's softmax over `count` live blocks times value, its largest scores and sums of exponentials.
  // query (rows, depth), key_panels and dense value (columns, width) whole, sum (rows, width). spoilt: of all blocks,
  // whether a number of their values is not finite.
  // scratch, here and below: attention_scratch of C.
  void (*attention_forward)(
      const AttentionRowStrip& strip, const O* query, const O* key_panels, const O* value, const bool* spoilt,
      int64_t width, const int32_t* blocks, int64_t count, C* sum, C* top, C* total, C* scratch);

  void (*attention_backward)(const AttentionRowStrip& strip, const AttentionColumn<O>& column, C* scratch);

  // out[r * out_stride + j] += the gradient of what was added to the score of row r and key j.
  void (*attention_bias_backward)(
      const AttentionRowStrip& strip, const O* query, const O* grad_output, const O* key_panels, const O* value_panels,
      const RowStats<C>& row_stats, const int32_t* blocks, int64_t count, C* out, int64_t out_stride, C* scratch);

  // out[n] = a @ panels of columns[n], n < count; a (rows, depth) with unit column stride, out[n] (rows, b).
  void (*sdd)(
      const O* a, int64_t a_stride, int64_t rows, const O* panels, const int32_t* columns, int64_t count, int64_t block,
      int64_t depth, T* out);

  // sum[r - begin, :] = sum over n < count of row r of block n (of its transpose, if slots) times dense rows of block
  // indices[n]; block n is values[slots ? slots[n] : n]. dense and sum have `width` columns, a multiple of lanes.
  // scratch: dsd_scratch of O.
  void (*dsd)(
      const T* values, const int32_t* slots, const O* dense, int64_t dense_stride, const int32_t* indices,
      int64_t count, int64_t block, int64_t begin, int64_t end, int64_t width, C* sum, int64_t sum_stride, O* scratch);

  // out[n] = own . row list[n] of rows, n < count; out has room up to a multiple of lanes.
  void (*token_dots)(const O* own, const O* rows, int64_t head_dim, const int32_t* list, int64_t count, C* out);

  // sum = the sum over n < count of weights[n], or weights[slots[n] * slot_stride], times row list[n] of rows.
  void (*token_sum)(
      const Number<O>* weights, const int32_t* slots, int64_t slot_stride, const O* rows, int64_t head_dim,
      const int32_t* list, int64_t count, C* sum);

  void (*token_attention_forward)(const TokenForward<O>& work);

  void (*token_attention_backward)(const TokenBackward<O>& work);

  // The rows' band, 2 * window + 1 numbers each: a (rows to a multiple of 16, depth) by tokens, of which all are in
  // panels of `lanes`; depth in multiplicands.
  void (*window_matmul)(const WindowRows& rows, const O* a, const O* panels, int64_t depth, T* band);

  // output[r] = sum over tokens t of the row's window of band(r, t) * dense[t]; dense and output have `width` columns,
  // a multiple of lanes, and dense rows multiplicands of neighbouring tokens.
  void (*unwindow_matmul)(const WindowRows& rows, const Band<O>& band, const O* dense, int64_t width, C* output);
};

template <class T>
struct Kernels {
  using C = Compute<T>;

  Products<T, C> products;

  // Width of the panels that matmul_sdd's right operand is packed into, and multiple that rows are padded to.
  int64_t (*panel_width)(int64_t block);
  int64_t lanes;

  // x[r, c] -> out[r * out_stride + c], zero from `columns` to out_stride.
  void (*pack_rows)(
      const T* x, int64_t row_stride, int64_t column_stride, int64_t rows, int64_t columns, C* out, int64_t out_stride);

  // sum (rows, columns) -> out[r * out_stride + c], or out[c * out_stride + r] if transpose.
  void (*store_rows)(
      const C* sum, int64_t sum_stride, int64_t rows, int64_t columns, bool transpose, T* out, int64_t out_stride);

  // scratch: (1 + num_biases) * count * b of C.
  void (*softmax_forward)(const SoftmaxRows<T>& rows, C* scratch);

  // out = scale * probs * (grad - sum of grad * probs over the row), for rows begin to end of a block row of `count`
  // blocks.
  void (*softmax_backward)(
      const T* grad, const T* probs, T* out, int64_t count, int64_t block, int64_t begin, int64_t end, double scale);

  // sums[r * stride + c] += values[r, c]; stride 0 sums the rows of the block.
  void (*add_block)(const T* values, int64_t block, double* sums, int64_t stride);

  // out[r] = a[r] . b[r], rows of `columns` numbers.
  void (*row_dots)(
      const T* a, int64_t a_stride, int64_t a_column_stride, const T* b, int64_t b_stride, int64_t b_column_stride,
      int64_t rows, int64_t columns, C* out);

  // Softmax of each row of the band over the tokens at most `window` away, with causal none after the row's.
  // key_bias: null, or of all tokens. scratch: 2 * window + 1 of C, to a multiple of lanes.
  void (*window_softmax_forward)(
      const WindowRows& rows, const T* band, const C* key_bias, int64_t window, double scale, bool causal, T* probs,
      C* scratch);

  // out = scale * probs * (grad - sum of grad * probs over the row), of `count` rows of `width` numbers.
  void (*window_softmax_backward)(const T* grad, const T* probs, int64_t count, int64_t width, double scale, T* out);

  void (*decode_attention)(const DecodeRows<T>& work);

  // Tells if x[n] is 0 or more and below limit, for all n < count.
  bool (*are_below)(const int32_t* x, int64_t count, int32_t limit);
};

inline int64_t dsd_scratch(int64_t block, int64_t rows) {
  constexpr int64_t chunk = 16384;
  return block * rows > chunk ? block * rows : chunk;
}

template <class T>
const Kernels<T>& kernels();

// Null where the machine does not multiply bf16.
const Products<BFloat16, BFloat16Pair>* bf16_products();

template <class T, class O>
const Products<T, O>& products() {
  if constexpr (std::is_same_v<O, BFloat16Pair>)
    return *bf16_products();
  else
    return kernels<T>().products;
}

}  // namespace ds_sparse::cpu
