// What the kernels over lists of token pairs share: lists, rows of memory that are gathered, how lines of lists are
// shared out. Schemas and shapes: csrc/library.cpp.
//
// A line is a query and the keys that it sees, or a key and the queries that see it. A warp does a line: groups of
// kLanes lanes take one token of the list each, read its row in runs of 16 bytes, and keep sums of their own, which are
// put together at the end. What takes the time is bringing rows from L2, so that several of a group's tokens are read
// before the first is looked at, and the list is read a step ahead. Lines of more than kLong tokens are shared by the
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

namespace ds_sparse::token {

constexpr int kWarpLanes = 32;
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpLanes;
constexpr int kMaxWidth = 256;

// Tokens that a warp does by itself, so that a line does not set the time.
constexpr uint32_t kLong = 512;

// How a row lies in the lanes of a group: lane l has the runs of 16 bytes l, l + kLanes, and so on, kPieces of them.
template <class Element, int kLanesOfGroup, int kPiecesOfLane>
struct Shape {
  using T = Element;
  using A = Compute<T>;
  static constexpr int kLanes = kLanesOfGroup, kPieces = kPiecesOfLane;
  static constexpr int kGroups = kWarpLanes / kLanes;
  static constexpr int kWidth = kLanes * kPieces * kRun<T>;
  // Tokens of a group whose rows are on their way together.
  static constexpr int kTokens = kPieces < 4 ? 4 / kPieces : 1;
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
struct Part {
  uint4 piece[S::kPieces];
};

template <class S>
struct Numbers {
  using A = typename S::A;
  static constexpr int kCount = kRun<typename S::T>;
  A piece[S::kPieces][kCount];

  __device__ Numbers() : piece{} {}

