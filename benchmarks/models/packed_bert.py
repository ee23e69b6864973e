"""BERT on rows of packed documents, with other borders in each step: eager, and captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import bert
from benchmarks.models.attentions import FLOOR, GRAPH_IN_BERT, STRUCTURES_IN_BERT
from benchmarks.models.bert import make_model, queries_of
from benchmarks.models.results import Case
from benchmarks.models.steps import Piece, loss_of, model_with
from benchmarks.running import NOT_TRIED, release_memory
from ds_sparse.bench.documents import places_of
from ds_sparse.bench.machine import DTYPES, NO_GRAPH, Repeated
from ds_sparse.bench.reasons import Unsupported
from ds_sparse.layout import to_token_mask

__all__ = ["make_model", "queries_of"]

DOCUMENT = 300
"""Tokens that a document has in the mean: a batch always has as many documents."""

BATCHES, WARM_UPS = 20, 3
"""Borders that follow one another, and begin again; steps before the first, which compile what there is to compile."""

RATE = 1e-4
"""Weights move by it: after a few steps the losses tell if borders stay what they were."""

LOSSES_APART = 1e-3
"""Relative, of a step in a graph and the eager one; more is allowed only where eager steps repeated differ, too."""

FLOORS, VERIFIED_LAYERS = (), 2


def is_verified(name: str) -> bool:
    return True


def switch(model: Any, name: str) -> None:
    bert.switch(model, GRAPH_IN_BERT.get(name, name))


def borders(case: Case, seed: int) -> Tensor:
    """int32 (documents + 1), cu_seqlens over all rows one after the other: random ones, and the ends of rows."""
    tokens, rows = case.batch * case.seq_len, torch.arange(case.batch + 1) * case.seq_len
    inside = torch.arange(1, tokens)[torch.arange(1, tokens) % case.seq_len != 0]
    chosen = torch.randperm(len(inside), generator=torch.Generator().manual_seed(seed))
    return torch.cat([rows, inside[chosen[: tokens // DOCUMENT]]]).sort().values.int()


def places(case: Case, edges: Tensor) -> list[Tensor]:
    """int32 (rows, T) each: the number of each token's document, and the token's place in it."""
    return [x.view(case.batch, -1) for x in places_of(edges, case.batch * case.seq_len)]


def pieces_of(name: str, case: Case, config: Any, device: torch.device) -> list[Piece]:
    """With the borders, or, for what has a mask of documents instead, with their positions."""
    piece, edges = bert.batch(case.batch, case.seq_len, config.vocab_size, device), borders(case, 0).to(device)
    added = {"position_ids": places(case, edges)[1].long()}
    if name != FLOOR:
        # The capture of a graph takes one tensor as both.
        added = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges}
    return [piece._replace(inputs=piece.inputs | added)]


def masks_of(name: str, case: Case, config: Any, device: torch.device) -> Callable[[Any], Tensor]:
    """From a layer's attention to its mask: of documents, with the structure in each."""
    structure = STRUCTURES_IN_BERT[name](config.num_attention_heads)
    live = to_token_mask(structure.make_bool_layout(case.seq_len), structure.block).to(device)
    rows = zip(*places(case, borders(case, 0).to(device)), strict=True)
    mask = torch.stack([live[:, at[:, None], at] & (of[:, None] == of) for of, at in rows])
    return lambda module: mask


def make_step(name: str, case: Case, device: torch.device) -> Callable[[], Tensor]:
    """A whole step, from fp32 weights in autocast, with other borders at each call; returns its loss. Before the first
    come `WARM_UPS` with the same borders, in a graph and eager.

    Raises:
        Unsupported: a graph on a CPU.
    """
    is_graph = name in GRAPH_IN_BERT
    if is_graph and device.type == "cpu":
        raise Unsupported(f"{NOT_TRIED}{NO_GRAPH}")
    of_bert = Case(case.seq_len, "fp32", device.type, case.dropout, model=case.model, checkpointed=case.checkpointed)
    model = model_with(bert, GRAPH_IN_BERT.get(name, name), of_bert, device)
    (piece,) = pieces_of(name, case, model.config, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, capturable=is_graph)
    edges = piece.inputs["cu_seq_lens_q"]
    following = cycle([borders(case, seed).to(device) for seed in range(1, BATCHES + 1)])
    dtype = DTYPES[case.dtype]

    def train() -> Tensor:
        # What autocast caches would be of the capture alone.
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32, cache_enabled=False):
            loss = loss_of(model, piece, case.predicts_all)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    @cache
    def prepared() -> Callable[[], Tensor]:
        if is_graph:
            return Repeated(train, WARM_UPS).replay
        for _ in range(WARM_UPS):
            train()
        return train

    def step() -> Tensor:
        edges.copy_(next(following))
        return prepared()()

    return step


def require_same_losses(name: str, case: Case, device: torch.device) -> None:
    """Holds the losses of steps in a graph, the borders of which change, to those of eager steps.

    Dropout, which draws other numbers, is left out.

    Raises:
        ArithmeticError: they are further apart than `LOSSES_APART`, and than three times eager steps and those again.
    """

    def losses(of: str) -> Tensor:
        step = make_step(of, replace(case, dropout=0.0), device)
        found = torch.stack([step().clone() for _ in range(BATCHES)]).double()
        del step
        release_memory(device)
        return found

    graph, *eager = (losses(of) for of in (name, GRAPH_IN_BERT[name], GRAPH_IN_BERT[name]))
    apart, noise = (((x - eager[0]) / eager[0]).abs().max().item() for x in (graph, eager[1]))
    if not apart <= max(LOSSES_APART, 3 * noise):
        raise ArithmeticError(
            f"{name}: losses of {BATCHES} steps are up to {apart:.1e} from those of eager steps, which repeat to "
            f"{noise:.1e}"
        )
