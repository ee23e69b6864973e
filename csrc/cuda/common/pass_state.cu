// Where the states of passes lie.

#include "pass_state.h"

#include <array>
#include <atomic>
#include <mutex>

namespace ds_sparse {
namespace {

constexpr uint32_t kTurns = 1 << 16, kCaptured = 1 << 16;
constexpr int kDevices = 64;

// States of the current device, made when they are first asked for; null where there is no memory for them, or while a
// graph is captured, which allows no allocation.
PassState* states_of_device(const Launcher& launch, bool is_captured) {
  static std::mutex mutex;
  static std::array<PassState*, kDevices> of_devices{};
  int device = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  const std::lock_guard<std::mutex> lock(mutex);
  if (device >= kDevices || is_captured || of_devices[device] != nullptr) {
    return device < kDevices ? of_devices[device] : nullptr;
  }
  constexpr size_t bytes = (kTurns + kCaptured) * sizeof(PassState);
  void* data = nullptr;
  // Another thread may capture a graph, of which none of this becomes a part.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  STD_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  const bool is_made = cudaMalloc(&data, bytes) == cudaSuccess &&
                       cudaMemsetAsync(data, 0, bytes, launch.stream()) == cudaSuccess &&
                       cudaStreamSynchronize(launch.stream()) == cudaSuccess;  // any stream may use them next
  STD_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  if (is_made) {
    of_devices[device] = static_cast<PassState*>(data);
  } else {
    (void)cudaGetLastError();
  }
  return of_devices[device];
}

}  // namespace

StateOfPass::StateOfPass(const Launcher& launch, const Tensor& on) : stream_(launch.stream()) {
  static std::atomic<uint32_t> turns{0}, captured{0};
  const bool is_captured = launch.is_capturing();
  PassState* states = states_of_device(launch, is_captured);
  const uint32_t number = states == nullptr ? 0 : is_captured ? captured++ : turns++ % kTurns;
  if (states != nullptr && number < kCaptured) {
    state_ = states + (is_captured ? kTurns + number : number);
    return;
  }
  if (is_captured && states != nullptr) {
    captured = kCaptured;  // far below where it would begin again
  }
  own_ = launch.zeros(on, sizeof(PassState) / sizeof(int), torch::headeronly::ScalarType::Int);
  state_ = static_cast<PassState*>(own_->mutable_data_ptr());
}

StateOfPass::~StateOfPass() {
  if (!is_done_) {
    // Another error is on its way; this one would hide it.
    (void)cudaMemsetAsync(state_, 0, sizeof(PassState), stream_);
  }
}

}  // namespace ds_sparse
