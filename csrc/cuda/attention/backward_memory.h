// The shared memory of fused attention's backward passes, which hold two operands of their own tile.

#pragma once

#include <string>
#include <type_traits>

#include "../../checks.h"
#include "../common/launch.h"

namespace ds_sparse::attention {

// Launcher::with_memory; where even `Smaller` is too much for some GPUs, as two operands of 256 numbers in fp32 are,
// those are told.
template <class Memory, class Smaller, class F>
void with_backward_memory(const Launcher& launch, const F& f) {
  if constexpr (sizeof(Smaller) <= kPortableMemory) {
    launch.with_memory<Memory, Smaller>(f);
  } else {
    check(
        sizeof(Memory) <= launch.shared_memory(), "Gradients of fp32 heads with more than 128 numbers take ",
        sizeof(Memory), " bytes of shared memory, and a thread block of this GPU has ", launch.shared_memory(),
        "; use fp16 or bf16, smaller heads, or implementation=\"separate\".");
    f(std::type_identity<Memory>{});
  }
}

}  // namespace ds_sparse::attention
