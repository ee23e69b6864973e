"""What a plan says that no transcript of tests/cli has: rates unlike the committed ones, and its JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ds_sparse.plan.model import NAMED
from ds_sparse.plan.plan import make_plan
from ds_sparse.plan.settings import Settings
from ds_sparse.plan.text import as_json, lines_of
from ds_sparse.plan.untimed import plan_untimed

MODEL, SETTINGS = NAMED["bert-base"], Settings(4, zero_stage=1)
WINDOW = {"mode": "bslongformer", "block": 64}


@pytest.fixture
def planned(rates):
    """The plan of a block, with changes of the settings."""

    def made(block=WINDOW, rates=rates, memory_gib=None, dropout=0.1, **changes):
        settings, model = replace(SETTINGS, **changes), replace(MODEL, attention_dropout=dropout)
        return make_plan(block, "ds.json", model, settings, rates, 8192, memory_gib=memory_gib)

    return made


def test_where_dense_attention_is_quick_dense_is_faster_and_that_is_what_is_said(planned, rates):
    quick = {way: [c / 4 for c in coefficients] for way, coefficients in rates.dense.items()}
    plan = planned({"mode": "dense", "block": 16}, replace(rates, dense=quick))
    assert plan.gain < 1 and plan.dense_is_faster_to == 8192
    (layers,) = plan.layers
    assert layers.milliseconds > layers.dense_milliseconds and layers.density == 1
    verdict, other, *_ = lines_of(plan)
    assert f"; takes {1 / plan.gain:.2f} times as long as dense." in verdict
    assert other.startswith("best alternative: dense attention, without the flag; ")
    assert 'layers 0-11: dense attention is faster; give them null in "layers".' in lines_of(plan, details=True)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_layers_that_are_faster_dense_are_an_alternative_of_their_own(planned, rates, checkpoints):
    quick = {way: [c / 4 for c in coefficients] for way, coefficients in rates.dense.items()}
    plan = planned(
        WINDOW | {"layers": {"0-5": {"mode": "dense", "block": 16}}},
        replace(rates, dense=quick),
        checkpoints=checkpoints,
    )
    faster = planned(WINDOW | {"layers": {"0-5": None}}, replace(rates, dense=quick), checkpoints=checkpoints)
    assert plan.null_step.total == pytest.approx(faster.step.total)
    speed = f"{faster.tokens / faster.step.total * 1e3:,.0f} tokens a second"
    assert f'best alternative: null in "layers" for 0-5; {speed}' in [*lines_of(plan)][1]


@pytest.mark.parametrize(
    "layers, said",
    [
        ({"3": {"mode": "dense"}}, "layer 3"),
        ({"4": {"mode": "dense"}, "5": None}, "layers 4 and 5"),
        ({"0-3": {"mode": "dense"}, "6,9": None}, "layers 0-3, 6 and 9"),
    ],
)
def test_all_layers_that_see_everything_are_named_together(planned, layers, said):
    assert f"a token finds anything, in {said}." in lines_of(planned(WINDOW | {"layers": layers}))


def test_all_that_a_plan_was_compared_with_is_named(planned, rates):
    quick = replace(rates, dense={way: [c / 1.7 for c in coefficients] for way, coefficients in rates.dense.items()})
    plan = planned(WINDOW | {"layers": {"0": {"mode": "dense", "block": 16}}}, quick, memory_gib=139)
    others = 'dense attention, without the flag; with null in "layers" for 0'
    assert [*lines_of(plan)][1] == f"best alternative: none is faster; compared with {others}."


def test_null_is_no_alternative_for_windows_of_the_models_own(rates):
    quick = replace(rates, dense={way: [c / 32 for c in coefficients] for way, coefficients in rates.dense.items()})
    model = NAMED["modernbert-base"]
    plan = make_plan({"mode": "dense", "block": 16}, "ds.json", model, SETTINGS, quick, 8192)
    own = next(of for of in plan.layers if of.attention.startswith("own window"))
    assert own.milliseconds > own.dense_milliseconds
    told = "\n".join(lines_of(plan, details=True))
    assert told.count('give them null in "layers"') == 1 and f"layers {own.layers}: dense" not in told


def test_windows_over_ranks_are_counted_by_the_keys_that_these_send_each_other(planned):
    by_heads, by_keys = planned(gpus=4, ranks=4), planned(gpus=4, ranks=4, dropout=0)
    # The rank of the global row gets a block of keys and values of its neighbour, and outputs in fp32 of three ranks.
    of_keys, of_heads = (2 + 2 * 3) * 64 * 12, 3 / 16 * 8192 * 4 * 12
    assert by_keys.step.exchange / by_heads.step.exchange == pytest.approx(of_keys / of_heads)
    assert by_keys.dense_step.exchange == by_heads.dense_step.exchange
    assert "ranks of a sequence send each other keys in 12 of 12 layers; dense steps send heads." in by_keys.remarks
    more = planned(gpus=16, ranks=16, dropout=0)
    assert more.attention_flops == pytest.approx(by_keys.attention_flops / 4)
    assert "dense attention takes 12 ranks of a sequence at most: in dense steps the other ranks wait." in more.remarks
    with pytest.raises(ValueError, match="at most 12 ranks"):
        planned(gpus=16, ranks=16)


def test_unasked_a_plan_is_at_most_15_lines(planned):
    block = WINDOW | {"layers": {str(n): {"mode": "bslongformer", "block": 2 ** (4 + n % 4)} for n in range(11)}}
    for plan in (planned(block, memory_gib=gib, gpus=16, ranks=4) for gib in (None, 1, 8, 139)):
        assert len("\n".join(lines_of(plan)).splitlines()) < 15, "and a sentence of the command"


def test_what_was_not_measured_is_not_counted_and_that_is_said(planned, rates):
    bare = replace(rates, exchange=None, reduction=None, training=None)
    said = [remark for remark in planned(rates=bare, gpus=8, ranks=2).remarks if "measured here" in remark]
    assert [sentence[: sentence.index(" not counted")] for sentence in said] == [
        "time that GPUs take to send gradients and weights is",
        "time that GPUs take to send heads and keys of a sequence is",
        "what DeepSpeed and the program's loop take besides is",
    ]


def test_the_json_has_all_numbers_with_their_sums(planned):
    plan = planned(memory_gib=80)
    found = json.loads(json.dumps(as_json(plan)))
    assert found["step"]["total"] == plan.step.total == sum(v for k, v in found["step"].items() if k != "total")
    assert found["memory"]["total"] == plan.memory.total
    assert found["gain"] == plan.gain and found["tokens_per_second"] == plan.tokens / plan.step.total * 1e3
    assert found["layers"][0]["density"] == plan.layers[0].density
    assert found["advice"]["tokens_per_second"] == found["tokens_per_second"]
    assert found["advice"]["step"]["total"] == plan.step.total and found["advice"]["settings"]["ranks"] == 1
    assert len(found["lengths"]) == len(plan.lengths) and found["remarks"] == plan.remarks


CHOOSING = {"mode": "moba", "block": 64, "num_chosen_blocks": 8}
INDEXER = {"mode": "indexer", "block": 64, "num_chosen_blocks": 4, "layers": {"0-2": CHOOSING, "3": None}}


@pytest.mark.parametrize(
    "block, said",
    [
        (INDEXER, r"layers 0-2 \(moba, block 64\) and 4-11 \(indexer, block 64\) choose"),
        (WINDOW | {"layers": {"3": CHOOSING}}, r"layer 3 \(moba, block 64\) chooses"),
    ],
)
def test_a_plan_has_no_times_of_blocks_that_are_chosen(planned, block, said):
    with pytest.raises(ValueError, match=said):
        planned(block)


@pytest.mark.parametrize(
    "gib, verdict", [(None, "needs 16.8 GiB (give"), (80, "fits: 16.8 of 80 GiB; "), (8, "does not fit: a step needs ")]
)
def test_the_memory_of_blocks_that_are_chosen_is_that_of_any_others(planned, gib, verdict):
    plan = plan_untimed(INDEXER, "ds.json", MODEL, SETTINGS, 8192, document_tokens=4096, memory_gib=gib)
    assert plan.memory == planned().memory and plan.longest == planned(memory_gib=gib).longest
    first, *others = lines_of(plan)
    assert first.startswith(verdict) and first.endswith("; its speed is not known.")
    assert "padding: documents of 4,096 tokens leave 50% of each step to padding" in "\n".join(others)
    found = json.loads(json.dumps(as_json(plan)))
    assert found["fits"] is plan.fits and found["memory"]["total"] == plan.memory.total
    assert found["shares"] == [1 / 16, 1 / 32] and found["flops"] < found["dense_flops"]


def test_blocks_that_are_chosen_are_refused_where_heads_are_fewer_than_ranks_or_sequences_than_documents():
    with pytest.raises(ValueError, match="at most 12 ranks"):
        plan_untimed(CHOOSING, "ds.json", MODEL, replace(SETTINGS, gpus=16, ranks=16), 8192)
    with pytest.raises(ValueError, match="--document-tokens 9000 is more than --seq 8192"):
        plan_untimed(CHOOSING, "ds.json", MODEL, SETTINGS, 8192, document_tokens=9000)
    assert plan_untimed(WINDOW, "ds.json", MODEL, SETTINGS, 8192) is None