  __device__ explicit Numbers(const Part<S>& part) {
#pragma unroll
    for (int p = 0; p < S::kPieces; ++p) {
      unpack<typename S::T>(part.piece[p], piece[p]);
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
  __device__ void add_warps(A (&memory)[kWarps][S::kWidth]) {
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

  // Writes a row of `width` numbers, of contiguous ones. By one group.
  __device__ void store(typename S::T* to, int width) const {
    using T = typename S::T;
#pragma unroll
    for (int p = 0; p < S::kPieces; ++p) {
      const int column = S::column(p);
      if (width % kCount == 0) {
        if (column < width) {
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
        if (column + i < width) {
          to[column + i] = static_cast<T>(piece[p][i]);
        }
      }
    }
  }

  __device__ static int warp() { return threadIdx.x / kWarpLanes; }
};

// A line of one sequence and head.
struct Line {
  int64_t batch, head;
  int64_t matrix;  // batch * heads + head
  int64_t repeat;  // number among those that share the list
  int64_t token;
  uint32_t begin, end;  // its entries
};

// Lists by one side's tokens, the lines, of the other side's.
struct Lists {
  const int32_t *offsets, *entries, *slots;
  int64_t num_entries, list_batch, list_heads, batch, heads, lines;

  Lists(
      const Tensor& offsets, const Tensor& entries, const std::optional<Tensor>& slots, int64_t list_batch,
      int64_t list_heads, const Tensor& x, int64_t lines)
      : offsets(offsets.const_data_ptr<int32_t>()),
        entries(entries.const_data_ptr<int32_t>()),
        slots(slots ? slots->const_data_ptr<int32_t>() : nullptr),
        num_entries(entries.size(0)),
        list_batch(list_batch),
        list_heads(list_heads),
        batch(x.size(0)),
        heads(x.size(1)),
        lines(lines) {
    check_token_lists(offsets, entries, list_batch, list_heads, lines, x);
    if (slots) {
      check_list(*slots, x, "slots");
      check_size(*slots, 0, num_entries, "slots");
    }
  }

  __host__ __device__ int64_t tasks_of_matrix() const { return (lines + kWarps - 1) / kWarps; }
  __host__ __device__ int64_t tasks() const { return batch * heads * tasks_of_matrix(); }
  int64_t repeats() const { return batch * heads / (list_batch * list_heads); }

  // Of the matrix, without its token and entries.
  __device__ Line of_matrix(int64_t matrix) const {
    Line line;
    line.matrix = matrix;
    line.batch = matrix / heads;
    line.head = matrix % heads;
    const int64_t of_head = list_heads == 1 ? line.head : 0, heads_sharing = list_heads == 1 ? heads : 1;
    line.repeat = (list_batch == 1 ? line.batch : 0) * heads_sharing + of_head;
    return line;
  }

  __device__ int64_t first_offset(const Line& line) const {
    return ((list_batch == 1 ? 0 : line.batch) * list_heads + (list_heads == 1 ? 0 : line.head)) * lines;
  }
};

// Calls the job with each line: once by a warp, or, where it is long, by all warps of a thread block with shares of its
// entries. A thread block has neighbouring lines, which often list the same tokens, but long ones that lie far apart,
// since these tend to be neighbours.
//
// A Job has a Shape, Arguments, Memory to put shares together in, the least thread blocks of a multiprocessor, and
//   Job(arguments, line)        loads what belongs to the line itself
//   add(n, tokens)              the group's tokens, -1 beyond the end, of entries n, n + kGroups, and so on
//   finish_warp()               puts together what the groups have
//   finish_block(memory)        what the warps have, by a whole thread block
//   store(arguments, line)      by every lane of one warp
template <class Job>
__global__ void __launch_bounds__(kThreads, Job::kBlocks)
    lines_kernel(const __grid_constant__ Lists lists, const __grid_constant__ typename Job::Arguments arguments) {
  using S = typename Job::Shape;
  __shared__ typename Job::Memory memory;
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const int64_t tasks_of_matrix = lists.tasks_of_matrix(), tasks = lists.tasks();
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    Line line = lists.of_matrix(task / tasks_of_matrix);
    // A lane for each line that the block does together if it is long, and one for that of the warp if it is not.
    const int64_t number = task % tasks_of_matrix;
    const int64_t token = lane < kWarps ? number + lane * tasks_of_matrix : number * kWarps + warp;
    uint32_t begin = 0, end = 0;
    bool mine = false;
    if (lane <= kWarps && token < lists.lines) {
      const int32_t* offset = lists.offsets + lists.first_offset(line) + token;
      begin = offset[0];
      end = offset[1];
      mine = (end - begin > kLong) == (lane < kWarps);
    }
    for (uint32_t left = __ballot_sync(0xffffffffu, mine); left != 0; left &= left - 1) {
      const int from = __ffs(left) - 1;
      const bool together = from < kWarps;
      line.token = together ? number + from * tasks_of_matrix : number * kWarps + warp;
      line.begin = __shfl_sync(0xffffffffu, begin, from);
      line.end = __shfl_sync(0xffffffffu, end, from);
      uint32_t first = line.begin, last = line.end;
      if (together) {
        const uint32_t share = ((last - first + kWarps - 1) / kWarps + S::kStep - 1) / S::kStep * S::kStep;
        first = min(first + warp * share, last);
        last = min(first + share, last);
      }
      Job job(arguments, line);
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
        job.store(arguments, line);
      }
      if (together) {
        __syncthreads();
      }
    }
  }
}

// A tensor (B, H, tokens, width) whose rows kernels gather: each begins at a multiple of 16 bytes and is whole runs.
template <class T>
struct Rows {
  const T* data;
  int64_t batch_stride, head_stride;
  uint32_t token_bytes;
  int width;

  // A lane's part of the rows of one matrix; tokens of -1 and what is beyond the row are zeros.
  template <class S>
  struct Matrix {
    const char* first;  // of token 0
    uint32_t token_bytes;
    int beyond[S::kPieces];  // -1 for a piece that is beyond the row, else 0

    __device__ Matrix(const T* data, const Rows& rows)
        : first(reinterpret_cast<const char*>(data + S::column(0))), token_bytes(rows.token_bytes) {
#pragma unroll
      for (int p = 0; p < S::kPieces; ++p) {
        beyond[p] = S::column(p) < rows.width ? 0 : -1;
      }
    }

    __device__ __forceinline__ Part<S> load(int token) const {
      Part<S> part{};
      // Of 32 bits each, as one instruction multiplies them; the address of token -1 is not read.
      const char* row = first + uint64_t{static_cast<uint32_t>(token)} * token_bytes;
#pragma unroll
      for (int p = 0; p < S::kPieces; ++p) {
        if ((token | beyond[p]) >= 0) {
          part.piece[p] = *reinterpret_cast<const uint4*>(row + p * S::kLanes * 16);
        }
      }
      return part;
    }
  };

  template <class S>
  __device__ Matrix<S> of(const Line& line) const {
    return Matrix<S>(data + line.batch * batch_stride + line.head * head_stride, *this);
  }
};

// A tensor and its rows: a copy of it where it does not lie as kernels read it.
template <class T>
class Operand {
 public:
  explicit Operand(const Tensor& x) : tensor_(in_place(x) ? x : copy(x)) {}

  Rows<T> rows() const {
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
    const int64_t width = x.size(3), padded = (width + kRun<T> - 1) / kRun<T> * kRun<T>;
    Tensor to = torch::stable::new_zeros(x, {x.size(0), x.size(1), x.size(2), padded});
    Tensor inside = torch::stable::narrow(to, 3, 0, width);
    torch::stable::copy_(inside, x);
    return to;
  }

  Tensor tensor_;
};

// e^(x - origin).
template <class A>
__device__ __forceinline__ A exp_of_difference(A x, A origin) {
  if constexpr (std::is_same_v<A, float>) {
    // expf brings back results below 2^-126, which is not worth its instructions here.
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"((x - origin) * 1.4426950408889634f));
    return power;
  } else {
    return exp(x - origin);
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

// Calls f with a Shape for rows of up to `width` numbers of x's type.
template <class F>
void with_shape(const Tensor& x, int64_t width, const F& f) {
  check(
      width <= kMaxWidth, "tokens have " + std::to_string(width) + " numbers; on CUDA they have up to " +
                              std::to_string(kMaxWidth) + ".");
  const auto with_halves = [&](auto zero) {
    using T = decltype(zero);
    if (width <= 64) {
      f(Shape<T, 8, 1>{});
    } else if (width <= 128) {
      f(Shape<T, 16, 1>{});
    } else {
      f(Shape<T, 32, 1>{});
    }
  };
  switch (x.scalar_type()) {
    case ScalarType::Half:
      return with_halves(__half{});
    case ScalarType::BFloat16:
      return with_halves(__nv_bfloat16{});
    case ScalarType::Float:
      if (width <= 64) {
        return f(Shape<float, 16, 1>{});
      }
      return width <= 128 ? f(Shape<float, 32, 1>{}) : f(Shape<float, 32, 2>{});
    case ScalarType::Double:
      return width <= 64 ? f(Shape<double, 32, 1>{}) : f(Shape<double, 32, 4>{});
    default:
      check(false, "tokens are fp32, fp64, fp16 or bf16.");
  }
}

}  // namespace ds_sparse::token
