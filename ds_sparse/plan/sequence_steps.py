"""Steps of `ds_sparse bench sequence`, on one GPU and on several: predicted, and the rates of what ranks send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .communication import exchanged, reduced
from .memory import Memory, memory_of
from .model import Model
from .rates import Rates, bert_model, walk_in_bert
from .results import Results
from .sequence_cases import EXCHANGE, KEPT, REDUCTION, SEQUENCE, Case, Row
from .settings import BUCKET, Settings
from .step import Step, step_of


def model_of(case: Case) -> Model:
    """BERT whose logits are those of labelled tokens, in fp32, as in bing_bert."""
    return replace(bert_model(case.device), family="bing_bert")


def settings_of(case: Case, row: Row) -> Settings:
    """Those of the bench's JSON."""
    return Settings(
        micro_batch=case.sequences,
        accumulation=case.micro_batches,
        gpus=row.ranks,
        dtype=case.dtype,
        zero_stage=case.zero_stage,
        bucket_bytes=2 * BUCKET if case.zero_stage in (1, 2) else 0,
        checkpoints=case.activations != KEPT,
        ranks=row.ranks if row.parallel == SEQUENCE else 1,
    )


def predicted(rates: Rates, case: Case, row: Row) -> Step:
    model = model_of(case)
    walks = [walk_in_bert(case.structure, model.heads, case.seq_len)] * model.layers
    return step_of(rates, model, settings_of(case, row), case.seq_len, walks)


def predicted_memory(case: Case, row: Row) -> Memory:
    return memory_of(model_of(case), settings_of(case, row), case.seq_len)


def with_communication(rates: Rates, results: Results) -> Rates:
    """The rates, with `exchange` and `reduction` from these results."""
    return replace(
        rates,
        exchange=_least(
            replace(results, sequence=[x for x in results.sequence if _sends_heads(*x)]), EXCHANGE, exchanged
        ),
        reduction=_least(results, REDUCTION, reduced),
    )


def _sends_heads(case: Case, row: Row) -> bool:
    """Whether ranks exchanged heads, which alone is counted: of windows, and of one random block a row, as bigbird-16
    has, they send each other keys, fewer bytes."""
    return row.parallel == SEQUENCE and case.structure == "bigbird-64"


def _least(results: Results, part: str, sent: Callable[[Model, Settings, int], float]) -> float | None:
    """The fewest milliseconds that a byte took in any step: a rank that waits for another counts as sending."""
    found = [
        row.profile[part] / size
        for case, row in results.sequence
        if row.profile.get(part) and (size := sent(model_of(case), settings_of(case, row), case.seq_len))
    ]
    return min(found, default=None)
