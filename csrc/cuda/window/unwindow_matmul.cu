// The product of a band, or of its transpose, and dense tokens. Schema and shapes: csrc/library.cpp; meaning:
// ds_sparse/reference.py; where a band has what: band.h.
//
// A thread block has some tokens of the result, and walks those that their windows have; transposed, these are the
// band's rows. Each warp copies and reads a tile of the band of its own. Products are transposed: the band is their
// right operand, which a warp has all of while it goes through the depth of dense tokens.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <type_traits>

#include "../../checks.h"
#include "../common/elements.h"
#include "../common/gemm_tile.h"
#include "../common/launch.h"
#include "band.h"
#include "tuning.h"

namespace ds_sparse {
namespace {

constexpr int kWarpTokens = UnwindowMatmulTuning::kWarpTokens, kRing = UnwindowMatmulTuning::kRing;
constexpr int kNowhere = 1 << 24;  // as good as any other number as large: a walk is shorter

struct Span {
  int begin, end;

  __device__ bool has(int x) const { return x >= begin && x < end; }
  __device__ bool meets(int from, int to) const { return begin <= to && end > from; }
};

// The edges of a tile of a band, counted in the tile: line i is a row of the band if it is below `lines`, its window
// is the columns from begin + i to end + i - 1, and the columns from `first` to last - 1 are tokens that there are.
struct TileEdges {
  int begin, end, first, last, lines;

  template <class T>
  __device__ TileEdges(const BandMatrix<T>& band, int64_t row, int64_t column)
      : begin(limited(row - band.window - column)),
        end(limited(row + band.window + 1 - column)),
        first(limited(-column)),
        last(limited(band.tokens - column)),
        lines(limited(band.tokens - row)) {}

  // Edges of the tile that begins so many lines and columns on.
  __device__ TileEdges from(int line, int column) const {
    TileEdges edges = *this;
    edges.begin += line - column;
    edges.end += line - column;
    edges.first -= column;
    edges.last -= column;
    edges.lines -= line;
    return edges;
  }

  // The part of a line's window that exists.
  __device__ Span of(int line) const {
    return {max(begin + line, first), line < lines ? min(end + line, last) : -kNowhere};
  }

 private:
  static __device__ int limited(int64_t x) {
    return static_cast<int>(max(int64_t{-kNowhere}, min(int64_t{kNowhere}, x)));
  }
};

// A warp's tile of a band in shared memory: the windows of its tokens of the result, and of them kStep numbers that
// are summed. Lines are rows of the band; where these are 64 bytes long, the second half of them is beside the first.
// kCount: numbers that are copied together.
template <class T, bool kTransposed, int kCount>
class BandTile {
 public:
  static constexpr int kStep = kBlockK<T>, kBytes = 32 * kLineBytes;

  // `pitch`: of the band's rows.
  __device__ explicit BandTile(int64_t pitch) : pitch_(pitch) {}

  // The first number that the lane copies.
  static __device__ int line() { return lane() / kLanes; }
  static __device__ int column() { return lane() % kLanes * kCount; }

  // Starts copying. `from`: the lane's first number.
  __device__ __forceinline__ void copy(uint32_t tile, const T* from) const {
    copy_lines(tile, from, [](int) { return kCount; });
  }

  // The same of what the band has up to the end of each row's window. Beside their beginnings there is anything.
  __device__ __forceinline__ void copy_some(uint32_t tile, const T* from, const TileEdges& edges) const {
    copy_lines(tile, from, [&](int line) {
      const Span span = edges.of(line);
      return span.begin < column() + kCount ? max(min(span.end - column(), kCount), 0) : 0;
    });
  }

 private:
  static constexpr int kLines = kTransposed ? kStep : kWarpTokens, kLength = kTransposed ? kWarpTokens : kStep;
  static constexpr int kLanes = kLength / kCount;  // of a line

  static __device__ int lane() { return threadIdx.x % 32; }

