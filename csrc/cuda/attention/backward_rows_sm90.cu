// Fused attention, backward by rows, on Hopper (pipeline_sm90.h): the gradient of queries alone, in a fixed order. A
// warpgroup multiplies the next scores, and gradients of probabilities, while it still adds the last to its sums.

#include "arguments.h"
#include "backward.h"
#include "pipeline_sm90.h"

namespace ds_sparse::attention {
namespace {

constexpr int kN = 64;  // keys in a step

template <class T, int kD, bool kLimited>
struct Memory {
  static constexpr int kStages = 4, kSlots = kD == 64 ? 2 : 1;
  struct Stage {
    Panels<T, kD, kN> keys, values;
  };
  struct Own {
    Panels<T, kD, kHopperTile> queries, grads;
  };
  Own own[kSlots];
  Stage stages[kStages];
  Octet groups[kStages][kN / 16];
  LiveGroups live[kStages][Finder::kStrips];
  alignas(16) PairsOfStep<kN, kLimited> pairs[kStages];
  TaskOf<kLimited> tasks[kSlots];
  Barrier task_there[kSlots], task_free[kSlots], there[kStages], free[kStages];
};

struct Maps {
  CUtensorMap query, grad_output, key, value, grad_query;
};

template <class T, int kD, bool kLimited>
__device__ __forceinline__ void copy_all(
    const Backward<T>& p, const Sweep<T>& sweep, const Maps& maps, Memory<T, kD, kLimited>& memory, Queue queue) {
  const int lane = threadIdx.x % 32;
  const Lists& lists = sweep.lists;
  const Boxes<T, kD, kHopperTile> own_boxes(lists.log_block);
  const Boxes<T, kD, kN> boxes(lists.log_block);
  const Finder finder(lists);
  Ring<Memory<T, kD, kLimited>::kStages> ring;
  Ring<Memory<T, kD, kLimited>::kSlots> slot;
  for (int number = blockIdx.x, ticket; number < queue.count; number = Queue::unit_of(ticket), slot.next()) {
    ticket = queue.draw();
    const Work work(lists, number, p.heads, p.layout_heads, 1);
    const int kv_head = work.head / p.heads_of_group;
    const Other<kN> other{lists.entries + work.first_entry, work.num_entries, lists.log_block, p.scoring.keys,
                          p.scoring.key_states_of(work.batch, work.head)};
    const int steps = other.steps();
    auto& task = memory.tasks[slot.stage];
    auto& own = memory.own[slot.stage];
    Barrier& task_there = memory.task_there[slot.stage];
    memory.task_free[slot.stage].wait(slot.parity ^ 1);
    task.set(work, steps, lists, p.scoring.queries, p.scoring);
    const int token = own_boxes.any && steps > 0 ? task.tokens[own_boxes.line] : -1;
    const int copies = __popc(__ballot_sync(0xffffffffu, token >= 0));
    if (lane == 0) {
      task_there.arrive_and_expect(2 * copies * own_boxes.bytes());
    }
    if (token >= 0) {
      own_boxes.copy(own.queries, &maps.query, &task_there, token, work.head, work.batch);
      own_boxes.copy(own.grads, &maps.grad_output, &task_there, token, work.head, work.batch);
    }
    if (steps == 0) {
      continue;
    }
    const auto sight = Sight<kLimited>::template of_strip<false>(p.scoring, lists, task);
    Gathered<kN> next(other, boxes, 0);
    for (int step = 0; step < steps; ++step, ring.next()) {
      auto& stage = memory.stages[ring.stage];
      Barrier& there = memory.there[ring.stage];
      const Gathered<kN> here = next;
      if (step + 1 < steps) {
        next = Gathered<kN>(other, boxes, step + 1);
      }
      const LiveGroups live = finder.template find<kN / 16>(here.group, sight);
      memory.free[ring.stage].wait(ring.parity ^ 1);
      tell_step<kN, kLimited>(memory, ring.stage, there, here, live, sizeof(stage), lists, work, step);
      if (boxes.any) {
        boxes.copy(stage.keys, &maps.key, &there, here.token, kv_head, work.batch);
        boxes.copy(stage.values, &maps.value, &there, here.token, kv_head, work.batch);
      }
    }
  }
  memory.task_free[slot.stage].wait(slot.parity ^ 1);
  if (lane == 0) {
    memory.tasks[slot.stage].steps = -1;
    memory.task_there[slot.stage].arrive();
  }
}

template <class T, int kD, Scores kScores>
__device__ __forceinline__ void multiply_all(
    const Backward<T>& p, const Sweep<T>& sweep, const Maps& maps, Memory<T, kD, are_limited(kScores)>& memory) {
  constexpr bool kPlain = are_plain(kScores), kLimited = are_limited(kScores);
  const int thread = this_thread(), lane = thread % 32, warpgroup = uniform(thread / 128);
  const int strip = own_strip(thread), line0 = own_line(thread);
  const float unit = kPlain ? p.scoring.scale * kLog2E : kLog2E;
  const float bias_factor = kPlain ? 1 / p.scoring.scale : 1.0f;
  const bool drops = attention::drops<kScores>(p.scoring);
  const Dropout dropout = drops ? p.scoring.dropout() : Dropout{};
  const float of_dropout = drops ? dropout.factor() : 1.0f;
  Ring<Memory<T, kD, kLimited>::kStages> ring;
  Ring<Memory<T, kD, kLimited>::kSlots> slot;
  const Operand all_queries(memory.own[0].queries[0] + 64 * warpgroup * kPanel);
  const Operand all_output_grads(memory.own[0].grads[0] + 64 * warpgroup * kPanel);
  const auto& first_stage = memory.stages[0];
  const Operand keys(first_stage.keys), values(first_stage.values), key_columns(first_stage.keys, sizeof(first_stage.keys[0]));

  for (;; slot.next()) {
    memory.task_there[slot.stage].wait(slot.parity);
    const auto& task = memory.tasks[slot.stage];
    if (task.steps < 0) {
      break;
    }
    const uint32_t of_slot = uniform(slot.stage * sizeof(memory.own[0]));
    const Operand queries = all_queries + of_slot, output_grads = all_output_grads + of_slot;
    const Work work = task.work;
    const int steps = uniform(task.steps), token0 = task.tokens[line0], token8 = task.tokens[line0 + 8];
    const Row row0 = token0 < 0 ? no_row() : p.rows.at(work.matrix, token0);
    const Row row8 = token8 < 0 ? no_row() : p.rows.at(work.matrix, token8);

    float sums[kD / 2] = {};
    float probs[kN / 2], grads[kN / 2];
    uint32_t left[kN / 16][4];
    LiveGroups live{0};
    KeptOfStep<false> kept;

    const auto look = [&]() {
      memory.there[ring.stage].wait(ring.parity);
      live = {uniform(memory.live[ring.stage][strip / 16].bits)};
    };
    const auto multiply_scores = [&]() {
      const uint32_t stage = uniform(ring.stage * sizeof(memory.stages[0]));
      multiply_lines<T, kD, kN, kN>(probs, queries, keys + stage);
      end_products();
      multiply_lines<T, kD, kN, kN>(grads, output_grads, values + stage);
      end_products();
    };
    const auto add_grads = [&](int stage) {
      multiply_columns<T, kD, kN>(sums, left, key_columns + uniform(stage * sizeof(memory.stages[0])));
      end_products();
    };
    // Scores become probabilities, and the gradients of those the gradients of scores.
    const auto exponentiate = [&]() {
      sums_are_there(probs);
      const Octet* groups = memory.groups[ring.stage];
      finish_scores<T, kN, kPlain>(probs, p.scoring, task, groups);
      if (!live.is_whole<kN>()) {
        add_key_bias<kN>(probs, live, groups, p.scoring, work, bias_factor);
        mask_scores<kN, false, kLimited>(
            probs, live, groups, task, p.scoring, sweep.lists.pairs == nullptr ? nullptr : memory.pairs[ring.stage]);
      }
      if (drops) {
        kept.find(dropout, work.matrix, task.tokens[strip], groups);
      }
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) {
        const Row& row = i % 4 < 2 ? row0 : row8;
        probs[i] = kPlain ? exp2_of(probs[i] * unit - row.lse) : exp2_of((probs[i] - row.origin) * unit) * row.inverse;
      }
    };
    const auto differentiate = [&]() {
      sums_are_there(grads);
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) {
        const float factor = !drops ? 1.0f : kept[i] ? of_dropout : 0.0f;
        grads[i] = probs[i] * (grads[i] * factor - (i % 4 < 2 ? row0 : row8).delta);
      }
    };
    const auto added = [&](int stage) {
      wait_for_products<0>();
      sums_are_there(sums);
      arrive_once(memory.free[stage], lane);
    };

