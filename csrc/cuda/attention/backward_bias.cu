// The gradient of a bias on the scores of fused attention. A thread block takes a work tile's queries and, for 64 keys
// or fewer at a time, adds what the batches and heads that share the bias give, in their order; so that nothing is
// added by two.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "arguments.h"
#include "backward_memory.h"
#include "dropout_mask.h"
#include "key_bias.h"
#include "poison.h"
#include "row_stats.h"

namespace ds_sparse::attention {
namespace {

template <class T>
struct BiasBackward {
  Matrices<const T> query, key, value, grad_output;
  RowStatsPlanes row_stats;
  TileLists lists;
  Scoring scoring;
  int batch, heads_of_group, head_dim;
  float* grad;  // (batches, grad_heads, T, S)
  int batches, grad_heads;
  int only_layout;  // adds the share of its heads to what is there; -1: all that share an element, and nothing was
                    // there
};

template <class T, int kHeadDim, int kBlockN = kStep<T, kHeadDim>>
struct BiasMemory {
  enum { kTokens = kBlockN };
  Tile<T, kHeadDim, kBlockM> query, grad_output;
  Tile<T, kHeadDim, kBlockN> key, value;
  Octet octets[8];
  int tokens[kBlockM];
};

template <class T, int kHeadDim, class Memory>
__global__ void __launch_bounds__(kThreads) bias_backward_kernel(const __grid_constant__ BiasBackward<T> p) {
  if constexpr (!is_run_here<Memory, BiasMemory<T, kHeadDim>>()) {
    __trap();
    return;
  }
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr int kBlockN = Memory::kTokens, pitch = kPitch<T, kHeadDim>;
  auto& memory = *reinterpret_cast<Memory*>(shared);
  const int lane = threadIdx.x % 32, warp_tile = threadIdx.x / 32;
  int64_t number = blockIdx.x;
  const int sub_tile = number % p.lists.sub_tiles;
  number /= p.lists.sub_tiles;
  const int4 work_tile = p.lists.work_tiles[number % p.lists.num_work_tiles];
  number /= p.lists.num_work_tiles;
  const int layout = work_tile.x / p.lists.tiles_per_head;
  if (work_tile.x < 0 || (p.only_layout >= 0 && layout != p.only_layout)) {
    return;
  }
  // The heads and batches whose shares are added.
  const int2 first = p.lists.batch_and_head(0, work_tile.x);
  const int heads = p.lists.heads_of_layout, apart = p.grad_heads == 1 ? 1 : heads;
  const int first_head = first.y + number % apart, head_after = first_head + heads / apart;
  const int first_batch = first.x + number / apart;
  const int batch_after = p.batches == 1 && !p.lists.by_sequence ? p.batch : first_batch + 1;
  const int grad_head = p.grad_heads == 1 ? 0 : first_head, grad_batch = p.batches == 1 ? 0 : first_batch;

  const OtherSide<kBlockN> other{
      p.lists.entries + work_tile.y, work_tile.z, p.lists.log_other, p.scoring.keys, nullptr};
  if (threadIdx.x < kBlockM) {
    memory.tokens[threadIdx.x] = p.lists.token(work_tile.x, sub_tile, threadIdx.x, p.scoring.queries);
  }
  __syncthreads();
  const int token0 = memory.tokens[warp_tile * 16 + lane / 4], token8 = memory.tokens[warp_tile * 16 + lane / 4 + 8];
  const T* query_warp_tile = memory.query + warp_tile * 16 * pitch;
  const T* grad_warp_tile = memory.grad_output + warp_tile * 16 * pitch;

  for (int step = 0; step < other.steps(); ++step) {
    float sums[kBlockN / 8][4] = {};
    LiveOctets<kBlockN> live;
    for (int batch = first_batch; batch < batch_after; ++batch) {
      for (int head = first_head; head < head_after; ++head) {
        const int kv_head = head / p.heads_of_group;
        const auto own_token = [&](int tile_row) { return memory.tokens[tile_row]; };
        const auto other_token = [&](int tile_row) { return other.token(step, tile_row); };
        load_tile<kHeadDim, kBlockM>(memory.query, p.query.of(batch, head), p.query.tokens, p.head_dim, own_token);
        load_tile<kHeadDim, kBlockM>(
            memory.grad_output, p.grad_output.of(batch, head), p.grad_output.tokens, p.head_dim, own_token);
        load_tile<kHeadDim, kBlockN>(memory.key, p.key.of(batch, kv_head), p.key.tokens, p.head_dim, other_token);
        load_tile<kHeadDim, kBlockN>(memory.value, p.value.of(batch, kv_head), p.value.tokens, p.head_dim, other_token);
        end_of_copies();
        if (threadIdx.x < kBlockN / 8) {
          memory.octets[threadIdx.x] = other.octet(step, threadIdx.x);
        }
        wait_for_copies<0>();
        __syncthreads();
        live = LiveOctets<kBlockN>(memory.octets, p.lists.log_block, [&](const Octet&) { return false; });
        const int64_t matrix = int64_t{batch} * p.lists.heads + head;
        const float* key_bias = p.scoring.key_bias_of(batch, head);
        const RowStats stats[2] = {
            token0 < 0 ? no_row_stats() : p.row_stats.at(matrix, token0),
            token8 < 0 ? no_row_stats() : p.row_stats.at(matrix, token8)};
#pragma unroll
        for (int j = 0; j < kBlockN / 16; ++j) {
          if (!live.group(j)) {
            continue;
          }
          float probs[2][4], grads[2][4];
          products<kHeadDim>(probs, query_warp_tile, memory.key, 16 * j, lane);
          products<kHeadDim>(grads, grad_warp_tile, memory.value, 16 * j, lane);
          if (p.scoring.drops()) {
            const auto kept =
                kept_by<false>(p.scoring.dropout(), matrix, p.lists.log_block, token0, token8, memory.octets + 2 * j);
            const float factor = p.scoring.dropout().factor();
#pragma unroll
            for (int e = 0; e < 8; ++e) {
              grads[e / 4][e % 4] *= kept[e] ? factor : 0.0f;
            }
          }
          const int first[2] = {
              memory.octets[2 * j].token + lane % 4 * 2, memory.octets[2 * j + 1].token + lane % 4 * 2};
          p.scoring.template finish<T>(reinterpret_cast<float (&)[8]>(probs), batch, head, [&](int e) {
            return make_int2(max(e % 4 < 2 ? token0 : token8, 0), min(first[e / 4] + e % 2, p.scoring.keys - 1));
          });
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int octet = 2 * j + half;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int i = e < 2 ? token0 : token8, key = first[half] + e % 2;
              const bool counts = (live.bits >> (octet + e / 2 * 8) & 1) && i >= 0 && key < p.scoring.keys &&
                                  !(p.scoring.causal && key > i);
              const RowStats& of_row = stats[e / 2];
              const float bias = counts && key_bias != nullptr ? key_bias[key] : 0.0f;
              const float score = Scoring::with_key_bias<false>(probs[half][e], bias);
              const float prob = exp2_approx((score - of_row.row_max) * kLog2E) * of_row.inverse_sum;
              sums[octet][e] += counts && score != -kInfinity ? prob * (grads[half][e] - of_row.delta) : 0.0f;
            }
          }
        }
        __syncthreads();
      }
    }
    float* grad = p.grad + (int64_t{grad_batch} * p.grad_heads + grad_head) * p.scoring.queries * p.scoring.keys;
#pragma unroll
    for (int octet = 0; octet < kBlockN / 8; ++octet) {
      const int first = other.octet(step, octet).token + lane % 4 * 2;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = e < 2 ? token0 : token8, key = first + e % 2;
        if ((live.bits >> (octet + e / 2 * 8) & 1) && i >= 0 && key < p.scoring.keys) {
          float* to = grad + int64_t{i} * p.scoring.keys + key;
          *to = p.only_layout >= 0 ? *to + sums[octet][e] : sums[octet][e];
        }
      }
    }
  }
}

}  // namespace

