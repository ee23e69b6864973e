// Tokens of (B, H, T, D) operands as kernels read them, in Compute<T>, and their results back.
#pragma once

#include <algorithm>
#include <type_traits>

#include "arguments.h"
#include "memory.h"
#include "schedule.h"

namespace ds_sparse::cpu {

inline int64_t blocks_of(int64_t tokens, int64_t block) { return (tokens + block - 1) / block; }

// `count` up to a multiple of `kernel.lanes`.
template <class T>
int64_t padded(int64_t count) {
  int64_t lanes = kernels<T>().lanes;
  return blocks_of(count, lanes) * lanes;
}

// Calls f with a null pointer of the multiplicands that products of T multiply on this machine.
template <class T, class F>
void for_multiplicands(const F& f) {
  if constexpr (std::is_same_v<T, BFloat16>)
    if (bf16_products()) return f(static_cast<BFloat16Pair*>(nullptr));
  f(static_cast<Compute<T>*>(nullptr));
}

// Calls f with null pointers of the type that holds the dtype's numbers, and of the multiplicands that products of it
// multiply.
template <class F>
void for_operands(ScalarType dtype, const F& f) {
  for_dtype(dtype, [&](auto* type) {
    for_multiplicands<std::remove_pointer_t<decltype(type)>>([&](auto* multiplicand) { f(type, multiplicand); });
  });
}

// The multiplicands of attention and products on blocks, which have to be as wide as a vector of multiplicands.
template <class T, class F>
void for_multiplicands(int64_t block, const F& f) {
  if (block < 16) return f(static_cast<Compute<T>*>(nullptr));
  for_multiplicands<T>(f);
}

// While it lives, the thread that made it may call the kernels of attention.
template <class T, class O>
struct InAttention {
  InAttention() { products<T, O>().begin_attention(); }
  InAttention(const InAttention&) = delete;
  ~InAttention() { products<T, O>().end_attention(); }
};

// Multiplicands of O of `depth` numbers of T: as many as there are, or up to a multiple of lanes.
template <class T, class O>
int64_t multiplicands_of(int64_t depth) {
  return per_multiplicand<O> == 1 ? depth : padded<T>(depth) / per_multiplicand<O>;
}

// Tells if all numbers of `count` multiplicands are finite.
template <class T, class O>
bool are_finite(const O* x, int64_t count) {
  return products<T, O>().are_finite(reinterpret_cast<const Number<O>*>(x), count * per_multiplicand<O>);
}

// Sizes and strides of a (B, H, T, D) tensor, asked once: an answer goes through libtorch's C functions, and a row
// strip needs some twenty. It may stand for the tensor below. Only results are written to, which are new.
class View {
 public:
  explicit View(const Tensor& x) : data_(x.const_data_ptr()) {
    for (int64_t i = 0; i < 4; ++i) {
      sizes_[i] = x.size(i);
      strides_[i] = x.stride(i);
    }
  }
  const void* const_data_ptr() const { return data_; }
  void* mutable_data_ptr() const { return const_cast<void*>(data_); }
  int64_t size(int64_t dim) const { return sizes_[dim]; }
  int64_t stride(int64_t dim) const { return strides_[dim]; }