  template <class F>
  __device__ __forceinline__ void copy_lines(uint32_t tile, const T* from, const F& count_of) const {
    constexpr int step = 32 / kLanes;
    const uint32_t to = tile + swizzled(line(), column() / kRun<T>) + column() % kRun<T> * sizeof(T);
#pragma unroll
    for (int i = 0; i < kLines; i += step) {
      start_copy<kCount * sizeof(T)>(
          moved(to, i % 32, i / 32 * (kLength / kRun<T>)), from, count_of(line() + i) * int{sizeof(T)});
      from += step * pitch_;
    }
  }

  int64_t pitch_;
};

// The part of a tile that products take at a time: kDepth numbers that are summed, of all tokens.
template <class T, bool kTransposed>
class BandFragments {
 public:
  using M = Mma<T>;
  // Operands of two products in 32 bits would leave too few registers.
  static constexpr int kGroups = kWarpTokens / 8, kProducts = sizeof(T) == 2 ? 2 : 1;
  static constexpr int kDepth = kProducts * M::kDepth;

  // The places of a walk where all of what is taken there is the band's, or any. `edges`: of the tile at place 0.
  static __device__ Span whole(const TileEdges& edges) {
    if constexpr (kTransposed) {
      const bool all_there = edges.first <= 0 && edges.last >= kWarpTokens;
      return {kWarpTokens - edges.end, all_there ? min(2 - edges.begin, edges.lines + 1) - kDepth : -kNowhere};
    } else {
      const bool all_there = edges.lines >= kWarpTokens;
      return {
          max(edges.begin + kWarpTokens - 1, edges.first),
          all_there ? min(edges.end, edges.last) - kDepth + 1 : -kNowhere};
    }
  }
  static __device__ Span met(const TileEdges& edges) {
    if constexpr (kTransposed) {
      const bool any_there = edges.first < kWarpTokens && edges.last > 0;
      return {2 - kDepth - edges.end, any_there ? min(kWarpTokens - edges.begin, edges.lines) : -kNowhere};
    } else {
      const bool any_there = edges.lines > 0;
      return {
          max(edges.begin, edges.first) - kDepth + 1,
          any_there ? min(edges.end + min(edges.lines, kWarpTokens) - 1, edges.last) : -kNowhere};
    }
  }

  // The lane adds this to a tile's address.
  static __device__ uint32_t place() {
    if constexpr (sizeof(T) == 2) {
      return kTransposed ? swizzled(lane() % 16, lane() / 16) : swizzled(lane() % 8 + lane() / 16 * 8, lane() / 8 % 2);
    } else {
      return kTransposed ? swizzled(lane() % 4 * 2, lane() / 16) + lane() / 4 % 4 * sizeof(T)
                         : swizzled(lane() / 4, lane() % 4 / 2) + lane() % 2 * 2 * sizeof(T);
    }
  }

