// Fused attention, forward, on Hopper (pipeline_sm90.h). A unit is 128 queries of one head against the keys and values of
// its list, 128 at a time, or 64. Where a thread block has one team, a warpgroup multiplies the last probabilities and values
// while it does a softmax; where it has two, there are warps enough that do one while others do the other.

#include "arguments.h"
#include "forward.h"
#include "pipeline_sm90.h"

namespace ds_sparse::attention {
namespace {

template <class T, int kD, int kN, int kTeams, bool kLimited>
struct alignas(kPanelAlignment) Memory {
  static constexpr int kStages = 256 * 128 / (kD * kN * kTeams), kSlots = 2;
  struct Stage {
    Panels<T, kD, kN> keys, values;
  };
  Panels<T, kD, kHopperTile> queries[kSlots];  // then the unit's results
  Stage stages[kStages];
  Octet groups[kStages][kN / 16];
  LiveGroups live[kStages][Finder::kStrips];
  RowSum rows[kSlots][kHopperTile];  // of results
  alignas(16) PairsOfStep<kN, kLimited> pairs[kStages];
  TaskOf<kLimited> tasks[kSlots];
  Barrier task_told[kSlots], task_there[kSlots], task_free[kSlots];  // told: there, but for the queries
  Barrier keys_there[kStages], keys_free[kStages], values_there[kStages], values_free[kStages];
};

// Tells what units are, and copies their queries, as soon as there is space for the next; and results to memory.
template <class T, int kD, int kN, int kTeams, bool kLimited>
__device__ __forceinline__ void prepare_all(
    const Forward<T>& p, Memory<T, kD, kN, kTeams, kLimited>& memory, const CUtensorMap* query_map,
    const CUtensorMap* output_map, Queue queue, int team) {
  constexpr int kSlots = Memory<T, kD, kN, kTeams, kLimited>::kSlots;
  const int lane = threadIdx.x % 32;
  const Boxes<T, kD, kHopperTile> boxes(p.lists.log_block);
  Ring<kSlots> slot;
  int units = 0;
  // Once a slot is free: what its last unit left there, but for parts, which are not rounded yet.
  const auto store_results = [&]() {
    const auto& task = memory.tasks[slot.stage];
    const Work& work = task.work;
    const int part = work.part;
    __syncwarp();  // all lanes have read it before one of them writes the next unit there
    if (part >= 0) {
      return;
    }
    if (boxes.any && task.tokens[boxes.line] >= 0) {
      boxes.store(output_map, memory.queries[slot.stage], task.tokens[boxes.line], work.head, work.batch);
      end_stores();
    }
    const int64_t first = work.matrix * p.scoring.queries;
    for (int line = lane; line < kHopperTile; line += 32) {
      if (task.tokens[line] >= 0) {
        const RowSum row = memory.rows[slot.stage][line];
        p.rows[first + task.tokens[line]] = row;
        p.lse[first + task.tokens[line]] = row.lse();
      }
    }
    wait_for_stores();
    __syncwarp();
  };
  int number = blockIdx.x + team * gridDim.x, ticket = queue.draw();
  for (;; slot.next(), ++units) {
    memory.task_free[slot.stage].wait(slot.parity ^ 1);
    if (units >= kSlots) {
      store_results();
    }
    auto& task = memory.tasks[slot.stage];
    Barrier& there = memory.task_there[slot.stage];
    if (number >= queue.count) {
      if (lane == 0) {
        task.steps = -1;
        memory.task_told[slot.stage].arrive();
        there.arrive();
      }
      break;
    }
    const Work work(p.lists, number, p.heads, p.layout_heads, 1);
    const int steps = Other<kN>{nullptr, work.num_entries, p.lists.log_block}.steps();
    task.set(work, steps, p.lists, p.scoring.queries, p.scoring);
    // What does not exist is not copied, and nobody looks at what is in its place.
    const int token = boxes.any && steps > 0 ? task.tokens[boxes.line] : -1;
    const int copies = __popc(__ballot_sync(0xffffffffu, token >= 0));
    if (lane == 0) {
      memory.task_told[slot.stage].arrive();
      there.arrive_and_expect(copies * boxes.bytes());
    }
    if (token >= 0) {
      boxes.copy(memory.queries[slot.stage], query_map, &there, token, work.head, work.batch);
    }
    number = Queue::unit_of(ticket);
    ticket = queue.draw();
  }
  for (int left = min(units, kSlots - 1); left > 0; --left) {
    slot.next();
    memory.task_free[slot.stage].wait(slot.parity ^ 1);
    store_results();
  }
}

enum class Copied { kBoth, kKeys, kValues };
template <int kTeams>
constexpr int kCopyingWarps = kTeams == 1 ? 2 : 1;  // of a team

// By a warp for keys, which tells of each step what it is about, and one for values; or by one for both, where there are
// not as many.
template <Copied kCopied, class T, int kD, int kN, int kTeams, bool kLimited>
__device__ __forceinline__ void copy_all(
    const Forward<T>& p, Memory<T, kD, kN, kTeams, kLimited>& memory, const CUtensorMap* key_map,
    const CUtensorMap* value_map) {
  const int lane = threadIdx.x % 32;
  const Boxes<T, kD, kN> boxes(p.lists.log_block);
  const Finder finder(p.lists);
  Ring<Memory<T, kD, kN, kTeams, kLimited>::kStages> ring;

  for (Ring<Memory<T, kD, kN, kTeams, kLimited>::kSlots> slot;; slot.next()) {
    memory.task_told[slot.stage].wait(slot.parity);
    const auto& task = memory.tasks[slot.stage];
    const int steps = task.steps;
    if (steps < 0) {
      return;
    }
    const int head = task.work.head / p.heads_of_group, batch = task.work.batch;
    const Other<kN> other{p.lists.entries + task.work.first_entry, task.work.num_entries, p.lists.log_block,
                          p.scoring.keys, p.scoring.key_states_of(batch, task.work.head)};
    const auto sight = Sight<kLimited>::template of_strip<false>(p.scoring, p.lists, task);

    // By one warp, values come after the next step's keys: these are needed sooner, and their space is free sooner.
    auto last = ring;
    int last_token = 0;
    const auto copy_values = [&]() {
      Barrier& there = memory.values_there[last.stage];
      memory.values_free[last.stage].wait(last.parity ^ 1);
      if (lane == 0) {
        there.arrive_and_expect(sizeof(memory.stages[0].values));
      }
      if (boxes.any) {
        boxes.copy(memory.stages[last.stage].values, value_map, &there, last_token, head, batch);
      }
    };

    if (steps > 0) {
      Gathered<kN> next(other, boxes, 0);
      for (int step = 0; step < steps; ++step, ring.next()) {
        const Gathered<kN> here = next;
        if (step + 1 < steps) {
          next = Gathered<kN>(other, boxes, step + 1);
        }
        if constexpr (kCopied != Copied::kValues) {
          const LiveGroups live = finder.template find<kN / 16>(here.group, sight);
          Barrier& there = memory.keys_there[ring.stage];
          memory.keys_free[ring.stage].wait(ring.parity ^ 1);
          tell_step<kN, kLimited>(
              memory, ring.stage, there, here, live, sizeof(memory.stages[0].keys), p.lists, task.work, step);
          if (boxes.any) {
            boxes.copy(memory.stages[ring.stage].keys, key_map, &there, here.token, head, batch);
          }
        }
        if constexpr (kCopied == Copied::kBoth) {
          if (step > 0) {
            copy_values();
          }
        }
        last = ring;
        last_token = here.token;
        if constexpr (kCopied == Copied::kValues) {
          copy_values();
        }
      }
      if constexpr (kCopied == Copied::kBoth) {
        copy_values();
      }
    }
    arrive_once(memory.task_free[slot.stage], lane);
  }
}

template <class T, int kD, int kN, int kTeams, Scores kScores>
__device__ __forceinline__ void multiply_all(
    const Forward<T>& p, Memory<T, kD, kN, kTeams, are_limited(kScores)>& memory, int team) {
  constexpr bool kPlain = are_plain(kScores), kLimited = are_limited(kScores);
  const int thread = this_thread(), lane = thread % 32, warpgroup = uniform(thread / 128);
  const int strip = own_strip(thread);
  const float unit = kPlain ? p.scoring.scale * kLog2E : kLog2E;
  // A maximum that is looked at moves the origin that it is this far above: by a factor of 256 for probabilities. Where none
  // is looked at, a lane's sum of a step tells when they come near the end of what fp16 holds, or, in bf16, leave too little
  // of fp32's range to sums of their products with values.
  const float tolerance = 8 / unit;
  constexpr float kTooLarge = std::is_same_v<T, __half> ? 0x1p15f : 0x1p30f;
  const bool drops = attention::drops<kScores>(p.scoring);
  const Dropout dropout = drops ? p.scoring.dropout() : Dropout{};
  const float bias_factor = kPlain ? 1 / p.scoring.scale : 1.0f;
  constexpr bool kOverlaps = kTeams == 1;
  const Turns<kOverlaps> turns(warpgroup);
  using StageRing = Ring<Memory<T, kD, kN, kTeams, kLimited>::kStages>;
  StageRing ring;
  Ring<Memory<T, kD, kN, kTeams, kLimited>::kSlots> slot;

  // What the unit in `slot_of_sums` has summed; where `owes`, the product of `probs` with the values of stage `last` is
  // still to be added. It is added together with the next step's scores, be they the next unit's.
  float output[kD / 2];
  float scores[kN / 2];
  uint32_t probs[kN / 16][4];
  // The origins of exponents in a lane's two lines, and the sums of exponentials; whether the warp's lines all have origins.
  float origin0 = -kInfinity, origin8 = -kInfinity, sum0 = 0, sum8 = 0;
  bool have_origins = false, owes = false;
  StageRing last;
  int slot_of_sums = -1;
  const auto& stages = memory.stages;
  const Operand all_queries(memory.queries[0][0] + 64 * warpgroup * kPanel);
  const Operand keys(stages[0].keys), values(stages[0].values, sizeof(stages[0].values[0]));

  const auto multiply_values = [&]() {
    memory.values_there[last.stage].wait(last.parity);
    begin_products();
    multiply_columns<T, kD, kN>(output, probs, values + uniform(last.stage * sizeof(stages[0])));
    end_products();
  };
  const auto are_added = [&]() {
    sums_are_there(output);
    arrive_once(memory.values_free[last.stage], lane);
    owes = false;
  };
  // Hands the results of a unit over, with its slot.
  const auto finish = [&]() {
    const Work& work = memory.tasks[slot_of_sums].work;
    // Asked for anew: what follows from it would be made once and, for want of registers, kept in memory.
    const int own_thread = this_thread(), line0 = own_line(own_thread);
    sum0 = sum_of_four(sum0);
    sum8 = sum_of_four(sum8);
    const float of_dropout = drops ? dropout.factor() : 1.0f;
    const float factor0 = sum0 > 0 ? of_dropout / sum0 : 0.0f, factor8 = sum8 > 0 ? of_dropout / sum8 : 0.0f;
    const float to_origin = kPlain ? p.scoring.scale : 1.0f;
    const RowSum row0(origin0 * to_origin, sum0), row8(origin8 * to_origin, sum8);
    if (work.part >= 0) {
      const int64_t place = p.part_outputs.line(p.lists, work.copy, work.part, work.sub_tile) + line0;
      store_sums<kD>(output, factor0, factor8, p.width, [&](int half) -> float* {
        const bool any = (half ? sum8 : sum0) != 0;
        return any ? p.part_outputs.data + (place + 8 * half) * p.width : nullptr;
      });
      if (lane % 4 == 0) {
        p.part_rows[place] = row0;
        p.part_rows[place + 8] = row8;
      }
    } else {
      wait_at<128>(3 + kConsumers * team + warpgroup);  // until the warpgroup is done with its queries, whose space serves now
      auto& panels = memory.queries[slot_of_sums];
      store_strip_to_panels<kD>(
          panels[0] + own_strip(own_thread) * kPanel, kHopperTile * kPanel, output, factor0, factor8);
      if (lane % 4 == 0) {
        memory.rows[slot_of_sums][line0] = row0;
        memory.rows[slot_of_sums][line0 + 8] = row8;
      }
    }
    arrive_once(memory.task_free[slot_of_sums], lane);
  };
  const auto begin = [&](int of_slot) {
    if (slot_of_sums >= 0) {
      finish();
    }
    slot_of_sums = of_slot;
    origin0 = origin8 = -kInfinity;
    sum0 = sum8 = 0;
    have_origins = false;
#pragma unroll
    for (float& sum : output) {
      sum = 0;
    }
  };
  const auto decay = [&](float decay0, float decay8) {
#pragma unroll
    for (int i = 0; i < kD / 2; i += 4) {
      output[i] *= decay0;
      output[i + 1] *= decay0;
      output[i + 2] *= decay8;
      output[i + 3] *= decay8;
    }
  };
  // Moves origins to maxima. Returns whether, and by what, sums have to decay.
  const auto move_origins = [&](float& decay0, float& decay8) -> bool {
    // Four chains for each line: one would be bound by its latency.
    float largest[16];
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      largest[i % 16] = i < 16 ? scores[i] : fmaxf(largest[i % 16], scores[i]);
    }
#pragma unroll
    for (int i = 4; i < 16; ++i) {
      largest[i % 4] = fmaxf(largest[i % 4], largest[i]);
    }
    const float new0 = fmaxf(origin0, max_of_four(fmaxf(largest[0], largest[1])));
    const float new8 = fmaxf(origin8, max_of_four(fmaxf(largest[2], largest[3])));
    const bool moves = __any_sync(0xffffffffu, new0 > origin0 + tolerance || new8 > origin8 + tolerance);
    if (moves) {
      decay0 = exp2_of((origin0 - (new0 == -kInfinity ? 0.0f : new0)) * unit);
      decay8 = exp2_of((origin8 - (new8 == -kInfinity ? 0.0f : new8)) * unit);
      origin0 = new0;
      origin8 = new8;
      sum0 *= decay0;
      sum8 *= decay8;
    }
    have_origins = __all_sync(0xffffffffu, origin0 > -kInfinity && origin8 > -kInfinity);
    return moves;
  };
  const auto settle = [&]() {
    if (owes) {
      multiply_values();
      wait_for_products<0>();
      are_added();
    }
  };

