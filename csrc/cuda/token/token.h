// Shared by the kernels over lists of token pairs: lists, rows of memory that are gathered, how lists are shared
// out among warps. Schemas and shapes: csrc/library.cpp.
//
// A list has the keys that a query sees, or the queries that see a key. A warp does a list: groups of
// kLanes lanes take one token of the list each, read its row in runs of 16 bytes, and keep sums of their own, which are
// put together at the end. What takes the time is bringing rows from L2, so that several of a group's tokens are read
// before the first is looked at, and the list is read a step ahead. Lists of more than kLong tokens are shared by the
// warps of a thread block. The order of every sum is set by the list alone.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>

#include "../../checks.h"
#include "../../compute.h"
#include "../common/launch.h"
#include "../common/vector.h"
#include "tuning.h"

namespace ds_sparse::token {

constexpr int kWarpLanes = 32;
constexpr int kThreads = kWarps * kWarpLanes;
constexpr int kMaxHeadDim = 256;

// How a row lies in the lanes of a group: lane l has the runs of 16 bytes l, l + kLanes, and so on, kPieces of them.
template <class Element, int kLanesOfGroup, int kPiecesOfLane>
struct RowShape {
  using T = Element;
  using A = Compute<T>;
  static constexpr int kLanes = kLanesOfGroup, kPieces = kPiecesOfLane;
  static constexpr int kGroups = kWarpLanes / kLanes;
  static constexpr int kHeadDim = kLanes * kPieces * kRun<T>;
  // Tokens of a group whose rows are on their way together.
  static constexpr int kTokens = tokens_together(kPieces);
  static constexpr int kStep = kTokens * kGroups;

  __device__ static int lane() { return threadIdx.x % kLanes; }
  __device__ static int group() { return threadIdx.x % kWarpLanes / kLanes; }
  // The first number of the lane's piece.
  __device__ static int column(int piece) { return (piece * kLanes + lane()) * kRun<T>; }
};

// The sum, or maximum, over the groups of a warp of what all lanes of a group have.
template <class S, class A>
__device__ __forceinline__ A sum_of_groups(A x) {
#pragma unroll
  for (int offset = S::kLanes; offset < kWarpLanes; offset *= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, offset);
  }
  return x;
}

template <class S, class A>
__device__ __forceinline__ A max_of_groups(A x) {
#pragma unroll
  for (int offset = S::kLanes; offset < kWarpLanes; offset *= 2) {
    x = max(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}

// The numbers in 16 bytes of memory. Whole words are taken apart here: the compiler holds single halves in registers.
template <class T>
__device__ __forceinline__ void unpack(const uint4& run, Compute<T> (&numbers)[kRun<T>]) {
  const uint32_t words[] = {run.x, run.y, run.z, run.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (std::is_same_v<T, float>) {
      numbers[w] = __uint_as_float(words[w]);
    } else if constexpr (std::is_same_v<T, double>) {
      numbers[w / 2] = __hiloint2double(words[w / 2 * 2 + 1], words[w / 2 * 2]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      numbers[2 * w] = __uint_as_float(words[w] << 16);
      numbers[2 * w + 1] = __uint_as_float(words[w] & 0xffff0000u);
    } else {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[w]));
      numbers[2 * w] = pair.x;
      numbers[2 * w + 1] = pair.y;
    }
  }
}

// A lane's part of a row: as it is in memory, and as numbers to calculate with.
template <class S>
struct GatheredRow {
  uint4 piece[S::kPieces];
};

template <class S>
struct Numbers {
  using A = typename S::A;
  static constexpr int kCount = kRun<typename S::T>;
  A piece[S::kPieces][kCount];

  __device__ Numbers() : piece{} {}

  __device__ explicit Numbers(const GatheredRow<S>& gathered) {
#pragma unroll
    for (int p = 0; p < S::kPieces; ++p) {
      unpack<typename S::T>(gathered.piece[p], piece[p]);
    }
  }

  template <class F>
  __device__ __forceinline__ void for_each(const F& f) {
#pragma unroll
    for (int p = 0; p < S::kPieces; ++p) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        f(piece[p][i], p, i);
      }
    }
  }

  __device__ __forceinline__ void scale(A factor) {
    for_each([&](A& number, int, int) { number *= factor; });
  }

  __device__ __forceinline__ void add(A factor, const Numbers& other) {
    for_each([&](A& number, int p, int i) { number += factor * other.piece[p][i]; });
  }

  // The product of whole rows, the same bits in every lane of the group and whichever of the two is gathered.
  __device__ __forceinline__ A dot(const Numbers& other) const {
    A sum = 0;
#pragma unroll
    for (int p = 0; p < S::kPieces; ++p) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        sum += piece[p][i] * other.piece[p][i];
      }
    }
    return sum_of_lanes(sum, S::kLanes);
  }

  // Adds up those of the warp's groups; each has all then.
  __device__ __forceinline__ void add_groups() {
    for_each([&](A& number, int, int) { number = sum_of_groups<S>(number); });
  }

  // Adds up those of the warps, which `memory` passes on, in their order; for the whole thread block.
  __device__ void add_warps(A (&memory)[kWarps][S::kHeadDim]) {
    if (S::group() == 0) {
      for_each([&](A& number, int p, int i) { memory[warp()][S::column(p) + i] = number; });
    }
    __syncthreads();
    for_each([&](A& number, int p, int i) {
      number = 0;
      for (int w = 0; w < kWarps; ++w) {
        number += memory[w][S::column(p) + i];
      }
    });
  }

  // Writes a row of `head_dim` numbers, of contiguous ones. By one group.
  __device__ void store(typename S::T* to, int head_dim) const {
    using T = typename S::T;
#pragma unroll
    for (int p = 0; p < S::kPieces; ++p) {
      const int column = S::column(p);
      if (head_dim % kCount == 0) {
        if (column < head_dim) {
          Run<T, kCount> run;
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            run.element[i] = static_cast<T>(piece[p][i]);
          }
          store_run(to + column, run);
        }
        continue;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (column + i < head_dim) {
          to[column + i] = static_cast<T>(piece[p][i]);
        }
      }
    }
  }

  __device__ static int warp() { return threadIdx.x / kWarpLanes; }
};