  // Reads numbers from the `first` of a tile on.
  __device__ __forceinline__ void read(uint32_t address, int first) {
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
      const int k = first + product * M::kDepth;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if constexpr (sizeof(T) == 4) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            b_[product][group][e] = load_float(
                kTransposed ? moved(address, k + e, 2 * group) : moved(address, 8 * group, k / 4) + e * int{sizeof(T)});
          }
        } else if (group % 2 == 0) {
          uint32_t both[4];
          load_matrices<kTransposed>(
              both, kTransposed ? moved(address, k % 32, k / 32 * 4 + group) : moved(address, 8 * group, k / 8));
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            b_[product][group + e / 2][e % 2] = both[e];
          }
        }
      }
    }
  }

  // Numbers before the beginnings of windows become zero. `edges`: of the tile that begins here.
  __device__ __forceinline__ void clear_beside(const TileEdges& edges) {
    constexpr int bits = 8 * sizeof(T);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int token = 8 * group + lane() / 4;
      int limit;
      if constexpr (kTransposed) {
        // A row's window begins here or before it up to the row after which it begins further on.
        limit = token >= edges.first && token < edges.last ? token - edges.begin + 1 : -kNowhere;
      } else {
        limit = edges.of(token).begin;
      }
      limit = (limit - lane() % 4 * 2) * bits;
#pragma unroll
      for (int product = 0; product < kProducts; ++product) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int k = product * M::kDepth + e * (sizeof(T) == 2 ? 8 : 1);
          const uint32_t after = bits_from(limit - k * bits);
          keep_bits(b_[product][group][e], kTransposed ? ~after : after);
        }
      }
    }
  }

  // c += a @ this, tokens 8 * group and on.
  __device__ __forceinline__ void multiply_add(
      float (&c)[4], const typename M::FragmentA& a, int product, int group) const {
    const typename M::FragmentB b = {b_[product][group][0], b_[product][group][1]};
    M::template product<false>(c, a, b, 0);
  }

 private:
  static __device__ int lane() { return threadIdx.x % 32; }

  // All bits from the n-th on.
  static __device__ uint32_t bits_from(int n) { return __funnelshift_lc(0u, ~0u, max(n, 0)); }

  static __device__ void keep_bits(uint32_t& x, uint32_t bits) { x &= bits; }
  static __device__ void keep_bits(float& x, uint32_t bits) { x = __uint_as_float(__float_as_uint(x) & bits); }

  std::remove_extent_t<typename M::FragmentB> b_[kProducts][kGroups][2];
};

// A product's sums, 16 x 8, as 8 lines of 16.
template <class T>
__device__ __forceinline__ void store_transposed(T* to, int pitch, const float (&sum)[4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (sizeof(T) == 2) {
      alignas(4) T pair[2];
      store_pair(pair, sum[2 * half], sum[2 * half + 1]);
      T* here = to + lane / 4 * pitch + half * 8 + lane % 4 * 2;
      *reinterpret_cast<uint32_t*>(here) = transposed(*reinterpret_cast<const uint32_t*>(pair));
    } else {
      T* here = to + lane % 4 * 2 * pitch + half * 8 + lane / 4;
      here[0] = sum[2 * half];
      here[pitch] = sum[2 * half + 1];
    }
  }
}

template <class T>
struct UnwindowArguments {
  const T* band;
  int64_t batch_stride, head_stride;
  TokenRows<T> dense;
  T* out;
  int64_t batch, heads, tokens, window, head_dim;
  int64_t tiles;
  int column_tiles;
};

// The parts of a kernel. kKBlocks: of a thread block's depth.
template <class T, bool kTransposed, int kCount, int kKBlocks>
struct KernelShape {
  using Tile = BandTile<T, kTransposed, kCount>;
  static constexpr int kWarps = kThreads / 32, kTokens = kWarps * kWarpTokens;
  static constexpr int kColumns = kKBlocks * kBlockK<T>;
  static constexpr int kThreadBlocks = UnwindowMatmulTuning::kThreadBlocks<kColumns>;

  // A stage of the ring: dense tokens and the warps' tiles.
  static constexpr int kDenseTile = Tile::kStep * kLineBytes, kDense = kKBlocks * kDenseTile;
  static constexpr int kStage = kDense + kWarps * Tile::kBytes;
  static constexpr size_t kBytes = kRing * kStage;
  // Results take its place, a k block of them at a time.
  static constexpr int kResultPitch = pitch_of<T>(kBlockK<T>);
  static_assert(kBytes >= kTokens * kResultPitch * sizeof(T));
};

// One number of the result by its definition: what a row's window does not have cannot matter. Once NaN it stays so.
template <bool kTransposed, class T>
__device__ float sum_of_window(const BandMatrix<const T>& band, const T* dense, int64_t token_stride, int64_t token) {
  const int64_t end = min(token + band.window + 1, band.tokens);
  float sum = 0;
#pragma unroll 1
  for (int64_t other = max(token - band.window, int64_t{0}); other < end && !isnan(sum); ++other) {
    const T of_band = kTransposed ? *band.at(other, token) : *band.at(token, other);
    sum += static_cast<float>(of_band) * static_cast<float>(dense[other * token_stride]);
  }
  return sum;
}

