// Instructions that Hopper has and earlier GPUs have not, one instruction a function: products of warpgroups (wgmma) on
// tiles that the copy engine (TMA) brings, and the barriers between the two. Names are CUTLASS's where it has one. PTX
// ISA chapters "Asynchronous warpgroup level matrix instructions", "cp.async.bulk.tensor" and "mbarrier".
//
// A tile in shared memory is made of panels: lines of 64 16-bit elements, 128 bytes, in the copy engine's 128-byte
// swizzle, which repeats every 8 lines.

#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "copies.h"

namespace ds_sparse::hopper {

constexpr int kPanel = 64;             // elements of a panel's line
constexpr int kPanelAlignment = 1024;  // bytes; dynamic shared memory is asked for that much more

// x, which is the same in all lanes: the compiler knows it then, and what is made of it can be the operand of wgmma as
// it is. Else descriptors are made anew, in each lane, for every product.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(0xffffffffu, x, 0); }

// The first place in dynamic shared memory where a panel may begin.
__device__ __forceinline__ unsigned char* align_panels(unsigned char* shared) {
  const uint32_t first = uniform((shared_address(shared) + kPanelAlignment - 1) & ~(kPanelAlignment - 1u));
  return static_cast<unsigned char*>(__cvta_shared_to_generic(first));
}

// The place of a run of 8 elements in a panel: runs are swapped within a line, differently in each of eight lines.
template <class T>
__device__ __forceinline__ T* run_of_line(T* panel, int line, int run) {
  return panel + line * kPanel + (run ^ line % 8) * 8;
}

// The same in lines of 16 or 32 elements, in the swizzle of 32 or 64 bytes.
template <int kWidth, class T>
__device__ __forceinline__ T* run_of_short_line(T* lines, int line, int run) {
  return lines + line * kWidth + (run ^ line / (kPanel / kWidth) % (kWidth / 8)) * 8;
}

// A pointer that stays in a register, where the compiler would make it anew at every use in a loop; into device memory,
// and into shared memory.
template <class T>
__device__ __forceinline__ T* kept(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}
template <class T>
__device__ __forceinline__ T* kept_shared(T* pointer) {
  uint32_t address = shared_address(pointer);
  asm volatile("" : "+r"(address));
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

// A barrier counts arrivals, and bytes of copies that it was told to expect; each time both are there it enters its
// next phase. A phase is named by the last bit of its number, its parity.
struct Barrier {
  uint64_t state;

  __device__ __forceinline__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(arrivals));
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }
  __device__ __forceinline__ void arrive_and_expect_tx(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)), "r"(bytes)
                 : "memory");
  }
  // So many bytes more, before the arrival of whoever starts their copies.
  __device__ __forceinline__ void expect_tx(uint32_t bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(bytes)
                 : "memory");
  }
  // Until the phase of this parity is over.
  __device__ __forceinline__ void wait(uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n"
        "}" ::"r"(shared_address(this)),
        "r"(parity)
        : "memory");
  }
};

// For a warp, once all of it is there.
__device__ __forceinline__ void warp_arrive(Barrier& barrier, int lane) {
  __syncwarp();
  if (lane == 0) {
    barrier.arrive();
  }
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Makes this thread's stores to shared memory visible to the copy engine and to wgmma; and what it has read of it is
// read before the copy engine, told so later, overwrites it.
__device__ __forceinline__ void fence_view_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Starts a copy of a box of a tensor (batch, head, token, column) into a panel; `barrier` receives its bytes.
__device__ __forceinline__ void tma_load(
    void* to, const CUtensorMap* map, Barrier* barrier, int column, int token, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(token), "r"(head), "r"(batch)
      : "memory");
}

// The same of runs of tokens (RunsMap).
__device__ __forceinline__ void tma_load_runs(
    void* to, const CUtensorMap* map, Barrier* barrier, int column, int place) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %4, %4, %5}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(0), "r"(place)
      : "memory");
}

