// Work of every CUDA operator around its kernels: pick the tensors' device and its current stream, check the launch.

#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/shim_utils.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

#include "../../checks.h"
#include "../../tensors.h"

namespace ds_sparse {

// Bytes of shared memory that a thread block may have on every GPU since sm_80; 86, 89 and 120 have no more. Kernels
// that are not for Hopper alone keep to it.
constexpr size_t kPortableMemory = 99 << 10;
constexpr size_t kHopperMemory = 227 << 10;  // and on Hopper

// The least and the most that it may have on a GPU which runs the machine code that is being made; that of 80 is for 86
// and 89, too. PTX is for later GPUs with as much as the one that it is made for.
#if defined(DS_SPARSE_SHARED_MEMORY) || !defined(__CUDA_ARCH__)
constexpr size_t kLeastMemory = kPortableMemory, kMostMemory = SIZE_MAX;
#elif __CUDA_ARCH__ >= 1200
constexpr size_t kLeastMemory = kPortableMemory, kMostMemory = kPortableMemory;
#elif __CUDA_ARCH__ >= 900
constexpr size_t kLeastMemory = kHopperMemory, kMostMemory = kHopperMemory;
#else
constexpr size_t kLeastMemory = kPortableMemory, kMostMemory = 163 << 10;
#endif

// False where no such GPU runs a kernel with this memory, `First` being what Launcher::with_memory takes where it fits.
// A kernel without a body keeps the library small.
template <class Memory, class First>
constexpr bool is_run_here() {
  return sizeof(Memory) <= kMostMemory && (std::is_same_v<Memory, First> || sizeof(First) > kLeastMemory);
}

// Makes a tensor's device the current one while it lives, and launches on that device's current stream.
class Launcher {
 public:
  explicit Launcher(const Tensor& on) : device_(on.get_device_index()), guard_(device_) {
    // A thread whose first CUDA call is ours, as autograd's may be, has no context, and cuTensorMapEncodeTiled fails
    // with 201. The runtime gives it one; the guard does not ask for it where the device is the current one already.
    STD_CUDA_CHECK(cudaSetDevice(device_));
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  cudaStream_t stream() const { return stream_; }
  int64_t multiprocessors() const { return attribute<cudaDevAttrMultiProcessorCount>(); }
  // Bytes that a thread block may have. DS_SPARSE_SHARED_MEMORY, where it is defined, lets a GPU stand for one with
  // less.
  size_t shared_memory() const {
#ifdef DS_SPARSE_SHARED_MEMORY
    return DS_SPARSE_SHARED_MEMORY;
#else
    return attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>();
#endif
  }
  bool is_hopper() const { return attribute<cudaDevAttrComputeCapabilityMajor>() == 9; }
  // Tells if launches become part of a CUDA graph.
  bool is_capturing() const {
    cudaStreamCaptureStatus status;
    STD_CUDA_CHECK(cudaStreamIsCapturing(stream_, &status));
    return status != cudaStreamCaptureStatusNone;
  }

  // A contiguous tensor that begins at a multiple of 16 bytes: a copy where `x` does not.
  Tensor aligned(const Tensor& x) const {
    if (reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0) {
      return x;
    }
    Tensor copy = empty_on(x, x.sizes());
    const size_t bytes = x.numel() * x.element_size();
    STD_CUDA_CHECK(
        cudaMemcpyAsync(copy.mutable_data_ptr(), x.const_data_ptr(), bytes, cudaMemcpyDeviceToDevice, stream_));
    return copy;
  }

  // So many elements of `on`'s device, all bits 0.
  Tensor zeros(const Tensor& on, int64_t count, torch::headeronly::ScalarType type) const {
    Tensor x = empty_on(on, {count}, type);
    STD_CUDA_CHECK(cudaMemsetAsync(x.mutable_data_ptr(), 0, count * x.element_size(), stream_));
    return x;
  }

  // Runs `kernel` on at most 2^31 - 1 thread blocks (the limit of the x dimension): where there may be more work,
  // kernels stride over what is left.
  template <class... Parameters, class... Arguments>
  void operator()(void (*kernel)(Parameters...), int64_t blocks, dim3 threads, Arguments... arguments) const {
    run(kernel, blocks, threads, 0, nullptr, arguments...);
  }

  // Runs `kernel` on a grid that has thread blocks in all dimensions.
  template <class... Parameters, class... Arguments>
  void on_grid(void (*kernel)(Parameters...), dim3 grid, dim3 threads, Arguments... arguments) const {
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = threads;
    config.stream = stream_;
    check_launch(cudaLaunchKernelEx(&config, kernel, arguments...));
  }

  // Runs `kernel` with `bytes` of shared memory for each thread block.
  template <class... Parameters, class... Arguments>
  void with_shared_memory(
      void (*kernel)(Parameters...), int64_t blocks, dim3 threads, size_t bytes, Arguments... arguments) const {
    allow_shared_memory(reinterpret_cast<const void*>(kernel), bytes);
    run(kernel, blocks, threads, bytes, nullptr, arguments...);
  }

  // Calls f with what a thread block has in its shared memory, as a type_identity: `Memory` where this GPU has so much
  // of it, or else `Smaller`, which fits every GPU.
  template <class Memory, class Smaller, class F>
  void with_memory(const F& f) const {
    static_assert(sizeof(Smaller) <= kPortableMemory);
    if constexpr (sizeof(Memory) <= kPortableMemory) {
      f(std::type_identity<Memory>{});
    } else if (sizeof(Memory) <= shared_memory()) {
      f(std::type_identity<Memory>{});
    } else {
      f(std::type_identity<Smaller>{});
    }
  }

  // Runs a kernel, on a GPU since Hopper, that may begin while the last one still runs, if that one says so
  // (`let_next_begin`), and waits for all of it (`wait_for_previous`) in every thread, before it reads what that one
  // writes and before it ends: what comes next in the stream waits for this kernel alone. What it reads before it waits
  // was written before the last kernel began, which therefore is not run this way itself. Its thread blocks are in
  // place when the last kernel's are done. CUDA's programmatic dependent launch.
  template <class... Parameters, class... Arguments>
  void beside_previous(void (*kernel)(Parameters...), int64_t blocks, dim3 threads, Arguments... arguments) const {
    cudaLaunchAttribute beside{};
    beside.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    beside.val.programmaticStreamSerializationAllowed = 1;
    run(kernel, blocks, threads, 0, &beside, arguments...);
  }

 private:
  // One that is never 0, asked for once on each of the first devices.
  template <cudaDeviceAttr kName>
  int attribute() const {
    static std::array<std::atomic<int>, 64> known{};
    int value = device_ < known.size() ? known[device_].load() : 0;
    if (value == 0) {
      STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, kName, device_));
      if (device_ < known.size()) {
        known[device_] = value;
      }
    }
    return value;
  }

