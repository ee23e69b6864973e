// Numbers that the kernels of a pass share in memory: work tiles that are taken, and whether a result is not finite.

#pragma once

#include <optional>

#include "launch.h"

namespace ds_sparse {

// All are 0 before a pass, and its last kernel leaves them so: nothing has to be set before the first one.
struct PassState {
  // Of work tiles, by sweeps over rows and over columns; or of the first and the second half of tiles, forward.
  int row_tickets, column_tickets;
  int not_finite;  // whether a sum is not finite
  int done;        // thread blocks of the last kernel, where one is not
};

// A state for a pass. One that is captured in a CUDA graph has its own for good, as graphs may be replayed beside
// anything; others take turns at so many that no two of them can be under way with the same.
class StateOfPass {
 public:
  StateOfPass(const Launcher& launch, const Tensor& on);
  StateOfPass(const StateOfPass&) = delete;
  // Sets it to 0 where the pass ended in an error, before its last kernel was launched.
  ~StateOfPass();

  PassState* get() const { return state_; }
  // The last kernel, which leaves it at 0, is launched.
  void done() { is_done_ = true; }

 private:
  PassState* state_;
  std::optional<Tensor> own_;
  cudaStream_t stream_;
  bool is_done_ = false;
};

// Notes that a lane's sums of two rows, 8 apart, are not all finite. tokens: of the first row and those after it; what
// a row without one (-1) has is whatever lay in memory. Of every four sums, the first two are the first row's. A
// product of two takes an instruction for both; one that overflows is noted too, which costs time alone. row_sum0 and
// row_sum8, of probabilities, count as well: dropout may have dropped those that are not finite.
template <int kCount>
__device__ __forceinline__ void note_not_finite(
    const float (&sums)[kCount], const int* tokens, PassState* state, float row_sum0 = 0, float row_sum8 = 0) {
  float probes[4] = {row_sum0, row_sum8};
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    probes[i / 2 % 4] = fmaf(sums[i], sums[i + 1], probes[i / 2 % 4]);
  }
  const bool finite0 = isfinite(probes[0] + probes[2]), finite8 = isfinite(probes[1] + probes[3]);
  if ((!finite0 && tokens[0] >= 0) || (!finite8 && tokens[8] >= 0)) {
    state->not_finite = 1;
  }
}

}  // namespace ds_sparse
