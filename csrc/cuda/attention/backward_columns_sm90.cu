// Fused attention, backward by columns, on Hopper (pipeline_sm90.h): a unit is 128 keys and values of one head against the
// queries, and gradients of outputs, of its list, 64 at a time. Products are transposed (keys are the lines), so that
// probabilities are the left operand of the next product as they are. Gradients of queries, where they are asked for, are
// added to memory as they come, in an order that is not fixed: five products where two sweeps do seven. They take what all
// 128 keys give: a third warpgroup makes them where registers reach for one, else the two do, which then go in step.

#include "arguments.h"
#include "backward.h"
#include "pipeline_sm90.h"

namespace ds_sparse::attention {
namespace {

constexpr int kN = 64;  // queries in a step

// Whether registers reach for a third warpgroup, and whether it makes the gradients of queries.
template <int kD>
constexpr bool kHasThird = kD == 64;
template <int kD, bool kWithQueries>
constexpr bool kApart = kWithQueries && kHasThird<kD>;

constexpr int kCopyingWarps = 2;

template <class T, int kD, bool kLimited>
struct Memory {
  static constexpr int kStages = kD == 64 ? 4 : 3, kSlots = 2, kOwns = kD == 64 ? 2 : 1, kBuffers = kHasThird<kD> ? 2 : 1;
  struct Stage {
    Panels<T, kD, kN> queries, grads;
  };
  struct Own {
    Panels<T, kD, kHopperTile> keys, values;
  };
  Own own[kOwns];
  Stage stages[kStages];
  Panels<T, kN, kHopperTile> grad_scores[kBuffers];  // a line for each key; of one step or two
  // For each warp that multiplies, eight runs of 16 x 8 sums; or rounded results, 16 lines of 64 in one half or two.
  alignas(kPanelAlignment) float4 spaces[kHopperTile / 16 + (kHasThird<kD> ? 4 : 0)][8][32];
  float rows[kStages][4][kN];  // members of Row
  Octet groups[kStages][kN / 16];
  LiveGroups live[kStages][Finder::kStrips];
  alignas(16) PairsOfStep<kN, kLimited> pairs[kStages];
  TaskOf<kLimited> tasks[kSlots];
  Barrier task_told[kSlots], task_there[kSlots], task_free[kSlots];  // told: there, but for keys and values
  Barrier own_free[kOwns];
  Barrier there[kStages], free[kStages];
  Barrier grad_scores_there[kBuffers], grad_scores_free[kBuffers];  // for the third warpgroup
};

struct Maps {
  CUtensorMap key, value, query, grad_output, grad_key, grad_value;
};

// Tells what units are, and copies their keys and values, as soon as there is space for the next.
template <class T, int kD, Scores kScores>
__device__ __forceinline__ void prepare_all(
    const Backward<T>& p, const Sweep<T>& sweep, const Maps& maps, Memory<T, kD, are_limited(kScores)>& memory,
    Queue queue) {
  constexpr bool kLimited = are_limited(kScores);
  const int lane = threadIdx.x % 32;
  const Lists& lists = sweep.lists;
  const Boxes<T, kD, kHopperTile> boxes(lists.log_block);
  Ring<Memory<T, kD, kLimited>::kSlots> slot;
  Ring<Memory<T, kD, kLimited>::kOwns> place;
  for (int number = blockIdx.x, ticket; number < queue.count; number = Queue::unit_of(ticket), slot.next(), place.next()) {
    ticket = queue.draw();
    const Work work(lists, number, p.heads, p.layout_heads, 1);
    const int kv_head = work.head / p.heads_of_group;
    auto& task = memory.tasks[slot.stage];
    auto& own = memory.own[place.stage];
    Barrier& there = memory.task_there[slot.stage];
    memory.task_free[slot.stage].wait(slot.parity ^ 1);
    task.set(work, 0, lists, p.scoring.keys, p.scoring);
    // Keys that are all masked have nothing to do.
    const uint8_t* states = p.scoring.key_states_of(work.batch, work.head);
    bool any = states == nullptr;
    for (int line = lane; line < kHopperTile && !any; line += 32) {
      any = task.tokens[line] >= 0 && states[task.tokens[line] / 8] != kAllMasked;
    }
    const int all = Other<kN>{nullptr, work.num_entries, lists.log_block}.steps();
    const int steps = __any_sync(0xffffffffu, any) ? all : 0;
    if (lane == 0) {
      task.steps = steps;
      memory.task_told[slot.stage].arrive();
    }
    memory.own_free[place.stage].wait(place.parity ^ 1);
    if (lane == 0) {
      there.arrive_and_expect(steps > 0 ? sizeof(own) : 0);
    }
    if (steps > 0 && boxes.any) {
      // Where there are no keys, the copy engine brings zeros.
      const int token = task.tokens[boxes.line] < 0 ? p.scoring.keys : task.tokens[boxes.line];
      boxes.copy(own.keys, &maps.key, &there, token, kv_head, work.batch);
      boxes.copy(own.values, &maps.value, &there, token, kv_head, work.batch);
    }
  }
  memory.task_free[slot.stage].wait(slot.parity ^ 1);
  if (lane == 0) {
    memory.tasks[slot.stage].steps = -1;
    memory.task_told[slot.stage].arrive();
    memory.task_there[slot.stage].arrive();
  }
}

// By a warp that copies queries, and tells of each step what it is about, and by one that copies gradients of outputs, and
// rows: with small blocks that is more than one warp starts in time.
template <class T, int kD, Scores kScores, bool kOfGrads>
__device__ __forceinline__ void copy_all(
    const Backward<T>& p, const Sweep<T>& sweep, const Maps& maps, Memory<T, kD, are_limited(kScores)>& memory) {
  constexpr bool kPlain = are_plain(kScores), kLimited = are_limited(kScores);
  const int lane = threadIdx.x % 32;
  const Lists& lists = sweep.lists;
  const Boxes<T, kD, kN> boxes(lists.log_block);
  const Finder finder(lists);
  Ring<Memory<T, kD, kLimited>::kStages> ring;
  for (Ring<Memory<T, kD, kLimited>::kSlots> slot;; slot.next()) {
    memory.task_told[slot.stage].wait(slot.parity);
    const auto& task = memory.tasks[slot.stage];
    const Work& work = task.work;
    const int steps = task.steps;
    if (steps < 0) {
      return;
    }
    if (steps > 0) {
      const Other<kN> other{
          lists.entries + work.first_entry, work.num_entries, lists.log_block, p.scoring.queries, nullptr};
      const auto sight = Sight<kLimited>::template of_strip<true>(p.scoring, lists, task);
      Gathered<kN> next(other, boxes, 0);
      for (int step = 0; step < steps; ++step, ring.next()) {
        auto& stage = memory.stages[ring.stage];
        Barrier& there = memory.there[ring.stage];
        const Gathered<kN> here = next;
        if (step + 1 < steps) {
          next = Gathered<kN>(other, boxes, step + 1);
        }
        if constexpr (kOfGrads) {
          constexpr int members = kPlain ? 2 : 4;
          memory.free[ring.stage].wait(ring.parity ^ 1);
          if (lane == 0) {
            there.arrive_and_expect(sizeof(stage.grads) + members * sizeof(memory.rows[0][0]));
          }
          __syncwarp();
          if (boxes.any) {
            boxes.copy(stage.grads, &maps.grad_output, &there, here.token, work.head, work.batch);
            for (int member = boxes.panel; member < members; member += kD / kPanel) {
              copy_bytes(
                  memory.rows[ring.stage][member] + boxes.line, p.rows.plane(work.matrix, member) + here.token,
                  int{sizeof(float)} << boxes.log_tokens, &there);
            }
          }
        } else {
          const LiveGroups live = finder.template find<kN / 16>(here.group, sight);
          memory.free[ring.stage].wait(ring.parity ^ 1);
          tell_step<kN, kLimited>(memory, ring.stage, there, here, live, sizeof(stage.queries), lists, work, step);
          if (boxes.any) {
            boxes.copy(stage.queries, &maps.query, &there, here.token, work.head, work.batch);
          }
        }
      }
    }
    arrive_once(memory.task_free[slot.stage], lane);
  }
}

// Adds a warp's 16 x 64 sums, of gradients of queries, to memory, by way of its space; null: to nothing.
__device__ __forceinline__ void add_grad_queries(float4 (&space)[8][32], const float (&sums)[32], float* to) {
  if (to == nullptr) {
    return;
  }
  const int lane = threadIdx.x % 32;
  warp_waits_for_stores(lane);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    space[i][lane] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
  }
  fence_stores();
  __syncwarp();
  if (lane == 0) {
    add_to_memory(to, &space[0][0].x, sizeof(space));
  }
}

// sums = what the tile's keys give to the gradients of a step's queries, 64 columns of them.
template <class T>
__device__ __forceinline__ void multiply_grad_scores(float (&sums)[32], const Operand& grad_scores, const Operand& keys) {
  begin_products();
#pragma unroll
  for (int k = 0; k < kHopperTile / 16; ++k) {
    constexpr int lines = 16 * kPanel * sizeof(T);
    Products<T>::template from_shared<64, false, true>(sums, grad_scores.from(k * lines), keys.from(k * lines), k > 0);
  }
  end_products();
}

// All that the third warpgroup does.
template <class T, int kD, Scores kScores>
__device__ __forceinline__ void multiply_for_queries(
    const Backward<T>& p, Memory<T, kD, are_limited(kScores)>& memory) {
  constexpr bool kLimited = are_limited(kScores);
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32 % 4);
  const Operand all_keys(memory.own[0].keys[0]), all_grad_scores(memory.grad_scores[0]);
  auto& space = memory.spaces[kHopperTile / 16 + warp];
  Ring<Memory<T, kD, kLimited>::kStages> ring;
  Ring<Memory<T, kD, kLimited>::kSlots> slot;
  Ring<Memory<T, kD, kLimited>::kOwns> place;
  Ring<Memory<T, kD, kLimited>::kBuffers> buffer;
  for (;; slot.next(), place.next()) {
    memory.task_there[slot.stage].wait(slot.parity);
    const auto& task = memory.tasks[slot.stage];
    const int steps = uniform(task.steps);
    if (steps < 0) {
      break;
    }
    const Operand keys = all_keys + uniform(place.stage * sizeof(memory.own[0]));
    const int64_t matrix = task.work.matrix;
    for (int step = 0; step < steps; ++step, ring.next(), buffer.next()) {
      memory.grad_scores_there[buffer.stage].wait(buffer.parity);
      const Octet group = memory.groups[ring.stage][warp];
      arrive_once(memory.free[ring.stage], lane);
      float sums[32];
      multiply_grad_scores<T>(sums, all_grad_scores + uniform(buffer.stage * sizeof(memory.grad_scores[0])), keys);
      wait_for_products<0>();
      sums_are_there(sums);
      arrive_once(memory.grad_scores_free[buffer.stage], lane);
      add_grad_queries(space, sums, group.owners != 0 ? p.grad_query_sums.strip(matrix, group.token) : nullptr);
    }
    arrive_once(memory.own_free[place.stage], lane);
    arrive_once(memory.task_free[slot.stage], lane);
  }
  if (lane == 0) {
    wait_for_stores();
  }
}

