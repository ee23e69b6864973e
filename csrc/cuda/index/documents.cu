// Packed documents as the builder of indices takes them (csrc/index.h): the bits of their blocks, what their tokens
// see, and where the blocks of tiles lie.

#include <torch/csrc/stable/library.h>

#include "../../index.h"
#include "../common/launch.h"
#include "tuning.h"

namespace ds_sparse::index {
namespace {

// By one thread block: the number of each document's first block, and whether something is not as it has to be.
__global__ void __launch_bounds__(kThreads)
    documents_kernel(Documents documents, int32_t* firsts, int32_t* lost, int64_t blocks, bool own, int64_t most) {
  __shared__ int of_warps[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t before = 0;
  bool fits = true;
  for (int64_t begin = 0; begin < documents.count; begin += kThreads) {
    const int64_t document = begin + threadIdx.x;
    const bool exists = document < documents.count;
    const int64_t own_count = exists ? documents.blocks_of(document) : 0;
    fits = fits && (!exists || (documents.has(document) && (!own || own_count <= most)));
    const int count = fits ? static_cast<int>(own_count) : 0;
    int sum = count;
    for (int i = 1; i < 32; i *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, i);
      sum += lane >= i ? other : 0;
    }
    __syncthreads();
    if (lane == 31) {
      of_warps[warp] = sum;
    }
    __syncthreads();
    int of_all = 0;
    for (int i = 0; i < kWarps; ++i) {
      sum += i < warp ? of_warps[i] : 0;
      of_all += of_warps[i];
    }
    if (exists) {
      firsts[document] = static_cast<int>(before) + sum - count;
    }
    before += of_all;
  }
  fits = __syncthreads_and(fits) && (!own || before <= blocks);
  if (threadIdx.x == 0) {
    *lost = !fits;
  }
}

// Where documents are not as they have to be, blocks are those of the row, so that each token is in one, and see none.
__global__ void __launch_bounds__(kThreads) blocks_of_documents_kernel(
    Documents documents, const int32_t* firsts, const int32_t* lost, int2* spans, int2* ranges, int64_t blocks,
    bool own, int64_t most) {
  const bool is_lost = *lost != 0;
  for (int64_t number = int64_t{blockIdx.x} * kThreads + threadIdx.x; number < blocks;
       number += int64_t{gridDim.x} * kThreads) {
    BlockOfDocuments x{};
    if (is_lost) {
      const int64_t token = number * documents.block, left = documents.tokens - token;
      x = left > 0 ? BlockOfDocuments{static_cast<int32_t>(token), static_cast<int32_t>(min(left, documents.block))}
                   : x;
    } else if (own) {
      const int64_t document = document_of(firsts, documents.count, number);
      x = documents.own(document, firsts[document], number);
    } else {
      x = documents.of_row(number, most);
    }
    spans[number] = {x.token, x.tokens};
    ranges[number] = {x.first, x.end};
  }
}

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

std::tuple<Tensor, Tensor> index_documents(
    const Tensor& cu_seqlens, int64_t tokens, int64_t blocks, int64_t block, bool own, int64_t most) {
  const Documents documents = check_documents(cu_seqlens, tokens, blocks, block, own, most);
  const Launcher launch(cu_seqlens);
  Tensor made = empty_on(cu_seqlens, {2, blocks, 2}, ScalarType::Int);
  Tensor lost = empty_on(cu_seqlens, {1}, ScalarType::Int);
  Tensor firsts = empty_on(cu_seqlens, {documents.count}, ScalarType::Int);
  int2* spans = static_cast<int2*>(made.mutable_data_ptr());
  launch(
      documents_kernel, 1, kThreads, documents, firsts.mutable_data_ptr<int32_t>(), lost.mutable_data_ptr<int32_t>(),
      blocks, own, most);
  launch(
      blocks_of_documents_kernel, ceil_div<int64_t>(blocks, kThreads), kThreads, documents,
      firsts.const_data_ptr<int32_t>(), lost.const_data_ptr<int32_t>(), spans, spans + blocks, blocks, own, most);
  return {made, lost};
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
  m.impl("index_documents", TORCH_BOX(&ds_sparse::index::index_documents));
  m.impl("index_bits_of_documents", TORCH_BOX(&ds_sparse::index::index_bits_of_documents));
  m.impl("index_limits", TORCH_BOX(&ds_sparse::index::index_limits));
  m.impl("index_tile_spans", TORCH_BOX(&ds_sparse::index::index_tile_spans));
}
