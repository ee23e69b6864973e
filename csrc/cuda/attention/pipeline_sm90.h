// What the passes of fused attention share on Hopper: how tokens are gathered by the copy engine, and which of them a
// strip and a warpgroup see.
//
// A thread block stays on its multiprocessor and takes unit after unit, or each of its two teams does. A team's two
// warpgroups have 64 lines of the unit's tile each, a strip of 16 for each warp. Warps after them look units up (and forward
// send their results) and keep copies going, through a ring of stages in shared memory: one for the first job and one or two
// for the second, or (backward by rows) one for both.

#pragma once

#include "../common/hopper.h"
#include "../common/tensor_map.h"
#include "backward.h"

namespace ds_sparse::attention {

using namespace hopper;

// What kernels are made for: products times a positive number, which exponents can take with them, or masked; the same
// with dropout; the same limited token by token; and all else.
enum class Scores { kPlain, kDropped, kLimited, kOptions };
constexpr bool are_plain(Scores scores) { return scores != Scores::kOptions; }
// By a window or pair by pair, perhaps.
constexpr bool are_limited(Scores scores) { return scores == Scores::kLimited || scores == Scores::kOptions; }
// For passes without a kernel for dropout alone.
constexpr Scores with_any_dropout(Scores scores) { return scores == Scores::kDropped ? Scores::kOptions : scores; }

// Whether probabilities are dropped.
template <Scores kScores>
__device__ __forceinline__ bool drops(const Scoring& scoring) {
  return kScores == Scores::kDropped || (kScores == Scores::kOptions && scoring.drops());
}

constexpr int kConsumers = 2;  // warpgroups with kHopperTile / kConsumers lines each
// A team is these and the warps that prepare and copy for them; the teams of a thread block have nothing to do with each
// other.
constexpr int kTeamThreads = 128 * kConsumers;
template <int kTeams>
constexpr int kHopperThreads = kTeams * kTeamThreads + 128;

// What the threads do: a team's multiply(team), with so many registers, and for it, with a few, a warp for each of `others`.
template <int kTeams, int kFew, int kMany, class M, class... C>
__device__ __forceinline__ void share_work(const M& multiply, const C&... others) {
  static_assert(kTeams * sizeof...(others) <= 4);
  if (threadIdx.x < kTeams * kTeamThreads) {
    take_registers<kMany>();
    multiply(kTeams == 1 ? 0 : uniform(threadIdx.x / kTeamThreads));
  } else {
    give_registers<kFew>();
    const int warp = uniform(threadIdx.x / 32 - kTeams * (kTeamThreads / 32));
    int number = 0;
    ((warp / kTeams == number++ ? others(warp % kTeams) : void()), ...);
  }
}

// Lines of kD elements as panels.
template <class T, int kD, int kTokens>
using Panels = T[kD / kPanel][kTokens * kPanel];

// The thread's number in its team, which the compiler does not ask for again at every use.
__device__ __forceinline__ int this_thread() {
  int number;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
  return number % kTeamThreads;
}

// Copies by a warp, in both directions: each lane has one box, a panel of up to a block's tokens.
template <class T, int kD, int kTokens>
struct Boxes {
  int panel, line, log_tokens;
  bool any;  // whether this lane has one

  __device__ explicit Boxes(int log_block) {
    constexpr int panels = kD / kPanel;
    const int lane = threadIdx.x % 32;
    log_tokens = min(log_block, log2_of(kTokens));
    panel = lane % panels;
    line = lane / panels << log_tokens;
    any = line < kTokens;
  }

  __device__ int bytes() const { return int{sizeof(T)} * kPanel << log_tokens; }