// Writes a warp's sums, by way of shared memory where the ring was; `own`: the first of the warp's tokens.
template <class S, bool kTransposed, int kKBlocks, class T, int kGroups>
__device__ __forceinline__ void store_results(
    const UnwindowArguments<T>& p, const WorkTile& work, const BandMatrix<const T>& band, const T* dense, int64_t own,
    int first_k_block, T* results, const float (&sum)[S::kColumns / 16][kGroups][4]) {
  constexpr int kTiles = kBlockK<T> / 16;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T* result = results + warp * kWarpTokens * S::kResultPitch;
  T* out = p.out + ((work.batch * p.heads + work.head) * p.tokens + own) * p.head_dim + first_k_block * kBlockK<T>;
  // The warp's tokens that there are.
  const int begin = static_cast<int>(max(-own, int64_t{0}));
  const int end = static_cast<int>(min(p.tokens - own, int64_t{kWarpTokens}));
  float zero = 0;  // or NaN, if a sum is not finite
#pragma unroll
  for (int k_block = 0; k_block < kKBlocks; ++k_block) {
    __syncwarp();
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const float (&of)[4] = sum[k_block * kTiles + t][group];
        zero += 0 * of[0] + 0 * of[1] + 0 * of[2] + 0 * of[3];
        store_transposed(result + 8 * group * S::kResultPitch + 16 * t, S::kResultPitch, of);
      }
    }
    __syncwarp();
    const int columns = static_cast<int>(min(p.head_dim - (first_k_block + k_block) * kBlockK<T>, int64_t{kBlockK<T>}));
    T* to = out + k_block * kBlockK<T>;
    if (p.head_dim % kRun<T> == 0) {
      const int c = lane % 8 * kRun<T>;
#pragma unroll
      for (int i = 0; i < kWarpTokens; i += 4) {
        const int token = i + lane / 8;
        if (token >= begin && token < end && c < columns) {
          store_run(to + token * p.head_dim + c, load_aligned(result + token * S::kResultPitch + c));
        }
      }
    } else {
#pragma unroll 1
      for (int token = begin; token < end; ++token) {
#pragma unroll 1
        for (int c = lane; c < columns; c += 32) {
          to[token * p.head_dim + c] = result[token * S::kResultPitch + c];
        }
      }
    }
  }
  // A number that is not finite, times the zeros beside the windows, has spoilt rows that do not see it.
  if (!__all_sync(0xffffffffu, zero == 0)) {
    __syncwarp();  // a vote does not show a lane what others have written
    const int columns = static_cast<int>(min(p.head_dim - first_k_block * kBlockK<T>, int64_t{S::kColumns}));
#pragma unroll 1
    for (int token = begin; token < end; ++token) {
#pragma unroll 1
      for (int c = lane; c < columns; c += 32) {
        T& number = out[token * p.head_dim + c];
        if (!isfinite(static_cast<float>(number))) {
          number = static_cast<T>(sum_of_window<kTransposed>(
              band, dense + first_k_block * kBlockK<T> + c, p.dense.token_stride, own + token));
        }
      }
    }
  }
}

