// Included before each source when the CPU library is built with -fsanitize=thread. The threads are torch's, which
// ThreadSanitizer sees neither start nor join, so that each parallel loop says it. docs/contributing.md has the commands.
#pragma once

#include <sanitizer/tsan_interface.h>
#include <torch/csrc/stable/c/shim.h>

#include <cstdint>

// What a loop calls, and with what.
struct ObservedLoop {
  ParallelFunc function;
  void* context;
};

inline char loop_starts, loop_ends;

inline void observe_part(int64_t begin, int64_t end, void* loop) {
  __tsan_acquire(&loop_starts);  // before anything of the loop is read
  const auto* observed = static_cast<const ObservedLoop*>(loop);
  observed->function(begin, end, observed->context);
  __tsan_release(&loop_ends);
}

inline AOTITorchError observed_parallel_for(
    int64_t begin, int64_t end, int64_t grain, ParallelFunc function, void* context) {
  ObservedLoop loop{function, context};
  __tsan_release(&loop_starts);
  AOTITorchError error = torch_parallel_for(begin, end, grain, observe_part, &loop);
  __tsan_acquire(&loop_ends);
  return error;
}

#define torch_parallel_for observed_parallel_for
