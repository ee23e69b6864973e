// Packed documents as the builder of indices takes them (csrc/index.h): the bits of their blocks, what their tokens
// see, and where the blocks of tiles lie.

#include <torch/csrc/stable/library.h>

#include "../../index.h"
#include "../common/launch.h"
#include "tuning.h"

namespace ds_sparse::index {
namespace {

__global__ void __launch_bounds__(kThreads) bits_of_documents_kernel(
    const uint32_t* layout, const int32_t* ranges, uint32_t* to, int64_t count, int rows, int words, int blocks,
    bool own, bool causal) {
  const int to_words = words_of(blocks);
  for (int64_t number = int64_t{blockIdx.x} * kThreads + threadIdx.x; number < count;
       number += int64_t{gridDim.x} * kThreads) {
    const int64_t line = number / to_words, row = line % blocks;
    to[number] = word_of_documents(
        layout == nullptr ? nullptr : layout + line / blocks * rows * words, rows, words, ranges + 2 * row, row,
        number % to_words, own, causal);
  }
}

__global__ void __launch_bounds__(kThreads)
    limits_kernel(const int32_t* edges, const int32_t* windows, int2* to, int64_t count, int documents, int tokens) {
  for (int64_t number = int64_t{blockIdx.x} * kThreads + threadIdx.x; number < count;
       number += int64_t{gridDim.x} * kThreads) {
    int2 limits;
    limits_of(edges, documents, number % tokens, windows[number / tokens], limits.x, limits.y);
    to[number] = limits;
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

Tensor index_bits_of_documents(const std::optional<Tensor>& bits, const Tensor& ranges, bool own, bool causal) {
  const int64_t heads = check_bits_of_documents(bits, ranges), blocks = ranges.size(0), words = words_of(blocks);
  const Launcher launch(ranges);
  const int64_t count = product({heads, blocks, words});
  Tensor made = empty_on(ranges, {heads, blocks, 4 * words}, ScalarType::Byte);
  launch(
      bits_of_documents_kernel, ceil_div<int64_t>(count, kThreads), kThreads,
      bits ? static_cast<const uint32_t*>(bits->const_data_ptr()) : nullptr, ranges.const_data_ptr<int32_t>(),
      static_cast<uint32_t*>(made.mutable_data_ptr()), count, bits ? static_cast<int>(bits->size(1)) : 0,
      bits ? static_cast<int>(bits->size(2) / 4) : 0, static_cast<int>(blocks), own, causal);
  return made;
}

Tensor index_limits(const Tensor& cu_seqlens, const Tensor& windows, int64_t tokens) {
  check_limits(cu_seqlens, windows, tokens);
  const Launcher launch(cu_seqlens);
  const int64_t heads = windows.size(0), count = product({heads, tokens});
  Tensor limits = empty_on(cu_seqlens, {heads, tokens, 2}, ScalarType::Int);
  launch(
      limits_kernel, ceil_div<int64_t>(count, kThreads), kThreads, cu_seqlens.const_data_ptr<int32_t>(),
      windows.const_data_ptr<int32_t>(), static_cast<int2*>(limits.mutable_data_ptr()), count,
      static_cast<int>(cu_seqlens.size(0) - 1), static_cast<int>(tokens));
  return limits;
}

Tensor index_tile_spans(const Tensor& spans, const Tensor& lines, const Tensor& entries) {
  check_tile_spans(spans, lines, entries);
  check(
      reinterpret_cast<uintptr_t>(spans.const_data_ptr()) % 8 == 0,
      "spans has to begin at a multiple of 8 bytes; make a copy.");
  const Launcher launch(spans);
  const int64_t count = lines.numel() + entries.numel();
  Tensor made = empty_on(spans, {count, 2}, ScalarType::Int);
  launch(
      tile_spans_kernel, ceil_div<int64_t>(count, kThreads), kThreads, static_cast<const int2*>(spans.const_data_ptr()),
      lines.const_data_ptr<int32_t>(), reinterpret_cast<const uint32_t*>(entries.const_data_ptr<int32_t>()),
      static_cast<int2*>(made.mutable_data_ptr()), count, static_cast<int>(lines.numel()),
      static_cast<int>(spans.size(0)));
  return made;
}

}  // namespace
}  // namespace ds_sparse::index

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("index_bits_of_documents", TORCH_BOX(&ds_sparse::index::index_bits_of_documents));
  m.impl("index_limits", TORCH_BOX(&ds_sparse::index::index_limits));
  m.impl("index_tile_spans", TORCH_BOX(&ds_sparse::index::index_tile_spans));
}
