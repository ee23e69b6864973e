// Row softmax over live blocks. Schemas and shapes: csrc/library.cpp; meaning: ds_sparse/reference.py.
//
// `width` neighbouring threads share a token row and take its 16-byte runs in turn, whatever the size of its blocks; a
// thread holds a few of them, which it copies to places of its own in shared memory: a warp's next rows while it works on
// the present ones. It works on as many rows of a block row at once as its own length lets it. Rows that a warp cannot
// hold are found first, spread over the thread blocks and done by 2 to 8 warps each; those that even these cannot hold
// are read twice, the second time mostly from cache.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <type_traits>
#include <vector>

#include "../checks.h"
#include "../compute.h"
#include "copies.h"
#include "elements.h"
#include "launch.h"
#include "logits.h"
#include "vector.h"

namespace ds_sparse {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 32;
constexpr int kCacheLine = 128;  // bytes
constexpr int kMostRows = 8;     // of a warp at once: blocks are 8 or more, so that they are of one block row
constexpr int kRowsInTurn = 4;   // of a warp, at least: as many at most as are of one block row
constexpr int kLongRows = 4;     // rows that a thread block takes together where a warp cannot hold one
constexpr int kForwardHeld = 5, kBackwardHeld = 4;  // runs of each input that a thread holds

// The live blocks of all heads and where their values are.
struct Blocks {
  const int32_t* row_offsets;
  uint32_t layout_heads, rows, values;
  int log_block;

  // N, the live blocks of the stored layouts. Only the device knows it without a synchronisation.
  __device__ uint32_t entries() const { return row_offsets[int64_t{layout_heads} * rows]; }
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

// The threads of a warp: 2^log_width to a row.
struct Lanes {
  static constexpr bool kHoldsRow = true;
  int log_width;

  __device__ int lane() const { return threadIdx.x & ((1 << log_width) - 1); }
  __device__ int row() const { return threadIdx.x % kLanes >> log_width; }
  __device__ int rows_at_once() const { return kLanes >> log_width; }

  template <class A>
  __device__ A sum(A x) const {
    return combine_lanes(x, log_width, [](A a, A b) { return a + b; });
  }
  template <class A>
  __device__ A max(A x) const {
    return combine_lanes(x, log_width, [](A a, A b) { return ::max(a, b); });
  }
};

// Those, each with kRuns runs of a row, the last of which may not be there.
template <int kRuns>
struct LanesWith : Lanes {
  static constexpr int kShare = kRuns;
};

// Those of a thread block: 2^log_width to a row, two warps at least.
struct Warps {
  static constexpr bool kHoldsRow = false;
  int log_width;
  double (*exchange)[kThreads / kLanes];  // two, so that one may still be read while the other is written
  mutable int turn = 0;

  __device__ int lane() const { return threadIdx.x & ((1 << log_width) - 1); }
  __device__ int row() const { return threadIdx.x >> log_width; }
  __device__ int rows_at_once() const { return kThreads >> log_width; }

  template <class A>
  __device__ A sum(A x) const {
    return combine(sum_of_lanes(x, kLanes), [](A a, A b) { return a + b; });
  }
  template <class A>
  __device__ A max(A x) const {
    return combine(max_of_lanes(x, kLanes), [](A a, A b) { return ::max(a, b); });
  }

 private:
  template <class A, class F>
  __device__ A combine(A x, const F& f) const {
    A* of_warp = reinterpret_cast<A*>(exchange[turn]);
    turn ^= 1;
    if (threadIdx.x % kLanes == 0) {
      of_warp[threadIdx.x / kLanes] = x;
    }
    __syncthreads();
    of_warp += row() << log_width - log2_of(kLanes);
    x = of_warp[0];
    for (int i = 1; i < 1 << (log_width - log2_of(kLanes)); ++i) {
      x = f(x, of_warp[i]);
    }
    return x;
  }
};

// The log of the smallest number of threads that hold `runs` runs with `held` each; it is from `least` to `most`.
__device__ __forceinline__ int log_width_for(uint32_t runs, int held, int least, int most) {
  int log = least;
  while (log < most && (held << log) < runs) {
    ++log;
  }
  return log;
}

// Rows of one block row: where they are, and their elements as `count` runs of 16 bytes each, of which a thread holds
// kHeld at once.
template <class T, int kHeld>
struct Rows {
  static constexpr int kLogRun = log2_of(kRun<T>);
  uint32_t batch, head, row, first_within;
  int64_t first_run;
  int first_entry, count, log_block;

