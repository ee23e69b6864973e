// decode_attention_forward: attention of few queries, at positions among cached keys, on the live blocks of a layout.
//
// A query's keys are read from the layout's bits, in the kernel: a thread block counts the live blocks of the row,
// takes its share of their tokens, and lists the blocks of that in shared memory. Neighbouring heads that see the same
// keys are done together, so that a key is read once for them. The host knows no list: it sets a number of shares that
// fills the GPU, and shares that are not needed end at once. Another kernel puts the shares together, in their order.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "../../decode.h"
#include "token.h"

namespace ds_sparse::token {
namespace {

// Rows of (B, H, tokens, head_dim) in any order of memory, with the numbers of a token adjacent.
template <class T>
struct CachedRows {
  const T* data;
  int64_t batch_stride, head_stride, token_stride;
  bool in_runs;  // each row begins at a multiple of 16 bytes and is whole runs

  explicit CachedRows(const Tensor& x)
      : data(static_cast<const T*>(x.const_data_ptr())),
        batch_stride(x.stride(0)),
        head_stride(x.stride(1)),
        token_stride(x.stride(2)),
        in_runs(x.size(3) % kRun<T> == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0) {
    for (int dim = 0; dim < 3; ++dim) {
      in_runs = in_runs && (x.size(dim) == 1 || x.stride(dim) % kRun<T> == 0);
    }
  }

  __device__ const T* of(int64_t batch, int64_t head) const { return data + batch * batch_stride + head * head_stride; }

  // A lane's part of a row of one matrix; token -1, and what is beyond the row, are zeros. by_runs: whether it is read
  // by 16 bytes, which has to be known to the compiler where several rows are to be on their way together.
  template <class S>
  __device__ __forceinline__ GatheredRow<S> load(const T* matrix, int token, int head_dim, bool by_runs) const {
    GatheredRow<S> gathered{};
    const T* row = matrix + token * token_stride;
#pragma unroll
    for (int p = 0; p < S::kPieces; ++p) {
      const int column = S::column(p);
      if (by_runs) {
        if (token >= 0 && column < head_dim) {
          gathered.piece[p] = *reinterpret_cast<const uint4*>(row + column);
        }
      } else if (token >= 0) {
        Run<T, kRun<T>> run;
#pragma unroll
        for (int i = 0; i < kRun<T>; ++i) {
          run.element[i] = column + i < head_dim ? row[column + i] : T(0.0f);
        }
        gathered.piece[p] = *reinterpret_cast<const uint4*>(&run);
      }
    }
    return gathered;
  }
};

template <class T>
struct DecodeArguments {
  using A = Compute<T>;
  CachedRows<T> queries, keys, values;
  const uint32_t* bits;  // null: all is live
  const void* offsets;   // null: all are `offset`
  int64_t offset, offsets_stride;
  bool long_offsets, causal;
  const bool* keep;  // or null
  int64_t keep_batch_stride, keep_stride;
  const A* sinks;  // or null
  A scale;
  T* output;
  A* lse;
  // Of each query: its shares' outputs, not divided, and then their maxima and sums.
  A* shares;
  int64_t batch, heads, tokens, num_keys, rows, row_words;
  int heads_of_key, heads_of_layout, heads_alike, units_alike;  // units: of heads that a thread block does
  int log_block, head_dim, num_shares;

