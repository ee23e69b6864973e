// Packed documents as the builder of indices takes them (csrc/index.h): the bits of their blocks, and where the blocks
// of tiles lie.

#include <torch/csrc/stable/library.h>

#include "../../index.h"
#include "../common/launch.h"

namespace ds_sparse::index {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) bits_of_documents_kernel(
    const uint32_t* layout, const int32_t* ranges, uint32_t* to, int64_t count, int rows, int words, int blocks,
    bool own, bool causal) {
  const int to_words = words_of(blocks);
  for (int64_t number = int64_t{blockIdx.x} * kThreads + threadIdx.x; number < count;
       number += int64_t{gridDim.x} * kThreads) {
    const int64_t line = number / to_words, row = line % blocks;
    to[number] = word_of_documents(
        layout + line / blocks * rows * words, rows, words, ranges + 2 * row, row, number % to_words, own, causal);
  }
}

__global__ void __launch_bounds__(kThreads) tile_spans_kernel(
    const int2* spans, const int32_t* lines, const uint32_t* entries, int2* to, int64_t count, int num_lines,
    int blocks) {
  for (int64_t number = int64_t{blockIdx.x} * kThreads + threadIdx.x; number < count;
       number += int64_t{gridDim.x} * kThreads) {
    const int block = number < num_lines ? lines[number] : block_of(entries[number - num_lines]);
    to[number] = block >= 0 && block < blocks ? spans[block] : int2{0, 0};
  }
}

Tensor index_bits_of_documents(const Tensor& bits, const Tensor& ranges, bool own, bool causal) {
  check_bits_of_documents(bits, ranges);
  const Launcher launch(bits);
  const int64_t heads = bits.size(0), blocks = ranges.size(0), words = words_of(blocks);
  const int64_t count = product({heads, blocks, words});
  Tensor made = torch::stable::new_empty(bits, {heads, blocks, 4 * words}, ScalarType::Byte);
  launch(
      bits_of_documents_kernel, ceil_div<int64_t>(count, kThreads), kThreads,
      static_cast<const uint32_t*>(bits.const_data_ptr()), ranges.const_data_ptr<int32_t>(),
      static_cast<uint32_t*>(made.mutable_data_ptr()), count, static_cast<int>(bits.size(1)),
      static_cast<int>(bits.size(2) / 4), static_cast<int>(blocks), own, causal);
  return made;
}

Tensor index_tile_spans(const Tensor& spans, const Tensor& lines, const Tensor& entries) {
  check_tile_spans(spans, lines, entries);
  check(
      reinterpret_cast<uintptr_t>(spans.const_data_ptr()) % 8 == 0,
      "spans has to begin at a multiple of 8 bytes; make a copy.");
  const Launcher launch(spans);
  const int64_t count = lines.numel() + entries.numel();
  Tensor made = torch::stable::new_empty(spans, {count, 2}, ScalarType::Int);
  launch(
      tile_spans_kernel, ceil_div<int64_t>(count, kThreads), kThreads,
      static_cast<const int2*>(spans.const_data_ptr()), lines.const_data_ptr<int32_t>(),
      reinterpret_cast<const uint32_t*>(entries.const_data_ptr<int32_t>()), static_cast<int2*>(made.mutable_data_ptr()),
      count, static_cast<int>(lines.numel()), static_cast<int>(spans.size(0)));
  return made;
}

}  // namespace
}  // namespace ds_sparse::index

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("index_bits_of_documents", TORCH_BOX(&ds_sparse::index::index_bits_of_documents));
  m.impl("index_tile_spans", TORCH_BOX(&ds_sparse::index::index_tile_spans));
}
