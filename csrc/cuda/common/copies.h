// Copies from device to shared memory that threads start and do not wait for, on any GPU from sm_80. PTX ISA chapter
// "cp.async"; what Hopper's copy engine does is in hopper.h.

#pragma once

#include <cstdint>

namespace ds_sparse {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Starts a copy of kBytes to an address in shared memory, of which those from `given` on become zero and are not read.
template <int kBytes>
__device__ __forceinline__ void start_copy(uint32_t to, const void* from, int given) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(given));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes), "r"(given));
  }
}

// Starts a copy of 16 bytes unless `number` is negative: without a branch, into which the compiler would move what the
// addresses of many copies share.
__device__ __forceinline__ void start_copy_of(int number, uint32_t to, const void* from) {
  asm volatile(
      "{\n.reg .pred exists;\nsetp.ge.s32 exists, %2, 0;\n@exists cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(
          to),
      "l"(from), "r"(number));
}

// Ends the group of copies started so far.
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;"); }

// Until all but the newest `kNewer` groups of this thread's copies are there.
template <int kNewer>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewer));
}

}  // namespace ds_sparse
