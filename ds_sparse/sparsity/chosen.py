"""The base of structures without a layout: queries choose their blocks in each call."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from ..tools.block_sizes import CHOSEN_BLOCK_SIZES, forced_blocks
from ._base import SparsityConfig
from ._steps import RowStep, row_step
from .declarations import Rule, declared, one_of_sizes

ChosenBlock = Annotated[
    int,
    AfterValidator(one_of_sizes(CHOSEN_BLOCK_SIZES)),
    Field(description="Keys in a block that is chosen or not.", json_schema_extra={"enum": list(CHOSEN_BLOCK_SIZES)}),
]
NumChosenBlocks = Annotated[
    int, Field(ge=1, description="Blocks that a query takes, with those that it takes whatever they score.")
]
NumFirstBlocks = Annotated[int, Field(ge=0, description="Blocks from the sequence's start on that every query takes.")]
ForcedWindow = Annotated[
    int,
    Field(
        ge=0,
        description="Width of the window of blocks that a query takes whatever they score, as in the other modes: half "
        "of it on either side of its own, before it if causal.",
    ),
]


def forced_fit(
    num_chosen_blocks: int, num_first_blocks: int, num_sliding_window_blocks: int, causal: bool
) -> str | None:
    """The rule that a query takes no fewer blocks than are forced."""
    forced = forced_blocks(num_first_blocks, num_sliding_window_blocks // 2 + 1, causal)
    if forced <= num_chosen_blocks:
        return None
    return (
        f"num_first_blocks and num_sliding_window_blocks take {forced} blocks whatever they score, and "
        f"num_chosen_blocks is {num_chosen_blocks}; give that or more."
    )


@declared
class ChosenSparsityConfig(SparsityConfig):
    """Blocks of keys that queries choose anew in each call; `make_layout` has the blocks that may be chosen."""

    block: ChosenBlock = 64
    different_layout_per_head: bool = Field(default=False, init=False)
    seed: int | None = Field(default=None, init=False)
    strict_causal: bool = Field(default=False, init=False)
    num_chosen_blocks: NumChosenBlocks = 8
    num_first_blocks: NumFirstBlocks = 0
    num_sliding_window_blocks: ForcedWindow = 1

    rules: ClassVar[tuple[Rule, ...]] = (forced_fit,)

    adds_parameters: ClassVar[bool] = False
    """Tells if layers get a module with parameters that learn to choose."""

    def rows_to_draw(self, tokens: int | None = None) -> Any:
        """Raises ValueError: each call chooses blocks of its own."""
        raise ValueError(
            f"{type(self).__name__} has no layout to draw: each call chooses its blocks. ds_sparse draw --model --text "
            "shows what a model chose."
        )

    @row_step
    def _candidates(self, h: int, blocks: int) -> RowStep:
        return lambda live, rows: live.fill_(1).tril_(rows.start) if self.causal else live.fill_(1)

    def computed_share(self, seq_len: int, causal: bool = False) -> float:
        """The share of scores that are computed, where each query finds as many blocks as it takes.

        Args:
            seq_len: tokens, a multiple of the block.
            causal: whether the model is, whatever the structure says.

        Returns:
            Above 0 to 1.

        Raises:
            ValueError, TypeError: seq_len is no positive multiple of the block.
        """
        blocks = self._blocks_in(seq_len)
        taken = [min(self.num_chosen_blocks, row + 1 if causal or self.causal else blocks) for row in range(blocks)]
        return sum(taken) / blocks**2


def adds_parameters(structure: object) -> bool:
    """Tells if a structure gives each layer a module with parameters."""
    return isinstance(structure, ChosenSparsityConfig) and structure.adds_parameters
