// Row softmax over live blocks. Schemas and shapes: csrc/library.cpp; meaning: ds_sparse/reference.py.
//
// The live blocks of a block row lie one after the other in memory, each contiguous. So a warp takes a strip of a block
// row: those neighbouring token rows of which a load of 16 bytes a lane covers 512 contiguous bytes in each block, a
// unit. A few neighbouring lanes share a token row and hold a run of 16 bytes of it for every unit. Warps take several
// short strips at once; long ones are shared by 2 to 8 warps; what these cannot hold is read twice, the second time
// mostly from cache.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <type_traits>
#include <vector>

#include "../checks.h"
#include "../compute.h"
#include "elements.h"
#include "launch.h"
#include "logits.h"
#include "vector.h"

namespace ds_sparse {
namespace {

constexpr int kThreads = 256;
constexpr int kLogLanes = 5, kLanes = 1 << kLogLanes;
constexpr int kLogWarps = 3, kWarps = 1 << kLogWarps;
constexpr uint32_t kAllLanes = 0xffffffff;

// The live blocks of all heads and where their values are.
struct Blocks {
  const int32_t* row_offsets;
  uint32_t layout_heads, rows, values, given_entries;
  int log_block;

  // N, the live blocks of the stored layouts. If it is not given, only the device knows it without a synchronisation.
  __device__ uint32_t entries() const {
    return given_entries != 0 ? given_entries : row_offsets[int64_t{layout_heads} * rows];
  }
  __device__ uint32_t heads(uint32_t entries) const { return layout_heads == 1 ? values / entries : layout_heads; }

  // Entries [x, y) of block row `row` of `head`.
  __device__ int2 entries_of(uint32_t head, uint32_t row) const {
    const int64_t at = (layout_heads == 1 ? 0 : int64_t{head} * rows) + row;
    return {row_offsets[at], row_offsets[at + 1]};
  }

  // Where entry n of `head` starts among the elements of the values (B, V, b, b).
  __device__ int64_t element_of(uint32_t batch, uint32_t head, uint32_t entries, int entry) const {
    return (int64_t{batch} * values + (layout_heads == 1 ? int64_t{head} * entries : 0) + entry) << 2 * log_block;
  }
};

// How block rows are cut into strips and these into units. Where a whole block is smaller than a unit, neighbouring
// blocks are side by side in it; where a token row of a block is larger, it is a strip, and each of its parts a unit.
template <class T>
struct Cut {
  int log_block;
  int log_runs;        // of a block's token row in a unit
  int log_side;        // blocks side by side in a unit
  int log_parts;       // units of a block in a strip
  uint32_t row_lanes;  // the bits in which lanes of the same token row differ
  uint32_t gap;        // runs of a block that are not the strip's

  explicit Cut(int log_block) : log_block(log_block) {
    const int log_row = log_block - log2_of(kRun<T>);
    log_runs = std::min(log_row, kLogLanes);
    log_side = std::max(kLogLanes - log_block - log_row, 0);
    log_parts = log_row - log_runs;
    row_lanes = ((1u << log_runs) - 1) | (((1u << log_side) - 1) << (kLogLanes - log_side));
    gap = log_side > 0 ? 0 : (1u << (log_block + log_row)) - (1u << (kLogLanes + log_parts));
  }

  __device__ int log_rows() const { return kLogLanes - log_runs - log_side; }  // of a strip
  __device__ int log_strips() const { return log_block - log_rows(); }         // of a block row
  // Where its entry `entry` begins, in runs.
  __device__ int64_t run_of(int64_t entry) const { return entry << (log_block + log_runs + log_parts); }
  // Units in which so many blocks are, or those that lie at `side`.
  __device__ int units(int blocks, int side = 0) const {
    return ((blocks << log_parts) + (1 << log_side) - 1 - side) >> log_side;
  }
  // The lane's run in unit `unit`, where `strip` is that in the first.
  template <class Words>
  __device__ __forceinline__ Words* at(Words* strip, int unit) const {
    const uint32_t run = static_cast<uint32_t>(unit >> log_parts) * gap + static_cast<uint32_t>(unit) * kLanes;
    // The compiler would add up offsets in 64 bits, from the beginning of the tensor: six instructions in place of one.
    Words* words;
    asm("mad.wide.u32 %0, %1, 16, %2;" : "=l"(words) : "r"(run), "l"(strip));
    return words;
  }