  __device__ __forceinline__ void copy(
      Panels<T, kD, kTokens>& to, const CUtensorMap* map, Barrier* barrier, int token, int head, int batch) const {
    copy_box(to[panel] + line * kPanel, map, barrier, panel * kPanel, token, head, batch);
  }
  // The way back.
  __device__ __forceinline__ void store(
      const CUtensorMap* map, const Panels<T, kD, kTokens>& from, int token, int head, int batch) const {
    store_box(map, from[panel] + line * kPanel, panel * kPanel, token, head, batch);
  }
};

// A step of the other side, as the copying warp sees it: its box's first token, and a group of 16 for the first lanes.
template <int kTokens>
struct Gathered {
  int token;
  Octet group;  // the first eight of it stand for all

  // The last step may lack tokens: others take their place, which nobody sees.
  template <class B>
  __device__ __forceinline__ Gathered(const Other<kTokens>& other, const B& boxes, int step) {
    const int place = step * kTokens + boxes.line, lane = threadIdx.x % 32;
    const int entry = min(place >> other.log_block, other.num_entries - 1);
    token = static_cast<int>((other.entries[entry] & 0xffffffu) << other.log_block) + (place & ((1 << other.log_block) - 1));
    group = lane < kTokens / 16 ? other.group(step, lane) : Octet{0, 0};
  }
};

// Units in their order, to whichever team is free. The first one of a team has the number blockIdx.x + team * gridDim.x.
struct Queue {
  int* taken;  // 0 before the kernel
  int count, teams;

  // A number in the first lane of a warp, which nobody waits for yet.
  __device__ __forceinline__ int draw() const {
    int ticket = 0;
    if (threadIdx.x % 32 == 0) {
      ticket = teams + atomicAdd(taken, 1);
    }
    return ticket;
  }
  // The unit of that number; count or more where there is none.
  static __device__ __forceinline__ int unit_of(int ticket) { return __shfl_sync(0xffffffffu, ticket, 0); }
};

// What a team does next: a warp looks it up, and finds the tokens, while the others are at work.
struct Task {
  Work work;
  int steps;                // -1: there is nothing left to do
  int tokens[kHopperTile];  // of the tile; -1 where there is none
};

// And what its tokens see of a window, where kernels serve that; everything where there is none.
template <bool kLimited>
struct TaskOf : Task {
  Range limits[kLimited ? kHopperTile : 1];
  int places[kLimited ? kHopperTile : 1];

  // By the warp that looks units up.
  __device__ __forceinline__ void set(
      const Work& next, int num_steps, const Lists& lists, int length, const Scoring& scoring) {
    for (int line = threadIdx.x % 32; line < kHopperTile; line += 32) {
      const int token = lists.token(next.tile, next.sub_tile, line, length);
      tokens[line] = token;
      if constexpr (kLimited) {
        limits[line] = scoring.limits_of(next.head, token);
        places[line] = scoring.place_of(next.head, token);
      }
    }
    if (threadIdx.x % 32 == 0) {
      work = next;
      steps = num_steps;
    }
    __syncwarp();
  }

  template <bool kTransposed>
  __device__ __forceinline__ Seen<kTransposed, kLimited> seen_by(int line, const Scoring& scoring) const {
    if constexpr (kLimited) {
      return {scoring, work.head, tokens[line], limits[line], places[line]};
    }
    return {scoring, work.head, tokens[line], {}, 0};
  }
};

// Of a step's blocks of 64 tokens, the pairs that count, where they are given one by one.
template <int kTokens, bool kLimited>
using PairsOfStep = uint2[kLimited ? kTokens / 64 : 1][kLimited ? kHopperTile : 1];

// Brings them, by the copying warp, to where `there` waits for so many more bytes.
template <int kTokens>
__device__ __forceinline__ int bytes_of_pairs(const Lists& lists) {
  return lists.pairs == nullptr ? 0 : kTokens / 64 * kHopperTile * int{sizeof(uint2)};
}
template <int kTokens>
__device__ __forceinline__ void copy_pairs(
    PairsOfStep<kTokens, true>& to, const Lists& lists, const Work& work, int step, Barrier* there) {
  const int lane = threadIdx.x % 32;
  if (lists.pairs != nullptr && lane < kTokens / 64) {
    const int entry = work.first_entry + min(step * (kTokens / 64) + lane, work.num_entries - 1);
    const uint2* from = lists.pairs + work.head * lists.pairs_stride + int64_t{entry} * kHopperTile;
    copy_bytes(to[lane], from, sizeof(to[lane]), there);
  }
}

// What the 16 lines of a strip see of the other side: all of them the tokens in `all` and, with a window, the first
// `all_global`; none of them others than these global ones and those in `any`.
template <bool kLimited>
struct Sight {
  Range all, any, all_global;
  int num_global;

