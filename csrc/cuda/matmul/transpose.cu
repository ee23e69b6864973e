// A contiguous copy of an operand whose tokens are adjacent in memory, and not the numbers of each. Schema:
// csrc/library.cpp.
//
// A thread takes eight tokens of eight numbers: it reads a run of 16 bytes of each number's tokens and writes one of
// each token's numbers. Neighbouring threads have the next numbers, so that a token is written as whole cache lines;
// the 64 bytes that four of them read of a number are two sectors.

#include <torch/csrc/stable/library.h>

#include <cstdint>

#include "../../checks.h"
#include "../common/launch.h"
#include "../common/vector.h"
#include "tuning.h"

namespace ds_sparse {
namespace {

constexpr int kThreads = TransposeTuning::kThreads, kSide = TransposeTuning::kSide;

struct TransposedOperand {
  const uint16_t* from;
  int64_t batch, head, token, number;  // strides
  uint32_t heads, tokens, depth;
};

__global__ void __launch_bounds__(kThreads) transpose_kernel(const TransposedOperand x, uint16_t* to, int64_t squares) {
  const int64_t square = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (square >= squares) {
    return;
  }
  const uint32_t across = x.depth / kSide, down = x.tokens / kSide;
  const uint32_t number = square % across * kSide;
  const int64_t line = square / across;
  const uint32_t token = line % down * kSide, matrix = line / down;
  const uint16_t* from =
      x.from + matrix / x.heads * x.batch + matrix % x.heads * x.head + number * x.number + token * x.token;
  Run<uint16_t, kSide> numbers[kSide];
  if (x.token == 1 && x.number % kSide == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      numbers[i] = load_aligned(from + i * x.number);
    }
  } else {
    for (int i = 0; i < kSide; ++i) {
      for (int j = 0; j < kSide; ++j) {
        numbers[i].element[j] = from[i * x.number + j * x.token];
      }
    }
  }
  to += (int64_t{matrix} * x.tokens + token) * x.depth + number;
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    Run<uint16_t, kSide> of_token;
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      of_token.element[j] = numbers[j].element[i];
    }
    store_run(to + i * x.depth, of_token);
  }
}

Tensor transpose(const Tensor& x) {
  check_dim(x, 4, "x");
  check(
      x.element_size() == 2 && x.size(2) % kSide == 0 && x.size(3) % kSide == 0,
      "x has to have 16 bits a number, and a multiple of 8 of tokens and of numbers of each.");
  Tensor out = empty_on(x, x.sizes());
  const TransposedOperand operand{
      static_cast<const uint16_t*>(x.const_data_ptr()),
      x.stride(0),
      x.stride(1),
      x.stride(2),
      x.stride(3),
      static_cast<uint32_t>(x.size(1)),
      static_cast<uint32_t>(x.size(2)),
      static_cast<uint32_t>(x.size(3))};
  const int64_t squares = x.numel() / (kSide * kSide);
  const Launcher launch(x);
  launch(
      transpose_kernel, (squares + kThreads - 1) / kThreads, kThreads, operand,
      static_cast<uint16_t*>(out.mutable_data_ptr()), squares);
  return out;
}

}  // namespace
}  // namespace ds_sparse

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) { m.impl("transpose", TORCH_BOX(&ds_sparse::transpose)); }