 private:
  const void* data_;
  int64_t sizes_[4], strides_[4];
};

// The tokens of x[b, head] from `first` on.
template <class T, class X>
const T* tokens_of(const X& x, int64_t b, int64_t head, int64_t first) {
  return static_cast<const T*>(x.const_data_ptr()) + b * x.stride(0) + head * x.stride(1) + first * x.stride(2);
}

template <class T, class X>
T* mutable_tokens_of(const X& x, int64_t b, int64_t head, int64_t first) {
  return static_cast<T*>(x.mutable_data_ptr()) + b * x.stride(0) + head * x.stride(1) + first * x.stride(2);
}

// Tells if tokens of x (B, H, tokens, D) lie in memory as rows of `width` multiplicands, one after another: rows that
// lie apart would meet in a few sets of the cache.
template <class T, class O>
bool has_rows(const Tensor& x, int64_t width) {
  return std::is_same_v<T, Number<O>> && x.size(3) == width * per_multiplicand<O> && x.stride(3) == 1 &&
         x.stride(2) == x.size(3);
}

// `rows` tokens of x[b, head] from `first` on as rows of `width` multiplicands, zero beyond the tokens and numbers
// there are.
template <class T, class X, class O>
void pack_tokens(const X& x, int64_t b, int64_t head, int64_t first, int64_t rows, int64_t width, O* out) {
  int64_t there = std::clamp<int64_t>(x.size(2) - first, 0, rows);
  products<T, O>().pack_rows(
      tokens_of<T>(x, b, head, first), x.stride(2), x.stride(3), there, x.size(3), reinterpret_cast<Number<O>*>(out),
      width * per_multiplicand<O>);
  std::fill(out + there * width, out + rows * width, O{});
}

// The same as dense rows of `width` numbers.
template <class T, class X, class O>
void pack_dense_tokens(const X& x, int64_t b, int64_t head, int64_t first, int64_t rows, int64_t width, O* out) {
  int64_t there = std::clamp<int64_t>(x.size(2) - first, 0, rows), written = blocks_of(there, per_multiplicand<O>);
  products<T, O>().pack_dense(tokens_of<T>(x, b, head, first), x.stride(2), x.stride(3), there, x.size(3), out, width);
  std::fill(out + written * width, out + rows / per_multiplicand<O> * width, O{});
}

// A block of packed tokens, rows of `width` multiplicands, as panels of `depth` of them. Multiplicands are moved,
// whatever they hold.
template <class O>
void pack_block_panels(const O* rows, int64_t width, int64_t block, int64_t depth, O* panels) {
  using C = Compute<O>;
  const Kernels<C>& kernel = kernels<C>();
  kernel.products.pack_panels(
      reinterpret_cast<const C*>(rows), 1, width, depth, block, kernel.panel_width(block),
      reinterpret_cast<C*>(panels));
}

enum class Form { rows, dense, panels };

// Multiplicands of one of x's matrices (tokens, depth), packed.
template <class T, class O>
int64_t packed_size(const Tensor& x, int64_t block, int64_t width, Form form) {
  int64_t tokens = blocks_of(x.size(2), block) * block;
  return form == Form::panels ? tokens * multiplicands_of<T, O>(x.size(3)) : tokens * width / per_multiplicand<O>;
}

// The blocks of matrices first_matrix to last_matrix - 1 of the tensor (B, H, tokens, depth), one after another: rows
// and dense ones of `width` numbers, panels of `depth`. spoilt: null, or for each block whether a number of it is not
// finite; not of panels.
template <class T, class O>
void pack_matrices(
    const Tensor& tensor, int64_t first_matrix, int64_t last_matrix, int64_t block, int64_t width, Form form, O* packed,
    bool* spoilt) {
  const View x(tensor);
  int64_t heads = x.size(1), blocks = blocks_of(x.size(2), block), depth = multiplicands_of<T, O>(x.size(3)),
          numbers = block * width, size = form == Form::panels ? block * depth : numbers / per_multiplicand<O>;
  int64_t grain = std::max<int64_t>(1, task_cost / 8 / (block * std::max<int64_t>(1, width)));
  torch::stable::parallel_for(0, (last_matrix - first_matrix) * blocks, grain, [&](int64_t begin, int64_t end) {
    Buffer<O> rows(form == Form::panels ? numbers / per_multiplicand<O> : 0);
    for (int64_t i = begin; i < end; ++i) {
      int64_t matrix = first_matrix + i / blocks, b = matrix / heads, head = matrix % heads, first = i % blocks * block;
      O *to = packed + i * size, *rows_to = form == Form::panels ? rows.data() : to;
      if (form == Form::dense) {
        pack_dense_tokens<T>(x, b, head, first, block, width, to);
      } else if (form == Form::panels && first + block <= x.size(2)) {
        products<T, O>().pack_panels(
            tokens_of<T>(x, b, head, first), x.stride(3), x.stride(2), x.size(3), block,
            kernels<T>().panel_width(block), to);
      } else {
        pack_tokens<T>(x, b, head, first, block, width / per_multiplicand<O>, rows_to);
        if (form == Form::panels) pack_block_panels(rows_to, width / per_multiplicand<O>, block, depth, to);
      }
    }
    if (!spoilt) return;
    bool all_finite = are_finite<T>(packed + begin * size, (end - begin) * size);
    for (int64_t i = begin; i < end; ++i) spoilt[i] = !all_finite && !are_finite<T>(packed + i * size, size);
  });
}

// All matrices of x.
template <class T, class O = Compute<T>>
Buffer<O> pack_all(const Tensor& x, int64_t block, int64_t width, Form form) {
  int64_t matrices = x.size(0) * x.size(1);
  Buffer<O> packed(matrices * packed_size<T, O>(x, block, width, form));
  pack_matrices<T, O>(x, 0, matrices, block, width, form, packed.data(), nullptr);
  return packed;
}

// Rows of `width` numbers to the tokens that there are of out[b, head], from `first` on.
template <class T, class X>
void store_tokens(
    const Compute<T>* rows, int64_t width, int64_t b, int64_t head, int64_t first, int64_t count, const X& out) {
  int64_t there = std::clamp<int64_t>(out.size(2) - first, 0, count);
  kernels<T>().store_rows(
      rows, width, there, out.size(3), false, mutable_tokens_of<T>(out, b, head, first), out.stride(2));
}

}  // namespace ds_sparse::cpu