template <class T, int kD, Scores kScores, bool kWithQueries>
__device__ __forceinline__ void multiply_all(
    const Backward<T>& p, const Sweep<T>& sweep, const Maps& maps, Memory<T, kD, are_limited(kScores)>& memory) {
  constexpr bool kPlain = are_plain(kScores), kLimited = are_limited(kScores);
  constexpr bool kApart = attention::kApart<kD, kWithQueries>;
  const int thread = this_thread(), lane = thread % 32, warpgroup = uniform(thread / 128);
  const int strip = own_strip(thread), line0 = own_line(thread);
  const float unit = kPlain ? p.scoring.scale * kLog2E : kLog2E;
  const float bias_factor = kPlain ? 1 / p.scoring.scale : 1.0f;
  const bool drops = attention::drops<kScores>(p.scoring);
  const Dropout dropout = drops ? p.scoring.dropout() : Dropout{};
  const float of_dropout = drops ? dropout.factor() : 1.0f;
  Ring<Memory<T, kD, kLimited>::kStages> ring;
  Ring<Memory<T, kD, kLimited>::kSlots> slot;
  Ring<Memory<T, kD, kLimited>::kOwns> place;
  Ring<Memory<T, kD, kLimited>::kBuffers> buffer;
  const auto& own = memory.own[0];
  const Operand own_keys(own.keys[0] + 64 * warpgroup * kPanel), own_values(own.values[0] + 64 * warpgroup * kPanel);
  const Operand own_columns(own.keys[kD == 128 ? warpgroup : 0]);  // 64 of the keys' columns
  const auto& first_stage = memory.stages[0];
  const Operand queries(first_stage.queries), output_grads(first_stage.grads);
  const Operand query_columns(first_stage.queries, sizeof(first_stage.queries[0]));
  const Operand output_grad_columns(first_stage.grads, sizeof(first_stage.grads[0]));

  // Gradients of scores, for those of queries. They are written once the last in their place have been multiplied: where
  // both warpgroups do that, the other says so at barrier 2 + its number, and both have written at barrier 1.
  const auto hand_over = [&](const uint32_t (&rounded)[4][4]) {
    if constexpr (kApart) {
      memory.grad_scores_free[buffer.stage].wait(buffer.parity ^ 1);
    } else if constexpr (kWithQueries) {
      wait_at<256>(3 - warpgroup);
    }
    if constexpr (kWithQueries) {
      store_lines_to_panel(memory.grad_scores[buffer.stage][0], strip, rounded);
      fence_stores();
    }
    if constexpr (kApart) {
      arrive_once(memory.grad_scores_there[buffer.stage], lane);
      buffer.next();
    }
  };
  if constexpr (kWithQueries && !kApart) {
    arrive_at<256>(2 + warpgroup);
  }
  for (;; slot.next(), place.next()) {
    memory.task_there[slot.stage].wait(slot.parity);
    const auto& task = memory.tasks[slot.stage];
    if (task.steps < 0) {
      break;
    }
    const uint32_t of_place = uniform(place.stage * sizeof(memory.own[0]));
    const Operand keys = own_keys + of_place, values = own_values + of_place, columns = own_columns + of_place;
    const Work work = task.work;
    const int steps = uniform(task.steps), token0 = task.tokens[line0], token8 = task.tokens[line0 + 8];
    // Keys that do not exist must not add to the gradients of queries.
    const float* key_bias = p.scoring.key_bias_of(work.batch, work.head);
    const auto bias_of = [&](int token) {
      return token < 0 ? -kInfinity : key_bias != nullptr ? key_bias[token] * bias_factor : 0.0f;
    };
    const float bias0 = bias_of(token0), bias8 = bias_of(token8);
    const bool biased = __any_sync(0xffffffffu, bias0 != 0 || bias8 != 0);

    float grad_key[kD / 2] = {}, grad_value[kD / 2] = {};
    float probs[kN / 2], grads[kN / 2];
    uint32_t left_probs[kN / 16][4], left_grads[kN / 16][4];
    KeptOfStep<true> kept;
    int last = -1;  // the stage whose products are still under way

    const auto are_added = [&]() {
      sums_are_there(grad_key);
      sums_are_there(grad_value);
      if (last >= 0) {
        arrive_once(memory.free[last], lane);
        last = -1;
      }
    };

    // Where both warpgroups make the gradients of queries, each makes 64 columns: this begins, and what follows ends it, once
    // the product is done.
    const auto multiply_grad_queries = [&](float (&sums)[32]) {
      wait_at<256>(1);
      multiply_grad_scores<T>(sums, Operand(memory.grad_scores[0]), columns);
    };
    const auto add_sums = [&](float (&sums)[32]) {
      sums_are_there(sums);
      arrive_at<256>(2 + warpgroup);
      const Octet group = memory.groups[ring.stage][strip / 16 % 4];
      float* to = p.grad_query_sums.strip(work.matrix, group.token) + warpgroup * 1024;
      add_grad_queries(memory.spaces[strip / 16], sums, group.owners != 0 ? to : nullptr);
    };

    for (int step = 0; step < steps; ++step, ring.next()) {
      memory.there[ring.stage].wait(ring.parity);
      const LiveGroups live{uniform(memory.live[ring.stage][strip / 16].bits)};
      if (live.warpgroup() != 0) {
        const Octet* groups = memory.groups[ring.stage];
        const auto of_rows = [&](int member, int n) {
          return *reinterpret_cast<const float2*>(memory.rows[ring.stage][member] + 8 * n + lane % 4 * 2);
        };
        begin_products();
        const uint32_t here = uniform(ring.stage * sizeof(first_stage));
        multiply_lines<T, kD, kN, kN>(probs, keys, queries + here);
        end_products();
        multiply_lines<T, kD, kN, kN>(grads, values, output_grads + here);
        end_products();
        // Read while products run: shared memory answers late under their load.
        float2 origins[kN / 8];
#pragma unroll
        for (int n = 0; n < kN / 8; ++n) {
          origins[n] = of_rows(kPlain ? 0 : 2, n);
        }
        if (drops) {
          kept.find(dropout, work.matrix, task.tokens[strip], groups);
        }
        wait_for_products<1>();
        are_added();
        sums_are_there(probs);
        finish_scores<T, kN, kPlain, true>(probs, p.scoring, task, groups);
        if (biased) {
#pragma unroll
          for (int i = 0; i < kN / 2; ++i) {
            probs[i] += i % 4 < 2 ? bias0 : bias8;
          }
        }
        if (!live.is_whole<kN>()) {
          mask_scores<kN, true, kLimited>(
              probs, live, groups, task, p.scoring,
              sweep.lists.pairs == nullptr ? nullptr : memory.pairs[ring.stage]);
        }
#pragma unroll
        for (int n = 0; n < kN / 8; ++n) {
          const float2 origin = origins[n], inverse = kPlain ? make_float2(1, 1) : of_rows(3, n);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& prob = probs[4 * n + e];
            const float of_row = e % 2 ? origin.y : origin.x;
            prob = kPlain ? exp2_of(prob * unit - of_row) : exp2_of((prob - of_row) * unit) * (e % 2 ? inverse.y : inverse.x);
          }
        }
        round_sums<T, kN>(left_probs, probs);
        if (drops) {
          kept.mask(left_probs);
        }
        begin_products();
        multiply_columns<T, kD, kN>(grad_value, left_probs, output_grad_columns + here);
        end_products();
        wait_for_products<1>();
        sums_are_there(grads);
#pragma unroll
        for (int n = 0; n < kN / 8; ++n) {
          const float2 delta = of_rows(1, n);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& grad = grads[4 * n + e];
            const float factor = !drops ? 1.0f : kept[4 * n + e] ? of_dropout : 0.0f;
            grad = probs[4 * n + e] * (grad * factor - (e % 2 ? delta.y : delta.x));
          }
        }
        round_sums<T, kN>(left_grads, grads);
        hand_over(left_grads);
        float sums[32];
        if constexpr (kWithQueries && !kApart) {
          multiply_grad_queries(sums);  // before the keys' gradients, which are multiplied while these are added
        }
        begin_products();
        multiply_columns<T, kD, kN>(grad_key, left_grads, query_columns + here);
        end_products();
        if constexpr (kWithQueries && !kApart) {
          wait_for_products<1>();
          add_sums(sums);
        }
        if constexpr (kD == 128) {
          wait_for_products<0>();  // registers do not reach to the next step
          sums_are_there(grad_key);
        }
      } else {
        wait_for_products<0>();
        are_added();
        const uint32_t zeros[4][4] = {};
        hand_over(zeros);
        if constexpr (kWithQueries && !kApart) {
          float sums[32];
          multiply_grad_queries(sums);
          wait_for_products<0>();
          add_sums(sums);
        }
      }
      last = ring.stage;
    }
    wait_for_products<0>();
    are_added();
    arrive_once(memory.own_free[place.stage], lane);
    // The warp's space has room for both results, or for one after the other.
    constexpr int kPanelsOfSpace = 2, kElements = 16 * kPanel;
    T* space = reinterpret_cast<T*>(memory.spaces[strip / 16]);
    warp_waits_for_stores(lane);
    store_sums_of_unit<kD>(
        grad_key, p.scoring.scale, p, sweep, task, space, kElements, &maps.grad_key, sweep.first_parts,
        sweep.first_shares);
    if constexpr (kD == kPanelsOfSpace * kPanel) {
      warp_waits_for_stores(lane);
    } else {
      space += kElements;
    }
    store_sums_of_unit<kD>(
        grad_value, of_dropout, p, sweep, task, space, kElements, &maps.grad_value, sweep.second_parts,
        sweep.second_shares);
    arrive_once(memory.task_free[slot.stage], lane);
  }
  if (lane == 0) {
    wait_for_stores();  // shared memory has to outlast them
  }
}

