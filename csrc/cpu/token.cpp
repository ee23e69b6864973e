// token_matmul_sdd, token_matmul_dsd, token_attention_forward and token_attention_backward on the CPU; schemas and
// letters in ../library.cpp.
//
// Work is by lists, each done by one thread: a query gathers the rows of its keys, and for the gradients of keys and
// values a key gathers the rows of its queries. Loads of these rows are what takes the time. Backward goes over the
// queries first, and keeps for each pair what its key needs; of as many sequences and heads at a time as fit
// `kept_pairs`. Nothing is added up between threads: the order of every sum is that of a list.

#include <torch/csrc/stable/library.h>

#include <cmath>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "arguments.h"
#include "memory.h"
#include "operands.h"
#include "schedule.h"

namespace ds_sparse::cpu {

namespace {

// Pairs of which backward keeps two numbers at a time, so that they stay in a cache; or those of one sequence and head.
constexpr int64_t kept_pairs = int64_t{1} << 16;

// A list for each token of one side, of tokens of the other side.
struct TokenLists {
  const int32_t *offsets, *entries, *slots;
  int64_t num_entries, copies, list_batch, list_heads, batch, heads, num_lists, other_tokens, longest = 0;
  std::vector<int64_t> tasks;  // where each begins among the lists of all copies one after another, and their end

  // pair_cost: multiply-adds of a pair.
  TokenLists(
      const Tensor& offsets, const Tensor& entries, const std::optional<Tensor>& slots, int64_t list_batch,
      int64_t list_heads, const Tensor& x, int64_t num_lists, int64_t other_tokens, int64_t pair_cost)
      : offsets(pointer<int32_t>(offsets)),
        entries(pointer<int32_t>(entries)),
        slots(slots ? pointer<int32_t>(*slots) : nullptr),
        num_entries(entries.size(0)),
        copies(product({list_batch, list_heads})),
        list_batch(list_batch),
        list_heads(list_heads),
        batch(x.size(0)),
        heads(x.size(1)),
        num_lists(num_lists),
        other_tokens(other_tokens) {
    check_token_lists(offsets, entries, list_batch, list_heads, num_lists, x);
    check_offsets(offsets, num_entries);
    if (slots) {
      check_list(*slots, x, "slots");
      check_size(*slots, 0, num_entries, "slots");
    }
    pair_cost = std::min(pair_cost, task_cost);
    int64_t cost = task_cost;
    for (int64_t list = 0; list < copies * num_lists; ++list) {
      int64_t count = this->offsets[list + 1] - this->offsets[list];
      if (cost >= task_cost) {
        tasks.push_back(list);
        cost = 0;
      }
      // A list costs, besides its pairs, as much as a dozen of them.
      cost += (count + 12) * pair_cost;
      longest = std::max(longest, count);
    }
    tasks.push_back(copies * num_lists);
  }

  int64_t repeats() const { return batch * heads / copies; }
};

// The list of one token of one sequence and head.
struct TokenList {
  int64_t matrix;  // b * heads + head
  int64_t repeat;  // number among those that share the list
  int64_t token;
  int64_t first, count;  // its entries
  const int32_t *entries, *slots;
};

// Calls the workers with each list of each sequence and head, of those of `first` to `last` among the repeats.
template <class MakeWorker>
void run_lists(const TokenLists& lists, int64_t first, int64_t last, const MakeWorker& make_worker) {
  int64_t tasks = static_cast<int64_t>(lists.tasks.size()) - 1,
          shared_by_heads = lists.list_heads == 1 ? lists.heads : 1;
  std::atomic<bool> fits{true};
  run_tasks((last - first) * tasks, [&] {
    return [&, worker = make_worker()](int64_t task) mutable {
      int64_t repeat = first + task / tasks;
      for (int64_t at = lists.tasks[task % tasks]; at < lists.tasks[task % tasks + 1]; ++at) {
        int64_t copy = at / lists.num_lists;
        int64_t b = lists.list_batch == 1 ? repeat / shared_by_heads : copy / lists.list_heads,
                head = lists.list_heads == 1 ? repeat % lists.heads : copy % lists.list_heads;
        int64_t begin = lists.offsets[at], count = lists.offsets[at + 1] - begin;
        TokenList list{
            b * lists.heads + head,
            repeat,
            at % lists.num_lists,
            begin,
            count,
            lists.entries + begin,
            lists.slots ? lists.slots + begin : nullptr};
        if (kernels<float>().are_below(list.entries, count, lists.other_tokens) &&
            (!list.slots || kernels<float>().are_below(list.slots, count, lists.num_entries)))
          worker(list);
        else
          fits = false;
      }
    };
  });
  check(
      fits, "the lists have to hold tokens of 0 or more and below ", lists.other_tokens, ", and slots below the ",
      lists.num_entries, " entries.");
}

// Tensors (B, H, tokens, D) as rows that a gather reads: of head_dim multiplicands one after another from the start of
// a cache line, zero beyond their own numbers. In place where they lie so.
template <class T, class O>
class Rows {
 public:
  explicit Rows(const Tensor& x)
      : head_dim_(padded<T>(blocks_of(x.size(3), per_multiplicand<O>))),
        head_stride_(x.size(2) * head_dim_),
        packed_(0) {
    bool in_place =
        x.is_contiguous() && has_rows<T, O>(x, head_dim_) && reinterpret_cast<uintptr_t>(pointer<T>(x)) % 64 == 0;
    if (in_place) {
      data_ = reinterpret_cast<const O*>(pointer<T>(x));
      return;
    }
    head_stride_ = padded<T>(x.size(2)) * head_dim_;
    packed_ = pack_all<T, O>(x, kernels<T>().lanes, num_columns(), Form::rows);
    data_ = packed_.data();
  }