  // The first row is number `first` of the token rows of all heads and batches.
  __device__ Rows(const Blocks& blocks, uint32_t entries, uint32_t heads, int64_t first) : log_block(blocks.log_block) {
    // Block rows of all heads and batches are fewer than 2^32.
    const uint32_t line = static_cast<uint32_t>(first >> log_block), matrix = line / blocks.rows;
    row = line % blocks.rows;
    batch = matrix / heads;
    head = matrix % heads;
    first_within = static_cast<uint32_t>(first) & ((1u << log_block) - 1);
    const int2 of_row = blocks.entries_of(head, row);
    first_entry = of_row.x;
    first_run = (blocks.element_of(batch, head, entries, of_row.x) >> kLogRun) + (first_within << log_runs());
    count = (of_row.y - of_row.x) << log_runs();
  }

  __device__ bool is_long() const { return count > kHeld * kLanes; }
  template <class Team>
  __device__ int held_by(const Team& team) const {
    return kHeld << team.log_width;
  }
  __device__ int log_runs() const { return log_block - kLogRun; }
  __device__ uint32_t token(int number) const { return (row << log_block) + first_within + number; }
  __device__ int within_block(int run) const { return run & ((1 << log_runs()) - 1); }
  // The place of row `number`'s first run among all of a tensor, and of its others counted from there.
  __device__ int64_t place(int number) const { return first_run + (number << log_runs()); }
  __device__ uint32_t offset(int run) const {
    return (static_cast<uint32_t>(run >> log_runs()) << (log_block + log_runs())) + within_block(run);
  }
  __device__ int column(int run, const int32_t* columns) const {
    return (columns[first_entry + (run >> log_runs())] << log_block) + (within_block(run) << kLogRun);
  }

  // Calls f(i, run) for the thread's share, i < kHeld, of the runs from `first` on; those that no thread of the row has
  // are left out. With the last of the others, `run` may not be there. What is known to have a share has all from 0 on.
  template <class Team, class F>
  __device__ __forceinline__ void for_each_run(const Team& team, int first, const F& f) const {
    if constexpr (requires { Team::kShare; }) {
#pragma unroll
      for (int i = 0; i < Team::kShare; ++i) {
        f(i, (i << team.log_width) + team.lane());
      }
    } else {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int start = first + (i << team.log_width);
        if (start < count) {
          f(i, start + team.lane());
        }
      }
    }
  }
};

// Calls f with a constant of `number`, which is from 1 to kLargest.
template <int kLargest, class F>
__device__ __forceinline__ void with_number(int number, const F& f) {
  if constexpr (kLargest > 1) {
    if (number < kLargest) {
      return with_number<kLargest - 1>(number, f);
    }
  }
  f(std::integral_constant<int, kLargest>{});
}

// Where threads copy what they hold of kInputs tensors: two stages, of which only one is used where rows are long.
template <int kHeld, int kInputs>
struct Stages {
  uint4 runs[2][kInputs][kHeld][kThreads];

  __device__ const uint4& of(int stage, int i, int input = 0) const { return runs[stage][input][i][threadIdx.x]; }

