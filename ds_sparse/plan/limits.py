"""Remarks of a plan on itself: its assumptions, and where it goes beyond what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..sparsity.declarations import declared_value
from ..tools.wording import listed
from .communication import ADAPTER_GBITS, NODE, crosses_nodes
from .layers import Kind, Walked
from .memory import LEFT_FREE
from .model import Model
from .rates import Rates
from .settings import ADAMS, STATES, Settings

UNMEASURED = "not measured: "
"""The beginning of a sentence about what is extrapolated."""

TOKENS_MEASURED = {2: 32768, 4: 2048}
"""Tokens of a forward pass that rates come from, by the bytes of a number: 32 bits are those of a CPU."""

TOKENS_OF_A_RANK = 65536
"""Tokens of a forward pass on several GPUs, with fewer of which they wait for Python (docs/plan.md)."""


def said_of(
    rates: Rates, model: Model, settings: Settings, kinds: Sequence[Kind], walks: Sequence[Walked], seq_len: int
) -> list[str]:
    """Sentences, first of what is assumed, then, with `UNMEASURED` in front, of what is extrapolated."""
    beyond = [f"{UNMEASURED}{sentence}" for sentence in _beyond(rates, model, settings, kinds, seq_len)]
    return [*_assumed(rates, model, settings, walks), *beyond]


def _assumed(rates: Rates, model: Model, settings: Settings, walks: Sequence[Walked]) -> list[str]:
    kept = "made again layer by layer" if settings.checkpoints else "kept"
    predicted = "all" if model.labelled == 1 else f"{model.labelled:.0%} of the"
    said = [
        f"eager PyTorch, activations {kept}, logits of {predicted} tokens, dropout {model.dropout:g}, in attention "
        f"{model.attention_dropout:g}.",
        f"{LEFT_FREE:.0%} of the GPU's memory is left to CUDA, libraries and the allocator.",
    ]
    if settings.optimizer.lower() not in (*STATES, *ADAMS):
        known = listed((*STATES, *ADAMS), "and")
        said.append(f"optimizer {settings.optimizer} is counted as Adam; known are {known}.")
    if settings.gpus > 1:
        said.extend(_sent(rates, settings))
    if keys := sum(walked is not None and walked.keys is not None for walked in walks):
        said.append(
            f"ranks of a sequence send each other keys in {keys} of {model.layers} layers"
            f"{', and heads in the others' if keys < model.layers else ''}; dense steps send heads."
        )
    if settings.ranks > model.heads:
        said.append(
            f"dense attention takes {model.heads} ranks of a sequence at most: in dense steps the other ranks wait."
        )
    if settings.offloads:
        said.append("what an optimizer on the CPU takes is not counted.")
    if settings.dtype == "fp16":
        said.append("fp16 is counted as bf16, whose rates were measured.")
    if rates.training is None:
        said.append("what DeepSpeed and the program's loop take besides is not counted: no training was measured here.")
    if any(model.windows):
        said.append("the model's own windows are counted in blocks of 64; dense steps, as if they had no mask.")
    return said


def _beyond(rates: Rates, model: Model, settings: Settings, kinds: Sequence[Kind], seq_len: int) -> list[str]:
    of, said = rates.measured, []
    if not of.tokens[0] <= seq_len <= of.tokens[1]:
        said.append(f"attention over {seq_len:,} tokens; measured are {of.tokens[0]:,} to {of.tokens[1]:,}.")
    if seq_len > of.dense_tokens[1]:
        said.append(f"dense attention over {seq_len:,} tokens; measured are up to {of.dense_tokens[1]:,}.")
    if blocks := sorted({kind.block for kind in kinds if kind.structure is not None} - set(of.blocks)):
        said.append(f"blocks of {listed(blocks, 'and')}; measured are {listed(of.blocks, 'and')}.")
    if model.head_dim not in of.head_dims:
        said.append(f"heads of {model.head_dim} numbers; measured are {listed(of.head_dims, 'and')}.")
    if model.does.causal or any(declared_value(kind.structure, "causal") for kind in kinds):
        said.append("attention that masks later tokens; it is counted as if blocks on the diagonal had no mask.")
    if not model.does.measured:
        said.append(f"a step of {model.family}; what it computes is counted, at the rates of BERT.")
    if (model.hidden, model.layers) != (of.hidden, of.layers):
        said.append(
            f"{model.layers} layers of {model.hidden}; rates of products and kernels are those of {of.layers} layers "
            f"of {of.hidden}."
        )
    tokens, least = settings.tokens(seq_len), TOKENS_MEASURED[rates.itemsize]
    if settings.gpus > 1:
        least = TOKENS_OF_A_RANK
    if tokens < least:
        said.append(f"a pass of {tokens:,} tokens: with fewer than {least:,} a GPU may wait for Python's launches.")
    if settings.gpus > NODE:
        sent = "all" if crosses_nodes(settings) else "gradients and weights"
        said.append(
            f"what nodes of {NODE} GPUs send each other: {sent} by the {ADAPTER_GBITS} Gb/s of an adapter a GPU, its "
            "vendor's figure."
        )
    return said


def _sent(rates: Rates, settings: Settings) -> Iterator[str]:
    """Sentences on what GPUs send each other, and how fast."""
    parts = {"gradients and weights": rates.reduction}
    if settings.ranks > 1:
        parts["heads and keys of a sequence"] = rates.exchange
    for what, rate in parts.items():
        yield (
            f"time that GPUs take to send {what} is not counted: none was measured here."
            if rate is None
            else f"each GPU of a node sends {what} at {1e-6 / rate:.0f} GB/s, the fastest that was measured."
        )