  // Of strip `number` of all: its block row among all of them, its place in that, and the lane's token row in that.
  __device__ uint32_t line(int64_t number) const { return static_cast<uint32_t>(number >> log_strips()); }
  __device__ int strip(int64_t number) const { return static_cast<int>(number) & ((1 << log_strips()) - 1); }
  __device__ int row(int64_t number) const {
    return (strip(number) << log_rows()) + ((threadIdx.x >> log_runs) & ((1 << log_rows()) - 1));
  }
  __device__ int side() const { return threadIdx.x % kLanes >> (kLogLanes - log_side); }
  // The lane's first column of unit `unit` in a block row whose live blocks have `columns`.
  __device__ int column(int unit, const int32_t* columns) const {
    const int part = unit & ((1 << log_parts) - 1), run = threadIdx.x & ((1 << log_runs) - 1);
    const int block = columns[((unit >> log_parts) << log_side) + side()];
    return (block << log_block) + ((part << log_runs) + run) * kRun<T>;
  }

  // What f makes of the lanes of each token row; the same bits in all of them.
  template <class A, int kCount, class F>
  __device__ __forceinline__ void combine(A (&x)[kCount], const F& f) const {
#pragma unroll
    for (int log = kLogLanes - 1; log >= 0; --log) {
      if (row_lanes >> log & 1) {
#pragma unroll
        for (A& of_strip : x) {
          of_strip = f(of_strip, __shfl_xor_sync(kAllLanes, of_strip, 1 << log));
        }
      }
    }
  }
  template <class A, int kCount>
  __device__ __forceinline__ void sum(A (&x)[kCount]) const {
    combine(x, [](A a, A b) { return a + b; });
  }
  template <class A, int kCount>
  __device__ __forceinline__ void max(A (&x)[kCount]) const {
    combine(x, [](A a, A b) { return ::max(a, b); });
  }
};

// Gives all elements of an array the value x.
template <class X>
__device__ __forceinline__ void fill(X& all, const std::remove_all_extents_t<X>& x) {
  if constexpr (std::is_array_v<X>) {
#pragma unroll
    for (auto& one : all) {
      fill(one, x);
    }
  } else {
    all = x;
  }
}

// What a lane has of a strip.
struct Strip {
  int64_t number;   // among all strips
  int64_t run;      // where its runs begin, in runs from the beginning of the tensor
  int first_entry;  // of the block row
  int units;        // of the lane
  int most;         // of any lane of the warp
};

// The warps that share a strip, each of whose units is every 2^log_warps-th.
struct Team {
  int log_warps, member;
  int* turn;  // which of two places is next to exchange in: the other may still be read

  __device__ int unit(int i) const { return (i << log_warps) + member; }

