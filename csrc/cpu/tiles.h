// Products of bf16 in the tiles of AMX: the Tile of gemm.h where its sums lie in tile registers.
//
// All that knows of the instructions is in namespace amx. With DS_SPARSE_EMULATE_TILES it is plain C++ instead, so that
// tests of everything else run on machines without AMX.
#pragma once

#include <cstdint>
#include <cstring>

#include "vec.h"

namespace ds_sparse::cpu::DS_SPARSE_ISA {

namespace amx {

constexpr int max_rows = 16, row_bytes = 64;

// As LDTILECFG reads it.
struct Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(Config) == 64);

#if !defined(DS_SPARSE_EMULATE_TILES)

DS_SPARSE_INLINE void configure(const Config& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
DS_SPARSE_INLINE void release() { asm volatile("tilerelease"); }

template <int R>
DS_SPARSE_INLINE void clear() {
  asm volatile("tilezero %%tmm%c0" ::"i"(R));
}

// Row i of the register is at from + i * stride, in bytes.
template <int R>
DS_SPARSE_INLINE void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(R) : "memory");
}
template <int R>
DS_SPARSE_INLINE void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(R) : "memory");
}

// sum[m][n] += a[m][k] * b[k][n], for both numbers of all pairs.
template <int Sum, int A, int B>
DS_SPARSE_INLINE void multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}

#else

struct State {
  bool configured = false;
  Config config;
  uint32_t words[8][max_rows][row_bytes / 4];
};
static thread_local State state;

inline void expect(bool holds) {
  if (!holds) __builtin_trap();
}

inline void configure(const Config& config) {
  state = {};
  state.config = config;
  state.configured = true;
}

inline void release() { state = {}; }

template <int R>
inline void clear() {
  expect(state.configured && state.config.rows[R] > 0);
  memset(state.words[R], 0, sizeof(state.words[R]));
}

template <int R>
inline void load(const void* from, int64_t stride) {
  clear<R>();
  for (int i = 0; i < state.config.rows[R]; ++i)
    memcpy(state.words[R][i], static_cast<const char*>(from) + i * stride, state.config.row_bytes[R]);
}

template <int R>
inline void store(void* to, int64_t stride) {
  expect(state.configured && state.config.rows[R] > 0);
  for (int i = 0; i < state.config.rows[R]; ++i)
    memcpy(static_cast<char*>(to) + i * stride, state.words[R][i], state.config.row_bytes[R]);
}

// In the order of sums of the instruction: even and odd numbers on their own first. A subnormal number counts as 0.
template <int Sum, int A, int B>
inline void multiply() {
  const Config& config = state.config;
  expect(state.configured && config.rows[A] == config.rows[Sum] && config.row_bytes[B] == config.row_bytes[Sum]);
  expect(config.row_bytes[A] == 4 * config.rows[B]);
  auto flushed = [](uint32_t bits) {
    bits = (bits & 0x7f800000) == 0 ? bits & 0x80000000 : bits;
    return bit_cast<float>(bits);
  };
  for (int m = 0; m < config.rows[Sum]; ++m) {
    for (int n = 0; n < config.row_bytes[Sum] / 4; ++n) {
      float even = 0, odd = 0;
      for (int k = 0; k < config.rows[B]; ++k) {
        uint32_t a = state.words[A][m][k], b = state.words[B][k][n];
        even = __builtin_fmaf(flushed(a << 16), flushed(b << 16), even);
        odd = __builtin_fmaf(flushed(a & 0xffff0000), flushed(b & 0xffff0000), odd);
      }
      float sum = flushed(bit_cast<uint32_t>(even)) + flushed(bit_cast<uint32_t>(odd));
      uint32_t& to = state.words[Sum][m][n];
      to = bit_cast<uint32_t>(flushed(to) + flushed(bit_cast<uint32_t>(sum)));
      to = bit_cast<uint32_t>(flushed(to));
    }
  }
}

#endif

}  // namespace amx

// Registers 0 to V - 1 are the sums. A tile takes 16 multiplicands of a depth at a time, or 8 where 16 do not divide
// it. Each of these steps has registers of its own for the left operand and the right one, as configuring registers
// anew takes longer than a product of blocks of 16. There is one Tile at a time, between `begin_products` and
// `end_products`.
template <int Step>
constexpr int left_register = Step == 16 ? 4 : 6;
template <int Step>
constexpr int right_register = left_register<Step> + 1;