  // Starts copying a run there, or zeros if it is not `given`.
  __device__ void copy(int stage, int i, int input, const uint4* from, bool given = true) const {
    start_copy<16>(shared_address(&of(stage, i, input)), from, given ? 16 : 0);
  }
};

// Keeps reads of a stage where they are among copies to it, which the compiler does not know to be writes.
__device__ __forceinline__ void keep_order() { asm volatile("" ::: "memory"); }

// Copies a thread's share of a long row's runs from `first` on.
template <class Copy, class Rows, class Team>
__device__ __forceinline__ void copy_now(const Copy& copy, const Rows& rows, const Team& team, int row, int first) {
  keep_order();
  copy(rows, team, row, first, 0);
  end_of_copies();
  wait_for_copies<0>();
  keep_order();
}

// Goes twice through a row whose first runs have been copied, in chunks of what the team holds: calls add(first) for
// each, finish() after all of them, then write(first, again) for each. A row of one chunk is not copied `again`.
template <class Copy, class Rows, class Team, class Add, class Finish, class Write>
__device__ __forceinline__ void for_each_chunk(
    const Copy& copy, const Rows& rows, const Team& team, int row, const Add& add, const Finish& finish,
    const Write& write) {
  add(0);
  if constexpr (Team::kHoldsRow) {
    finish();
    write(0, false);
  } else {
    const int held = rows.held_by(team);
    for (int first = held; first < rows.count; first += held) {
      copy_now(copy, rows, team, row, first);
      add(first);
    }
    finish();
    if (rows.count <= held) {
      write(0, false);
      return;
    }
    for (int first = 0; first < rows.count; first += held) {
      copy_now(copy, rows, team, row, first);
      write(first, true);
    }
  }
}

// Has all token rows copied, and worked on when they are there, shared out over the grid, long ones first. `copy` and
// `work` take rows, a team, which of the rows is its own, and a stage; `copy` also the first of the runs to copy.
template <class T, int kHeld, class Copy, class Work>
__device__ __forceinline__ void for_all_rows(
    const Blocks& blocks, int64_t batch, const Copy& copy, const Work& work) {
  using OfBlock = Rows<T, kHeld>;
  __shared__ double exchange[2][kThreads / kLanes];
  __shared__ uint32_t long_ones[kThreads / kLanes];
  const uint32_t entries = blocks.entries(), heads = blocks.heads(entries);
  const int64_t token_rows = (batch * heads * blocks.rows) << blocks.log_block;
  const int warp = threadIdx.x / kLanes;

  // Task number `first` + i * gridDim.x is thread i's to look at, and the thread block's to do.
  for (int64_t first = blockIdx.x; first < token_rows / kLongRows; first += int64_t{gridDim.x} * kThreads) {
    const auto rows_of = [&](int i) {
      return OfBlock(blocks, entries, heads, (first + int64_t{gridDim.x} * i) * kLongRows);
    };
    const bool exists = first + int64_t{gridDim.x} * threadIdx.x < token_rows / kLongRows;
    const uint32_t of_warp = __ballot_sync(0xffffffffu, exists && rows_of(threadIdx.x).is_long());
    if (threadIdx.x % kLanes == 0) {
      long_ones[warp] = of_warp;
    }
    __syncthreads();
    for (int w = 0; w < kThreads / kLanes; ++w) {
      for (uint32_t ones = long_ones[w]; ones != 0; ones &= ones - 1) {
        const OfBlock rows = rows_of(w * kLanes + __ffs(ones) - 1);
        const Warps team{log_width_for(rows.count, kHeld, log2_of(2 * kLanes), log2_of(kThreads)), exchange};
        for (int row = team.row(); row < kLongRows; row += team.rows_at_once()) {
          copy_now(copy, rows, team, row, 0);
          work(rows, team, row, 0);
        }
        __syncthreads();  // the next ones exchange from the first place again
      }
    }
    __syncthreads();
  }

  // Rows of average length leave some of what a warp can hold free for those that are longer.
  const int64_t lines = int64_t{blocks.layout_heads} * blocks.rows;
  const int64_t runs = (int64_t{entries} << blocks.log_block) / kRun<T>;
  const int least = log_width_for((runs + lines - 1) / lines, kHeld - 1, log2_of(kLanes / kMostRows), log2_of(kLanes));
  // Rows that a warp takes in turn before it jumps by the grid: those of a block row share the search for its entries.
  // Where blocks' rows do not fill cache lines, neighbouring warps have those of a line: it is read at one time. Nor are
  // more taken in turn than there are for each warp.
  const bool fill_lines = (static_cast<int>(sizeof(T)) << blocks.log_block) >= kCacheLine;
  const bool are_enough = token_rows >= int64_t{gridDim.x} * (kThreads / kLanes) * kRowsInTurn;
  const int in_turn = fill_lines && are_enough ? max(kLanes >> least, kRowsInTurn) : kLanes >> least;
  const int64_t step = int64_t{gridDim.x} * (kThreads / kLanes) * in_turn;

  // The rows that the warp has come to, of which the team's own is number `row`.
  struct Place {
    int64_t first;
    OfBlock rows;
    Lanes team;
    int row;
  };
  const auto at = [&](int64_t first) {
    const OfBlock rows(blocks, entries, heads, min(first, token_rows - 1));
    const Lanes team{log_width_for(rows.count, kHeld, least, log2_of(kLanes))};
    return Place{first, rows, team, team.row()};
  };
  const auto has_work = [&](const Place& place) { return place.rows.count > 0 && !place.rows.is_long(); };
  const auto next_of = [&](Place place) {
    place.row += place.team.rows_at_once();
    // The same for all of a warp: whether its first row is one of those that it takes in turn.
    if (place.row - place.team.row() >= in_turn) {
      do {
        place = at(place.first + step);
      } while (place.first < token_rows && !has_work(place));
    }
    return place;
  };
  const auto start = [&](const Place& place, int stage) {
    keep_order();
    if (place.first < token_rows) {
      copy(place.rows, place.team, place.row, 0, stage);
    }
    end_of_copies();
  };
  Place place = at((int64_t{blockIdx.x} * (kThreads / kLanes) + warp) * in_turn);
  while (place.first < token_rows && !has_work(place)) {
    place = at(place.first + step);
  }
  start(place, 0);
  for (int stage = 0; place.first < token_rows; stage ^= 1) {
    const Place next = next_of(place);
    start(next, stage ^ 1);
    wait_for_copies<1>();
    keep_order();
    work(place.rows, place.team, place.row, stage);
    place = next;
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

template <class A, int Count>
__device__ __forceinline__ void mask(A (&logits)[Count]) {
#pragma unroll
  for (A& logit : logits) {
    logit = -infinity<A>();
  }
}

template <class T>
struct Forward {
  const uint4* scores;
  uint4* probs;
  Blocks blocks;
  const int32_t* columns;
  int64_t batch;
  Biases biases;
  Compute<T> scale;
  bool causal;
};

// kPlain: scale is positive, and there is nothing else. Then it is left to the exponents, whose differences it scales.
template <class T, bool kPlain>
__global__ void __launch_bounds__(kThreads, kPlain ? 3 : 2) softmax_forward_kernel(
    const __grid_constant__ Forward<T> p) {
  using A = Compute<T>;
  constexpr int kHeld = kForwardHeld;
  extern __shared__ __align__(16) unsigned char shared[];
  auto& stages = *reinterpret_cast<Stages<kHeld, 1>*>(shared);
  const A exponent_scale = kPlain ? p.scale * kLog2E<A> : kLog2E<A>;
  const auto copy = [&](const auto& rows, const auto& team, int row, int first, int stage) {
    const uint4* from = p.scores + rows.place(row);
    rows.for_each_run(team, first, [&](int i, int run) {
      stages.copy(stage, i, 0, from + rows.offset(min(run, rows.count - 1)));
    });
  };
  const auto work = [&](const auto& rows, const auto& team, int row, int stage) {
    uint4* to = p.probs + rows.place(row);
    A logits[kHeld][kRun<T>];
    // The thread's largest logit of the runs from `first` on.
    const auto read = [&](int first) {
      A largest = -infinity<A>();
      if constexpr (kPlain) {
        rows.for_each_run(team, first, [&](int i, int) {
          largest = max(largest, largest_of<T>(stages.of(stage, i)));
          unpack<T>(stages.of(stage, i), logits[i]);
        });
        return largest;
      }
      rows.for_each_run(team, first, [&](int i, int) {
        unpack<T>(stages.of(stage, i), logits[i]);
        scale_run(logits[i], p.scale);
      });
      int column[kHeld];
      rows.for_each_run(
          team, first, [&](int i, int run) { column[i] = rows.column(min(run, rows.count - 1), p.columns); });
      const int token = rows.token(row);
      // Those that are there come first.
#pragma unroll 1
      for (const Bias* bias = p.biases.bias; bias < p.biases.bias + 3 && bias->data != nullptr; ++bias) {
        const int64_t of_row = rows.batch * bias->batch + rows.head * bias->head + token * bias->token;
        if (bias->keeps) {
          const uint8_t* data = static_cast<const uint8_t*>(bias->data) + of_row;
          rows.for_each_run(team, first, [&](int i, int) {
            const auto keep = load_run<kRun<T>>(data + column[i] * bias->column, bias->column);
#pragma unroll
            for (int e = 0; e < kRun<T>; ++e) {
              logits[i][e] = keep.element[e] != 0 ? logits[i][e] : -infinity<A>();
            }
          });
        } else {
          const T* data = static_cast<const T*>(bias->data) + of_row;
          rows.for_each_run(team, first, [&](int i, int) {
            add_run(load_run<kRun<T>>(data + column[i] * bias->column, bias->column), logits[i]);
          });
        }
      }
      rows.for_each_run(team, first, [&](int i, int) {
        if (p.causal) {
#pragma unroll
          for (int e = 0; e < kRun<T>; ++e) {
            logits[i][e] = column[i] + e > token ? -infinity<A>() : logits[i][e];
          }
        }
        largest = max(largest, largest_of(logits[i]));
      });
      return largest;
    };
    // Logits become their powers; returns the sum of the thread's.
    const auto to_powers = [&](int first, A reference) {
      A sum = 0;
      rows.for_each_run(team, first, [&](int i, int run) {
#pragma unroll
        for (A& logit : logits[i]) {
          logit = power_of_difference(logit, reference, exponent_scale);
        }
        const A of_run = sum_of(logits[i]);
        sum += run < rows.count ? of_run : A(0);
      });
      return sum;
    };
    A largest = -infinity<A>(), reference = 0, sum = 0, factor = 0;
    const auto add = [&](int first) {
      const A larger = max(largest, team.max(read(first)));
      reference = finite_reference(larger);
      sum *= power_of_difference(largest, reference, exponent_scale);
      largest = larger;
      sum += to_powers(first, reference);
    };
    const auto finish = [&] {
      sum = team.sum(sum);
      factor = sum == 0 ? A(0) : 1 / sum;
    };
    const auto write = [&](int first, bool again) {
      if (again) {
        read(first);
        to_powers(first, reference);
      }
      rows.for_each_run(team, first, [&](int i, int run) {
        if (run < rows.count) {
#pragma unroll
          for (A& power : logits[i]) {
            power *= factor;
          }
          to[rows.offset(run)] = pack<T>(logits[i]);
        }
      });
    };
    for_each_chunk(copy, rows, team, row, add, finish, write);
  };
  for_all_rows<T, kHeld>(p.blocks, p.batch, copy, [&](const auto& rows, const auto& team, int row, int stage) {
    if constexpr (kPlain && std::is_same_v<std::remove_cvref_t<decltype(team)>, Lanes>) {
      // Code without a question at each run: its reads and exponentials overlap.
      with_number<kHeld>(((rows.count - 1) >> team.log_width) + 1, [&](auto share) {
        work(rows, LanesWith<share>{team}, row, stage);
      });
    } else {
      work(rows, team, row, stage);
    }
  });
}

template <class T>
struct Backward {
  const uint4* grad;
  const uint4* probs;
  uint4* grad_scores;
  Blocks blocks;
  int64_t batch;
  Compute<T> scale;
};

template <class T>
__global__ void __launch_bounds__(kThreads, 3) softmax_backward_kernel(const __grid_constant__ Backward<T> p) {
  using A = Compute<T>;
  constexpr int kHeld = kBackwardHeld;
  extern __shared__ __align__(16) unsigned char shared[];
  auto& stages = *reinterpret_cast<Stages<kHeld, 2>*>(shared);
  const auto copy = [&](const auto& rows, const auto& team, int row, int first, int stage) {
    const int64_t place = rows.place(row);
    rows.for_each_run(team, first, [&](int i, int run) {
      const bool exists = run < rows.count;
      const int64_t at = place + rows.offset(exists ? run : 0);
      stages.copy(stage, i, 0, p.grad + at, exists);
      stages.copy(stage, i, 1, p.probs + at, exists);
    });
  };
  for_all_rows<T, kHeld>(p.blocks, p.batch, copy, [&](const auto& rows, const auto& team, int row, int stage) {
    const int64_t place = rows.place(row);
    A dot = 0;
    const auto add = [&](int first) {
      rows.for_each_run(team, first, [&](int i, int run) {
        A grad[kRun<T>], prob[kRun<T>];
        unpack<T>(stages.of(stage, i, 0), grad);
        unpack<T>(stages.of(stage, i, 1), prob);
#pragma unroll
        for (int e = 0; e < kRun<T>; ++e) {
          dot += grad[e] * prob[e];
        }
      });
    };
    const auto finish = [&] { dot = team.sum(dot); };
    const auto write = [&](int first, bool) {
      rows.for_each_run(team, first, [&](int i, int run) {
        if (run < rows.count) {
          A grad[kRun<T>], prob[kRun<T>];
          unpack<T>(stages.of(stage, i, 0), grad);
          unpack<T>(stages.of(stage, i, 1), prob);
#pragma unroll
          for (int e = 0; e < kRun<T>; ++e) {
            grad[e] = p.scale * prob[e] * (grad[e] - dot);
          }
          p.grad_scores[place + rows.offset(run)] = pack<T>(grad);
        }
      });
    };
    for_each_chunk(copy, rows, team, row, add, finish, write);
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

Blocks blocks_of(const Tensor& values, const Tensor& row_offsets, int64_t layout_heads, int64_t block) {
  const int64_t rows = (row_offsets.size(0) - 1) / layout_heads;
  return {
      row_offsets.const_data_ptr<int32_t>(), static_cast<uint32_t>(layout_heads), static_cast<uint32_t>(rows),
      static_cast<uint32_t>(values.size(1)), log2_of(block)};
}

// A few runs a thread, in as many thread blocks as keep the device busy; in twice as many, as rows differ in length, where
// that leaves each thread enough to copy ahead of.
int64_t thread_blocks(const Tensor& values, const Launcher& launch) {
  const int64_t runs = values.numel() * static_cast<int64_t>(values.element_size()) / 16;
  const int64_t enough = launch.multiprocessors() * 12;
  return std::max(std::min((runs + 2 * kThreads - 1) / (2 * kThreads), enough), std::min(runs / (16 * kThreads), 2 * enough));
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
        blocks_of(scores, row_offsets, layout_heads, block), columns.const_data_ptr<int32_t>(), scores.size(0), biases,
        static_cast<Compute<T>>(scale), causal};
    launch.with_shared_memory(
        plain ? softmax_forward_kernel<T, true> : softmax_forward_kernel<T, false>, thread_blocks(scores, launch),
        kThreads, sizeof(Stages<kForwardHeld, 1>), arguments);
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
        static_cast<uint4*>(grad_scores.mutable_data_ptr()), blocks_of(probs, row_offsets, layout_heads, block),
        probs.size(0), static_cast<Compute<T>>(scale)};
    launch.with_shared_memory(
        softmax_backward_kernel<T>, thread_blocks(probs, launch), kThreads, sizeof(Stages<kBackwardHeld, 2>), arguments);
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
        blocks_of(values, row_offsets, layout_heads, block), columns.const_data_ptr<int32_t>(), values.size(0), heads,
        BiasShape{shape[0], shape[1], shape[2], shape[3]});
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