  // Gives x to the other warps. Returns where the first one's is, for the same lane; the next one's is kLanes further.
  template <class A>
  __device__ __forceinline__ const A* exchange(A (&memory)[2][kThreads], std::type_identity_t<A> x) const {
    A* of_turn = memory[*turn];
    *turn ^= 1;
    of_turn[threadIdx.x] = x;
    __syncthreads();
    return of_turn + threadIdx.x - member * kLanes;
  }
};

template <int kNumber>
using Units = std::integral_constant<int, kNumber>;

// Calls f(s, i, unit) for the lane's units of each strip s, from its `first` on and kUnits at most, of which unit `unit`
// of the strip is number i.
template <int kUnits, int kStrips, class F>
__device__ __forceinline__ void for_each_unit(
    const Strip (&strips)[kStrips], const Team& team, int first, const F& f) {
#pragma unroll
  for (int s = 0; s < kStrips; ++s) {
    const int left = strips[s].units - first;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (i < left) {
        f(s, i, team.unit(first + i));
      }
    }
  }
}

// The log of how many strips of so many units a thread block takes at once.
template <int kHeld, int kAtOnce>
__device__ __forceinline__ int log_at_once(int units) {
  if (units > kHeld) {
    return units <= 2 * kHeld ? kLogWarps - 1 : units <= 4 * kHeld ? kLogWarps - 2 : 0;
  }
  return units > kAtOnce / 2 ? kLogWarps : units > kAtOnce / 4 ? kLogWarps + 1 : kLogWarps + 2;
}

// Has all strips worked on, shared out over the grid: calls work(units, strips, team) for those that the warp takes at
// once, each with up to `units` units: up to kAtOnce in all, or of one kHeld. The latter may be shared, and longer.
template <int kHeld, int kAtOnce, class T, class Work>
__device__ __forceinline__ void for_all_strips(
    const Blocks& blocks, const Cut<T>& cut, int64_t batch, const Work& work) {
  static_assert(kLogWarps == 3);
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const uint32_t entries = blocks.entries(), lines = blocks.layout_heads * blocks.rows;
  // Of the layouts; block rows of all heads and batches are fewer than 2^32.
  const uint32_t copies = static_cast<uint32_t>(batch) * blocks.values / entries;
  const int64_t strips = (int64_t{copies} * lines) << cut.log_strips();
  // A thread block looks at so many strips at a time, a lane at each: its share, if that is not too many, in whole
  // numbers of what it takes at once of average ones.
  const int at_once = 1 << log_at_once<kHeld, kAtOnce>(cut.units(static_cast<int>(__fdividef(entries, lines))));
  const int share = static_cast<int>(min(__fdividef(strips, gridDim.x), float{kLanes}));
  const int looked_at = max(at_once, (share + at_once - 1) & -at_once);
  int turn = 0;
  for (int64_t start = int64_t{blockIdx.x} * looked_at; start < strips; start += int64_t{gridDim.x} * looked_at) {
    const int64_t number = start + lane;
    const uint32_t line = cut.line(number), of_layout = line % lines;
    const int first_entry = blocks.row_offsets[of_layout];
    const bool exists = lane < looked_at && number < strips;
    const int count = exists ? blocks.row_offsets[of_layout + 1] - first_entry : 0;
    const int64_t run = cut.run_of(int64_t{line / lines} * entries + first_entry) +
                        (cut.strip(number) << (kLogLanes + cut.log_parts));
    const int log = count > 0 ? log_at_once<kHeld, kAtOnce>(cut.units(count)) : -1;

    // Long ones first.
#pragma unroll 1
    for (uint32_t kinds = __reduce_or_sync(kAllLanes, count > 0 ? 1u << log : 0); kinds != 0; kinds &= kinds - 1) {
      const int kind = __ffs(kinds) - 1;
      const uint32_t ones = __ballot_sync(kAllLanes, log == kind);
      const int rank = log == kind ? __popc(ones & ((1u << lane) - 1)) : -1;
      const int log_warps = max(kLogWarps - kind, 0);
      const Team team{log_warps, warp & ((1 << log_warps) - 1), &turn};
      // The strip of this kind with that rank, or one without units.
      const auto strip_of = [&](int wanted) {
        const uint32_t of_lane = __ballot_sync(kAllLanes, rank == wanted);
        const int from = of_lane != 0 ? __ffs(of_lane) - 1 : 0;
        const int blocks = of_lane != 0 ? __shfl_sync(kAllLanes, count, from) : 0;
        const auto of_member = [&](int units) { return (units - team.member + (1 << log_warps) - 1) >> log_warps; };
        return Strip{
            start + from, __shfl_sync(kAllLanes, run, from) + lane, __shfl_sync(kAllLanes, first_entry, from),
            of_member(cut.units(blocks, cut.side())), of_member(cut.units(blocks))};
      };
      const auto take = [&](auto held, const auto&... strips) {
        const Strip taken[] = {strips...};
        if (log_warps > 0 || taken[0].most > 0) {
          work(held, taken, held < kHeld ? Team{0, 0, &turn} : team);
        }
      };
      for (int done = 0; done < __popc(ones); done += 1 << kind) {
        const int first = done + (kind <= kLogWarps ? warp >> log_warps : warp << (kind - kLogWarps));
        if (kind == kLogWarps + 2) {
          take(Units<kAtOnce / 4>{}, strip_of(first), strip_of(first + 1), strip_of(first + 2), strip_of(first + 3));
        } else if (kind == kLogWarps + 1) {
          take(Units<kAtOnce / 2>{}, strip_of(first), strip_of(first + 1));
        } else if (const Strip strip = strip_of(first); kAtOnce < kHeld && kind == kLogWarps && strip.most <= kAtOnce) {
          take(Units<kAtOnce>{}, strip);
        } else {
          take(Units<kHeld>{}, strip);
        }
      }
    }
  }
}

// Something added to the scores, or a mask to keep where true, of shape (B or 1, H or 1, T or 1, S): strides are 0
// where the size is 1. `data` is null where there is none.
struct Bias {
  const void* data;
  bool keeps;
  int64_t batch, head, token, column;
};

// Those that are there come first.
struct Biases {
  Bias bias[3];
};

template <class T>
__device__ __forceinline__ void add_run(const Run<T, kRun<T>>& bias, Compute<T> (&logits)[kRun<T>]) {
  using A = Compute<T>;
  A sums[kRun<T>];
  bool dropped = false;  // rare; only then it matters whether a sum overflowed
#pragma unroll
  for (int i = 0; i < kRun<T>; ++i) {
    sums[i] = logits[i] + static_cast<A>(bias.element[i]);
    dropped |= sums[i] == -infinity<A>();
  }
  if (dropped) {
#pragma unroll
    for (int i = 0; i < kRun<T>; ++i) {
      sums[i] = biased(logits[i], static_cast<A>(bias.element[i]));
    }
  }
#pragma unroll
  for (int i = 0; i < kRun<T>; ++i) {
    logits[i] = sums[i];
  }
}

template <class T>
struct Forward {
  const uint4* scores;
  uint4* probs;
  Blocks blocks;
  Cut<T> cut;
  const int32_t* columns;
  int64_t batch;
  Biases biases;
  Compute<T> scale;
  bool causal;
};

// Scales the scores in `logits`, adds what is given, and drops what is masked.
template <class T, int kStrips, int kUnits>
__device__ __forceinline__ void finish_logits(
    const Forward<T>& p, const Strip (&strips)[kStrips], const Team& team, int first,
    Compute<T> (&logits)[kStrips][kUnits][kRun<T>]) {
  using A = Compute<T>;
  const auto for_each = [&](const auto& f) { for_each_unit<kUnits>(strips, team, first, f); };
  const uint32_t heads = p.blocks.heads(p.blocks.entries());
  for_each([&](int s, int i, int) { scale_run(logits[s][i], p.scale); });
  const auto column_of = [&](int s, int unit) { return p.cut.column(unit, p.columns + strips[s].first_entry); };
  uint32_t batch[kStrips], head[kStrips], token[kStrips];
#pragma unroll
  for (int s = 0; s < kStrips; ++s) {
    const uint32_t line = p.cut.line(strips[s].number), matrix = line / p.blocks.rows;
    batch[s] = matrix / heads;
    head[s] = matrix % heads;
    token[s] = (line % p.blocks.rows << p.cut.log_block) + p.cut.row(strips[s].number);
  }
  // Those that are there come first.
#pragma unroll 1
  for (const Bias* bias = p.biases.bias; bias < p.biases.bias + 3 && bias->data != nullptr; ++bias) {
    for_each([&](int s, int i, int unit) {
      const int64_t at = batch[s] * bias->batch + head[s] * bias->head + token[s] * bias->token +
                         column_of(s, unit) * bias->column;
      if (bias->keeps) {
        const auto keep = load_run<kRun<T>>(static_cast<const uint8_t*>(bias->data) + at, bias->column);
#pragma unroll
        for (int e = 0; e < kRun<T>; ++e) {
          logits[s][i][e] = keep.element[e] != 0 ? logits[s][i][e] : -infinity<A>();
        }
      } else {
        add_run(load_run<kRun<T>>(static_cast<const T*>(bias->data) + at, bias->column), logits[s][i]);
      }
    });
  }
  if (p.causal) {
    for_each([&](int s, int i, int unit) {
      const int column = column_of(s, unit);
#pragma unroll
      for (int e = 0; e < kRun<T>; ++e) {
        logits[s][i][e] = column + e > token[s] ? -infinity<A>() : logits[s][i][e];
      }
    });
  }
}

// What a warp made of its part of a row.
template <class A>
struct Part {
  A largest, sum;
};

// Units that a warp holds: as they lie in memory if scores are only scaled (kPlain), else as logits.
template <bool kPlain>
constexpr int kForwardHeld = kPlain ? 20 : 6;
// In so many the powers take the place of what was held; with more they are made a second time for the results.
template <bool kPlain>
constexpr int kForwardPowers = kPlain ? 10 : kForwardHeld<kPlain>;
constexpr int kBackwardHeld = 10;  // of each input

// kPlain: scale is positive, and there is nothing else. Then it is left to the exponents, whose differences it scales.
template <class T, bool kPlain>
__global__ void __launch_bounds__(kThreads, 2) softmax_forward_kernel(const __grid_constant__ Forward<T> p) {
  using A = Compute<T>;
  constexpr int kHeld = kForwardHeld<kPlain>, kPowers = kForwardPowers<kPlain>;
  __shared__ Part<A> exchanged[2][kThreads];
  const A exponent_scale = kPlain ? p.scale * kLog2E<A> : kLog2E<A>;
  for_all_strips<kHeld, kPowers>(p.blocks, p.cut, p.batch, [&](auto units, const auto& strips, const Team& team) {
    constexpr int kUnits = units, kStrips = std::extent_v<std::remove_reference_t<decltype(strips)>>;
    constexpr bool kIsWhole = kUnits < kHeld;  // the strips are this warp's alone, and it holds them
    constexpr bool kHoldsPowers = kStrips * kUnits <= kPowers;
    uint4 runs[kStrips][kUnits];
    A numbers[kStrips][kUnits][kRun<T>];  // logits that are not plain, powers that are held
    A largest[kStrips], reference[kStrips], sum[kStrips], factor[kStrips];

    const auto for_each = [&](int first, const auto& f) { for_each_unit<kUnits>(strips, team, first, f); };
    const auto read = [&](int first) {
      // Where a unit is not there, what was held of earlier strips would keep its registers.
      fill(runs, {});
      fill(numbers, 0);
      for_each(first, [&](int s, int i, int unit) {
        runs[s][i] = load_once(p.cut.at(p.scores + strips[s].run, unit));
      });
      if constexpr (!kPlain) {
        for_each(first, [&](int s, int i, int) { unpack<T>(runs[s][i], numbers[s][i]); });
        finish_logits(p, strips, team, first, numbers);
      }
    };
    const auto find_largest = [&](int first, A (&of_lane)[kStrips]) {
      if constexpr (kPlain) {
        uint4 larger[kStrips];
        fill(larger, lowest_run<T>());
        for_each(first, [&](int s, int i, int) { larger[s] = larger_of<T>(larger[s], runs[s][i]); });
#pragma unroll
        for (int s = 0; s < kStrips; ++s) {
          of_lane[s] = largest_of<T>(larger[s]);
        }
      } else {
        fill(of_lane, -infinity<A>());
        for_each(first, [&](int s, int i, int) { of_lane[s] = max(of_lane[s], largest_of(numbers[s][i])); });
      }
    };
    // Calls f(s, powers, unit) for those units, and where powers are held makes them so.
    const auto for_each_power = [&](int first, const auto& f) {
      for_each(first, [&](int s, int i, int unit) {
        A powers[kRun<T>];
        if constexpr (kPlain) {
          unpack<T>(runs[s][i], powers);
        }
#pragma unroll
        for (int e = 0; e < kRun<T>; ++e) {
          powers[e] = power_of_difference(kPlain ? powers[e] : numbers[s][i][e], reference[s], exponent_scale);
          if constexpr (kHoldsPowers) {
            numbers[s][i][e] = powers[e];
          }
        }
        f(s, powers, unit);
      });
    };
    const auto write = [&](int s, A (&powers)[kRun<T>], int unit) {
#pragma unroll
      for (A& power : powers) {
        power *= factor[s];
      }
      store_words(p.cut.at(p.probs + strips[s].run, unit), pack<T>(powers));
    };

    fill(largest, -infinity<A>());
    fill(sum, A(0));
    int first = 0;
    do {
      read(first);
      A larger[kStrips];
      find_largest(first, larger);
      p.cut.max(larger);
#pragma unroll
      for (int s = 0; s < kStrips; ++s) {
        larger[s] = max(largest[s], larger[s]);
        reference[s] = finite_reference(larger[s]);
        sum[s] *= power_of_difference(largest[s], reference[s], exponent_scale);
        largest[s] = larger[s];
      }
      for_each_power(first, [&](int s, const auto& powers, int) { sum[s] += sum_of(powers); });
      first += kUnits;
    } while (!kIsWhole && first < strips[0].most);
    p.cut.sum(sum);

    const bool again = !kIsWhole && first > kUnits;
    A correction = 1;  // of powers that are held
    if (!kIsWhole && team.log_warps > 0) {
      const Part<A>* parts = team.exchange(exchanged, {largest[0], sum[0]});
      A overall = -infinity<A>();
#pragma unroll 1
      for (int w = 0; w < 1 << team.log_warps; ++w) {
        overall = max(overall, parts[w * kLanes].largest);
      }
      reference[0] = finite_reference(overall);
      correction = power_of_difference(largest[0], reference[0], exponent_scale);
      sum[0] = 0;
#pragma unroll 1
      for (int w = 0; w < 1 << team.log_warps; ++w) {
        const Part<A> part = parts[w * kLanes];
        sum[0] += part.sum * power_of_difference(part.largest, reference[0], exponent_scale);
      }
    }
#pragma unroll
    for (int s = 0; s < kStrips; ++s) {
      factor[s] = sum[s] == 0 ? A(0) : 1 / sum[s];
    }
    if (kHoldsPowers && !again) {
      factor[0] *= correction;
      for_each(0, [&](int s, int i, int unit) { write(s, numbers[s][i], unit); });
      return;
    }
    first = 0;
    do {
      if (again) {
        read(first);
      }
      for_each_power(first, write);
      first += kUnits;
    } while (!kIsWhole && first < strips[0].most);
  });
}

template <class T>
struct Backward {
  const uint4* grad;
  const uint4* probs;
  uint4* grad_scores;
  Blocks blocks;
  Cut<T> cut;
  int64_t batch;
  Compute<T> scale;
};

template <class T>
__global__ void __launch_bounds__(kThreads, 2) softmax_backward_kernel(const __grid_constant__ Backward<T> p) {
  using A = Compute<T>;
  constexpr int kHeld = kBackwardHeld;
  __shared__ A exchanged[2][kThreads];
  for_all_strips<kHeld, kHeld>(p.blocks, p.cut, p.batch, [&](auto units, const auto& strips, const Team& team) {
    constexpr int kUnits = units, kStrips = std::extent_v<std::remove_reference_t<decltype(strips)>>;
    constexpr bool kIsWhole = kUnits < kHeld;
    uint4 grads[kStrips][kUnits], probs[kStrips][kUnits];
    A dot[kStrips];
    const auto for_each = [&](int first, const auto& f) { for_each_unit<kUnits>(strips, team, first, f); };
    const auto read = [&](int first) {
      // As forward.
      fill(grads, {});
      fill(probs, {});
      for_each(first, [&](int s, int i, int unit) {
        grads[s][i] = load_once(p.cut.at(p.grad + strips[s].run, unit));
        probs[s][i] = load_once(p.cut.at(p.probs + strips[s].run, unit));
      });
    };
    fill(dot, A(0));
    int first = 0;
    do {
      read(first);
      for_each(first, [&](int s, int i, int) {
        A grad[kRun<T>], prob[kRun<T>];
        unpack<T>(grads[s][i], grad);
        unpack<T>(probs[s][i], prob);
#pragma unroll
        for (int e = 0; e < kRun<T>; ++e) {
          dot[s] += grad[e] * prob[e];
        }
      });
      first += kUnits;
    } while (!kIsWhole && first < strips[0].most);
    p.cut.sum(dot);
    if (!kIsWhole && team.log_warps > 0) {
      const A* of_warps = team.exchange(exchanged, dot[0]);
      dot[0] = 0;
#pragma unroll 1
      for (int w = 0; w < 1 << team.log_warps; ++w) {
        dot[0] += of_warps[w * kLanes];
      }
    }
    const bool again = first > kUnits;
    first = 0;
    do {
      if (!kIsWhole && again) {
        read(first);
      }
      for_each(first, [&](int s, int i, int unit) {
        A grad[kRun<T>], prob[kRun<T>];
        unpack<T>(grads[s][i], grad);
        unpack<T>(probs[s][i], prob);
#pragma unroll
        for (int e = 0; e < kRun<T>; ++e) {
          grad[e] = p.scale * prob[e] * (grad[e] - dot[s]);
        }
        store_words(p.cut.at(p.grad_scores + strips[s].run, unit), pack<T>(grad));
      });
      first += kUnits;
    } while (!kIsWhole && first < strips[0].most);
  });
}

// Sizes of the gradient of a bias: (B or 1, H or 1, T or 1, S).
struct BiasShape {
  int64_t batch, heads, tokens, columns;
};

// [first, last) of a dimension of `size`: the one that is given, or all where the bias has 1.
struct Range {
  int64_t first, last;
  __device__ Range(int64_t given, int64_t bias_size, int64_t size)
      : first(bias_size == 1 ? 0 : given), last(bias_size == 1 ? size : given + 1) {}
};

// One output element a thread. Where tokens are summed, threadIdx.y shares out the block rows, and the shares are added
// in order, in fp64: the terms are many, one after the other, and may cancel. A thread finds the entry of its own
// column in a block row by bisection: dead blocks are not read.
template <class T>
__global__ void softmax_bias_backward_kernel(
    const T* __restrict__ values, Compute<T>* __restrict__ grad_bias, Blocks blocks,
    const int32_t* __restrict__ columns, int64_t batch, int64_t heads, BiasShape shape) {
  __shared__ double shares[kThreads];
  const bool sums_tokens = shape.tokens == 1;
  const int64_t outputs = shape.batch * shape.heads * shape.tokens * shape.columns;
  const int64_t block = int64_t{1} << blocks.log_block;
  const uint32_t entries_of_all = blocks.entries();
  for (int64_t start = blockIdx.x * int64_t{blockDim.x}; start < outputs; start += gridDim.x * int64_t{blockDim.x}) {
    const int64_t output = start + threadIdx.x;
    double sum = 0;
    if (output < outputs) {
      const int64_t column = output % shape.columns;
      const int64_t token = output / shape.columns % shape.tokens;
      const Range over_heads(output / shape.columns / shape.tokens % shape.heads, shape.heads, heads);
      const Range over_batch(output / shape.columns / shape.tokens / shape.heads, shape.batch, batch);
      const Range over_rows(token / block, shape.tokens, blocks.rows);
      const Range over_tokens(token % block, shape.tokens, block);
      for (int64_t head = over_heads.first; head < over_heads.last; ++head) {
        for (int64_t row = over_rows.first + threadIdx.y; row < over_rows.last; row += blockDim.y) {
          const int2 entries = blocks.entries_of(head, row);
          int low = entries.x, high = entries.y;
          while (low < high) {
            const int middle = low + (high - low) / 2;
            if (columns[middle] < column / block) {
              low = middle + 1;
            } else {
              high = middle;
            }
          }
          if (low == entries.y || columns[low] != column / block) {
            continue;
          }
          for (int64_t b = over_batch.first; b < over_batch.last; ++b) {
            const T* value = values + blocks.element_of(b, head, entries_of_all, low) + column % block;
            for (int64_t t = over_tokens.first; t < over_tokens.last; ++t) {
              sum += static_cast<Compute<T>>(value[t * block]);
            }
          }
        }
      }
    }
    if (sums_tokens) {
      shares[threadIdx.y * blockDim.x + threadIdx.x] = sum;
      __syncthreads();
      for (unsigned y = 1; threadIdx.y == 0 && y < blockDim.y; ++y) {
        sum += shares[y * blockDim.x + threadIdx.x];
      }
      __syncthreads();
    }
    if (threadIdx.y == 0 && output < outputs) {
      grad_bias[output] = static_cast<Compute<T>>(sum);
    }
  }
}

// `entries`: N, or 0 if it is not known.
Blocks blocks_of(
    const Tensor& values, const Tensor& row_offsets, int64_t layout_heads, int64_t block, int64_t entries) {
  const int64_t rows = (row_offsets.size(0) - 1) / layout_heads;
  return {
      row_offsets.const_data_ptr<int32_t>(), static_cast<uint32_t>(layout_heads), static_cast<uint32_t>(rows),
      static_cast<uint32_t>(values.size(1)), static_cast<uint32_t>(entries), log2_of(block)};
}

// More than are at work at a time where there is enough for them: the device deals them out as others end, and rows
// differ in length.
int64_t thread_blocks(const Tensor& values, const Launcher& launch) {
  const int64_t units = (values.numel() * static_cast<int64_t>(values.element_size()) / 16 + kLanes - 1) / kLanes;
  const int64_t of_each = std::clamp<int64_t>(units / (launch.multiprocessors() * 16), 8 * kWarps, 16 * kWarps);
  return (units + of_each - 1) / of_each;
}

// `x` is (B or 1, H or 1, T or 1, S), or (B or 1, S) with 2 dimensions.
Bias bias_of(
    const std::optional<Tensor>& x, int64_t dimensions, const Tensor& scores, int64_t heads, int64_t tokens,
    const char* name) {
  if (!x.has_value()) {
    return {};
  }
  check_dim(*x, dimensions, name);
  check_bias(*x, scores, heads, tokens, name);
  const auto stride = [&](int64_t dim) { return x->size(dim) == 1 ? 0 : x->stride(dim); };
  const bool keeps = x->scalar_type() == ScalarType::Bool;
  if (dimensions == 2) {
    return {x->const_data_ptr(), keeps, stride(0), 0, 0, stride(1)};
  }
  return {x->const_data_ptr(), keeps, stride(0), stride(1), stride(2), stride(3)};
}

Tensor softmax_forward(
    const Tensor& scores, const std::optional<Tensor>& rpe, const std::optional<Tensor>& key_padding_mask,
    const std::optional<Tensor>& attn_mask, const Tensor& row_offsets, const Tensor& columns, int64_t layout_heads,
    int64_t block, double scale, bool causal) {
  check_block(block);
  check_values(scores, block, "scores");
  check_list(columns, scores, "columns");
  Tensor probs = torch::stable::new_empty(scores, scores.sizes());
  if (probs.numel() == 0) {
    return probs;
  }
  const int64_t heads = heads_of(scores.size(1), columns.size(0), layout_heads);
  check_lists(row_offsets, layout_heads, heads, scores);
  const int64_t tokens = (row_offsets.size(0) - 1) / layout_heads * block;
  const Bias all[] = {
      bias_of(rpe, 4, scores, heads, tokens, "rpe"),
      bias_of(key_padding_mask, 2, scores, heads, tokens, "key_padding_mask"),
      bias_of(attn_mask, 4, scores, heads, tokens, "attn_mask")};
  Biases biases{};
  std::copy_if(std::begin(all), std::end(all), biases.bias, [](const Bias& bias) { return bias.data != nullptr; });
  const bool plain = biases.bias[0].data == nullptr && !causal && scale > 0;
  const Launcher launch(scores);
  const Tensor aligned_scores = launch.aligned(scores);
  with_element<true>(scores, "softmax", [&](auto zero) {
    using T = decltype(zero);
    const Forward<T> arguments{
        static_cast<const uint4*>(aligned_scores.const_data_ptr()), static_cast<uint4*>(probs.mutable_data_ptr()),
        blocks_of(scores, row_offsets, layout_heads, block, columns.size(0)), Cut<T>(log2_of(block)),
        columns.const_data_ptr<int32_t>(), scores.size(0), biases, static_cast<Compute<T>>(scale), causal};
    launch(
        plain ? softmax_forward_kernel<T, true> : softmax_forward_kernel<T, false>, thread_blocks(scores, launch),
        kThreads, arguments);
  });
  return probs;
}

Tensor softmax_backward(
    const Tensor& grad, const Tensor& probs, const Tensor& row_offsets, int64_t layout_heads, int64_t block,
    double scale) {
  check_block(block);
  check_values(probs, block, "probs");
  check_values_like(grad, probs, block, "grad");
  check_lists(row_offsets, layout_heads, layout_heads, probs);
  Tensor grad_scores = torch::stable::new_empty(probs, probs.sizes());
  const Launcher launch(probs);
  const Tensor aligned_grad = launch.aligned(grad), aligned_probs = launch.aligned(probs);
  with_element<true>(probs, "softmax", [&](auto zero) {
    using T = decltype(zero);
    const Backward<T> arguments{
        static_cast<const uint4*>(aligned_grad.const_data_ptr()),
        static_cast<const uint4*>(aligned_probs.const_data_ptr()),
        static_cast<uint4*>(grad_scores.mutable_data_ptr()),
        blocks_of(probs, row_offsets, layout_heads, block, layout_heads == 1 ? 0 : probs.size(1)),
        Cut<T>(log2_of(block)), probs.size(0), static_cast<Compute<T>>(scale)};
    launch(softmax_backward_kernel<T>, thread_blocks(probs, launch), kThreads, arguments);
  });
  return grad_scores;
}

Tensor softmax_bias_backward(
    const Tensor& values, const Tensor& row_offsets, const Tensor& columns, int64_t layout_heads, int64_t heads,
    int64_t block, const std::vector<int64_t>& shape) {
  check_bias_backward(values, row_offsets, columns, layout_heads, heads, block, shape);
  const bool is_double = values.scalar_type() == ScalarType::Double;
  Tensor grad_bias = torch::stable::new_empty(values, shape, is_double ? ScalarType::Double : ScalarType::Float);
  const Launcher launch(values);
  const dim3 threads = shape[2] == 1 ? dim3(8, kThreads / 8) : dim3(kThreads);
  with_element<true>(values, "softmax", [&](auto zero) {
    using T = decltype(zero);
    launch(
        softmax_bias_backward_kernel<T>, (grad_bias.numel() + threads.x - 1) / threads.x, threads,
        static_cast<const T*>(values.const_data_ptr()), static_cast<Compute<T>*>(grad_bias.mutable_data_ptr()),
        blocks_of(values, row_offsets, layout_heads, block, columns.size(0)), columns.const_data_ptr<int32_t>(),
        values.size(0), heads, BiasShape{shape[0], shape[1], shape[2], shape[3]});
  });
  return grad_bias;
}

}  // namespace
}  // namespace ds_sparse

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("softmax_forward", TORCH_BOX(&ds_sparse::softmax_forward));
  m.impl("softmax_backward", TORCH_BOX(&ds_sparse::softmax_backward));
  m.impl("softmax_bias_backward", TORCH_BOX(&ds_sparse::softmax_bias_backward));
}
