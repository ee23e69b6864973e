// Memory that kernels write first: scratch, and outputs that PyTorch's allocator gives.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <memory>
#include <new>

#include "../tensors.h"

namespace ds_sparse::cpu {

// Above this size malloc maps fresh memory at every call, and at 4 kB a page fault the first write costs more than the
// arithmetic; huge pages are asked for where the system leaves it to the program ("madvise").
constexpr int64_t fresh_memory = int64_t{32} << 20;

inline void expect_first_write(void* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  if (bytes < fresh_memory) return;
  constexpr uintptr_t page = 4096;
  uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// An output, about to be written.
inline Tensor fresh(Tensor x) {
  expect_first_write(x.mutable_data_ptr(), x.numel() * static_cast<int64_t>(x.element_size()));
  return x;
}

// Uninitialised memory, aligned to a cache line.
template <class C>
class Buffer {
 public:
  explicit Buffer(int64_t size) : data_(static_cast<C*>(::operator new(sizeof(C) * size, alignment))) {
    expect_first_write(data_.get(), sizeof(C) * size);
  }
  C* data() const { return data_.get(); }

 private:
  static constexpr std::align_val_t alignment{64};
  struct Delete {
    void operator()(C* data) const { ::operator delete(data, alignment); }
  };
  std::unique_ptr<C, Delete> data_;
};

}  // namespace ds_sparse::cpu