  __device__ int64_t position(int64_t b, int64_t token) const {
    if (offsets == nullptr) {
      return offset + token;
    }
    const int64_t at = b * offsets_stride;
    return token + (long_offsets ? static_cast<const int64_t*>(offsets)[at] : static_cast<const int32_t*>(offsets)[at]);
  }
  // Where the share of a query, numbered (batch * heads + head) * tokens + token, has its output.
  __device__ A* share_output(int64_t row, int64_t share) const {
    return shares + (row * num_shares + share) * head_dim;
  }
  __device__ A* share_sums(int64_t row, int64_t share) const {
    return shares + batch * heads * tokens * num_shares * head_dim + 2 * (row * num_shares + share);
  }
};

// Writes a query's results, by lanes that hold its output, not divided: `store` is true in those that write it.
template <class S>
__device__ void store_query(
    const DecodeArguments<typename S::T>& all, int64_t row, int64_t head, Numbers<S>& output, typename S::A row_max,
    typename S::A row_sum, bool store) {
  using A = typename S::A;
  const bool is_empty = row_sum == 0;
  A factor = is_empty ? A(0) : 1 / row_sum;
  A lse = is_empty ? -std::numeric_limits<A>::infinity() : row_max + log(row_sum);
  if (all.sinks != nullptr) {
    const A sink = all.sinks[head], largest = max(row_max, sink);
    const A total = row_sum * exp(row_max - largest) + exp(sink - largest);
    factor = is_empty ? A(0) : exp(row_max - largest) / total;
    lse = is_empty ? sink : largest + log(total);
  }
  if (!store) {
    return;
  }
  if (threadIdx.x % S::kLanes == 0) {
    all.lse[row] = lse;
  }
  output.scale(factor);
  output.store(all.output + row * all.head_dim, all.head_dim);
}

template <class S, int kHeads, bool kInRuns>
__global__ void __launch_bounds__(kThreads) decode_kernel(const __grid_constant__ DecodeArguments<typename S::T> all) {
  using T = typename S::T;
  using A = typename S::A;
  constexpr int kTokens = S::kTokens;
  __shared__ int listed[kListedBlocks];
  __shared__ int counts[kWarps];
  __shared__ A maxima[kHeads][kWarps], sums[kHeads][kWarps], outputs[kWarps][S::kHeadDim];
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  let_next_begin();
  const int64_t units = all.heads / all.heads_alike * all.units_alike, work = all.batch * all.tokens * units;
  for (int64_t item = blockIdx.x; item < work * all.num_shares; item += gridDim.x) {
    const int share = static_cast<int>(item % all.num_shares);
    const int64_t number = item / all.num_shares, unit = number % units, token = number / units % all.tokens,
                  b = number / units / all.tokens;
    const int64_t alike = unit / all.units_alike;
    const int first_of_alike = static_cast<int>(unit % all.units_alike) * kHeads;
    const int64_t first_head = alike * all.heads_alike + first_of_alike;
    const int num_heads = min(kHeads, all.heads_alike - first_of_alike);

    // The queries are on their way while the row is looked up.
    Numbers<S> query[kHeads], output[kHeads];
    A row_max[kHeads], row_sum[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const T* matrix = all.queries.of(b, h < num_heads ? first_head + h : first_head);
      query[h] =
          Numbers<S>(all.queries.template load<S>(matrix, static_cast<int>(token), all.head_dim, all.queries.in_runs));
      row_max[h] = std::numeric_limits<A>::lowest();
      row_sum[h] = 0;
    }

    const int64_t position = all.position(b, token), block = int64_t{1} << all.log_block;
    const bool is_inside = position >= 0 && position >> all.log_block < all.rows;
    const SeenBlocks seen(is_inside ? position : 0, all.num_keys, block, all.causal);
    const uint32_t* row_bits =
        all.bits == nullptr ? nullptr
                            : all.bits + (first_head / all.heads_of_layout * all.rows + seen.row) * all.row_words;
    const int words = static_cast<int>(seen.words()), words_of_thread = (words + kThreads - 1) / kThreads;
    const int first_word = threadIdx.x * words_of_thread, last_word = min(words, first_word + words_of_thread);
    int mine = 0;
    for (int w = first_word; w < last_word; ++w) {
      mine += __popc(seen.word(row_bits, w));
    }
    int before = mine;  // live blocks before this thread's words
#pragma unroll
    for (int distance = 1; distance < kWarpLanes; distance *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, before, distance);
      before += lane >= distance ? other : 0;
    }
    if (lane == kWarpLanes - 1) {
      counts[warp] = before;
    }
    before -= mine;
    __syncthreads();
    int live = 0;
    for (int w = 0; w < kWarps; ++w) {
      before += w < warp ? counts[w] : 0;
      live += counts[w];
    }
    const int64_t num_tokens = is_inside ? seen.tokens(row_bits, live, block) : 0;
    constexpr int64_t kLeast = std::max<int64_t>(kLeastShare, kWarps * S::kStep);
    const int64_t even = (num_tokens + all.num_shares - 1) / all.num_shares;
    const int64_t of_share = (even + kLeast - 1) / kLeast * kLeast;
    const int64_t begin = min(share * of_share, num_tokens), end = min(begin + of_share, num_tokens);

    const T* keys = all.keys.of(b, first_head / all.heads_of_key);
    const T* values = all.values.of(b, first_head / all.heads_of_key);
    const bool* keep = all.keep == nullptr ? nullptr : all.keep + b * all.keep_batch_stride;
    int64_t first_listed = begin >> all.log_block;
    for (int64_t from = begin; from < end; first_listed += kListedBlocks) {
      // The blocks from number first_listed on, as many as there is space for.
      int rank = before;
      for (int w = first_word; w < last_word && rank < first_listed + kListedBlocks; ++w) {
        for (uint32_t left = seen.word(row_bits, w); left != 0; left &= left - 1, ++rank) {
          if (rank >= first_listed && rank < first_listed + kListedBlocks) {
            listed[rank - first_listed] = 32 * w + __ffs(left) - 1;
          }
        }
      }
      __syncthreads();
      const int64_t until = min(end, (first_listed + kListedBlocks) << all.log_block);
      for (int64_t n = from + warp * S::kStep; n < until; n += kWarps * S::kStep) {
        int tokens[kTokens];
        GatheredRow<S> gathered_keys[kTokens], gathered_values[kTokens];
#pragma unroll
        for (int u = 0; u < kTokens; ++u) {
          const int64_t at = n + S::group() + u * S::kGroups;
          tokens[u] = -1;
          if (at < until) {
            const int64_t key =
                (int64_t{listed[(at >> all.log_block) - first_listed]} << all.log_block) | (at & (block - 1));
            tokens[u] = keep == nullptr || keep[key * all.keep_stride] ? static_cast<int>(key) : -1;
          }
          gathered_keys[u] = all.keys.template load<S>(keys, tokens[u], all.head_dim, kInRuns);
          gathered_values[u] = all.values.template load<S>(values, tokens[u], all.head_dim, kInRuns);
        }
        A scores[kHeads][kTokens];
#pragma unroll
        for (int u = 0; u < kTokens; ++u) {
          const Numbers<S> key(gathered_keys[u]);
#pragma unroll
          for (int h = 0; h < kHeads; ++h) {
            const A score = score_of(query[h].dot(key), all.scale);
            scores[h][u] = tokens[u] < 0 ? -std::numeric_limits<A>::infinity() : score;
          }
        }
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          A new_max = row_max[h];
#pragma unroll
          for (int u = 0; u < kTokens; ++u) {
            new_max = max(new_max, scores[h][u]);
          }
          const A rescale = exp_of_difference(row_max[h], new_max);
          row_max[h] = new_max;
          row_sum[h] *= rescale;
          output[h].scale(rescale);
#pragma unroll
          for (int u = 0; u < kTokens; ++u) {
            scores[h][u] = exp_of_difference(scores[h][u], new_max);
            row_sum[h] += scores[h][u];
          }
        }
#pragma unroll
        for (int u = 0; u < kTokens; ++u) {
          const Numbers<S> value(gathered_values[u]);
#pragma unroll
          for (int h = 0; h < kHeads; ++h) {
            output[h].add(scores[h][u], value);
          }
        }
      }
      from = until;
      __syncthreads();
    }

