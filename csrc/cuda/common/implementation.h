// The implementation that an operator is asked for, on a GPU.

#pragma once

#include <string>

#include "../../implementation.h"
#include "launch.h"

namespace ds_sparse {

// Tells if it is Hopper's own, "hopper", which other GPUs cannot run; else it is "portable".
inline bool is_for_hopper(const Launcher& launch, const std::string& implementation) {
  if (implementation != "hopper") {
    check_implementation(implementation, "portable");
    return false;
  }
  check(
      launch.is_hopper(),
      "implementation is \"hopper\", and this GPU's compute capability does not begin with 9; give \"portable\".");
  return true;
}

}  // namespace ds_sparse