  int64_t head_dim() const { return head_dim_; }
  int64_t num_columns() const { return head_dim_ * per_multiplicand<O>; }
  const O* of(int64_t matrix) const { return data_ + matrix * head_stride_; }
  const O* of(int64_t matrix, int64_t token) const { return of(matrix) + token * head_dim_; }

 private:
  int64_t head_dim_, head_stride_;
  Buffer<O> packed_;
  const O* data_;
};

// A contiguous (B, H, tokens, D), about to be written by rows.
template <class T>
class Result {
 public:
  explicit Result(Tensor& x) : data_(static_cast<T*>(x.mutable_data_ptr())), tokens_(x.size(2)), head_dim_(x.size(3)) {}

  void store(const TokenList& list, const Compute<T>* row) const {
    kernels<T>().store_rows(row, 0, 1, head_dim_, false, data_ + (list.matrix * tokens_ + list.token) * head_dim_, 0);
  }

 private:
  T* data_;
  int64_t tokens_, head_dim_;
};

template <class T, class O>
void sdd(const Tensor& query, const Tensor& key, const TokenLists& lists, Tensor& out) {
  using C = Compute<T>;
  Rows<T, O> queries(query), keys(key);
  T* values = static_cast<T*>(out.mutable_data_ptr());
  run_lists(lists, 0, lists.repeats(), [&] {
    return [&, dots = Buffer<C>(padded<C>(lists.longest))](const TokenList& list) {
      products<T, O>().token_dots(
          queries.of(list.matrix, list.token), keys.of(list.matrix), keys.head_dim(), list.entries, list.count,
          dots.data());
      kernels<T>().store_rows(
          dots.data(), 0, 1, list.count, false, values + list.repeat * lists.num_entries + list.first, 0);
    };
  });
}

template <class T, class O>
void dsd(const Tensor& values, const Tensor& dense, const TokenLists& lists, Tensor& out) {
  using Weight = Number<O>;
  constexpr bool same = std::is_same_v<T, Weight>;
  Rows<T, O> rows(dense);
  Result<T> result(out);
  const T* all_values = pointer<T>(values);
  run_lists(lists, 0, lists.repeats(), [&] {
    return [&, gathered = Buffer<T>(same ? 0 : lists.longest), weights = Buffer<Weight>(same ? 0 : lists.longest),
            sum = Buffer<Compute<T>>(rows.num_columns())](const TokenList& list) {
      const T* of_list = all_values + list.repeat * lists.num_entries;
      const int32_t* slots = list.slots;
      const Weight* from = weights.data();
      if constexpr (same) {
        from = slots ? of_list : of_list + list.first;
      } else {
        for (int64_t n = 0; slots && n < list.count; ++n) gathered.data()[n] = of_list[slots[n]];
        kernels<T>().pack_rows(
            slots ? gathered.data() : of_list + list.first, 0, 1, 1, list.count, weights.data(), list.count);
        slots = nullptr;
      }
      products<T, O>().token_sum(
          from, slots, 1, rows.of(list.matrix), rows.head_dim(), list.entries, list.count, sum.data());
      result.store(list, sum.data());
    };
  });
}

template <class T, class O>
void forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const TokenLists& lists, double scale, Tensor& output,
    Tensor& lse, Tensor& rows) {
  using C = Compute<T>;
  Rows<T, O> queries(query), keys(key), values(value);
  Result<T> result(output);
  C *lse_to = static_cast<C*>(lse.mutable_data_ptr()), *row_max_sums = static_cast<C*>(rows.mutable_data_ptr());
  run_lists(lists, 0, lists.repeats(), [&] {
    return [&, sum = Buffer<C>(values.num_columns()),
            scratch = Buffer<C>(padded<C>(lists.longest))](const TokenList& list) {
      int64_t at = list.matrix * lists.num_lists + list.token;
      C* row = row_max_sums + 2 * at;
      products<T, O>().token_attention_forward(
          {queries.of(list.matrix, list.token), keys.of(list.matrix), values.of(list.matrix), keys.head_dim(),
           values.head_dim(), list.entries, list.count, C(scale), sum.data(), row, scratch.data()});
      // Without a key the largest score is -inf and the sum 0.
      lse_to[at] = row[0] + std::log(row[1]);
      result.store(list, sum.data());
    };
  });
}

// Operands of the backward pass, without its lists.
template <class T, class O>
struct Backward {
  using C = Compute<T>;

