// Bands of windows as matrices of tokens by tokens, of which memory has what is near the diagonal.
//
// The number of a band (T, 2w + 1) for tokens r and c, band[r, c - r + w], lies 2w r + c + w elements from its
// beginning: rows are 2w apart and columns adjacent, as in a dense matrix of that pitch. So nothing is skewed where
// columns are tokens: 2w is even, and what begins at an even place in one row does so in all, though rows have an odd
// length.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>

#include "../../checks.h"
#include "../common/gemm_tile.h"
#include "../common/swizzle.h"

namespace ds_sparse {

inline int64_t ceil_div(int64_t all, int64_t each) { return (all + each - 1) / each; }

// Where a product's matrices are among work tiles: heads one after another, so that neighbours share what they load.
struct WorkTile {
  int64_t batch, head, tile;
  __device__ WorkTile(int64_t number, int64_t heads, int64_t tiles)
      : batch(number / tiles / heads), head(number / tiles % heads), tile(number % tiles) {}
};

// Tells if runs of 16 bytes that are aligned in one row are in all; pairs always are.
template <class T>
inline bool has_whole_runs(int64_t window) {
  return 2 * window % kRun<T> == 0;
}

// The band of one head.
template <class T>
struct BandMatrix {
  T* origin;  // of row 0 and column 0
  int64_t tokens, window;

  __device__ BandMatrix(T* data, int64_t tokens, int64_t window)
      : origin(data + window), tokens(tokens), window(window) {}

  __device__ T* at(int64_t row, int64_t column) const { return origin + row * (2 * window) + column; }

  // The last column up to this one whose place in row 0 is a multiple of so many bytes. Memory is read 32 at a time.
  __device__ int64_t aligned(int64_t column, int bytes = 32) const {
    return column - static_cast<int64_t>(reinterpret_cast<uintptr_t>(origin + column) % bytes / sizeof(T));
  }
};

// Tokens (B, H, T, D) whose numbers are adjacent and lie in aligned runs of 16 bytes.
template <class T>
struct TokenRows {
  const T* data;
  int64_t batch_stride, head_stride, token_stride, tokens;
  int head_dim;

  // `x` has that order of memory: `in_runs` gives it.
  explicit TokenRows(const torch::stable::Tensor& x)
      : data(static_cast<const T*>(x.const_data_ptr())),
        batch_stride(x.size(0) == 1 ? 0 : x.stride(0)),
        head_stride(x.size(1) == 1 ? 0 : x.stride(1)),
        token_stride(x.size(2) == 1 ? 0 : x.stride(2)),
        tokens(x.size(2)),
        head_dim(static_cast<int>(x.size(3))) {}

  __device__ const T* of(int64_t batch, int64_t head) const { return data + batch * batch_stride + head * head_stride; }
};

// Copies tokens of a head to swizzled tiles, kTokens at a time and a k block of their depth; what is not there becomes
// zero.
template <class T, int kTokens>
class TokenLoader {
 public:
  // From token `token` on; `all_there` if those of all copies are.
  __device__ TokenLoader(const TokenRows<T>& x, const T* head, int64_t token, bool all_there)
      : x_(x),
        from_(head + (token + line()) * x.token_stride + run() * kRun<T>),
        place_(keep(swizzled(line(), run()))),
        all_there_(all_there) {}

  // Starts the copies of a k block of the next tokens, which `token` is the first of.
  __device__ __forceinline__ void operator()(uint32_t tile, int64_t token, int k_block) const {
    const T* from = from_ + k_block * kBlockK<T>;
    const int given = k_block * kBlockK<T> + run() * kRun<T> < x_.head_dim ? 16 : 0;
    if (all_there_) {
#pragma unroll
      for (int i = 0; i < kTokens / kLines; ++i) {
        start_copy<16>(moved(tile + place_, i * kLines, 0), from, given);
        from += kLines * x_.token_stride;
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kTokens; i += kLines) {
        const int64_t here = token + line() + i;
        const uint32_t to = tile + swizzled(line() + i, run());
        start_copy<16>(to, from, here >= 0 && here < x_.tokens ? given : 0);
        from += kLines * x_.token_stride;
      }
    }
  }

  __device__ __forceinline__ void advance() { from_ += kTokens * x_.token_stride; }

 private:
  static constexpr int kRuns = kLineBytes / 16, kLines = kThreads / kRuns;

  static __device__ int line() { return threadIdx.x / kRuns; }
  static __device__ int run() { return threadIdx.x % kRuns; }

  const TokenRows<T>& x_;
  const T* from_;
  uint32_t place_;
  bool all_there_;
};

// x, or where its order of memory is another one a copy that `TokenRows` can read: with zeros after a token's numbers.
inline torch::stable::Tensor in_runs(const torch::stable::Tensor& x) {
  const int64_t run = 16 / static_cast<int64_t>(x.element_size());
  const int64_t head_dim = std::max<int64_t>(1, (x.size(3) + run - 1) / run) * run;
  bool fits = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0 && head_dim == x.size(3) && x.stride(3) == 1;
  for (int64_t dim = 0; dim < 3; ++dim) {
    fits = fits && (x.size(dim) == 1 || x.stride(dim) % run == 0);
  }
  if (fits) {
    return x;
  }
  torch::stable::Tensor copy = torch::stable::new_zeros(x, {x.size(0), x.size(1), x.size(2), head_dim});
  torch::stable::Tensor numbers = torch::stable::narrow(copy, 3, 0, x.size(3));
  torch::stable::copy_(numbers, x);
  return copy;
}

}  // namespace ds_sparse
