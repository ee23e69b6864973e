// The numbers added to the scores of keys, as attention's kernels read them.

#pragma once

#include <optional>

#include "../common/launch.h"
#include "scoring.h"

namespace ds_sparse::attention {

// Writes key_bias, fp32 or bool (keeps where true), (B or 1, S) or (B or 1, H or 1, 1, S), into `scoring`, with a
// KeyState for every eight keys. Returns what holds the numbers that `scoring` then points at. key_bias.cu
std::optional<Tensor> set_key_bias(const Launcher& launch, const std::optional<Tensor>& key_bias, Scoring& scoring);

}  // namespace ds_sparse::attention