    // Runs of steps that the warpgroup has a part in, as in the forward pass.
    for (int step = 0; step < steps;) {
      look();
      if (live.warpgroup() == 0) {
        arrive_once(memory.free[ring.stage], lane);
        ring.next();
        ++step;
        continue;
      }
      begin_products();
      multiply_scores();
      wait_for_products<0>();
      exponentiate();
      differentiate();
      round_sums<T, kN>(left, grads);
      int last = ring.stage;
      ring.next();
      for (++step; step < steps; ++step, ring.next()) {
        look();
        if (live.warpgroup() == 0) {
          break;
        }
        begin_products();
        multiply_scores();
        add_grads(last);
        wait_for_products<2>();
        exponentiate();
        wait_for_products<1>();
        differentiate();
        added(last);
        round_sums<T, kN>(left, grads);
        last = ring.stage;
      }
      begin_products();
      add_grads(last);
      added(last);
    }
    wait_at<128>(1 + warpgroup);  // until the warpgroup is done with its queries, whose space serves now
    store_sums_of_unit<kD>(
        sums, p.scoring.scale, p, sweep, task, memory.own[slot.stage].queries[0] + strip * kPanel, kHopperTile * kPanel,
        &maps.grad_query, sweep.first_parts, sweep.first_shares);
    if (lane == 0) {
      wait_for_stores();
    }
    arrive_once(memory.task_free[slot.stage], lane);
  }
}

