"""The experiments whose queries choose blocks: a decoder, an encoder, and what they choose."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.program import main
from benchmarks.train import chosen, decoder, encoder
from benchmarks.train.chosen import mass, together
from benchmarks.train.models import Attention
from benchmarks.train.results import Case
from ds_sparse import record_choices
from ds_sparse.bench.show import load
from ds_sparse.modules.choices import Choice

CPU = torch.device("cpu")
CASE = Case("decoder", "tiny", "fp32", "cpu", True, 256, 2e-3, 128)
ARMS = ["local_sliding_window", "moba", "nsa", "indexer"]


def choice(numbers, tokens=32, causal=False, seed=0):
    """Two heads that share a key head, and choose blocks of 4."""
    torch.manual_seed(seed)
    query, key = torch.randn(1, 2, tokens, 8), torch.randn(1, 1, tokens, 8)
    return Choice(numbers, 4, 1, 2, tokens, tokens, causal=causal, query=query, key=key)


def test_blocks_that_neighbours_choose_together_are_counted_once():
    numbers = torch.full((1, 1, 32, 3), -1)
    numbers[0, 0, :8] = torch.tensor([2, 2, 5])
    numbers[0, 0, 8:12, 0] = torch.arange(4)
    numbers[0, 0, 20:30] = torch.tensor([7, 0, -1])
    assert together(choice(numbers)) == (2 + 4 + 2 + 2) / 4


@pytest.mark.parametrize("causal", [False, True])
def test_the_mass_is_that_of_dense_attention(causal, monkeypatch):
    monkeypatch.setattr(chosen, "ROWS", 24)  # of causal ones all that see more than two blocks
    numbers = torch.stack([torch.randperm(8)[:2] for _ in range(32)])[None, None]
    one = choice(numbers, causal=causal)
    masses, mosts = [], []
    for row in torch.linspace(8 if causal else 0, 31, 24).long().tolist():
        seen = row + 1 if causal else 32
        weights = (one.query[0, :, row] @ one.key[0, 0, :seen].T / math.sqrt(8)).softmax(-1).mean(0).tolist()
        of_blocks = [sum(weights[first : first + 4]) for first in range(0, 32, 4)]
        masses.append(sum(of_blocks[number] for number in numbers[0, 0, row].tolist()))
        mosts.append(sum(sorted(of_blocks)[-2:]))
    assert mass(one) == pytest.approx((np.mean(masses), np.mean(mosts)))


def test_keys_of_padding_have_no_mass():
    numbers, mask = torch.tensor([0, 1]).expand(1, 1, 32, 2), torch.arange(32)[None] < 8
    assert mass(replace(choice(numbers), key_padding_mask=mask)) == pytest.approx((1, 1))


def test_decoders_begin_with_the_same_weights_and_only_some_of_them_choose():
    dense = decoder.make_decoder(Attention("dense", 192), CASE, CPU)
    tokens = torch.randint(256, (1, 192))
    assert chosen.measures(dense, input_ids=tokens) == {}
    for kind in ARMS:
        model = decoder.make_decoder(Attention(kind, 192), CASE, CPU).eval()
        weights = dict(model.named_parameters())
        assert all(torch.equal(weights[name], x) for name, x in dense.named_parameters()), kind
        assert (len(weights) > len(list(dense.parameters()))) == (kind in ("nsa", "indexer"))
        with record_choices(model, keep_operands=True) as found, torch.no_grad():
            model(input_ids=tokens)
        assert len(found) == (0 if kind == "local_sliding_window" else 2)
        for one in found.values():
            assert one.causal and one.block_indices.shape == (1, 1, 192, 5)
            taken, most = mass(one)
            assert 1 <= together(one) <= 12 and 0 < taken <= most <= 1


def test_the_late_loss_is_that_of_the_last_quarter_and_no_byte_sees_those_after_it():
    rows = np.random.default_rng(0).integers(0, 256, (4, 128)).astype(np.uint8)
    for kind in ("moba", "nsa", "indexer"):
        model = decoder.make_decoder(Attention(kind, 128), CASE, CPU).eval()
        task = decoder.Bytes(model, 128, rows, rows, CASE, CPU)
        with torch.no_grad():
            losses = task.losses(task.sequences(rows))
            assert losses.shape == (4, 127) and task.evaluate() == pytest.approx(losses.mean().item())
            assert task.measures()["late_loss"] == pytest.approx(losses[:, 95:].mean().item())
            changed = rows.copy()
            changed[:, 100:] ^= 1
            torch.testing.assert_close(task.losses(task.sequences(changed))[:, :99], losses[:, :99])


@pytest.mark.parametrize(
    ("experiment", "arm", "sentence"),
    [
        ("decoder", "fixed-512", "is no arm of decoder; give ATTENTION-LENGTH of dense, local_sliding_window, moba, "),
        ("decoder", "moba-100", "sequences of 100 tokens do not divide documents of 512"),
        ("encoder", "nsa-512", "is no arm of encoder; give ATTENTION-LENGTH of dense, bigbird, moba, indexer, such as"),
        ("encoder", "dense-256", "all arms of encoder have sequences of --document-tokens"),
        ("encoder", "bigbird-16", "--arms bigbird-16: sparse_attention.num_sliding_window_blocks"),
    ],
)
def test_an_arm_that_is_not_known_or_does_not_fit_says_so(experiment, arm, sentence, capsys):
    assert main(["train", "--experiment", experiment, "--quick", "--arms", arm]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow("trains every arm")
@pytest.mark.parametrize(("experiment", "module"), [("decoder", decoder), ("encoder", encoder)])
def test_a_quick_run_trains_every_arm_on_the_same_tokens(experiment, module, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_SPARSE_CACHE", str(tmp_path))
    path = tmp_path / "rows.json"
    assert main(["train", "--experiment", experiment, "--quick", "--tokens", "16384", "--json", str(path)]) == 0
    results = load(str(path))[2]
    assert [case.arm for case, _ in results] == module.default_arms(replace(CASE, document_tokens=512))
    for case, (row,) in results:
        assert row.curve[-1].tokens == 16384 and row.held_out < 1.3 * row.unigram
        assert all(a.held_out > b.held_out - 0.01 for a, b in itertools.pairwise(row.curve)), case.arm
        by_token = case.arm.startswith(("indexer", "nsa")) or (case.arm == "moba-512" and experiment == "decoder")
        assert ("together" in row.measures) == by_token


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("experiment", ["decoder", "encoder"])
def test_quick_runs_on_a_gpu(tmp_path, experiment):
    path = tmp_path / "rows.json"
    command = f"train --quick --experiment {experiment} --device cuda --minutes 0.02"
    assert main([*command.split(), "--json", str(path)]) == 0
    assert [row.reason for _, (row,) in load(str(path))[2] if row.reason] == []
