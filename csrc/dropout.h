// Decides which attention probabilities dropout keeps: a function of the seed and of the element's place alone, so that
// backward passes and recomputed forward passes find the same, in whatever order and shape of tiles they go. Philox4x32
// with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define DS_SPARSE_ANYWHERE __host__ __device__ __forceinline__
#else
#define DS_SPARSE_ANYWHERE inline
#endif

namespace ds_sparse {

struct Philox {
  uint32_t word[4];

  DS_SPARSE_ANYWHERE Philox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) : word{c0, c1, c2, c3} {
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int round = 0; round < 7; ++round) {
      const uint64_t a = product(0xD2511F53u, word[0]), b = product(0xCD9E8D57u, word[2]);
      word[0] = static_cast<uint32_t>(b >> 32) ^ word[1] ^ key0;
      word[1] = static_cast<uint32_t>(b);
      word[2] = static_cast<uint32_t>(a >> 32) ^ word[3] ^ key1;
      word[3] = static_cast<uint32_t>(a);
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
  }

  // The e-th of eight 15-bit numbers: a word has two, each below a bit of which use is made elsewhere.
  DS_SPARSE_ANYWHERE uint32_t number(int e) const { return word[e / 2] >> (e % 2 * 16) & 0x7fffu; }

 private:
  DS_SPARSE_ANYWHERE static uint64_t product(uint32_t x, uint32_t y) {
#ifdef __CUDA_ARCH__
    // As a product of 64-bit numbers it takes an instruction more, for an upper half that is 0.
    uint64_t wide;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(wide) : "r"(x), "r"(y));
    return wide;
#else
    return uint64_t{x} * y;
#endif
  }
};

// Dropout of one call. Eight elements of a 16 x 16 square of (query token i, key token j) share a Philox result: those
// at rows r and r + 8 and columns c, c + 1, c + 8 and c + 9, which is what a lane of a warp holds of a tensor core's
// product. A word has the numbers of neighbouring columns, as a register has them rounded to 16 bits.
struct Dropout {
  uint64_t seed;
  uint32_t offset;
  uint32_t threshold;  // of 15-bit numbers: those below are dropped; 0: none

  static uint32_t threshold_of(double p) {
    const double scaled = p * 32768 + 0.5;
    return scaled < 32767 ? static_cast<uint32_t>(scaled) : 32767u;
  }

  // The largest threshold with which numbers are compared as those of fp16 that have their bits, which are in the same
  // order: infinity. What is larger is no number.
  static constexpr uint32_t kLargestHalf = 0x7c00;

  // The factor of kept elements.
  DS_SPARSE_ANYWHERE float factor() const { return 32768.0f / (32768u - threshold); }

  // matrix = batch * heads + head.
  DS_SPARSE_ANYWHERE Philox numbers(uint32_t matrix, uint32_t i, uint32_t j) const {
    return {seed, j / 16 * 4 + j % 8 / 2, i / 16 * 8 + i % 8, matrix, offset};
  }

  DS_SPARSE_ANYWHERE static int element(uint32_t i, uint32_t j) { return j % 2 + 2 * (i % 16 / 8) + 4 * (j % 16 / 8); }

#ifdef __CUDACC__
  // Sets the half of each of a word's two numbers that is kept to ones. What is left of the bit above a number, once
  // the threshold is taken away, says which is larger.
  __device__ __forceinline__ uint32_t keeps_of(uint32_t word) const {
    uint32_t kept;
    // Bytes 1 and 3, of which it repeats the highest bit; __byte_perm does not serve that.
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(kept) : "r"((word | 0x80008000u) - threshold * 0x10001u));
    return kept;
  }
  // The same in one instruction, with a threshold of kLargestHalf at most.
  __device__ __forceinline__ uint32_t keeps_of_halves(uint32_t word) const {
    uint32_t kept;
    asm("{\n"
        ".reg .b32 numbers;\n"
        "abs.f16x2 numbers, %1;\n"
        "set.geu.u32.f16x2 %0, numbers, %2;\n"
        "}"
        : "=r"(kept)
        : "r"(word), "r"(threshold * 0x10001u));
    return kept;
  }
#endif

  DS_SPARSE_ANYWHERE bool keeps(uint32_t matrix, uint32_t i, uint32_t j) const {
    return numbers(matrix, i, j).number(element(i, j)) >= threshold;
  }
};

}  // namespace ds_sparse