  // A strip's for each of the first lanes.
  template <bool kTransposed>
  static __device__ __forceinline__ Sight of_strip(
      const Scoring& scoring, const Lists& lists, const TaskOf<kLimited>& task) {
    const int line = threadIdx.x % (kHopperTile / 16) * 16, first = task.tokens[line];
    // Of the line that causality leaves least.
    const Range range = first < 0 ? Range{0, kTransposed ? scoring.queries : scoring.keys}
                                  : scoring.template range_of<kTransposed>(kTransposed ? first + 15 : first);
    Sight sight{range, {0, 0}, {0, 0}, 0};
    if constexpr (kLimited) {
      const Window& window = scoring.window;
      sight.any = {INT32_MAX, 0};
      for (int i = line; i < line + 16; ++i) {
        if (task.tokens[i] >= 0) {
          const Range limits = task.limits[i];
          sight.all = sight.all.within(limits);
          sight.any = {min(sight.any.first, limits.first), max(sight.any.end, limits.end)};
        }
      }
      sight.num_global = window.num_global;
      sight.all_global = Range{0, window.num_global}.within(range);
      if (scoring.goes_by_places() || lists.pairs != nullptr) {
        sight.all = sight.all_global = {0, 0};
      }
    }
    return sight;
  }

  // A group of 16 tokens: whether no element has to be looked at; whether any may count.
  __device__ __forceinline__ bool is_whole(int token) const {
    return all.has(token, 16) || (kLimited && all_global.has(token, 16));
  }
  __device__ __forceinline__ bool reaches(int token) const {
    return !kLimited || token < num_global || (token < any.end && token + 16 > any.first);
  }
};

// What a strip sees of a step's groups of 16 tokens. Bit g of each: the group counts for the strip; for any strip of its
// warpgroup; has elements to look at one by one.
struct LiveGroups {
  uint32_t bits;

  __device__ uint32_t strip() const { return bits & 0xffu; }
  __device__ uint32_t warpgroup() const { return bits >> 8 & 0xffu; }
  __device__ uint32_t ragged() const { return bits >> 16; }
  // Whether all of the kN / 16 groups count for the strip, and none has to be looked at.
  template <int kN>
  __device__ bool is_whole() const {
    return (bits & 0xffff00ffu) == (1u << kN / 16) - 1;
  }
};

// Finds them, by the copying warp: a strip in each of its first lanes.
struct Finder {
  static constexpr int kStrips = kHopperTile / 16;
  int line;            // of the tile, as the bits of owners count them
  uint32_t warpgroup;  // all lines of the strip's warpgroup

  __device__ explicit Finder(const Lists& lists) : warpgroup(0) {
    const int strip = threadIdx.x % kStrips;
    line = line_of(lists, strip);
    for (int other = strip / 4 * 4; other < strip / 4 * 4 + 4; ++other) {
      warpgroup |= 1u << line_of(lists, other);
    }
  }