    // The groups of a warp, then the warps.
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const A of_warp = max_of_groups<S>(row_max[h]);
      if (lane == 0) {
        maxima[h][warp] = of_warp;
      }
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      A new_max = maxima[h][0];
      for (int w = 1; w < kWarps; ++w) {
        new_max = max(new_max, maxima[h][w]);
      }
      const A rescale = exp_of_difference(row_max[h], new_max);
      row_max[h] = new_max;
      output[h].scale(rescale);
      output[h].add_groups();
      row_sum[h] = sum_of_groups<S>(row_sum[h] * rescale);
      if (lane == 0) {
        sums[h][warp] = row_sum[h];
      }
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      output[h].add_warps(outputs);
      __syncthreads();
      A sum = is_inside ? A(0) : std::numeric_limits<A>::quiet_NaN();
      for (int w = 0; w < kWarps; ++w) {
        sum += sums[h][w];
      }
      if (h >= num_heads || warp != 0) {
        continue;
      }
      const int64_t row = (b * all.heads + first_head + h) * all.tokens + token;
      if (all.num_shares == 1) {
        store_query<S>(all, row, first_head + h, output[h], row_max[h], sum, S::group() == 0);
        continue;
      }
      if (lane == 0) {
        A* to = all.share_sums(row, share);
        to[0] = row_max[h];
        to[1] = sum;
      }
      if (S::group() == 0 && begin < end) {
        A* to = all.share_output(row, share);
        output[h].for_each([&](A& x, int p, int i) {
          if (S::column(p) + i < all.head_dim) {
            to[S::column(p) + i] = x;
          }
        });
      }
    }
    __syncthreads();
  }
}