Tensor attention_bias_backward(
    const AttentionCall& call, const AttentionResults& results, const TileTensors& rows,
    const std::vector<int64_t>& shape) {
  const Tensor &query = call.query, &key = call.key, &value = call.value;
  const Tensor &grad_output = results.grad_output, &output = results.output;
  const int64_t tile = call.tile;
  check_alignment(grad_output, "grad_output");
  check_alignment(output, "output");
  Tensor grad = torch::stable::new_zeros(query, shape, ScalarType::Float);
  if (query.numel() == 0) {
    return grad;
  }
  const Launcher launch(query);
  check(tile == kBlockM, "tile has to be 64, got ", tile, ".");
  const RowsOfBackward made =
      make_row_stats(launch, grad_output, results.grad_lse, output, results.rows, spans_of(call));
  const TileLists lists = lists_of(call, rows, true);
  Scoring scoring = scoring_of(call);
  const std::optional<Tensor> of_keys = set_key_bias(launch, call.key_bias, scoring);
  with_head_dim(query, [&](auto zero, auto padded) {
    using T = decltype(zero);
    constexpr int kHeadDim = decltype(padded)::value;
    BiasBackward<T> p{
        matrices_of<const T>(query),
        matrices_of<const T>(key),
        matrices_of<const T>(value),
        matrices_of<const T>(grad_output),
        made.row_stats,
        lists,
        scoring,
        static_cast<int>(query.size(0)),
        static_cast<int>(query.size(1) / key.size(1)),
        static_cast<int>(query.size(3)),
        grad.mutable_data_ptr<float>(),
        static_cast<int>(shape[0]),
        static_cast<int>(shape[1]),
        -1};
    const int64_t heads_apart = shape[1] == 1 ? 1 : call.heads_of_layout(), batches = call.by_sequence ? 1 : shape[0];
    const int64_t blocks = int64_t{lists.num_work_tiles} * lists.sub_tiles * heads_apart * batches;
    // Layouts that share the bias add to it one after the other.
    const bool one_by_one =
        (call.layout_heads > 1 && shape[1] == 1) || (call.by_sequence && query.size(0) > 1 && shape[0] == 1);
    for (int layout = 0; layout < (one_by_one ? call.all_layout_heads() : 1); ++layout) {
      p.only_layout = one_by_one ? layout : -1;
      with_backward_memory<BiasMemory<T, kHeadDim>, BiasMemory<T, kHeadDim, 16>>(launch, [&](auto fitting) {
        using Memory = typename decltype(fitting)::type;
        launch.with_shared_memory(bias_backward_kernel<T, kHeadDim, Memory>, blocks, kThreads, sizeof(Memory), p);
      });
    }
  });
  poison_rows(launch, call, lists, call.queries(), {&grad});
  return grad;
}

}  // namespace ds_sparse::attention
