// Softmax and its gradients, a token row at a time over the live blocks of its block row.
#pragma once

#include "../bias.h"
#include "vec.h"

namespace ds_sparse::cpu::DS_SPARSE_ISA {

// Adds without turning a sum of finite numbers into -inf; -inf on either side stays -inf, whatever the other is.
template <class C, int W>
DS_SPARSE_INLINE Vec<C, W> add_bias(Vec<C, W> x, Vec<C, W> bias) {
  auto sum = x + bias;
  sum = sum < lowest<C> ? broadcast<C, W>(lowest<C>) : sum;
  sum = x == -infinity<C> ? x : sum;
  return bias == -infinity<C> ? bias : sum;
}

// A bias, or the sum of some, that counts as no lower than the lowest.
template <class C, int W>
DS_SPARSE_INLINE Vec<C, W> raised(Vec<C, W> bias) {
  return (bias < kLowestBias<C>)&(bias != -infinity<C>) ? broadcast<C, W>(kLowestBias<C>) : bias;
}

// scale * x, where no finite number becomes -inf.
template <class C, int W>
DS_SPARSE_INLINE Vec<C, W> scaled_scores(Vec<C, W> x, C scale) {
  Vec<C, W> scaled = x * scale;
  auto overflowed = (scaled < lowest<C>)&(x - x == 0);
  return overflowed ? broadcast<C, W>(lowest<C>) : scaled;
}

// Exponentials in place of a row's scores, a multiple of W of them, and 1 over their sum: 0 where nothing is left.
template <class C, int W>
DS_SPARSE_INLINE C softmax_in_place(C* row, int64_t length) {
  using V = Vec<C, W>;
  V largest = broadcast<C, W>(-infinity<C>);
  for (int64_t c = 0; c < length; c += W) {
    V x = load<C, W>(row + c);
    largest = x > largest ? x : largest;
  }
  C top = max_lanes<C, W>(largest);
  // With nothing left (and no NaN) every exponential, and the sum, is 0.
  if (top == -infinity<C>) top = 0;
  V sums{};
  for (int64_t c = 0; c < length; c += W) {
    V e = exp_nonpositive<C, W>(load<C, W>(row + c) - top);
    store<C, W>(row + c, e);
    sums += e;
  }
  C sum = sum_lanes<C, W>(sums);
  return sum == 0 ? C(0) : 1 / sum;
}

// One row of a bias over the live blocks; -inf where a bool one drops.
template <class T, int W>
static void read_bias(
    const Bias& bias, int64_t token, const int32_t* columns, int64_t count, int64_t block, Compute<T>* out) {
  using C = Compute<T>;
  for (int64_t n = 0; n < count; ++n, out += block) {
    int64_t offset = token * bias.row_stride + columns[n] * block * bias.column_stride;
    if (bias.is_bool) {
      const Keep* keep = static_cast<const Keep*>(bias.data) + offset;
      if (bias.column_stride == 1)
        for (int64_t c = 0; c < block; c += W) store<C, W>(out + c, load<C, W>(keep + c));
      else
        for (int64_t c = 0; c < block; ++c) out[c] = keep[c * bias.column_stride].byte ? C(0) : -infinity<C>;
    } else {
      const T* from = static_cast<const T*>(bias.data) + offset;
      if (bias.column_stride == 1)
        for (int64_t c = 0; c < block; c += W) store<C, W>(out + c, load<C, W>(from + c));
      else
        for (int64_t c = 0; c < block; ++c) out[c] = load_one<C>(from + c * bias.column_stride);
    }
  }
}

template <class T, int W>
static void softmax_forward_of(const SoftmaxRows<T>& rows, Compute<T>* scratch) {
  using C = Compute<T>;
  using V = Vec<C, W>;
  int64_t block = rows.block, length = rows.count * block;
  C* row = scratch;
  C scale = C(rows.scale);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    int64_t token = rows.row * block + r;
    for (int64_t n = 0; n < rows.count; ++n) {
      const T* scores = rows.scores + (n * block + r) * block;
      for (int64_t c = 0; c < block; c += W)
        store<C, W>(row + n * block + c, scaled_scores<C, W>(load<C, W>(scores + c), scale));
    }
    for (int i = 0; i < rows.num_biases; ++i) {
      if (r == rows.begin || rows.biases[i].row_stride != 0)
        read_bias<T, W>(rows.biases[i], token, rows.columns, rows.count, block, scratch + (i + 1) * length);
    }
    for (int64_t c = 0; rows.num_biases > 0 && c < length; c += W) {
      V sum = raised<C, W>(load<C, W>(scratch + length + c));
      for (int i = 1; i < rows.num_biases; ++i)
        sum = add_bias<C, W>(sum, raised<C, W>(load<C, W>(scratch + (i + 1) * length + c)));
      store<C, W>(row + c, add_bias<C, W>(load<C, W>(row + c), raised<C, W>(sum)));
    }
    if (rows.causal) {
      for (int64_t n = 0; n < rows.count; ++n) {
        int64_t seen = token + 1 - rows.columns[n] * block;
        for (int64_t c = seen < 0 ? 0 : seen; c < block; ++c) row[n * block + c] = -infinity<C>;
      }
    }
    C inverse = softmax_in_place<C, W>(row, length);
    for (int64_t n = 0; n < rows.count; ++n) {
      T* probs = rows.probs + (n * block + r) * block;
      for (int64_t c = 0; c < block; c += W) store<C, W>(probs + c, V(load<C, W>(row + n * block + c) * inverse));
    }
  }
}

