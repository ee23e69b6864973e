// Which implementation of an operator runs is chosen in Python, by ds_sparse/dispatch; an operator is given its
// name. Nothing here chooses: a name that cannot run is refused.
#pragma once

#include <string>

#include "checks.h"

namespace ds_sparse {

inline void check_implementation(const std::string& given, const std::string& wanted) {
  check(given == wanted, "implementation is \"", given, "\"; on this device it has to be \"", wanted, "\".");
}

}  // namespace ds_sparse
