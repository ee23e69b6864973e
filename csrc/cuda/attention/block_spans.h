// Where the tokens of blocks lie in memory. Documents that are packed in a row begin anywhere: there a block's number
// says nothing about its tokens, and the last block of a document may be short.

#pragma once

#include <cstdint>

namespace ds_sparse::attention {

// Kernels count tokens as if all blocks were whole: number and place of a block, and the token's place in it (an
// aligned number). Null: blocks are one behind the other, and aligned numbers are those in memory.
struct BlockSpans {
  const int2* spans;  // of each block: its first token in memory, and its number of tokens
  int log_block;

  __device__ __forceinline__ int in_block(int aligned) const { return aligned & ((1 << log_block) - 1); }
  __device__ __forceinline__ bool has(int aligned) const {
    return spans == nullptr || in_block(aligned) < spans[aligned >> log_block].y;
  }
  // For 16 aligned numbers from one on, which are one block's: the first's token in memory, and how many exist; perhaps
  // none, or fewer.
  __device__ __forceinline__ int2 sixteen(int aligned) const {
    const int2 span = spans[aligned >> log_block];
    return make_int2(span.x + in_block(aligned), span.y - in_block(aligned));
  }
  // The token in memory; where there is none, somewhere.
  __device__ __forceinline__ int token(int aligned) const {
    return spans == nullptr ? aligned : spans[aligned >> log_block].x + in_block(aligned);
  }
};

}  // namespace ds_sparse::attention