  // `group`: in lane g the g-th.
  template <int kGroups, bool kLimited>
  __device__ __forceinline__ LiveGroups find(const Octet& group, const Sight<kLimited>& sight) const {
    LiveGroups live{0};
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int token = __shfl_sync(0xffffffffu, group.token, g);
      const uint32_t owners = __shfl_sync(0xffffffffu, group.owners, g);
      const bool ragged = (owners & Octet::kBiased) != 0 || !sight.is_whole(token);
      live.bits |= (sight.reaches(token) ? owners >> line & 1 : 0u) << g | ((owners & warpgroup) != 0 ? 1u : 0u) << (8 + g) |
                   (owners != 0 && ragged ? 1u : 0u) << (16 + g);
    }
    return live;
  }

 private:
  static __device__ int line_of(const Lists& lists, int strip) {
    return min(16 * strip >> lists.log_block, lists.lines_per_tile - 1);
  }
};

// Writes what a step is about, by the copying warp, and makes `there` wait for so many bytes and, where they are given, for
// the step's pairs, whose copy it starts.
template <int kTokens, bool kLimited, class M>
__device__ __forceinline__ void tell_step(
    M& memory, int stage, Barrier& there, const Gathered<kTokens>& here, const LiveGroups& live, int bytes,
    const Lists& lists, const Work& work, int step) {
  const int lane = threadIdx.x % 32;
  if (lane < kTokens / 16) {
    memory.groups[stage][lane] = here.group;
  }
  if (lane < Finder::kStrips) {
    memory.live[stage][lane] = live;
  }
  __syncwarp();
  if (lane == 0) {
    there.arrive_and_expect(bytes + bytes_of_pairs<kTokens>(lists));
  }
  if constexpr (kLimited) {
    copy_pairs<kTokens>(memory.pairs[stage], lists, work, step, &there);
  }
}

// The first line of a warp's strip, and the first of a lane's two lines; the other is 8 below. `thread`: as of
// `this_thread`, where that is known.
__device__ __forceinline__ int own_strip(int thread = threadIdx.x % kTeamThreads) { return thread / 32 * 16; }
__device__ __forceinline__ int own_line(int thread = threadIdx.x % kTeamThreads) {
  return own_strip(thread) + thread % 32 / 4;
}

// Which of a lane's probabilities (64 x 64) dropout keeps; by rows or, transposed, by columns. A strip's lines are
// neighbours, and begin at a multiple of 16.
template <bool kTransposed>
struct KeptOfStep {
  Kept<kTransposed> squares[4];

  __device__ __forceinline__ void find(const Dropout& dropout, uint32_t matrix, int first_token, const Octet* groups) {
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      squares[g] = Kept<kTransposed>::of_square(dropout, matrix, first_token, groups[g].token);
    }
  }
  // In the order of sums.
  __device__ __forceinline__ bool operator[](int i) const { return squares[i / 8][i % 8]; }
  // Of probabilities that are rounded.
  __device__ __forceinline__ void mask(uint32_t (&probs)[4][4]) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      probs[i / 4][i % 4] &= squares[i / 4].pairs[i % 4];
    }
  }
};

// From a lane's products to scores, but for the bias of keys. Lines are queries, or with kTransposed keys.
template <class T, int kN, bool kPlain, bool kTransposed = false>
__device__ __forceinline__ void finish_scores(
    float (&scores)[kN / 2], const Scoring& scoring, const Task& task, const Octet* groups) {
  if constexpr (!kPlain) {
    const int token0 = task.tokens[own_line()], token8 = task.tokens[own_line() + 8];
    const int length = kTransposed ? scoring.queries : scoring.keys;
    int first[kN / 16];
#pragma unroll
    for (int g = 0; g < kN / 16; ++g) {
      first[g] = groups[g].token + threadIdx.x % 4 * 2;
    }
    scoring.template finish<T>(scores, task.work.batch, task.work.head, [&](int e) {
      const int mine = max(e % 4 < 2 ? token0 : token8, 0), its = min(first[e / 8] + e % 8 / 4 * 8 + e % 2, length - 1);
      return kTransposed ? make_int2(its, mine) : make_int2(mine, its);
    });
  }
}