template <class T, int kD, Scores kScores>
__global__ void __launch_bounds__(kHopperThreads<1>, 1) rows_on_hopper_kernel(
    const __grid_constant__ Backward<T> p, const __grid_constant__ Sweep<T> sweep, const __grid_constant__ Maps maps,
    Queue queue) {
  extern __shared__ unsigned char shared[];
  using M = Memory<T, kD, are_limited(kScores)>;
  auto& memory = *reinterpret_cast<M*>(align_panels(shared));
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < M::kSlots; ++slot) {
      memory.task_there[slot].init(1);
      memory.task_free[slot].init(4 * kConsumers);
    }
    for (int stage = 0; stage < M::kStages; ++stage) {
      memory.there[stage].init(1);
      memory.free[stage].init(4 * kConsumers);
    }
    fence_barriers();
  }
  __syncthreads();
  share_work<1, 24, 240>(
      [&](int) { multiply_all<T, kD, kScores>(p, sweep, maps, memory); },
      [&](int) { copy_all<T, kD, are_limited(kScores)>(p, sweep, maps, memory, queue); });
}

}  // namespace

template <class T>
void rows_on_hopper(
    const Launcher& launch, const Backward<T>& p, const Sweep<T>& sweep, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& grad_output, const Tensor& grad_query, int64_t copies) {
  with_hopper_kernel(p.scoring, sweep.lists, p.width, [&](auto width, auto scores) {
    constexpr Scores kScores = with_any_dropout(decltype(scores)::value);
    constexpr int kD = decltype(width)::value;
    const int64_t count = copies * sweep.lists.num_units * sweep.lists.sub_tiles;
    const int block = 1 << sweep.lists.log_block, own_box = std::min(block, kHopperTile), box = std::min(block, kN);
    const Maps maps{
        tensor_map(query, own_box), tensor_map(grad_output, own_box), tensor_map(key, box), tensor_map(value, box),
        tensor_map(grad_query, 16)};
    with_queue(launch, query, count, 1, [&](const Queue& queue, int64_t blocks) {
      launch.with_shared_memory(
          rows_on_hopper_kernel<T, kD, kScores>, blocks, kHopperThreads<1>,
          sizeof(Memory<T, kD, are_limited(kScores)>) + kPanelAlignment, p, sweep, maps, queue);
    });
  });
}

template void rows_on_hopper(
    const Launcher&, const Backward<__half>&, const Sweep<__half>&, const Tensor&, const Tensor&, const Tensor&,
    const Tensor&, const Tensor&, int64_t);
template void rows_on_hopper(
    const Launcher&, const Backward<__nv_bfloat16>&, const Sweep<__nv_bfloat16>&, const Tensor&, const Tensor&,
    const Tensor&, const Tensor&, const Tensor&, int64_t);

}  // namespace ds_sparse::attention