// The list of one token of one sequence and head.
struct TokenList {
  int64_t batch, head;
  int64_t matrix;  // batch * heads + head
  int64_t repeat;  // number among the matrices that share it
  int64_t token;
  uint32_t begin, end;  // its entries
};

// A list for each token of one side, of tokens of the other side.
struct TokenLists {
  const int32_t *offsets, *entries, *slots;
  int64_t num_entries, list_batch, list_heads, batch, heads, num_lists;

  TokenLists(
      const Tensor& offsets, const Tensor& entries, const std::optional<Tensor>& slots, int64_t list_batch,
      int64_t list_heads, const Tensor& x, int64_t num_lists)
      : offsets(offsets.const_data_ptr<int32_t>()),
        entries(entries.const_data_ptr<int32_t>()),
        slots(slots ? slots->const_data_ptr<int32_t>() : nullptr),
        num_entries(entries.size(0)),
        list_batch(list_batch),
        list_heads(list_heads),
        batch(x.size(0)),
        heads(x.size(1)),
        num_lists(num_lists) {
    check_token_lists(offsets, entries, list_batch, list_heads, num_lists, x);
    if (slots) {
      check_list(*slots, x, "slots");
      check_size(*slots, 0, num_entries, "slots");
    }
  }

  __host__ __device__ int64_t work_tiles_of_matrix() const { return (num_lists + kWarps - 1) / kWarps; }
  __host__ __device__ int64_t work_tiles() const { return batch * heads * work_tiles_of_matrix(); }
  int64_t repeats() const { return batch * heads / (list_batch * list_heads); }

  // The list's matrix, without token and entries.
  __device__ TokenList of_matrix(int64_t matrix) const {
    TokenList list;
    list.matrix = matrix;
    list.batch = matrix / heads;
    list.head = matrix % heads;
    const int64_t of_head = list_heads == 1 ? list.head : 0, heads_sharing = list_heads == 1 ? heads : 1;
    list.repeat = (list_batch == 1 ? list.batch : 0) * heads_sharing + of_head;
    return list;
  }

  __device__ int64_t first_offset(const TokenList& list) const {
    return ((list_batch == 1 ? 0 : list.batch) * list_heads + (list_heads == 1 ? 0 : list.head)) * num_lists;
  }
};

