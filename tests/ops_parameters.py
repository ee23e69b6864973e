"""Parameters of operations' tests. On a CPU some are left to `--all`; GPUs run every one always."""

from __future__ import annotations

import pytest
from helpers import NEEDS_COMPILER

BACKENDS = (
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[NEEDS_COMPILER, pytest.mark.slow_on_cpu("compiles C++; a layer and a product are compiled so always")],
    ),
)
"""Of torch.compile."""
