// Chooses the kernels that this machine can run.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"

namespace ds_sparse::cpu {

#define DS_SPARSE_TABLES(isa)                    \
  namespace isa {                                \
  extern const Kernels<float> table_float;       \
  extern const Kernels<double> table_double;     \
  extern const Kernels<Half> table_half;         \
  extern const Kernels<BFloat16> table_bfloat16; \
  }
#define DS_SPARSE_BF16_TABLE(isa)                            \
  namespace isa {                                            \
  extern const Products<BFloat16, BFloat16Pair> table_pairs; \
  }

DS_SPARSE_TABLES(portable)
#if defined(__x86_64__)
DS_SPARSE_TABLES(avx2)
DS_SPARSE_TABLES(avx512)
DS_SPARSE_BF16_TABLE(avx512_bf16)
DS_SPARSE_BF16_TABLE(amx_bf16)
#endif

namespace {

// From the least to the most: a machine with one runs the kernels of those before it.
enum class InstructionSet { portable, avx2, avx512, avx512_bf16, amx_bf16 };
constexpr const char* names[] = {"portable", "avx2", "avx512", "avx512_bf16", "amx_bf16"};

#if defined(__x86_64__)
// Linux gives a process the registers of tiles when it asks, and threads and forked processes with it.
bool may_use_tiles() {
#if defined(DS_SPARSE_EMULATE_TILES)
  return true;
#elif defined(__linux__)
  constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  constexpr unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24;
  unsigned a, b, c, features;
  return __get_cpuid_count(7, 0, &a, &b, &c, &features) && features & amx_bf16 && features & amx_tile &&
         syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
  return false;
#endif
}

// The most that this machine runs.
InstructionSet most() {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
    return InstructionSet::portable;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return InstructionSet::avx2;
  if (!__builtin_cpu_supports("avx512bf16")) return InstructionSet::avx512;
  return may_use_tiles() ? InstructionSet::amx_bf16 : InstructionSet::avx512_bf16;
}

// AVX512-BF16 pays on AMD's chips. A Xeon multiplies pairs at a lower rate than fp32: attention forward on blocks of 16
// took 11.1 ms there by vdpbf16ps, 8.1 ms with conversions and FMAs, and 5.1 ms by tiles.
InstructionSet fastest_up_to(InstructionSet most) {
  bool slow_pairs = most == InstructionSet::avx512_bf16 && !__builtin_cpu_is("amd");
  return slow_pairs ? InstructionSet::avx512 : most;
}
#else
InstructionSet most() { return InstructionSet::portable; }
InstructionSet fastest_up_to(InstructionSet most) { return most; }
#endif

// The most that the environment lets kernels use.
InstructionSet limit() {
  // PyTorch's own variable, so that one setting holds for all kernels of a process.
  const char* capability = std::getenv("ATEN_CPU_CAPABILITY");
  if (capability && std::strcmp(capability, "default") == 0) return InstructionSet::portable;
  if (capability && std::strcmp(capability, "avx2") == 0) return InstructionSet::avx2;
  return InstructionSet::amx_bf16;
}

InstructionSet choose() {
  InstructionSet last = std::min(most(), limit());
  const char* wanted = std::getenv("DS_SPARSE_CPU");
  if (!wanted || !*wanted) return fastest_up_to(last);
  for (int i = 0; i <= static_cast<int>(last); ++i)
    if (std::strcmp(wanted, names[i]) == 0) return static_cast<InstructionSet>(i);
  std::string known;
  for (int i = 0; i <= static_cast<int>(last); ++i) known += (i ? ", " : "") + std::string(names[i]);
  throw std::runtime_error(
      "ds_sparse: DS_SPARSE_CPU is '" + std::string(wanted) + "', and this machine runs " + known +
      "; name one of these or unset it.");
}

InstructionSet instruction_set() {
  static const InstructionSet chosen = choose();
  return chosen;
}

}  // namespace

#if defined(__x86_64__)
#define DS_SPARSE_KERNELS(T, table)  \
  template <>                        \
  const Kernels<T>& kernels<T>() {   \
    switch (instruction_set()) {     \
      case InstructionSet::portable: \
        return portable::table;      \
      case InstructionSet::avx2:     \
        return avx2::table;          \
      default:                       \
        return avx512::table;        \
    }                                \
  }

const Products<BFloat16, BFloat16Pair>* bf16_products() {
  switch (instruction_set()) {
    case InstructionSet::amx_bf16:
      return &amx_bf16::table_pairs;
    case InstructionSet::avx512_bf16:
      return &avx512_bf16::table_pairs;
    default:
      return nullptr;
  }
}
#else
#define DS_SPARSE_KERNELS(T, table) \
  template <>                       \
  const Kernels<T>& kernels<T>() {  \
    return portable::table;         \
  }

const Products<BFloat16, BFloat16Pair>* bf16_products() { return nullptr; }
#endif

DS_SPARSE_KERNELS(float, table_float)
DS_SPARSE_KERNELS(double, table_double)
DS_SPARSE_KERNELS(Half, table_half)
DS_SPARSE_KERNELS(BFloat16, table_bfloat16)

}  // namespace ds_sparse::cpu

// For native.py: its name, or nothing where the environment names none that runs here.
extern "C" __attribute__((visibility("default"))) const char* ds_sparse_cpu_instruction_set() {
  try {
    return ds_sparse::cpu::names[static_cast<int>(ds_sparse::cpu::instruction_set())];
  } catch (const std::runtime_error&) {
    return "";
  }
}