// Calls the job with each list: once by a warp, or, where it is long, by all warps of a thread block with shares of its
// entries. A thread block has neighbouring lists, which often list the same tokens, but long ones that lie far apart,
// since these tend to be neighbours.
//
// A Job has a RowShape, Arguments, Memory to put shares together in, the least thread blocks of a multiprocessor, and
//   Job(arguments, list)        loads what belongs to the list's own token
//   add(n, tokens)              the group's tokens, -1 beyond the end, of entries n, n + kGroups, and so on
//   finish_warp()               puts together what the groups have
//   finish_block(memory)        what the warps have, by a whole thread block
//   store(arguments, list)      by every lane of one warp
template <class Job>
__global__ void __launch_bounds__(kThreads, Job::kThreadBlocks)
    lists_kernel(const __grid_constant__ TokenLists lists, const __grid_constant__ typename Job::Arguments arguments) {
  using S = typename Job::RowShape;
  __shared__ typename Job::Memory memory;
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int64_t work_tiles_of_matrix = lists.work_tiles_of_matrix(), work_tiles = lists.work_tiles();
  for (int64_t work_tile = blockIdx.x; work_tile < work_tiles; work_tile += gridDim.x) {
    TokenList list = lists.of_matrix(work_tile / work_tiles_of_matrix);
    // A lane for each list that the block does together if it is long, and one for that of the warp if it is not.
    const int64_t number = work_tile % work_tiles_of_matrix;
    const int64_t token = lane < kWarps ? number + lane * work_tiles_of_matrix : number * kWarps + warp;
    uint32_t begin = 0, end = 0;
    bool mine = false;
    if (lane <= kWarps && token < lists.num_lists) {
      const int32_t* offset = lists.offsets + lists.first_offset(list) + token;
      begin = offset[0];
      end = offset[1];
      mine = (end - begin > kLong) == (lane < kWarps);
    }
    for (uint32_t left = __ballot_sync(0xffffffffu, mine); left != 0; left &= left - 1) {
      const int from = __ffs(left) - 1;
      const bool together = from < kWarps;
      list.token = together ? number + from * work_tiles_of_matrix : number * kWarps + warp;
      list.begin = __shfl_sync(0xffffffffu, begin, from);
      list.end = __shfl_sync(0xffffffffu, end, from);
      uint32_t first = list.begin, last = list.end;
      if (together) {
        const uint32_t of_warp = ((last - first + kWarps - 1) / kWarps + S::kStep - 1) / S::kStep * S::kStep;
        first = min(first + warp * of_warp, last);
        last = min(first + of_warp, last);
      }
      Job job(arguments, list);
      const auto read = [&](uint32_t n, int (&tokens)[S::kTokens]) {
        const int32_t* entries = lists.entries + n;
#pragma unroll
        for (int u = 0; u < S::kTokens; ++u) {
          tokens[u] = n + u * S::kGroups < last ? entries[u * S::kGroups] : -1;
        }
      };
      int next[S::kTokens];
      read(first + S::group(), next);
      for (uint32_t n = first; n < last; n += S::kStep) {
        int tokens[S::kTokens];
#pragma unroll
        for (int u = 0; u < S::kTokens; ++u) {
          tokens[u] = next[u];
        }
        read(n + S::group() + S::kStep, next);
        job.add(n + S::group(), tokens);
      }
      job.finish_warp();
      if (together) {
        job.finish_block(memory);
      }
      if (!together || warp == 0) {
        job.store(arguments, list);
      }
      if (together) {
        __syncthreads();
      }
    }
  }
}

// A tensor (B, H, tokens, head_dim) whose rows kernels gather: each begins at a multiple of 16 bytes and is whole runs.
template <class T>
struct GatheredRows {
  const T* data;
  int64_t batch_stride, head_stride;
  uint32_t token_bytes;
  int head_dim;

  // A lane's part of the rows of one matrix; tokens of -1 and what is beyond the row are zeros.
  template <class S>
  struct Matrix {
    const char* first;  // of token 0
    uint32_t token_bytes;
    int beyond[S::kPieces];  // -1 for a piece that is beyond the row, else 0

    __device__ Matrix(const T* data, const GatheredRows& rows)
        : first(reinterpret_cast<const char*>(data + S::column(0))), token_bytes(rows.token_bytes) {
#pragma unroll
      for (int p = 0; p < S::kPieces; ++p) {
        beyond[p] = S::column(p) < rows.head_dim ? 0 : -1;
      }
    }