template <class T, bool kTransposed, int kCount, int kKBlocks>
__global__ void __launch_bounds__(kThreads, (KernelShape<T, kTransposed, kCount, kKBlocks>::kThreadBlocks))
    unwindow_matmul_kernel(const __grid_constant__ UnwindowArguments<T> p) {
  extern __shared__ __align__(128) unsigned char shared[];
  using S = KernelShape<T, kTransposed, kCount, kKBlocks>;
  using Tile = typename S::Tile;
  using OfBand = BandFragments<T, kTransposed>;
  using OfDense = DepthFragments<T>;
  using M = Mma<T>;
  constexpr int kGroups = OfBand::kGroups, kTiles = kBlockK<T> / 16;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t ring = keep(shared_address(shared)), own_tile = S::kDense + warp * Tile::kBytes;
  const uint32_t of_dense = keep(ring + OfDense::place(lane)), of_band = keep(ring + own_tile + OfBand::place());
  const int64_t tiles_of_head = p.tiles * p.column_tiles, work_tiles = p.batch * p.heads * tiles_of_head;

  for (int64_t number = blockIdx.x; number < work_tiles; number += gridDim.x) {
    const WorkTile work(number, p.heads, tiles_of_head);
    const int first_k_block = static_cast<int>(work.tile % p.column_tiles) * kKBlocks;
    const BandMatrix<const T> band(
        p.band + work.batch * p.batch_stride + work.head * p.head_stride, p.tokens, p.window);
    const T* dense = p.dense.of(work.batch, work.head);
    // The thread block's tokens, and the others that they have in their windows.
    int64_t token = work.tile / p.column_tiles * S::kTokens;
    if constexpr (kTransposed) {
      token += band.aligned(0);
    }
    if (token >= p.tokens) {
      continue;
    }
    int64_t first = max(token - p.window, int64_t{0});
    if constexpr (!kTransposed) {
      first = band.aligned(first);
    }
    const int64_t past = min(min(token + S::kTokens, p.tokens) + p.window, p.tokens);
    const int steps = static_cast<int>((past - first + Tile::kStep - 1) / Tile::kStep);
    const bool all_there = first >= 0 && first + int64_t{steps} * Tile::kStep <= p.tokens;
    TokenLoader<T, Tile::kStep> load_tokens(p.dense, dense, first, all_there);

    // The warp's walk: a place in it is how far it has come from `first`.
    const int64_t own = token + warp * kWarpTokens, pitch = 2 * p.window;
    const TileEdges edges(band, kTransposed ? first : own, kTransposed ? own : first);
    const Span whole = OfBand::whole(edges), met = OfBand::met(edges);
    const auto edges_at = [&](int place) { return kTransposed ? edges.from(place, 0) : edges.from(0, place); };
    const Tile band_tile(pitch);
    const T* from = (kTransposed ? band.at(first, own) : band.at(own, first)) + Tile::line() * pitch + Tile::column();
    const auto load = [&](int step, uint32_t stage) {
      if (step < steps) {
        const uint32_t tile = ring + stage * S::kStage;
        const int place = step * Tile::kStep, last = place + Tile::kStep - OfBand::kDepth;
        if (whole.has(place) && whole.has(last)) {
          band_tile.copy(tile + own_tile, from);
        } else if (met.meets(place, last)) {
          band_tile.copy_some(tile + own_tile, from, edges_at(place));
        }
        from += Tile::kStep * (kTransposed ? pitch : 1);
#pragma unroll
        for (int k_block = 0; k_block < kKBlocks; ++k_block) {
          load_tokens(tile + k_block * S::kDenseTile, first + place, first_k_block + k_block);
        }
        load_tokens.advance();
      }
      end_of_copies();
    };

    __syncthreads();  // what the work tile before read is free
#pragma unroll 1
    for (int step = 0; step < kRing - 1; ++step) {
      load(step, step);
    }
    float sum[S::kColumns / 16][kGroups][4] = {};
    uint32_t stage = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      wait_for_copies<kRing - 2>();
      __syncthreads();
      load(step + kRing - 1, stage == 0 ? kRing - 1 : stage - 1);
#pragma unroll
      for (int k = 0; k < Tile::kStep; k += OfBand::kDepth) {
        const int place = step * Tile::kStep + k;
        if (met.has(place)) {
          OfBand b;
          b.read(of_band + stage * S::kStage, k);
          if (kTransposed ? place >= whole.end : place < whole.begin) {
            b.clear_beside(edges_at(place));
          }
#pragma unroll
          for (int product = 0; product < OfBand::kProducts; ++product) {
#pragma unroll
            for (int t = 0; t < S::kColumns / 16; ++t) {
              typename M::FragmentA a;
              OfDense::read(
                  a, of_dense + stage * S::kStage + t / kTiles * S::kDenseTile, k + product * M::kDepth,
                  t % kTiles * (16 / kRun<T>));
#pragma unroll
              for (int group = 0; group < kGroups; ++group) {
                b.multiply_add(sum[t][group], a, product, group);
              }
            }
          }
        }
      }
      stage = stage == kRing - 1 ? 0 : stage + 1;
    }

    __syncthreads();  // the ring is free
    store_results<S, kTransposed, kKBlocks>(
        p, work, band, dense, own, first_k_block, reinterpret_cast<T*>(shared), sum);
  }
}

