"""SparseAttnBuilder: where scripts ask DeepSpeed whether sparse attention is there."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import deepspeed
from deepspeed.ops.op_builder.builder import OpBuilder


class SparseAttnBuilder(OpBuilder):
    """Answers for the native library of ds_sparse, which is built with the package and not by this."""

    BUILD_VAR = "DS_BUILD_SPARSE_ATTN"
    NAME = "sparse_attn"

    def __init__(self):
        super().__init__(name=self.NAME)

    def absolute_name(self) -> str:
        return f"deepspeed.ops.sparse_attention.{self.NAME}_op"

    def sources(self) -> list[str]:
        return []

    def is_compatible(self, verbose: bool = False) -> bool:
        """Tells whether the library loads here."""
        try:
            self.load()
        except (ImportError, OSError) as error:
            if verbose:
                self.warning(f"{self.NAME} is not available: {error}")
            return False
        return True

    def load(self, verbose: bool = True) -> ModuleType:
        """Loads the library.

        Raises:
            ImportError, OSError: it cannot be.
        """
        return importlib.import_module(self.absolute_name())


def register_builder() -> None:
    """Adds the builder to `deepspeed.ops.op_builder` and to the operations that DeepSpeed knows, `ALL_OPS`, of which
    `deepspeed.ops.__compatible_ops__` and ds_report tell."""
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    deepspeed.ops.op_builder.SparseAttnBuilder = SparseAttnBuilder
    deepspeed.ops.op_builder.sparse_attn = sys.modules[__name__]
    sys.modules["deepspeed.ops.op_builder.sparse_attn"] = sys.modules[__name__]
    ALL_OPS[SparseAttnBuilder.NAME] = SparseAttnBuilder()
    # It is a dict of what was true when it was first asked for.
    asked_for = vars(deepspeed.ops).get("__compatible_ops__")
    if asked_for is not None:
        asked_for[SparseAttnBuilder.NAME] = SparseAttnBuilder().is_compatible()
