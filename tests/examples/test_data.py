"""The data of the pretraining example: packing, masking, order, what is held out."""

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tokens
from corpus import Corpus, Document
from data import NOT_PREDICTED, PretrainingData, pack
from tokens import CLS, MASK, PAD, SEP, TokenizedCorpus, open_corpus

T = 64


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory, texts):
    corpus = Corpus("invented", [Document(f"{number}", text) for number, text in enumerate(texts)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_SPARSE_CACHE", str(tmp_path_factory.mktemp("module")))
        patch.setattr(tokens, "load_corpus", lambda *_: corpus)
        return open_corpus("invented", 512)


@pytest.fixture(scope="module")
def data(tokenized):
    return PretrainingData(tokenized, T, seed=3, eval_sequences=4)


def take(batches, count):
    return [next(batches) for _ in range(count)]


def samples(batches):
    """Every row of some batches as something that can be compared."""
    return [tuple(row.numpy().tobytes() for row in rows) for batch in batches for rows in zip(*batch[:5])]


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=60), st.integers(16, 80), st.randoms())
def test_packing_takes_every_token_once_and_keeps_short_documents_whole(sizes, length, draw):
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    documents = np.array(sorted(draw.sample(range(len(sizes)), draw.randint(1, len(sizes)))))
    packing = pack(offsets, documents, length)
    taken = Counter()
    for pieces in packing.sequences:
        assert 2 + sum(packing.lengths[pieces] + 1) <= length
        assert packing.lengths[pieces[-1]] == max(packing.lengths[pieces])
        for piece in pieces:
            document = packing.documents[piece]
            start, end = packing.starts[piece], packing.starts[piece] + packing.lengths[piece]
            assert offsets[document] <= start < end <= offsets[document + 1]
            if sizes[document] <= length - 3:
                assert (start, end) == (offsets[document], offsets[document + 1])
            elif end < offsets[document + 1]:
                assert end - start == length - 3
            taken.update(range(start, end))
    assert set(taken.values()) <= {1}
    assert taken.total() + packing.left_out == sum(sizes[document] for document in documents)
    assert packing.left_out < length
    assert 0 <= packing.padding_share <= 0.5


def test_a_batch_has_bing_berts_fields_and_knows_where_tokens_and_predictions_are(data):
    assert data.training.padding_share < 0.05 and data.training.left_out < T
    for batch in take(data.batches(4, 4), 5):
        assert batch._fields[:5] == ("input_ids", "input_mask", "segment_ids", "nsp_label", "mlm_labels")
        assert [tuple(tensor.shape) for tensor in batch[:5]] == [(4, T), (4, T), (4, T), (4,), (4, T)]
        assert all(tensor.dtype == torch.int64 for tensor in batch[:6])
        assert batch.lengths == batch.input_mask.sum(1).tolist()
        predicted = torch.zeros(4 * T, dtype=torch.bool)
        predicted[batch.mlm_positions] = True
        assert torch.equal(predicted.view(4, T), batch.mlm_labels != NOT_PREDICTED)


def test_a_batch_reaches_the_device_as_it_is(data, device):
    batch = next(data.batches(2, 2))
    moved = batch.to(torch.device(device))
    assert moved.lengths == batch.lengths
    for tensor, original in zip(moved[:-1], batch[:-1]):
        assert tensor.device.type == device and torch.equal(tensor.cpu(), original)


