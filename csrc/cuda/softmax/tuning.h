// Tuned sizes of softmax over live blocks, in one place: threads, what each of them holds, thread blocks on a
// multiprocessor. Measurements, and what was tried besides: docs/lab-notebook.md, "Softmax over live blocks". How rows
// are cut into row strips, and into how many threads' elements, is ds_sparse/index/strips.py's choice.

#pragma once

namespace ds_sparse {

// softmax.cu.
struct SoftmaxTuning {
  static constexpr int kHeld = 5;  // runs that a thread holds; more than four, as half of the rows are above the mean
  // Threads on a multiprocessor, which are what its registers have room for. With nothing but scores 48 warps hide what
  // memory takes: powers are taken twice, so that 40 registers do.
  template <class T, bool kPlain>
  static constexpr int kForwardThreads = kPlain && sizeof(T) < 8 ? 1536 : 1024;
  static constexpr int kBackwardThreads = 896;
};

// backward_bias.cu.
struct SoftmaxBackwardBiasTuning {
  static constexpr int kThreads = 256;
  static constexpr int kColumns =
      8;  // of those, neighbouring columns, where rows are summed: the others share the rows
};

}  // namespace ds_sparse