template <int kD, bool kWithQueries>
constexpr int kColumnThreads = kHopperThreads<1> + (kApart<kD, kWithQueries> ? 128 : 0);

template <class T, int kD, Scores kScores, bool kWithQueries>
__global__ void __launch_bounds__(kColumnThreads<kD, kWithQueries>, 1) columns_on_hopper_kernel(
    const __grid_constant__ Backward<T> p, const __grid_constant__ Sweep<T> sweep, const __grid_constant__ Maps maps,
    Queue queue) {
  extern __shared__ unsigned char shared[];
  using M = Memory<T, kD, are_limited(kScores)>;
  auto& memory = *reinterpret_cast<M*>(align_panels(shared));
  constexpr bool kApart = attention::kApart<kD, kWithQueries>;
  constexpr int kMultiplying = 4 * (kConsumers + (kApart ? 1 : 0));  // warps
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < M::kSlots; ++slot) {
      memory.task_told[slot].init(1);
      memory.task_there[slot].init(1);
      memory.task_free[slot].init(kMultiplying + kCopyingWarps);
    }
    for (int place = 0; place < M::kOwns; ++place) {
      memory.own_free[place].init(kMultiplying);
    }
    for (int stage = 0; stage < M::kStages; ++stage) {
      memory.there[stage].init(kCopyingWarps);
      memory.free[stage].init(kMultiplying);
    }
    for (int buffer = 0; buffer < M::kBuffers; ++buffer) {
      memory.grad_scores_there[buffer].init(4 * kConsumers);
      memory.grad_scores_free[buffer].init(4);
    }
    fence_barriers();
  }
  __syncthreads();
  // Of registers, all that the kernel starts with.
  constexpr int kFew = kD == 64 ? 40 : 24, kThird = 72, kMany = kApart ? 200 : kD == 64 ? 232 : 240;
  static_assert(!kApart || kMany * kTeamThreads + (kThird + kFew) * 128 <= 65536);
  if constexpr (kApart) {
    if (threadIdx.x >= kHopperThreads<1>) {
      give_registers<kThird>();
      multiply_for_queries<T, kD, kScores>(p, memory);
      return;
    }
  }
  share_work<1, kFew, kMany>(
      [&](int) { multiply_all<T, kD, kScores, kWithQueries>(p, sweep, maps, memory); },
      [&](int) { prepare_all<T, kD, kScores>(p, sweep, maps, memory, queue); },
      [&](int) { copy_all<T, kD, kScores, false>(p, sweep, maps, memory); },
      [&](int) { copy_all<T, kD, kScores, true>(p, sweep, maps, memory); });
}