  for (;; slot.next()) {
    memory.task_there[slot.stage].wait(slot.parity);
    const auto& task = memory.tasks[slot.stage];
    if (task.steps < 0) {
      break;
    }
    const Operand queries = all_queries + uniform(slot.stage * sizeof(memory.queries[0]));
    const Work& work = task.work;
    const int steps = uniform(task.steps);
    bool begins = kOverlaps;
    if constexpr (!kOverlaps) {
      begin(slot.stage);
    }
    LiveGroups live{0};
    int first_keys[kN / 16];

    const auto mask = [&]() {
      const Octet* groups = memory.groups[ring.stage];
      finish_scores<T, kN, kPlain>(scores, p.scoring, task, groups);
      if (!live.is_whole<kN>()) {
        add_key_bias<kN>(scores, live, groups, p.scoring, work, bias_factor);
        mask_scores<kN, false, kLimited>(
            scores, live, groups, task, p.scoring, p.lists.pairs == nullptr ? nullptr : memory.pairs[ring.stage]);
        if (kLimited && p.lists.pairs != nullptr) {
          // Pairs are overwritten when keys are freed, which may be the next thing that happens.
          fence_stores();
        }
      }
    };
    // Scores become exponentials, whose sums are the lane's.
    const auto exponentiate = [&]() -> float2 {
      const float base0 = origin0 == -kInfinity ? 0.0f : origin0, base8 = origin8 == -kInfinity ? 0.0f : origin8;
      const float of_line0 = base0 * unit, of_line8 = base8 * unit;
      float2 sums{0, 0};
#pragma unroll
      for (int i = 0; i < kN / 2; i += 4) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          scores[i + e] = kPlain ? exp2_of(scores[i + e] * unit - (e < 2 ? of_line0 : of_line8))
                                 : exp2_of((scores[i + e] - (e < 2 ? base0 : base8)) * unit);
        }
        sums.x += scores[i] + scores[i + 1];
        sums.y += scores[i + 2] + scores[i + 3];
      }
      return sums;
    };
    // Whether to look at maxima in each step. Else keys have to stay until it is known that they are not needed again; where
    // there are two stages, and one short unit comes after the other, copies are too late then.
    const bool looks = !kPlain || (kOverlaps && steps < 8);
    // Scores become probabilities; returns as move_origins does. Once lines have origins their maxima are not looked at, but
    // sums tell if these would have been needed: then the warp makes its scores again.
    const auto softmax = [&](float& decay0, float& decay8) -> bool {
      mask();
      // Before keys are free, and with them what is known of their groups.
      if (drops) {
#pragma unroll
        for (int g = 0; g < kN / 16; ++g) {
          first_keys[g] = memory.groups[ring.stage][g].token;
        }
      }
      const bool tries = have_origins && !looks;
      bool moves = false;
      if (!tries) {
        arrive_once(memory.keys_free[ring.stage], lane);
        moves = move_origins(decay0, decay8);
      }
      float2 sums = exponentiate();
      if (tries) {
        if (__any_sync(0xffffffffu, fmaxf(sums.x, sums.y) > kTooLarge)) {
          // Registers are short for it: what need not be there meanwhile is put aside, for which other steps do not pay then.
          volatile float aside[kD / 2];
          if constexpr (!kOverlaps) {
#pragma unroll
            for (int i = 0; i < kD / 2; ++i) {
              aside[i] = output[i];
            }
          }
          multiply_strip<T, kD, kN>(scores, memory.queries[slot.stage], strip, stages[ring.stage].keys);
          mask();
          moves = move_origins(decay0, decay8);
          sums = exponentiate();
          if constexpr (!kOverlaps) {
#pragma unroll
            for (int i = 0; i < kD / 2; ++i) {
              output[i] = aside[i];
            }
          }
        }
        arrive_once(memory.keys_free[ring.stage], lane);
      }
      sum0 += sums.x;
      sum8 += sums.y;
      return moves;
    };

