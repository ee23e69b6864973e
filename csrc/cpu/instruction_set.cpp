// Chooses the kernels that this machine can run.

#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace ds_sparse::cpu {

#define DS_SPARSE_TABLES(isa)                    \
  namespace isa {                                \
  extern const Kernels<float> table_float;       \
  extern const Kernels<double> table_double;     \
  extern const Kernels<Half> table_half;         \
  extern const Kernels<BFloat16> table_bfloat16; \
  }

DS_SPARSE_TABLES(portable)
#if defined(__x86_64__)
DS_SPARSE_TABLES(avx2)
DS_SPARSE_TABLES(avx512)
#endif

namespace {

enum class InstructionSet { portable, avx2, avx512 };

InstructionSet choose() {
#if defined(__x86_64__)
  // PyTorch's own variable, so that one setting holds for all kernels of a process.
  const char* capability = std::getenv("ATEN_CPU_CAPABILITY");
  bool at_most_portable = capability && std::strcmp(capability, "default") == 0;
  bool at_most_avx2 = capability && std::strcmp(capability, "avx2") == 0;
  bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (at_most_portable || !has_avx2) return InstructionSet::portable;
  if (!at_most_avx2 && has_avx512) return InstructionSet::avx512;
  return InstructionSet::avx2;
#else
  return InstructionSet::portable;
#endif
}

InstructionSet instruction_set() {
  static const InstructionSet chosen = choose();
  return chosen;
}

}  // namespace

#if defined(__x86_64__)
#define DS_SPARSE_KERNELS(T, table) \
  template <>                       \
  const Kernels<T>& kernels<T>() {  \
    switch (instruction_set()) {    \
      case InstructionSet::avx512:  \
        return avx512::table;       \
      case InstructionSet::avx2:    \
        return avx2::table;         \
      default:                      \
        return portable::table;     \
    }                               \
  }
#else
#define DS_SPARSE_KERNELS(T, table) \
  template <>                       \
  const Kernels<T>& kernels<T>() {  \
    return portable::table;         \
  }
#endif

DS_SPARSE_KERNELS(float, table_float)
DS_SPARSE_KERNELS(double, table_double)
DS_SPARSE_KERNELS(Half, table_half)
DS_SPARSE_KERNELS(BFloat16, table_bfloat16)

}  // namespace ds_sparse::cpu