// Starts a copy of adjacent bytes, a multiple of 16 from and to multiples of 16.
__device__ __forceinline__ void bulk_load(void* to, const void* from, int bytes, Barrier* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// Where a role is in a pipeline of kStages stages: the index of its next stage, and the parity of the phase in which
// that stage fills. A consumer waits on the full barrier with this phase, a producer on the empty barrier with the
// opposite.
template <int kStages>
struct PipelineState {
  int index = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void next() {
    if (++index == kStages) {
      index = 0;
      phase ^= 1;
    }
  }
};

// Barriers of a thread block by number, 1 to 15, for so many threads: until all are there; or only counting as there.
template <int kThreadsOfBoth>
__device__ __forceinline__ void named_barrier_sync(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(kThreadsOfBoth) : "memory");
}
template <int kThreadsOfBoth>
__device__ __forceinline__ void named_barrier_arrive(int number) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(kThreadsOfBoth) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit_batch() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until all but the newest kNewer groups of products are done.
template <int kNewer>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNewer) : "memory");
}

// Keeps the compiler from using accumulators before they are there.
template <int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(float (&sums)[kCount]) {
#pragma unroll
  for (float& sum : sums) {
    asm volatile("" : "+f"(sum)::"memory");
  }
}

// A panel of a tile as an operand of wgmma, from which its descriptors are made. `panels_apart`: bytes between panels,
// where an operand's lines run along the product's n; without a swizzle, between eight numbers along k and the next.
struct GmmaDescriptor {
  uint32_t low, high;

  // The upper word: a swizzle of 128 bytes, in which groups of 8 lines are 1024 bytes apart.
  __device__ __forceinline__ explicit GmmaDescriptor(const void* panel, uint32_t panels_apart = 0)
      : low((panels_apart >> 4) << 16 | shared_address(panel) >> 4), high(1u << 30 | 1024 >> 4) {}

  // Of rows of 16 bytes, one behind the other: the eight numbers along k, which stand for the next eight as well, as
  // these are 0 bytes apart.
  static __device__ __forceinline__ GmmaDescriptor of_short_rows(const void* rows) {
    GmmaDescriptor of_rows(rows);
    of_rows.high = 128 >> 4;  // no swizzle; groups of 8 rows are 128 bytes apart
    return of_rows;
  }

  // Of eight such rows that stand for all, as groups of 8 rows are 0 bytes apart; behind them those of the next eight
  // numbers along k.
  static __device__ __forceinline__ GmmaDescriptor of_one_core(const void* rows) {
    GmmaDescriptor of_rows(rows, 128);
    of_rows.high = 0;
    return of_rows;
  }

  // So many bytes on.
  __device__ __forceinline__ GmmaDescriptor operator+(uint32_t bytes) const {
    GmmaDescriptor sum = *this;
    sum.low += bytes >> 4;
    return sum;
  }

  // Its descriptor from so many bytes on. In the lower word alone: there is no carry.
  __device__ __forceinline__ uint64_t from(uint32_t bytes) const {
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low + (bytes >> 4)), "r"(high));
    return descriptor;
  }
};

// Keeps what follows from being scheduled ahead of what x, which is never negative, is made of: the compiler takes the
// wait for products up before arithmetic that is meant to run beside them.
__device__ __forceinline__ void not_before(float x) {
  if (x == -1.0f) {
    asm volatile("nanosleep.u32 1;");
  }
}