    const auto multiply_scores = [&]() {
      begin_products();
      multiply_lines<T, kD, kN, kN>(scores, queries, keys + uniform(ring.stage * sizeof(stages[0])));
      end_products();
    };

    for (int step = 0; step < steps; ++step, ring.next()) {
      memory.keys_there[ring.stage].wait(ring.parity);
      live = {uniform(memory.live[ring.stage][strip / 16].bits)};
      turns.wait();
      if (live.warpgroup() == 0) {
        // Values that wait for their product would keep the ring from turning. Nobody frees values that are not there yet: the
        // round they would be counted to may be the one before.
        turns.pass_on();
        settle();
        memory.values_there[ring.stage].wait(ring.parity);
        arrive_once(memory.keys_free[ring.stage], lane);
        arrive_once(memory.values_free[ring.stage], lane);
        continue;
      }
      float decay0 = 1, decay8 = 1;
      if constexpr (!kOverlaps) {
        if (owes) {
          multiply_values();
        }
        multiply_scores();
        wait_for_products<0>();
        sums_are_there(scores);
        if (owes) {
          are_added();
        }
        if (softmax(decay0, decay8)) {
          decay(decay0, decay8);
        }
      } else if (owes && !begins) {
        multiply_scores();
        multiply_values();
        turns.pass_on();
        wait_for_products<1>();
        sums_are_there(scores);
        const bool moves = softmax(decay0, decay8);
        not_before(sum0 + sum8);
        wait_for_products<0>();
        are_added();
        if (moves) {
          decay(decay0, decay8);
        }
      } else {
        if (owes) {
          multiply_scores();
          multiply_values();
          turns.pass_on();
          wait_for_products<0>();
          sums_are_there(scores);
          are_added();
        } else {
          multiply_scores();
          turns.pass_on();
          wait_for_products<0>();
          sums_are_there(scores);
        }
        if (begins) {
          begin(slot.stage);
          begins = false;
        }
        if (softmax(decay0, decay8)) {
          decay(decay0, decay8);
        }
      }
      round_sums<T, kN>(probs, scores);
      if (drops) {
#pragma unroll
        for (int g = 0; g < kN / 16; ++g) {
          const auto kept = Kept<false>::of_square(dropout, work.matrix, task.tokens[strip], first_keys[g]);
#pragma unroll
          for (int pair = 0; pair < 4; ++pair) {
            probs[g][pair] &= kept.pairs[pair];
          }
        }
      }
      last = ring;
      owes = true;
    }
    if constexpr (!kOverlaps) {
      settle();
      finish();
      slot_of_sums = -1;
    } else if (begins) {
      settle();
      begin(slot.stage);
    }
  }
  settle();
  if (slot_of_sums >= 0) {
    finish();
  }
}

