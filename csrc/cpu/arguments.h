// What an operator does with its arguments before the work: checks what lists hold, reads pointers and dtypes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "../checks.h"
#include "kernels.h"

namespace ds_sparse::cpu {

template <class T>
const T* pointer(const Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}

// Offsets that cut `entries` entries into lines, one after the other.
inline void check_offsets(const Tensor& offsets, int64_t entries) {
  const int32_t *begin = pointer<int32_t>(offsets), *end = begin + offsets.size(0);
  check(*begin == 0 && end[-1] == entries && std::is_sorted(begin, end),
        "offsets have to ascend from 0 to the " + std::to_string(entries) + " entries.");
}

// Offsets, and the entries that they cut: block numbers below `blocks`, ascending within a line.
inline void check_entries(const Tensor& offsets, const Tensor& indices, int64_t blocks) {
  check_offsets(offsets, indices.size(0));
  const int32_t *offset = pointer<int32_t>(offsets), *index = pointer<int32_t>(indices);
  bool fits = true;
  for (int64_t line = 0; line < offsets.size(0) - 1; ++line) {
    int64_t above = -1;
    for (int64_t n = offset[line]; n < offset[line + 1]; ++n) {
      fits &= index[n] > above;
      above = index[n];
    }
    fits &= above < blocks;
  }
  check(fits, "the block rows or columns in the lists have to ascend within a line, from 0 or more to below " +
                  std::to_string(blocks) + ".");
}

// Places of the entries among the stored blocks.
inline void check_slots(const Tensor& slots) {
  const int32_t* slot = pointer<int32_t>(slots);
  bool fits = true;
  for (int64_t n = 0; n < slots.size(0); ++n) fits &= slot[n] >= 0 && slot[n] < slots.size(0);
  check(fits, "slots have to be 0 or more and below the " + std::to_string(slots.size(0)) + " entries.");
}

// Calls f with a null pointer of the type that holds the dtype's numbers: use(float*), and so on.
template <class F>
void for_dtype(ScalarType dtype, const F& f) {
  switch (dtype) {
    case ScalarType::Float:
      return f(static_cast<float*>(nullptr));
    case ScalarType::Double:
      return f(static_cast<double*>(nullptr));
    case ScalarType::Half:
      return f(static_cast<Half*>(nullptr));
    case ScalarType::BFloat16:
      return f(static_cast<BFloat16*>(nullptr));
    default:
      throw std::runtime_error("ds_sparse: tensors on the CPU have to be fp32, fp64, fp16 or bf16.");
  }
}

}  // namespace ds_sparse::cpu