// Leaves -inf where scores do not count: groups that are not the strip's, and of ragged ones what the line does not see.
// Without branches within a group, as all lanes go through it anyway. pairs: of the step; null: all that the line sees.
template <int kN, bool kTransposed, bool kLimited>
__device__ __forceinline__ void mask_scores(
    float (&scores)[kN / 2], const LiveGroups& live, const Octet* groups, const TaskOf<kLimited>& task,
    const Scoring& scoring, const uint2 (*pairs)[kLimited ? kHopperTile : 1]) {
  constexpr uint32_t all = (1u << kN / 16) - 1;
  if (live.strip() != all) {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      scores[i] = live.strip() >> i / 8 & 1 ? scores[i] : -kInfinity;
    }
  }
  if constexpr (kLimited) {
    if (pairs != nullptr) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int block = 0; block < kN / 64; ++block) {
          uint2 words = pairs[block][own_line() + 8 * half];
          words.x >>= threadIdx.x % 4 * 2;
          words.y >>= threadIdx.x % 4 * 2;
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            // Of every eight columns, of which a word has four times as many, a lane has two.
            float& score = scores[32 * block + i / 2 * 4 + 2 * half + i % 2];
            const int bit = i / 2 % 4 * 8 + i % 2;
            score = (i < 8 ? words.x : words.y) >> bit & 1 ? score : -kInfinity;
          }
        }
      }
      return;
    }
  }
  if (live.ragged() != 0) {
    // A line at a time, and then what causality by places denies: registers are short.
    const auto keep = [&](int half, const auto& seen) {
#pragma unroll
      for (int g = 0; g < kN / 16; ++g) {
        if (live.ragged() >> g & 1) {
          const int first = groups[g].token + threadIdx.x % 4 * 2;
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& score = scores[8 * g + e / 2 * 4 + 2 * half + e % 2];
            score = seen(first + e / 2 * 8 + e % 2) ? score : -kInfinity;
          }
        }
      }
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto seen = task.template seen_by<kTransposed>(own_line() + 8 * half, scoring);
      keep(half, [&](int token) { return seen.has(token); });
    }
    if constexpr (kLimited) {
      if (scoring.goes_by_places()) {
        for (int half = 0; half < 2; ++half) {
          const auto seen = task.template seen_by<kTransposed>(own_line() + 8 * half, scoring);
          keep(half, [&](int token) { return seen.is_in_order(token); });
        }
      }
    }
  }
}

// Adds the bias of keys, which is not 0 in ragged groups only, where these are the other side.
template <int kN>
__device__ __forceinline__ void add_key_bias(
    float (&scores)[kN / 2], const LiveGroups& live, const Octet* groups, const Scoring& scoring, const Work& work,
    float factor) {
  if (scoring.key_bias != nullptr && live.ragged() != 0) {
    const float* key_bias = scoring.key_bias_of(work.batch, work.head);
#pragma unroll
    for (int g = 0; g < kN / 16; ++g) {
      if (live.ragged() >> g & 1) {
        const int first = groups[g].token + threadIdx.x % 4 * 2;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (e % 4 < 2) {
            const float bias = key_bias[min(first + e / 4 * 8 + e % 2, scoring.keys - 1)] * factor;
            scores[8 * g + e] += bias;
            scores[8 * g + e + 2] += bias;
          }
        }
      }
    }
  }
}

// The two warpgroups start a step's products in turns, so that one exponentiates while the other multiplies. Each takes
// as many turns.
template <bool kTakes>
struct Turns {
  int warpgroup;

  __device__ explicit Turns(int warpgroup) : warpgroup(warpgroup) {
    if (warpgroup == 1) {
      pass_on();
    }
  }
  __device__ __forceinline__ void wait() const {
    if constexpr (kTakes) {
      wait_at<2 * 128>(1 + warpgroup);
    }
  }
  __device__ __forceinline__ void pass_on() const {
    if constexpr (kTakes) {
      arrive_at<2 * 128>(2 - warpgroup);
    }
  }
};