template <class T, int kD, int kN, int kTeams, Scores kScores>
__global__ void __launch_bounds__(kHopperThreads<kTeams>, 1) forward_on_hopper_kernel(
    const __grid_constant__ Forward<T> p, const __grid_constant__ CUtensorMap query_map,
    const __grid_constant__ CUtensorMap key_map, const __grid_constant__ CUtensorMap value_map,
    const __grid_constant__ CUtensorMap output_map, Queue queue) {
  extern __shared__ unsigned char shared[];
  using M = Memory<T, kD, kN, kTeams, are_limited(kScores)>;
  M* memories = reinterpret_cast<M*>(align_panels(shared));
  if (threadIdx.x < kTeams) {
    M& memory = memories[threadIdx.x];
    for (int slot = 0; slot < M::kSlots; ++slot) {
      memory.task_told[slot].init(1);
      memory.task_there[slot].init(1);
      memory.task_free[slot].init(4 * kConsumers + kCopyingWarps<kTeams>);
    }
    for (int stage = 0; stage < M::kStages; ++stage) {
      memory.keys_there[stage].init(1);
      memory.values_there[stage].init(1);
      memory.keys_free[stage].init(4 * kConsumers);
      memory.values_free[stage].init(4 * kConsumers);
    }
    fence_barriers();
  }
  __syncthreads();
  const auto multiply = [&](int team) { multiply_all<T, kD, kN, kTeams, kScores>(p, memories[team], team); };
  const auto prepare = [&](int team) { prepare_all(p, memories[team], &query_map, &output_map, queue, team); };
  if constexpr (kCopyingWarps<kTeams> == 2) {
    share_work<kTeams, 40, 232>(
        multiply, prepare, [&](int team) { copy_all<Copied::kKeys>(p, memories[team], &key_map, &value_map); },
        [&](int team) { copy_all<Copied::kValues>(p, memories[team], &key_map, &value_map); });
  } else {
    share_work<kTeams, 32, 112>(
        multiply, prepare, [&](int team) { copy_all<Copied::kBoth>(p, memories[team], &key_map, &value_map); });
  }
}

}  // namespace