@pytest.mark.parametrize("predictions", [None, 1, 20, (T - 2) // 2])
def test_every_sequence_predicts_the_same_number_of_text_tokens(tokenized, predictions):
    data = PretrainingData(tokenized, T, max_predictions_per_seq=predictions)
    expected = round(0.15 * T) if predictions is None else predictions
    for batches, number in (
        (take(data.batches(2, 2), len(data.training.sequences)), expected),
        (data.held_out_batches(3), round(0.15 * T)),
    ):
        labels = torch.cat([batch.mlm_labels for batch in batches])
        assert ((labels != NOT_PREDICTED).sum(1) == number).all()
        assert not torch.isin(labels, torch.tensor([PAD, CLS, SEP, MASK])).any()


def test_of_the_predicted_tokens_80_percent_are_hidden_10_random_10_kept(data):
    batches = take(data.batches(1, 1), 2000)
    ids, labels = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("input_ids", "mlm_labels"))
    ids, labels = ids[labels != NOT_PREDICTED], labels[labels != NOT_PREDICTED]
    hidden, kept = ids == MASK, ids == labels
    assert abs(hidden.float().mean() - 0.8) < 0.01 and abs(kept.float().mean() - 0.1) < 0.01
    assert (ids[~hidden & ~kept] >= 5).all() and (ids < len(data.corpus.vocabulary)).all()


def restored(batch):
    """The tokens before masking."""
    return torch.where(batch.mlm_labels == NOT_PREDICTED, batch.input_ids, batch.mlm_labels)


def test_the_shape_of_a_sequence(data):
    for batch in take(data.batches(1, 1), 100):
        ids, mask, segments = restored(batch)[0], batch.input_mask[0], batch.segment_ids[0]
        used = int(mask.sum())
        assert mask.tolist() == [1] * used + [0] * (T - used)
        assert ids[0] == CLS and ids[used - 1] == SEP and (ids[used:] == PAD).all() and (ids[1:used] != PAD).all()
        second = segments.nonzero().flatten()
        assert second.tolist() == list(range(second[0], used))
        assert ids[second[0] - 1] == SEP and (ids[second] == SEP).sum() == 1
        assert len(second) - 1 <= 3 * T // 4


def test_labels_tell_true_continuations_from_other_documents(data):
    tokens, offsets = data.corpus.tokens, data.corpus.offsets
    documents = [" ".join(map(str, tokens[start:end])) + " " for start, end in pairwise(offsets)]
    labels = []
    for batch in take(data.batches(1, 1), 300):
        ids, segments = restored(batch)[0], batch.segment_ids[0]
        boundary = int(segments.nonzero()[0])
        second = ids[segments == 1][:-1].tolist()
        first = ids[: boundary - 1].tolist()
        first = first[max(place for place, token in enumerate(first) if token in (CLS, SEP)) + 1 :]
        joined = " ".join(map(str, first + second)) + " "
        continues = any(joined in document for document in documents)
        labels.append(int(batch.nsp_label))
        assert continues == (labels[-1] == 0)
        assert any(" ".join(map(str, second)) in document for document in documents)
    assert 0.4 < sum(labels) / len(labels) < 0.6


def in_memory(tmp_path, sizes):
    """A corpus whose document d consists of token 10 + d alone; the last document is held out."""
    tokens = np.repeat(np.arange(len(sizes)) + 10, sizes)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    held_out = np.arange(len(sizes)) == len(sizes) - 1
    vocabulary = [str(number) for number in range(100)]
    return TokenizedCorpus(tmp_path, {}, vocabulary, tokens, offsets, held_out, np.bincount(tokens, minlength=100))


def test_an_exchanged_segment_is_of_another_document_as_long_or_the_true_one_stays(tmp_path):
    for other, exchanges in ((T, {0, 1}), (3, {0})):
        data, labels = PretrainingData(in_memory(tmp_path, [30 * T, other, T]), T), set()
        for batch in take(data.batches(1, 1), 100):
            ids, start = restored(batch)[0], int(batch.segment_ids[0].argmax())
            assert (ids[start] == ids[start - 2]) == (int(batch.nsp_label) == 0)
            labels.add(int(batch.nsp_label))
        assert labels == exchanges


def test_nothing_but_the_text_gives_the_label_away(tokenized):
    """With and without exchange a sequence has the same length and the same boundary."""
    shapes = {}
    for share in (0.0, 1.0):
        data = PretrainingData(tokenized, T)
        for sequence in range(len(data.training.sequences)):
            row = data._sample(data.training, sequence, np.random.default_rng(sequence), 9, share)
            shapes.setdefault(sequence, set()).add((row[1].sum(), row[2].sum(), row[2].argmax()))
    assert all(len(found) == 1 for found in shapes.values())


def test_a_step_uses_the_same_samples_whatever_the_world_size(data):
    alone = samples(take(data.batches(8, 2), 40))
    for world_size, micro_batch in ((1, 8), (2, 2), (2, 4), (4, 1), (4, 2)):
        steps, accumulation = 10, 8 // (world_size * micro_batch)
        ranks = [data.batches(8, micro_batch, rank=rank, world_size=world_size) for rank in range(world_size)]
        for step in range(steps):
            shared = [sample for rank in ranks for sample in samples(take(rank, accumulation))]
            assert sorted(shared) == sorted(alone[8 * step : 8 * step + 8])


@settings(deadline=None, derandomize=True, max_examples=20)
@given(st.integers(0, 1000), st.sampled_from([1, 2]))
def test_resuming_at_a_sample_continues_exactly(data, steps, world_size):
    def rest(first):
        return data.batches(4, 1, first_sample=first, rank=world_size - 1, world_size=world_size)

    whole = rest(0 if steps < 50 else 4 * (steps - 3))
    take(whole, (steps if steps < 50 else 3) * 4 // world_size)
    assert samples(take(whole, 6)) == samples(take(rest(4 * steps), 6))


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_another_process_makes_the_same_batches_and_ends_with_them(data):
    here, ahead = (data.batches(4, 2, first_sample=3, ahead=ahead) for ahead in (False, True))
    for _ in range(3):
        (*tensors, lengths), (*others, other_lengths) = next(here), next(ahead)
        assert all(map(torch.equal, tensors, others)) and lengths == other_lengths
    (process,) = multiprocessing.active_children()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, number)
    for _ in range(4):
        next(ahead)
    assert process.is_alive()
    ahead.close()
    assert not process.is_alive()


FAILING = """
from data import PretrainingData

class Damaged(PretrainingData):
    def __getitem__(self, sample):
        raise RuntimeError("damaged")

data = Damaged.__new__(Damaged)
data.training = type("Packing", (), {"sequences": [0] * 8})
batches = data.batches(4, 2, ahead=True)
next(batches)
"""


def test_a_program_that_an_error_ends_does_not_wait_for_its_batches():
    path = os.pathsep.join([os.path.dirname(tokens.__file__), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", FAILING],
        check=False,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1 and "RuntimeError: damaged" in ended.stderr


def test_an_epoch_takes_every_sequence_once_and_the_next_masks_anew(data):
    size = len(data.training.sequences)
    epochs = [take(data.batches(1, 1, first_sample=size * epoch), size) for epoch in (0, 1)]

    def openings(batches):
        return [tuple(restored(batch)[0, : int(batch.segment_ids[0].argmax()) // 2].tolist()) for batch in batches]

    assert len(set(samples(epochs[0]))) == size
    assert not set(samples(epochs[0])) & set(samples(epochs[1]))
    first_tokens = [sorted(opening[:2] for opening in openings(epoch)) for epoch in epochs]
    assert first_tokens[0] == first_tokens[1]
    assert openings(epochs[0]) != openings(epochs[1])


def test_held_out_sequences_are_fixed_true_and_only_from_held_out_documents(tokenized, data):
    other = PretrainingData(tokenized, T, seed=99, max_predictions_per_seq=20, eval_sequences=4)
    assert samples(take(data.batches(1, 1), 5)) != samples(take(other.batches(1, 1), 5))
    batches = list(data.held_out_batches(3))
    assert samples(batches) == samples(other.held_out_batches(2))
    assert [len(batch.input_ids) for batch in batches] == [3, 1]
    assert all((batch.nsp_label == 0).all() for batch in batches)
    assert tokenized.held_out[data.held_out.documents].all()
    assert not tokenized.held_out[data.training.documents].any()


@pytest.mark.parametrize("micro_batch, ranks, used_up", [(1, 3, 2), (3, 3, 0), (2, 4, 0), (2, 5, 1)])
def test_ranks_share_the_held_out_sequences_and_get_as_many_batches_each(data, micro_batch, ranks, used_up):
    shares = [list(data.held_out_batches(micro_batch, rank, ranks)) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    shared = [batch for share in shares for batch in share if len(batch.mlm_positions)]
    assert sorted(samples(shared)) == sorted(samples(data.held_out_batches(1)))
    others = [batch for share in shares for batch in share if not len(batch.mlm_positions)]
    assert len(others) == used_up
    assert all(len(batch.input_ids) and (batch.mlm_labels == NOT_PREDICTED).all() for batch in others)


def test_unigram_cross_entropy_by_hand(data, tokenized):
    counts = Counter()
    for document in np.flatnonzero(~tokenized.held_out):
        counts.update(tokenized.tokens[tokenized.offsets[document] : tokenized.offsets[document + 1]].tolist())
    total, vocabulary = counts.total(), len(tokenized.vocabulary)
    losses = [
        -math.log((counts[token] + 1) / (total + vocabulary))
        for batch in data.held_out_batches(1) for token in batch.mlm_labels[0].tolist() if token != NOT_PREDICTED
    ]  # fmt: skip
    assert len(losses) == 4 * round(0.15 * T)
    assert data.held_out_unigram_cross_entropy == pytest.approx(sum(losses) / len(losses), rel=1e-12)


IMPOSSIBLE = [
    ({"sequence_length": 8}, "shortest that can be packed is 16"),
    ({"sequence_length": 65536}, "training documents have .* tokens together, too few for one sequence of 65,536"),
    ({"seed": -1}, "seed is -1"),
    ({"max_predictions_per_seq": 40}, "1 to 31 can be predicted, and 10 is usual"),
    ({"max_predictions_per_seq": 0}, "1 to 31 can be predicted"),
    ({"eval_sequences": 0}, "at least 1"),
    ({"global_batch": 6, "micro_batch": 4}, "multiple of 4"),
    ({"global_batch": 4096, "micro_batch": 1}, "a larger corpus"),
]


@pytest.mark.parametrize("arguments, said", IMPOSSIBLE)
def test_impossible_arguments_and_batches_are_refused_at_once(tokenized, data, arguments, said):
    asked = data.batches if "global_batch" in arguments else partial(PretrainingData, tokenized, sequence_length=T)
    with pytest.raises(ValueError, match=said):
        asked(**arguments)


def test_the_manifest_says_what_went_in(data, tokenized, tmp_path):
    data.write_manifest(tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["corpus"] == "invented" and manifest["cache_entry"] == tokenized.directory.name
    assert manifest["documents"]["training"] + manifest["documents"]["held_out"] == 160
    assert manifest["tokens"]["training"] + manifest["tokens"]["held_out"] == len(tokenized.tokens)
    assert (manifest["sequence_length"], manifest["seed"]) == (T, 3)
    assert os.listdir(tmp_path / "run") == ["manifest.json"]