// Sums (64 x kN) of a warpgroup: 64 of its tile's lines times kN lines, in panels of kTokens, over kD columns.
template <class T, int kD, int kN, int kTokens>
__device__ __forceinline__ void multiply_lines(float (&sums)[kN / 2], const Operand& left, const Operand& right) {
  constexpr int line = kPanel * sizeof(T);
#pragma unroll
  for (int k = 0; k < kD / 16; ++k) {
    // Panels of 64 columns, and 16 columns within them.
    Products<T>::template from_shared<kN, true>(
        sums, left.from(k / 4 * kHopperTile * line + k % 4 * 32), right.from(k / 4 * kTokens * line + k % 4 * 32), k > 0);
  }
}

// sums (64 x kD) += left (64 x kN, in registers) @ kN lines, which lie along the sum; `right` knows how far apart panels are.
template <class T, int kD, int kN>
__device__ __forceinline__ void multiply_columns(
    float (&sums)[kD / 2], const uint32_t (&left)[kN / 16][4], const Operand& right) {
#pragma unroll
  for (int j = 0; j < kN / 16; ++j) {
    Products<T>::template from_registers<kD>(sums, left[j], right.from(j * 16 * kPanel * sizeof(T)), true);
  }
}

// The same for a warp by itself, and as slowly as products without wgmma are: sums (16 x kN) of its lines, which begin at
// `line`, in the order that wgmma leaves them in.
template <class T, int kD, int kN>
__device__ __forceinline__ void multiply_strip(
    float (&sums)[kN / 2], const Panels<T, kD, kHopperTile>& left, int line, const Panels<T, kD, kN>& right) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (float& sum : sums) {
    sum = 0;
  }
#pragma unroll 1
  for (int k = 0; k < kD / 16; ++k) {
    const int panel = k / 4, run = k % 4 * 2;
    uint32_t a[4];
    load_matrices<false>(a, run_of_line(left[panel], line + lane % 16, run + lane / 16));
#pragma unroll
    for (int n = 0; n < kN / 16; ++n) {
      uint32_t b[4];
      load_matrices<false>(b, run_of_line(right[panel], 16 * n + lane / 16 * 8 + lane % 8, run + lane / 8 % 2));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float* of_eight = sums + 8 * n + 4 * j;
        float sum[4] = {of_eight[0], of_eight[1], of_eight[2], of_eight[3]};
        Mma<T>::template product<false>(sum, a, b, j);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          of_eight[e] = sum[e];
        }
      }
    }
  }
}

// Rounds sums to the left operand of the next product.
template <class T, int kN>
__device__ __forceinline__ void round_sums(uint32_t (&to)[kN / 16][4], const float (&sums)[kN / 2]) {
#pragma unroll
  for (int j = 0; j < kN / 16; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      to[j][e] = LeftOfSums<T>::pack(sums[8 * j + 2 * e], sums[8 * j + 2 * e + 1]);
    }
  }
}

// Writes a strip's rounded sums (16 x 64) to its lines of a panel, which begin at `line`.
template <class T>
__device__ __forceinline__ void store_lines_to_panel(T* panel, int line, const uint32_t (&rounded)[4][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    store_matrices(run_of_line(panel, line + lane % 16, 2 * j + lane / 16), rounded[j]);
  }
}

// Rounds a strip's sums (16 x kD) and writes them to its lines of panels, which are so many elements apart, for the copy
// engine to read.
template <int kD, class T>
__device__ __forceinline__ void store_strip_to_panels(
    T* lines, int panel_elements, const float (&sums)[kD / 2], float factor0, float factor8) {
#pragma unroll
  for (int column = 0; column < kD; column += kPanel) {
    uint32_t rounded[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float factor = e % 2 ? factor8 : factor0, *pair = sums + column / 2 + 8 * j + 2 * e;
        rounded[j][e] = LeftOfSums<T>::pack(pair[0] * factor, pair[1] * factor);
      }
    }
    store_lines_to_panel(lines + column / kPanel * panel_elements, 0, rounded);
  }
  fence_stores();
}