template <class T>
void forward_on_hopper(
    const Launcher& launch, const Forward<T>& p, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& output, int64_t copies) {
  with_hopper_kernel(p.scoring, p.lists, p.width, [&](auto width, auto scores) {
    constexpr Scores kScores = decltype(scores)::value;
    constexpr bool kPlain = are_plain(kScores), kLimited = are_limited(kScores);
    // Short lines leave room for a second team; half as many keys at a time leave registers for it, or for options.
    constexpr int kD = decltype(width)::value, kTeams = kD == 64 && kPlain ? 2 : 1, kN = kD == 128 && kPlain ? 128 : 64;
    const int64_t count = copies * p.lists.num_units * p.lists.sub_tiles;
    const int block = 1 << p.lists.log_block;
    const int own_box = std::min(block, kHopperTile);
    const CUtensorMap query_map = tensor_map(query, own_box), output_map = tensor_map(output, own_box);
    const CUtensorMap key_map = tensor_map(key, std::min(block, kN)), value_map = tensor_map(value, std::min(block, kN));
    with_queue(launch, query, count, kTeams, [&](const Queue& queue, int64_t blocks) {
      launch.with_shared_memory(
          forward_on_hopper_kernel<T, kD, kN, kTeams, kScores>, blocks, kHopperThreads<kTeams>,
          kTeams * sizeof(Memory<T, kD, kN, kTeams, kLimited>) + kPanelAlignment, p, query_map, key_map, value_map, output_map,
          queue);
    });
  });
}

template void forward_on_hopper(
    const Launcher&, const Forward<__half>&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t);
template void forward_on_hopper(
    const Launcher&, const Forward<__nv_bfloat16>&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t);

}  // namespace ds_sparse::attention