template <class T>
static void softmax_forward(const SoftmaxRows<T>& rows, Compute<T>* scratch) {
  constexpr int W = native_width<Compute<T>>;
  if (rows.block >= W)
    softmax_forward_of<T, W>(rows, scratch);
  else
    softmax_forward_of<T, 8>(rows, scratch);
}

// A row of softmax's gradients where a gradient of its probabilities is not finite, in `runs` runs of `length` numbers:
// those of probabilities that are 0, as of masked scores, do not count.
template <class T>
static __attribute__((noinline)) void spoilt_softmax_backward(
    const T* grad, const T* probs, T* out, int64_t runs, int64_t length, int64_t stride, double scale) {
  using C = Compute<T>;
  C sum = 0;
  for (int64_t n = 0; n < runs; ++n)
    for (int64_t at = n * stride; at < n * stride + length; ++at) {
      C prob = load_one<C>(probs + at);
      if (prob != 0) sum += prob * load_one<C>(grad + at);
    }
  for (int64_t n = 0; n < runs; ++n)
    for (int64_t at = n * stride; at < n * stride + length; ++at) {
      C prob = load_one<C>(probs + at);
      store_one<C>(out + at, prob == 0 ? C(0) : C(scale) * prob * (load_one<C>(grad + at) - sum));
    }
}

template <class C>
DS_SPARSE_INLINE bool is_finite(C x) {
  return x - x == 0;
}

template <class T, int W>
static void softmax_backward_of(
    const T* grad, const T* probs, T* out, int64_t count, int64_t block, int64_t begin, int64_t end, double factor) {
  using C = Compute<T>;
  using V = Vec<C, W>;
  C scale = C(factor);
  for (int64_t r = begin; r < end; ++r) {
    V sums{};
    for (int64_t n = 0; n < count; ++n) {
      int64_t at = (n * block + r) * block;
      for (int64_t c = at; c < at + block; c += W) sums += load<C, W>(grad + c) * load<C, W>(probs + c);
    }
    C sum = sum_lanes<C, W>(sums);
    if (!is_finite(sum)) {
      int64_t at = r * block;
      spoilt_softmax_backward<T>(grad + at, probs + at, out + at, count, block, block * block, factor);
      continue;
    }
    for (int64_t n = 0; n < count; ++n) {
      int64_t at = (n * block + r) * block;
      for (int64_t c = at; c < at + block; c += W)
        store<C, W>(out + c, V(scale * load<C, W>(probs + c) * (load<C, W>(grad + c) - sum)));
    }
  }
}

template <class T>
static void softmax_backward(
    const T* grad, const T* probs, T* out, int64_t count, int64_t block, int64_t begin, int64_t end, double scale) {
  constexpr int W = native_width<Compute<T>>;
  if (block >= W)
    softmax_backward_of<T, W>(grad, probs, out, count, block, begin, end, scale);
  else
    softmax_backward_of<T, 8>(grad, probs, out, count, block, begin, end, scale);
}

template <class T, int W>
static void add_block_of(const T* values, int64_t block, double* sums, int64_t stride) {
  using C = Compute<T>;
  auto wide = [](const T* from) { return __builtin_convertvector((load<C, W>(from)), Vec<double, W>); };
  for (int64_t c = 0; c < block; c += W) {
    if (stride == 0) {
      Vec<double, W> sum = load_raw<Vec<double, W>>(sums + c);
      for (int64_t r = 0; r < block; ++r) sum += wide(values + r * block + c);
      store<double, W>(sums + c, sum);
    } else {
      for (int64_t r = 0; r < block; ++r) {
        double* to = sums + r * stride + c;
        store<double, W>(to, load<double, W>(to) + wide(values + r * block + c));
      }
    }
  }
}

template <class T>
static void add_block(const T* values, int64_t block, double* sums, int64_t stride) {
  add_block_of<T, 8>(values, block, sums, stride);
}

template <class T>
static void row_dots(
    const T* a, int64_t a_stride, int64_t a_column_stride, const T* b, int64_t b_stride, int64_t b_column_stride,
    int64_t rows, int64_t columns, Compute<T>* out) {
  using C = Compute<T>;
  constexpr int W = native_width<C>;
  for (int64_t r = 0; r < rows; ++r, a += a_stride, b += b_stride) {
    Vec<C, W> sums{};
    int64_t c = 0;
    if (a_column_stride == 1 && b_column_stride == 1)
      for (; c + W <= columns; c += W) sums += load<C, W>(a + c) * load<C, W>(b + c);
    C rest = 0;
    for (; c < columns; ++c) rest += load_one<C>(a + c * a_column_stride) * load_one<C>(b + c * b_column_stride);
    out[r] = sum_lanes<C, W>(sums) + rest;
  }
}

}  // namespace ds_sparse::cpu::DS_SPARSE_ISA
