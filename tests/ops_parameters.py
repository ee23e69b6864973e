"""Parameters of operations' tests. On a CPU some are left to `--all`; GPUs run every one always."""

from __future__ import annotations

import pytest
import torch
from helpers import NEEDS_COMPILER

GRAPH_DTYPES = (
    torch.float32,
    pytest.param(torch.bfloat16, marks=pytest.mark.slow_on_cpu("graphs know dtypes only to pass them on")),
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