// A band whose rows are one after another: `x`, or a copy.
Tensor with_adjacent_rows(const Tensor& x) {
  const int64_t width = x.size(3);
  if ((width == 1 || x.stride(3) == 1) && (x.size(2) == 1 || x.stride(2) == width)) {
    return x;
  }
  Tensor copy = empty_on(x, x.sizes());
  torch::stable::copy_(copy, x);
  return copy;
}

Tensor unwindow_matmul(const Tensor& band, const Tensor& dense, bool transposed) {
  check_operands({{&dense, "dense"}, {&band, "band"}}, 3);
  check_band(band, "band");
  const int64_t batch = dense.size(0), heads = dense.size(1), tokens = dense.size(2), head_dim = dense.size(3);
  Tensor out = empty_on(dense, dense.sizes());
  const Launcher launch(dense);
  with_element<false>(dense, "unwindow_matmul", [&](auto zero) {
    using T = decltype(zero);
    if (out.numel() == 0) {
      return;
    }
    const Tensor rows = with_adjacent_rows(band), right = in_runs(dense);
    const int64_t window = band.size(3) / 2;
    const auto run = [&](auto is_transposed, auto count, auto k_blocks) {
      constexpr bool kTransposed = decltype(is_transposed)::value;
      constexpr int kCount = decltype(count)::value, kKBlocks = decltype(k_blocks)::value;
      using S = KernelShape<T, kTransposed, kCount, kKBlocks>;
      // Transposed, the first tile begins up to 31 bytes before the first token.
      const int64_t tiles = ceil_div(tokens + (kTransposed ? 32 / sizeof(T) - 1 : 0), S::kTokens);
      const int column_tiles = static_cast<int>(ceil_div(head_dim, S::kColumns));
      const UnwindowArguments<T> arguments{
          static_cast<const T*>(rows.const_data_ptr()),
          rows.stride(0),
          rows.stride(1),
          TokenRows<T>(right),
          static_cast<T*>(out.mutable_data_ptr()),
          batch,
          heads,
          tokens,
          window,
          head_dim,
          tiles,
          column_tiles};
      static_assert(S::kBytes <= kPortableMemory);
      launch.with_shared_memory(
          unwindow_matmul_kernel<T, kTransposed, kCount, kKBlocks>, batch * heads * tiles * column_tiles, kThreads,
          S::kBytes, arguments);
    };
    const auto with_head_dim = [&](auto is_transposed, auto count) {
      if constexpr (sizeof(T) == 2) {
        if (head_dim <= kBlockK<T>) {
          return run(is_transposed, count, std::integral_constant<int, 1>{});
        }
      }
      run(is_transposed, count, std::integral_constant<int, 2>{});
    };
    const auto with_count = [&](auto is_transposed) {
      has_whole_runs<T>(window) ? with_head_dim(is_transposed, std::integral_constant<int, kRun<T>>{})
                                : with_head_dim(is_transposed, std::integral_constant<int, 2>{});
    };
    transposed ? with_count(std::true_type{}) : with_count(std::false_type{});
  });
  return out;
}

}  // namespace
}  // namespace ds_sparse

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) { m.impl("unwindow_matmul", TORCH_BOX(&ds_sparse::unwindow_matmul)); }
