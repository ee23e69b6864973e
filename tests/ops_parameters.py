"""Parameters of operations' tests. On a CPU some are left to `--all`; GPUs run every one always."""

from __future__ import annotations

import pytest
import torch
from helpers import NEEDS_COMPILER

GRAPH_DTYPES = (
    pytest.param(torch.float32, marks=pytest.mark.slow_on_cpu("sums of bf16 have another dtype, so it shows more")),
    torch.bfloat16,
)
"""Where numbers do not matter: of schemas, fake tensors and graphs."""

BACKENDS = (
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[NEEDS_COMPILER, pytest.mark.slow_on_cpu("compiles C++; a layer and a product are compiled so always")],
    ),
)
"""Of torch.compile."""