  Rows<T, O> queries, keys, values, grad_outputs, outputs;
  const C *rows, *grad_lse;  // (B, H, T, 2), and (B, H, T) or null
  int64_t tokens;
  C scale;

  // Its gradient, and the two numbers of each of its pairs.
  void of_query(const TokenList& list, C* grad_query, Number<O>* pairs) const {
    int64_t at = list.matrix * tokens + list.token;
    const C* row = rows + 2 * at;
    const O* grad_output = grad_outputs.of(list.matrix, list.token);
    auto numbers = [](const O* multiplicands) { return reinterpret_cast<const Number<O>*>(multiplicands); };
    C delta;
    kernels<Number<O>>().row_dots(
        numbers(outputs.of(list.matrix, list.token)), 0, 1, numbers(grad_output), 0, 1, 1, values.num_columns(),
        &delta);
    if (grad_lse) delta -= grad_lse[at];
    products<T, O>().token_attention_backward(
        {queries.of(list.matrix, list.token), grad_output, keys.of(list.matrix), values.of(list.matrix),
         keys.head_dim(), values.head_dim(), list.entries, list.count, scale, row[0], row[1] > 0 ? 1 / row[1] : C(0),
         delta, grad_query, pairs});
  }
};

template <class T, class O>
void backward(
    const Backward<T, O>& all, const TokenLists& by_query, const TokenLists& by_key, Tensor& grad_query,
    Tensor& grad_key, Tensor& grad_value) {
  using C = Compute<T>;
  Result<T> of_query(grad_query), of_key(grad_key), of_value(grad_value);
  int64_t repeats = by_query.repeats(), size = by_query.num_entries,
          widest = std::max(all.keys.num_columns(), all.values.num_columns()),
          step = std::clamp<int64_t>(kept_pairs / std::max<int64_t>(1, size), 1, repeats);
  Buffer<Number<O>> kept(2 * step * size);
  for (int64_t first = 0; first < repeats; first += step) {
    int64_t last = std::min(first + step, repeats);
    auto kept_of = [&](const TokenList& list) { return kept.data() + 2 * (list.repeat - first) * size; };
    run_lists(by_query, first, last, [&] {
      return [&, grad = Buffer<C>(widest)](const TokenList& list) {
        all.of_query(list, grad.data(), kept_of(list) + 2 * list.first);
        of_query.store(list, grad.data());
      };
    });
    run_lists(by_key, first, last, [&] {
      return [&, grad = Buffer<C>(widest)](const TokenList& list) {
        const Number<O>* pairs = kept_of(list);
        products<T, O>().token_sum(
            pairs + 1, list.slots, 2, all.queries.of(list.matrix), all.keys.head_dim(), list.entries, list.count,
            grad.data());
        of_key.store(list, grad.data());
        products<T, O>().token_sum(
            pairs, list.slots, 2, all.grad_outputs.of(list.matrix), all.values.head_dim(), list.entries, list.count,
            grad.data());
        of_value.store(list, grad.data());
      };
    });
  }
}

Tensor token_matmul_sdd(
    Tensor query, Tensor key, Tensor row_offsets, Tensor columns, int64_t list_batch, int64_t list_heads) {
  check_token_operands({{&query, "query"}, {&key, "key"}});
  check_size(key, 3, query.size(3), "key");
  TokenLists lists(
      row_offsets, columns, std::nullopt, list_batch, list_heads, query, query.size(2), key.size(2), query.size(3));
  Tensor out = fresh(empty_on(query, {lists.repeats(), columns.size(0)}));
  if (out.numel() == 0) return out;
  for_operands(query.scalar_type(), [&](auto* type, auto* multiplicand) {
    sdd<std::remove_pointer_t<decltype(type)>, std::remove_pointer_t<decltype(multiplicand)>>(query, key, lists, out);
  });
  return out;
}

Tensor token_matmul_dsd(
    Tensor values, Tensor dense, Tensor offsets, Tensor indices, std::optional<Tensor> slots, int64_t list_batch,
    int64_t list_heads) {
  check_token_operands({{&dense, "dense"}});
  int64_t lines = lines_of(offsets, list_batch, list_heads, dense);
  TokenLists lists(offsets, indices, slots, list_batch, list_heads, dense, lines, dense.size(2), dense.size(3));
  check_dim(values, 2, "values");
  check_like(values, dense, "values");
  check_contiguous(values, "values");
  check_size(values, 0, lists.repeats(), "values");
  check_size(values, 1, lists.num_entries, "values");
  Tensor out = fresh(empty_on(dense, {dense.size(0), dense.size(1), lines, dense.size(3)}));
  if (out.numel() == 0) return out;
  for_operands(dense.scalar_type(), [&](auto* type, auto* multiplicand) {
    dsd<std::remove_pointer_t<decltype(type)>, std::remove_pointer_t<decltype(multiplicand)>>(
        values, dense, lists, out);
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> token_attention_forward(
    Tensor query, Tensor key, Tensor value, Tensor row_offsets, Tensor columns, int64_t list_batch, int64_t list_heads,
    double scale) {
  check_token_operands({{&query, "query"}, {&key, "key"}, {&value, "value"}});
  check_size(key, 3, query.size(3), "key");
  check_size(value, 2, key.size(2), "value");
  TokenLists lists(
      row_offsets, columns, std::nullopt, list_batch, list_heads, query, query.size(2), key.size(2),
      query.size(3) + value.size(3));
  int64_t batch = query.size(0), heads = query.size(1), tokens = query.size(2);
  Tensor output = fresh(empty_on(query, {batch, heads, tokens, value.size(3)})),
         lse = empty_on(query, {batch, heads, tokens}, lse_type(query)),
         rows = empty_on(query, {batch, heads, tokens, 2}, lse_type(query));
  if (lse.numel() > 0) {
    for_operands(query.scalar_type(), [&](auto* type, auto* multiplicand) {
      forward<std::remove_pointer_t<decltype(type)>, std::remove_pointer_t<decltype(multiplicand)>>(
          query, key, value, lists, scale, output, lse, rows);
    });
  }
  return {output, lse, rows};
}

std::tuple<Tensor, Tensor, Tensor> token_attention_backward(
    Tensor grad_output, std::optional<Tensor> grad_lse, Tensor query, Tensor key, Tensor value, Tensor output,
    Tensor rows, Tensor row_offsets, Tensor columns, Tensor column_offsets, Tensor column_rows, Tensor slots,
    int64_t list_batch, int64_t list_heads, double scale) {
  check_token_operands(
      {{&query, "query"}, {&key, "key"}, {&value, "value"}, {&grad_output, "grad_output"}, {&output, "output"}});
  check_size(key, 3, query.size(3), "key");
  check_size(value, 2, key.size(2), "value");
  check_size(output, 2, query.size(2), "output");
  check_size(output, 3, value.size(3), "output");
  check_attention_backward(grad_output, grad_lse, output, output, rows);
  if (grad_lse) check_contiguous(*grad_lse, "grad_lse");
  int64_t pair_cost = 2 * (query.size(3) + value.size(3));
  TokenLists by_query(
      row_offsets, columns, std::nullopt, list_batch, list_heads, query, query.size(2), key.size(2), pair_cost),
      by_key(column_offsets, column_rows, slots, list_batch, list_heads, query, key.size(2), query.size(2), pair_cost);
  check_size(column_rows, 0, by_query.num_entries, "column_rows");
  auto gradient = [](const Tensor& x) { return fresh(empty_on(x, x.sizes())); };
  Tensor grad_query = gradient(query), grad_key = gradient(key), grad_value = gradient(value);
  if (query.size(0) * query.size(1) > 0) {
    for_operands(query.scalar_type(), [&](auto* type, auto* multiplicand) {
      using T = std::remove_pointer_t<decltype(type)>;
      using O = std::remove_pointer_t<decltype(multiplicand)>;
      using C = Compute<T>;
      Backward<T, O> all{
          Rows<T, O>(query),
          Rows<T, O>(key),
          Rows<T, O>(value),
          Rows<T, O>(grad_output),
          Rows<T, O>(output),
          pointer<C>(rows),
          grad_lse ? pointer<C>(*grad_lse) : nullptr,
          query.size(2),
          C(scale)};
      backward(all, by_query, by_key, grad_query, grad_key, grad_value);
    });
  }
  return {grad_query, grad_key, grad_value};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CPU, m) {
  m.impl("token_matmul_sdd", TORCH_BOX(&token_matmul_sdd));
  m.impl("token_matmul_dsd", TORCH_BOX(&token_matmul_dsd));
  m.impl("token_attention_forward", TORCH_BOX(&token_attention_forward));
  m.impl("token_attention_backward", TORCH_BOX(&token_attention_backward));
}

}  // namespace ds_sparse::cpu