template <int V>
struct Tile<BFloat16Pair, 16, V> {
  using O = BFloat16Pair;
  static constexpr int rows = amx::max_rows, depth_multiple = 8;
  static_assert(V <= left_register<16>);

  DS_SPARSE_INLINE_MEMBER void clear() { clear_from<0>(); }
  DS_SPARSE_INLINE_MEMBER void load(const float* from, int64_t stride) { load_from<0>(from, 4 * stride); }
  template <class T>
  DS_SPARSE_INLINE_MEMBER void store(T* const (&out)[V], int64_t stride) const {
    store_from<0>(out, stride);
  }

  DS_SPARSE_INLINE_MEMBER void multiply(
      const O* a, int64_t m_stride, int64_t k_stride, const O* const (&b)[V], int64_t b_stride, int64_t depth) {
    if (depth % 16 == 0)
      multiply_steps<16>(a, m_stride, k_stride, b, b_stride, depth);
    else
      multiply_steps<8>(a, m_stride, k_stride, b, b_stride, depth);
  }

 private:
  template <int Step>
  DS_SPARSE_INLINE_MEMBER static void multiply_steps(
      const O* a, int64_t m_stride, int64_t k_stride, const O* const (&b)[V], int64_t b_stride, int64_t depth) {
    constexpr int left = left_register<Step>;
    for (int64_t k = 0; k < depth; k += Step) {
      if (k_stride == 1) {
        amx::load<left>(a + k, 4 * m_stride);
      } else {
        alignas(64) O transposed[rows * rows];
        const auto* from = reinterpret_cast<const BFloat16*>(a + k * k_stride);
        transpose_pairs(from, 2 * k_stride, Step, rows, transposed, rows);
        amx::load<left>(transposed, amx::row_bytes);
      }
      multiply_from<0, Step>(b, k, 4 * b_stride);
    }
  }

  template <int R>
  DS_SPARSE_INLINE_MEMBER static void clear_from() {
    if constexpr (R < V) {
      amx::clear<R>();
      clear_from<R + 1>();
    }
  }

  template <int R>
  DS_SPARSE_INLINE_MEMBER static void load_from(const float* from, int64_t stride) {
    if constexpr (R < V) {
      amx::load<R>(from + 16 * R, stride);
      load_from<R + 1>(from, stride);
    }
  }

  // Results that are not fp32 are rounded on their way.
  template <int R, class T>
  DS_SPARSE_INLINE_MEMBER static void store_from(T* const (&out)[V], int64_t stride) {
    if constexpr (R < V) {
      if constexpr (sizeof(T) == sizeof(float)) {
        amx::store<R>(out[R], 4 * stride);
      } else {
        alignas(64) float square[rows * 16];
        amx::store<R>(square, amx::row_bytes);
        for (int i = 0; i < rows; ++i)
          cpu::DS_SPARSE_ISA::store<float, 16>(
              out[R] + i * stride, cpu::DS_SPARSE_ISA::load<float, 16>(square + 16 * i));
      }
      store_from<R + 1>(out, stride);
    }
  }

  template <int R, int Step>
  DS_SPARSE_INLINE_MEMBER static void multiply_from(const O* const (&b)[V], int64_t k, int64_t stride) {
    if constexpr (R < V) {
      amx::load<right_register<Step>>(b[R] + k * (stride / 4), stride);
      amx::multiply<R, left_register<Step>, right_register<Step>>();
      multiply_from<R + 1, Step>(b, k, stride);
    }
  }
};

constexpr amx::Config tile_config() {
  amx::Config config;
  for (int i = 0; i < 8; ++i) {
    config.rows[i] = amx::max_rows;
    config.row_bytes[i] = amx::row_bytes;
  }
  config.row_bytes[left_register<8>] = 4 * 8;
  config.rows[right_register<8>] = 8;
  return config;
}

template <>
inline void begin_products<BFloat16Pair>() {
  alignas(64) static constexpr amx::Config config = tile_config();
  amx::configure(config);
}

template <>
inline void end_products<BFloat16Pair>() {
  amx::release();
}

}  // namespace ds_sparse::cpu::DS_SPARSE_ISA
