// Tokens of (B, H, T, D) operands as kernels read them, in Compute<T>, and their results back.
#pragma once

#include <algorithm>

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

// `rows` tokens of x[b, head] from `first` on as rows of `width` numbers, zero beyond the tokens and numbers there are.
template <class T>
void pack_tokens(
    const Tensor& x, int64_t b, int64_t head, int64_t first, int64_t rows, int64_t width, Compute<T>* out) {
  int64_t there = std::clamp<int64_t>(x.size(2) - first, 0, rows);
  const T* from = pointer<T>(x) + b * x.stride(0) + head * x.stride(1) + first * x.stride(2);
  kernels<T>().pack_rows(from, x.stride(2), x.stride(3), there, x.size(3), out, width);
  std::fill(out + there * width, out + rows * width, Compute<T>(0));
}

// A block of packed tokens as panels of `depth` of their numbers.
template <class C>
void pack_block_panels(const C* rows, int64_t width, int64_t block, int64_t depth, C* panels) {
  const Kernels<C>& kernel = kernels<C>();
  kernel.pack_panels(rows, 1, width, depth, block, kernel.panel_width(block), panels);
}

// All blocks of x (B, H, tokens, depth), as rows or as panels, the heads one after another. spoilt, of rows: null, or
// for each block whether a number of it is not finite.
template <class T>
Buffer<Compute<T>> pack_all(const Tensor& x, int64_t block, int64_t width, bool panels, bool* spoilt = nullptr) {
  using C = Compute<T>;
  int64_t heads = x.size(1), depth = x.size(3), blocks = blocks_of(x.size(2), block),
          size = block * (panels ? depth : width);
  Buffer<C> packed(x.size(0) * heads * blocks * size);
  int64_t grain = std::max<int64_t>(1, task_cost / 8 / (block * std::max<int64_t>(1, width)));
  torch::stable::parallel_for(0, x.size(0) * heads * blocks, grain, [&](int64_t begin, int64_t end) {
    Buffer<C> rows(panels ? block * width : 0);
    for (int64_t i = begin; i < end; ++i) {
      int64_t matrix = i / blocks;
      C* to = packed.data() + i * size;
      pack_tokens<T>(x, matrix / heads, matrix % heads, i % blocks * block, block, width, panels ? rows.data() : to);
      if (panels) pack_block_panels(rows.data(), width, block, depth, to);
    }
    if (!spoilt) return;
    bool all_finite = kernels<C>().are_finite(packed.data() + begin * size, (end - begin) * size);
    for (int64_t i = begin; i < end; ++i)
      spoilt[i] = !all_finite && !kernels<C>().are_finite(packed.data() + i * size, size);
  });
  return packed;
}

// Rows of `width` numbers to the tokens that there are of out[b, head], from `first` on.
template <class T>
void store_tokens(
    const Compute<T>* rows, int64_t width, int64_t b, int64_t head, int64_t first, int64_t count, const Tensor& out) {
  T* to = static_cast<T*>(out.mutable_data_ptr()) + b * out.stride(0) + head * out.stride(1) + first * out.stride(2);
  int64_t there = std::clamp<int64_t>(out.size(2) - first, 0, count);
  kernels<T>().store_rows(rows, width, there, out.size(3), false, to, out.stride(2));
}

}  // namespace ds_sparse::cpu
