// Where the states of passes lie.

#include "pass_state.h"

#include <array>
#include <atomic>
#include <mutex>

namespace ds_sparse {
namespace {

constexpr uint32_t kTurns = 1 << 16, kCaptured = 1 << 16;
constexpr int kDevices = 64;

// Those of the current device, made when they are first asked for; null while a graph is captured, which allows no
// allocation. Memory of a __device__ variable would do, but tickets come later from it: 5 % of a short forward pass.
PassState* states_of_device(bool may_make) {
  static std::mutex mutex;
  static std::array<PassState*, kDevices> of_devices{};
  int device = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  const std::lock_guard<std::mutex> lock(mutex);
  if (device >= kDevices) {
    return nullptr;
  }
  if (of_devices[device] == nullptr && may_make) {
    constexpr size_t bytes = (kTurns + kCaptured) * sizeof(PassState);
    void* data = nullptr;
    STD_CUDA_CHECK(cudaMalloc(&data, bytes));
    STD_CUDA_CHECK(cudaMemset(data, 0, bytes));
    STD_CUDA_CHECK(cudaDeviceSynchronize());  // any stream may use them next
    of_devices[device] = static_cast<PassState*>(data);
  }
  return of_devices[device];
}

}  // namespace

StateOfPass::StateOfPass(const Launcher& launch, const Tensor& on) {
  static std::atomic<uint32_t> turns{0}, captured{0};
  const bool is_captured = launch.is_capturing();
  PassState* states = states_of_device(!is_captured);
  if (states != nullptr && !is_captured) {
    state_ = states + turns++ % kTurns;
  } else if (states != nullptr && captured < kCaptured) {
    state_ = states + kTurns + captured++ % kCaptured;
  } else {
    own_ = launch.zeros(on, sizeof(PassState) / sizeof(int), torch::headeronly::ScalarType::Int);
    state_ = static_cast<PassState*>(own_->mutable_data_ptr());
  }
}

}  // namespace ds_sparse