// Writes a lane's sums of two lines in fp32; row_of(half) is where they go, or null.
template <int kD, class F>
__device__ __forceinline__ void store_sums(
    const float (&sums)[kD / 2], float factor0, float factor8, int width, const F& row_of) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* row = row_of(half);
    const float factor = half ? factor8 : factor0;
    if (row == nullptr) {
      continue;
    }
#pragma unroll
    for (int n = 0; n < kD / 8; ++n) {
      if (8 * n < width) {
        *reinterpret_cast<float2*>(row + 8 * n + column) =
            make_float2(sums[4 * n + 2 * half] * factor, sums[4 * n + 2 * half + 1] * factor);
      }
    }
  }
}

// Writes what a unit of a sweep has summed for its own tokens: to a part, to a head's share, or to the gradient, by way of
// `lines` of panels that are so many elements apart: they are read until the first lane's stores are done.
template <int kD, class T>
__device__ __forceinline__ void store_sums_of_unit(
    const float (&sums)[kD / 2], float factor, const Backward<T>& p, const Sweep<T>& sweep, const Task& task, T* lines,
    int panel_elements, const CUtensorMap* grad, const Parts& parts, float* shares) {
  const Work& work = task.work;
  const int line0 = own_line();
  if (work.part >= 0) {
    const int64_t place = parts.line(sweep.lists, work.copy, work.part, work.sub_tile) + line0;
    store_sums<kD>(
        sums, factor, factor, p.width, [&](int half) { return parts.data + (place + 8 * half) * parts.width; });
  } else if (shares != nullptr) {
    store_sums<kD>(sums, factor, factor, p.width, [&](int half) -> float* {
      const int token = task.tokens[line0 + 8 * half];
      return token < 0 ? nullptr : shares + (work.matrix * p.scoring.keys + token) * p.width;
    });
  } else {
    store_strip_to_panels<kD>(lines, panel_elements, sums, factor, factor);
    __syncwarp();
    const int token = task.tokens[own_strip()];
    if (threadIdx.x % 32 == 0 && token >= 0) {
#pragma unroll
      for (int panel = 0; panel < kD / kPanel; ++panel) {
        store_box(grad, lines + panel * panel_elements, panel * kPanel, token, work.head, work.batch);
      }
      end_stores();
    }
  }
}

// Calls f with a queue, for as long as that takes, of so many units, and the number of thread blocks of so many teams.
template <class F>
void with_queue(const Launcher& launch, const Tensor& on, int64_t count, int teams, const F& f) {
  Tensor taken = launch.zeros(on, 1, ScalarType::Int);
  const int64_t blocks = std::min(count, launch.multiprocessors());
  f(Queue{taken.mutable_data_ptr<int32_t>(), static_cast<int>(count), static_cast<int>(teams * blocks)}, blocks);
}

// Calls f with the head size, padded, and the kind of scores.
template <class F>
void with_hopper_kernel(const Scoring& scoring, const Lists& lists, int width, const F& f) {
  const auto with_options = [&](auto padded) {
    const bool limited = scoring.window.limits != nullptr || lists.pairs != nullptr;
    if (!scoring.plain() || (limited && scoring.drops())) {
      f(padded, std::integral_constant<Scores, Scores::kOptions>{});
    } else if (limited) {
      f(padded, std::integral_constant<Scores, Scores::kLimited>{});
    } else if (scoring.drops()) {
      f(padded, std::integral_constant<Scores, Scores::kDropped>{});
    } else {
      f(padded, std::integral_constant<Scores, Scores::kPlain>{});
    }
  };
  width <= 64 ? with_options(std::integral_constant<int, 64>{}) : with_options(std::integral_constant<int, 128>{});
}

}  // namespace ds_sparse::attention