// Puts the shares of a query together, by a warp.
template <class S>
__global__ void __launch_bounds__(kThreads) shares_kernel(const __grid_constant__ DecodeArguments<typename S::T> all) {
  using A = typename S::A;
  static_assert(kMostShares <= kWarpLanes);
  const int lane = threadIdx.x % kWarpLanes;
  const int64_t rows = all.batch * all.heads * all.tokens;
  wait_for_previous();
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpLanes; row < rows;
       row += int64_t{gridDim.x} * kWarps) {
    A share_max = std::numeric_limits<A>::lowest(), share_sum = 0;
    if (lane < all.num_shares) {
      share_max = all.share_sums(row, lane)[0];
      share_sum = all.share_sums(row, lane)[1];
    }
    A row_max = share_max;
#pragma unroll
    for (int bit = 1; bit < kWarpLanes; bit *= 2) {
      row_max = max(row_max, __shfl_xor_sync(0xffffffffu, row_max, bit));
    }
    const A factor = exp_of_difference(share_max, row_max);
    const A row_sum = sum_of_lanes(share_sum * factor, kWarpLanes);
    // Shares without a key have no output; NaN of one is NaN of all, and is the sum of a position beyond the layout.
    const bool counts = share_sum != 0 && row_sum == row_sum;
    Numbers<S> output;
    // Groups of lanes take turns at the shares. What is not there is loaded from another place and left out, so that
    // loads wait for nothing.
#pragma unroll 4
    for (int first = 0; first < all.num_shares; first += S::kGroups) {
      const int share = min(first + S::group(), all.num_shares - 1);
      const A weight = __shfl_sync(0xffffffffu, factor, share);
      const bool is_there = __shfl_sync(0xffffffffu, counts, share) && first + S::group() < all.num_shares;
      const A* from = all.share_output(row, share);
      output.for_each([&](A& x, int p, int i) {
        const int column = S::column(p) + i;
        const A number = column < all.head_dim ? from[column] : A(0);
        x += is_there ? weight * number : A(0);
      });
    }
    output.add_groups();
    store_query<S>(all, row, row / all.tokens % all.heads, output, row_max, row_sum, S::group() == 0);
  }
}