    __device__ __forceinline__ GatheredRow<S> load(int token) const {
      GatheredRow<S> gathered{};
      // Offsets of 32 bits each, as one instruction multiplies them; the address of token -1 is not read.
      const char* row = first + uint64_t{static_cast<uint32_t>(token)} * token_bytes;
#pragma unroll
      for (int p = 0; p < S::kPieces; ++p) {
        if ((token | beyond[p]) >= 0) {
          gathered.piece[p] = *reinterpret_cast<const uint4*>(row + p * S::kLanes * 16);
        }
      }
      return gathered;
    }
  };

  template <class S>
  __device__ Matrix<S> of(const TokenList& list) const {
    return Matrix<S>(data + list.batch * batch_stride + list.head * head_stride, *this);
  }
};

// A tensor and its rows: a copy of it where it does not lie as kernels read it.
template <class T>
class RowsOperand {
 public:
  explicit RowsOperand(const Tensor& x) : tensor_(in_place(x) ? x : copy(x)) {}

  GatheredRows<T> rows() const {
    const auto stride = [&](int dim) { return tensor_.size(dim) == 1 ? 0 : tensor_.stride(dim); };
    return {
        static_cast<const T*>(tensor_.const_data_ptr()), stride(0), stride(1),
        static_cast<uint32_t>(stride(2) * sizeof(T)), static_cast<int>(tensor_.size(3))};
  }

 private:
  static bool in_place(const Tensor& x) {
    constexpr int64_t bytes = sizeof(T);
    bool fits = x.size(3) % kRun<T> == 0 && x.stride(3) == 1;
    fits = fits && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
    for (int dim = 0; dim < 3; ++dim) {
      fits = fits && (x.size(dim) == 1 || x.stride(dim) % kRun<T> == 0);
    }
    return fits && (x.size(2) == 1 || x.stride(2) * bytes <= UINT32_MAX);
  }

  static Tensor copy(const Tensor& x) {
    const int64_t head_dim = x.size(3), padded = (head_dim + kRun<T> - 1) / kRun<T> * kRun<T>;
    Tensor to = torch::stable::new_zeros(x, {x.size(0), x.size(1), x.size(2), padded});
    Tensor inside = torch::stable::narrow(to, 3, 0, head_dim);
    torch::stable::copy_(inside, x);
    return to;
  }

  Tensor tensor_;
};

// e^(x - row_max).
template <class A>
__device__ __forceinline__ A exp_of_difference(A x, A row_max) {
  if constexpr (std::is_same_v<A, float>) {
    // expf brings back results below 2^-126, which is not worth its instructions here.
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"((x - row_max) * 1.4426950408889634f));
    return power;
  } else {
    return exp(x - row_max);
  }
}

// dot * scale, rounded before anything is taken off, so that every pass has the same. One that has become -inf is not
// masked.
template <class A>
__device__ __forceinline__ A score_of(A dot, A scale) {
  A score;
  if constexpr (std::is_same_v<A, float>) {
    score = __fmul_rn(dot, scale);
  } else {
    score = __dmul_rn(dot, scale);
  }
  constexpr A lowest = std::numeric_limits<A>::lowest();
  return score < lowest ? lowest : score;
}

// Calls f with a RowShape for rows of up to `head_dim` numbers of x's type.
template <class F>
void with_shape(const Tensor& x, int64_t head_dim, const F& f) {
  check(head_dim <= kMaxHeadDim, "tokens have ", head_dim, " numbers; on CUDA they have up to ", kMaxHeadDim, ".");
  const auto with_halves = [&](auto zero) {
    using T = decltype(zero);
    if (head_dim <= 64) {
      f(RowShape<T, 8, 1>{});
    } else if (head_dim <= 128) {
      f(RowShape<T, 16, 1>{});
    } else {
      f(RowShape<T, 32, 1>{});
    }
  };
  switch (x.scalar_type()) {
    case ScalarType::Half:
      return with_halves(__half{});
    case ScalarType::BFloat16:
      return with_halves(__nv_bfloat16{});
    case ScalarType::Float:
      if (head_dim <= 64) {
        return f(RowShape<float, 16, 1>{});
      }
      return head_dim <= 128 ? f(RowShape<float, 32, 1>{}) : f(RowShape<float, 32, 2>{});
    case ScalarType::Double:
      return head_dim <= 64 ? f(RowShape<double, 32, 1>{}) : f(RowShape<double, 32, 4>{});
    default:
      check(false, "tokens are fp32, fp64, fp16 or bf16.");
  }
}

}  // namespace ds_sparse::token