// Four 8 x 8 matrices of 16-bit elements, as a product's lanes hold them, to rows that lanes 8 i to 8 i + 7 point at.
__device__ __forceinline__ void store_matrices(void* row, const uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

// The same, each of them transposed.
__device__ __forceinline__ void store_matrices_transposed(void* row, const uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

// Starts a copy of a panel to a box of a tensor, but for what is outside of it, after `fence_view_async_shared` of all
// who wrote the panel and a barrier. The thread says when it has started all that are to be waited for.
__device__ __forceinline__ void tma_store(
    const CUtensorMap* map, const void* from, int column, int token, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(shared_address(from)), "r"(column), "r"(token), "r"(head), "r"(batch)
               : "memory");
}
__device__ __forceinline__ void tma_store_arrive() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until what this thread's stores, and additions, read is free again.
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// The same for a warp whose first lane stores for all.
__device__ __forceinline__ void warp_tma_store_wait(int lane) {
  if (lane == 0) {
    tma_store_wait();
  }
  __syncwarp();
}

// Starts the addition of adjacent numbers to what is in memory, in whatever order this and others' additions arrive.
__device__ __forceinline__ void bulk_reduce_add(float* to, const float* from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
  tma_store_arrive();
}

// Sums d (64 x kN of a warpgroup) = or += a @ b over 16. b's descriptor; b's lines run along k (kAlongK) or along n.
// Lane l of warp w holds rows 16 w + l / 4 and that + 8, columns 8 i + 2 (l % 4) and the next of each i, as d[4 i .. 4
// i + 3].
#define DS_SPARSE_SUMS_8(d, i)                                                                                \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define DS_SPARSE_SUMS_32(d, i) \
  DS_SPARSE_SUMS_8(d, i), DS_SPARSE_SUMS_8(d, i + 8), DS_SPARSE_SUMS_8(d, i + 16), DS_SPARSE_SUMS_8(d, i + 24)
#define DS_SPARSE_NAMES_32                                                                                         \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define DS_SPARSE_NAMES_64                                                                                           \
  DS_SPARSE_NAMES_32                                                                                                 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

template <class T>
struct Wgmma {
  // a from shared memory, its lines along k, or (kTransposed) along the rows of d.
  template <int kN, bool kAlongK, bool kTransposed = false>
  static __device__ __forceinline__ void from_shared(float (&d)[kN / 2], uint64_t a, uint64_t b, bool add) {
    static_assert(kN == 64 || kN == 128);
    if constexpr (kN == 64) {
#define DS_SPARSE_PRODUCT(type)                                                           \
  asm volatile(                                                                           \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"                                    \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" DS_SPARSE_NAMES_32 \
      "}, %32, %33, add, 1, 1, %36, %35;\n}"                                              \
      : DS_SPARSE_SUMS_32(d, 0)                                                           \
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kAlongK ? 0 : 1), "n"(kTransposed ? 1 : 0))
      if constexpr (std::is_same_v<T, __half>) {
        DS_SPARSE_PRODUCT("f16");
      } else {
        DS_SPARSE_PRODUCT("bf16");
      }
#undef DS_SPARSE_PRODUCT
    } else {
#define DS_SPARSE_PRODUCT(type)                                                            \
  asm volatile(                                                                            \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"                                     \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" DS_SPARSE_NAMES_64 \
      "}, %64, %65, add, 1, 1, %68, %67;\n}"                                               \
      : DS_SPARSE_SUMS_32(d, 0), DS_SPARSE_SUMS_32(d, 32)                                  \
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kAlongK ? 0 : 1), "n"(kTransposed ? 1 : 0))
      if constexpr (std::is_same_v<T, __half>) {
        DS_SPARSE_PRODUCT("f16");
      } else {
        DS_SPARSE_PRODUCT("bf16");
      }
#undef DS_SPARSE_PRODUCT
    }
  }

  // a from registers: the fragment of four, as sums of 16 columns become it. b's lines run along k (kAlongK) or along
  // n.
  template <int kN, bool kAlongK = false>
  static __device__ __forceinline__ void from_registers(
      float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, bool add) {
    static_assert(kN == 64 || kN == 128);
    if constexpr (kN == 64) {
#define DS_SPARSE_PRODUCT(type)                                                           \
  asm volatile(                                                                           \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"                                    \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" DS_SPARSE_NAMES_32 \
      "}, {%32, %33, %34, %35}, %36, add, 1, 1, %38;\n}"                                  \
      : DS_SPARSE_SUMS_32(d, 0)                                                           \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kAlongK ? 0 : 1))
      if constexpr (std::is_same_v<T, __half>) {
        DS_SPARSE_PRODUCT("f16");
      } else {
        DS_SPARSE_PRODUCT("bf16");
      }
#undef DS_SPARSE_PRODUCT
    } else {
#define DS_SPARSE_PRODUCT(type)                                                            \
  asm volatile(                                                                            \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"                                     \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" DS_SPARSE_NAMES_64 \
      "}, {%64, %65, %66, %67}, %68, add, 1, 1, %70;\n}"                                   \
      : DS_SPARSE_SUMS_32(d, 0), DS_SPARSE_SUMS_32(d, 32)                                  \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kAlongK ? 0 : 1))
      if constexpr (std::is_same_v<T, __half>) {
        DS_SPARSE_PRODUCT("f16");
      } else {
        DS_SPARSE_PRODUCT("bf16");
      }
#undef DS_SPARSE_PRODUCT
    }
  }
};

#undef DS_SPARSE_SUMS_8
#undef DS_SPARSE_SUMS_32
#undef DS_SPARSE_NAMES_32
#undef DS_SPARSE_NAMES_64

}  // namespace ds_sparse::hopper
