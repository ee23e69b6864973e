// NaN where bounded lists had no space for a tile's entries: never a wrong number.
#pragma once

#include "arguments.h"

namespace ds_sparse::attention {

// Poisons the rows of tiles without space. `results`: (B, H, tokens, ...) or, of keys, (B, Hkv, tokens, ...), any
// strides but adjacent numbers of a token; aligned: (B, H, aligned tokens, ...) contiguous, as lse is. whole: all rows
// of the tiles' heads. Launches nothing where all have some.
void poison_rows(
    const Launcher& launch, const AttentionCall& call, const TileLists& lists, int64_t length,
    std::initializer_list<const Tensor*> results, std::initializer_list<const Tensor*> aligned = {},
    std::initializer_list<const Tensor*> whole = {});

}  // namespace ds_sparse::attention