  void check_launch(cudaError_t error) const {
    check(
        error != cudaErrorNoKernelImageForDevice,
        "ds_sparse has no machine code for this GPU, whose compute capability is ",
        attribute<cudaDevAttrComputeCapabilityMajor>(), ".", attribute<cudaDevAttrComputeCapabilityMinor>(),
        "; build it there from source: docs/building.md.");
    STD_CUDA_CHECK(error);
  }

  // Lets a kernel have so many bytes on the device; asked for once, as it takes half as long as a launch.
  void allow_shared_memory(const void* kernel, size_t bytes) const {
    static std::mutex mutex;
    static std::map<std::pair<const void*, uint32_t>, size_t> allowed;
    const std::lock_guard<std::mutex> lock(mutex);
    size_t& most = allowed[{kernel, device_}];
    if (most < bytes) {
      check_launch(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
      most = bytes;
    }
  }

  // `attribute`: of the launch; may be null.
  template <class... Parameters, class... Arguments>
  void run(
      void (*kernel)(Parameters...), int64_t blocks, dim3 threads, size_t bytes, cudaLaunchAttribute* attribute,
      Arguments... arguments) const {
    if (blocks == 0) {
      return;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(blocks < INT32_MAX ? blocks : INT32_MAX);
    config.blockDim = threads;
    config.dynamicSmemBytes = bytes;
    config.stream = stream_;
    config.attrs = attribute;
    config.numAttrs = attribute != nullptr;
    check_launch(cudaLaunchKernelEx(&config, kernel, arguments...));
  }

  uint32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

// By all threads of a kernel, once: the next one may begin as soon as all thread blocks have come here.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Until the kernel before is over and what it has written can be read.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace ds_sparse