// Rounds the sums of a strip of 16 queries and 64 columns, as a warp's lanes hold them, and writes the queries' gradients.
template <class T>
__global__ void round_grad_query_kernel(GradQuerySums sums, Matrices<T> grad, int heads, int queries, int width, float scale) {
  const int64_t strips = sums.padded / 16, number = blockIdx.x;
  const int64_t matrix = number / strips;
  const int strip = number % strips;
  T* to = grad.of(matrix / heads, matrix % heads);
  for (int place = threadIdx.x; place < 2 * width; place += blockDim.x) {
    const int line = place % 16, run = place / 16, token = 16 * strip + line;
    if (token >= queries) {
      continue;
    }
    // Four lanes hold two of the run's eight columns each.
    const float* from = sums.strip(matrix, 16 * strip) + run * 128 + line % 8 * 16 + line / 8 * 2;
    uint4 rounded;
    uint32_t* pair = &rounded.x;
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      pair[lane] = LeftOfSums<T>::pack(from[4 * lane] * scale, from[4 * lane + 1] * scale);
    }
    *reinterpret_cast<uint4*>(to + token * grad.token_stride + 8 * run) = rounded;
  }
}

}  // namespace

template <class T>
void columns_on_hopper(
    const Launcher& launch, const Backward<T>& p, const Sweep<T>& sweep, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& grad_output, const Tensor& grad_key, const Tensor& grad_value, int64_t copies) {
  with_hopper_kernel(p.scoring, sweep.lists, p.width, [&](auto width, auto scores) {
    constexpr int kD = decltype(width)::value;
    const int64_t count = copies * sweep.lists.num_units * sweep.lists.sub_tiles;
    const int block = 1 << sweep.lists.log_block, own_box = std::min(block, kHopperTile), box = std::min(block, kN);
    const Maps maps{
        tensor_map(key, own_box),     tensor_map(value, own_box), tensor_map(query, box),
        tensor_map(grad_output, box), tensor_map(grad_key, 16),   tensor_map(grad_value, 16)};
    const auto run = [&](auto kind, auto with_queries) {
      constexpr Scores kScores = decltype(kind)::value;
      with_queue(launch, query, count, 1, [&](const Queue& queue, int64_t blocks) {
        launch.with_shared_memory(
            columns_on_hopper_kernel<T, kD, kScores, decltype(with_queries)::value>, blocks,
            kColumnThreads<kD, decltype(with_queries)::value>,
            sizeof(Memory<T, kD, are_limited(kScores)>) + kPanelAlignment, p, sweep, maps, queue);
      });
    };
    if (p.grad_query_sums.data == nullptr) {
      run(std::integral_constant<Scores, with_any_dropout(decltype(scores)::value)>{}, std::false_type{});
    } else {
      run(scores, std::true_type{});
    }
  });
}

template <class T>
void round_grad_query(const Launcher& launch, const Backward<T>& p, const Matrices<T>& grad_query, int64_t batch) {
  launch(
      round_grad_query_kernel<T>, batch * p.heads * p.grad_query_sums.padded / 16, p.width <= 64 ? 128 : 256,
      p.grad_query_sums, grad_query, p.heads, p.scoring.queries, p.width, p.scoring.scale);
}

#define DS_SPARSE_COLUMNS(T)                                                                                            \
  template void columns_on_hopper(                                                                                      \
      const Launcher&, const Backward<T>&, const Sweep<T>&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, \
      const Tensor&, const Tensor&, int64_t);                                                                           \
  template void round_grad_query(const Launcher&, const Backward<T>&, const Matrices<T>&, int64_t);
DS_SPARSE_COLUMNS(__half)
DS_SPARSE_COLUMNS(__nv_bfloat16)
#undef DS_SPARSE_COLUMNS

}  // namespace ds_sparse::attention
