// A layout as bits, of which an index is built (csrc/index.h): from blocks that are true or false, or from lists of
// them.

#include <torch/csrc/stable/library.h>

#include "../../index.h"
#include "../common/launch.h"
#include "tuning.h"

namespace ds_sparse::index {
namespace {

// So many thread blocks that each thread has one of `count`.
int64_t blocks_for(int64_t count) { return ceil_div<int64_t>(count, kThreads); }

struct Layout {
  const uint8_t* data;
  int64_t head_stride, row_stride, column_stride;
  int rows, columns;
};

__global__ void bits_kernel(Layout layout, uint32_t* bits, int64_t count) {
  const int words = words_of(layout.columns), lane = threadIdx.x % 32;
  for (int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32 * kAtOnce; first < count;
       first += int64_t{gridDim.x} * (kThreads / 32) * kAtOnce) {
    bool live[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t line = (first + i) / words, row = line % layout.rows, column = (first + i) % words * 32 + lane;
      live[i] =
          first + i < count && column < layout.columns &&
          layout.data
                  [line / layout.rows * layout.head_stride + row * layout.row_stride + column * layout.column_stride] !=
              0;
    }
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t word = __ballot_sync(0xffffffffu, live[i]);
      mine = lane == i ? word : mine;
    }
    if (lane < kAtOnce && first + lane < count) {
      bits[first + lane] = mine;
    }
  }
}

template <class N>
__global__ void bits_of_blocks_kernel(const N* block_indices, uint32_t* bits, int64_t count, int listed, int columns) {
  for (int64_t number = int64_t{blockIdx.x} * kThreads + threadIdx.x; number < count;
       number += int64_t{gridDim.x} * kThreads) {
    const int64_t block = block_indices[number], line = number / listed;
    if (block >= 0 && block < columns) {
      atomicOr(bits + line * words_of(columns) + block / 32, 1u << block % 32);
    }
  }
}

__global__ void causal_bits_kernel(const uint32_t* bits, uint32_t* to, int64_t count, int rows, int words) {
  for (int64_t number = int64_t{blockIdx.x} * kThreads + threadIdx.x; number < count;
       number += int64_t{gridDim.x} * kThreads) {
    to[number] = bits[number] & bits_between(number % words, 0, number / words % rows + 1);
  }
}

uint32_t* words_in(Tensor& bits) { return reinterpret_cast<uint32_t*>(bits.mutable_data_ptr()); }

Tensor index_bits(const Tensor& layout) {
  check_layout(layout);
  const Launcher launch(layout);
  const int64_t heads = layout.size(0), rows = layout.size(1), columns = layout.size(2), words = words_of(columns);
  const int64_t count = heads * rows * words;
  Tensor bits = empty_on(layout, {heads, rows, 4 * words}, ScalarType::Byte);
  const Layout given{
      static_cast<const uint8_t*>(layout.const_data_ptr()),
      layout.stride(0),
      layout.stride(1),
      layout.stride(2),
      static_cast<int>(rows),
      static_cast<int>(columns)};
  launch(bits_kernel, blocks_for(32 * ceil_div<int64_t>(count, kAtOnce)), kThreads, given, words_in(bits), count);
  return bits;
}

Tensor index_bits_of_blocks(const Tensor& block_indices, int64_t columns) {
  check_block_indices(block_indices, columns);
  const Launcher launch(block_indices);
  const int64_t heads = block_indices.size(0), rows = block_indices.size(1), listed = block_indices.size(2);
  const int64_t words = words_of(columns), count = block_indices.numel();
  Tensor bits = empty_on(block_indices, {heads, rows, 4 * words}, ScalarType::Byte);
  STD_CUDA_CHECK(cudaMemsetAsync(bits.mutable_data_ptr(), 0, bits.numel(), launch.stream()));
  const auto set = [&](const auto* from) {
    launch(
        bits_of_blocks_kernel<std::remove_cvref_t<decltype(*from)>>, blocks_for(count), kThreads, from, words_in(bits),
        count, static_cast<int>(listed), static_cast<int>(columns));
  };
  if (block_indices.scalar_type() == ScalarType::Long) {
    set(block_indices.const_data_ptr<int64_t>());
  } else {
    set(block_indices.const_data_ptr<int32_t>());
  }
  return bits;
}

Tensor index_causal_bits(const Tensor& bits) {
  check_bits(bits);
  const Launcher launch(bits);
  Tensor cut = empty_on(bits, bits.sizes());
  const int64_t words = bits.size(2) / 4, count = bits.size(0) * bits.size(1) * words;
  launch(
      causal_bits_kernel, blocks_for(count), kThreads, static_cast<const uint32_t*>(bits.const_data_ptr()),
      words_in(cut), count, static_cast<int>(bits.size(1)), static_cast<int>(words));
  return cut;
}

}  // namespace
}  // namespace ds_sparse::index

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("index_bits", TORCH_BOX(&ds_sparse::index::index_bits));
  m.impl("index_bits_of_blocks", TORCH_BOX(&ds_sparse::index::index_bits_of_blocks));
  m.impl("index_causal_bits", TORCH_BOX(&ds_sparse::index::index_causal_bits));
}