std::tuple<Tensor, Tensor> decode_attention_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& bits, int64_t block,
    const std::optional<Tensor>& offsets, int64_t offset, bool causal, const std::optional<Tensor>& keep,
    const std::optional<Tensor>& sinks, double scale) {
  const DecodeCall call{query, key, value, bits, block, offsets, offset, causal, keep, sinks, scale};
  call.check_all();
  const int64_t batch = call.batch(), heads = call.heads(), tokens = call.tokens(), head_dim = call.head_dim();
  Tensor output = empty_on(query, {batch, heads, tokens, head_dim}),
         lse = empty_on(query, {batch, heads, tokens}, lse_type(query));
  if (lse.numel() == 0) {
    return {output, lse};
  }
  const Launcher launch(query);
  const auto stride = [](const Tensor& x, int dim) { return x.size(dim) == 1 ? 0 : x.stride(dim); };
  with_shape(query, head_dim, [&](auto shape) {
    using S = decltype(shape);
    using T = typename S::T;
    using A = typename S::A;
    DecodeArguments<T> arguments{CachedRows<T>(query), CachedRows<T>(key), CachedRows<T>(value)};
    arguments.bits = call.row_bits(0, 0);
    arguments.offset = offset;
    if (offsets) {
      arguments.offsets = offsets->const_data_ptr();
      arguments.offsets_stride = stride(*offsets, 0);
      arguments.long_offsets = offsets->scalar_type() == ScalarType::Long;
    }
    arguments.causal = causal;
    if (keep) {
      arguments.keep = static_cast<const bool*>(keep->const_data_ptr());
      arguments.keep_batch_stride = stride(*keep, 0);
      arguments.keep_stride = stride(*keep, 1);
    }
    arguments.sinks = sinks ? static_cast<const A*>(sinks->const_data_ptr()) : nullptr;
    arguments.scale = static_cast<A>(scale);
    arguments.output = static_cast<T*>(output.mutable_data_ptr());
    arguments.lse = static_cast<A*>(lse.mutable_data_ptr());
    arguments.batch = batch;
    arguments.heads = heads;
    arguments.tokens = tokens;
    arguments.num_keys = call.keys();
    arguments.rows = call.rows();
    arguments.row_words = call.row_words();
    arguments.heads_of_key = static_cast<int>(call.heads_of_key());
    arguments.heads_of_layout = static_cast<int>(call.heads_of_layout());
    arguments.heads_alike = static_cast<int>(call.heads_alike());
    arguments.log_block = log2_of(block);
    arguments.head_dim = static_cast<int>(head_dim);

    const auto run = [&]<int kHeads, bool kInRuns>() {
      arguments.units_alike = index::ceil_div(arguments.heads_alike, kHeads);
      const int64_t work = batch * tokens * (heads / arguments.heads_alike) * arguments.units_alike;
      const int64_t longest =
          std::max<int64_t>(1, offsets || !causal ? call.keys() : std::min(call.keys(), offset + tokens));
      // One wave of thread blocks at most: a second one would wait for the first.
      arguments.num_shares = static_cast<int>(std::min<int64_t>(
          {std::max<int64_t>(1, kDecodeThreadBlocks * launch.multiprocessors() / work),
           index::ceil_div<int64_t>(longest, kLeastShare), kMostShares}));
      Tensor shares = empty_on(
          query, {arguments.num_shares == 1 ? 0 : batch * heads * tokens * arguments.num_shares * (head_dim + 2)},
          lse_type(query));
      arguments.shares = static_cast<A*>(shares.mutable_data_ptr());
      launch(decode_kernel<S, kHeads, kInRuns>, work * arguments.num_shares, kThreads, arguments);
      if (arguments.num_shares == 1) {
        return;
      }
      const int64_t blocks = index::ceil_div<int64_t>(batch * heads * tokens, kWarps);
      if (launch.is_hopper()) {
        launch.beside_previous(shares_kernel<S>, blocks, kThreads, arguments);
      } else {
        launch(shares_kernel<S>, blocks, kThreads, arguments);
      }
    };
    if (!arguments.keys.in_runs || !arguments.values.in_runs) {
      run.template operator()<1, false>();
    } else if (arguments.heads_alike == 1) {
      run.template operator()<1, true>();
    } else {
      run.template operator()<kHeadsTogether<A>, true>();
    }
  });
  return {output, lse};
}

}  // namespace
}  // namespace ds_sparse::token

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("decode_attention_forward", TORCH_BOX(&ds_sparse::token::decode_attention_forward));
}
