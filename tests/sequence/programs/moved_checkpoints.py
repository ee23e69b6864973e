"""A sequence-parallel engine, whose checkpoint goes on with other numbers of ranks, and of ranks of a sequence.

Ranks are forks. Prints the losses of each run as JSON:

python tests/sequence/programs/moved_checkpoints.py '[[ZeRO stage, [[ranks, ranks of a sequence], ...]], ...]'
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - an engine imports it, which takes seconds
import torch
import transformers
from deepspeed.checkpoint import ds_to_universal
from torch import distributed

import ds_sparse

STEPS, BATCH, TOKENS = 2, 2, 96
SIZES = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32,
    "max_position_embeddings": 128, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
BLOCK = {"mode": "bslongformer", "block": 16, "num_sliding_window_blocks": 3}


def engine_of(stage: int, size: int, universal: bool):
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "sparse_attention": BLOCK,
        "sequence_parallel_size": size,
        "checkpoint": {"load_universal": universal},
    }
    args = argparse.Namespace(deepspeed_sparse_attention=True)
    engine, *_ = ds_sparse.initialize(args, model, model_parameters=model.parameters(), config=config)
    return engine


def train(engine, size: int, first: int) -> list[float]:
    """The loss of each step: a mean over its rows, which are the same on any ranks."""
    groups, group = distributed.get_world_size() // size, distributed.get_rank() // size
    losses = []
    for step in range(first, first + STEPS):
        rows = torch.randint(3, 50, (BATCH, TOKENS), generator=torch.Generator().manual_seed(step))
        total = torch.zeros(())
        for row in rows[group::groups].split(1):
            loss = engine(input_ids=row, labels=row).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach() / len(rows[group::groups])
        distributed.all_reduce(total)
        losses.append(total.item() / distributed.get_world_size())
    return losses


def on_ranks(ranks: int, size: int, stage: int, place: Path, tag: str = "", saves: bool = False) -> list[float]:
    """Losses of the first steps, or of those after a checkpoint `tag`."""
    for file in place.glob("store*"):
        file.unlink()
    pids = [fork(rank, ranks, size, stage, place, tag, saves) for rank in range(ranks)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * ranks
    return json.loads((place / "losses.json").read_text())


def fork(rank: int, ranks: int, size: int, stage: int, place: Path, tag: str, saves: bool) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # asked for, and not used beside a store
        store = f"file://{place}/store"
        ds_sparse.init_distributed(dist_backend="gloo", init_method=store, rank=rank, world_size=ranks, verbose=False)
        with redirect_stdout(sys.stderr):
            engine = engine_of(stage, size, universal=tag == "universal")
            if tag:
                engine.load_checkpoint(str(place), tag=tag)
            losses = train(engine, size, STEPS if tag else 0)
            if saves:
                engine.save_checkpoint(str(place), tag="saved")
        if rank == 0:
            (place / "losses.json").write_text(json.dumps(losses))
        distributed.barrier()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - a fork must not go on as its parent
        traceback.print_exc()
        os._exit(1)


def convert(place: Path) -> None:
    options = argparse.Namespace(
        input_folder=str(place / "saved"), output_folder=str(place / "universal"), num_extract_workers=1,
        num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
    )  # fmt: skip
    with redirect_stdout(StringIO()):
        ds_to_universal.main(options)


def moved(stage: int, others: list[list[int]]) -> list[list[float]]:
    """Losses after the first steps: on the ranks that began, two of one sequence, then on each number of others."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        on_ranks(2, 2, stage, place, saves=True)
        found = [on_ranks(2, 2, stage, place, "saved")]
        if stage:
            convert(place)
        for ranks, size in others:
            found.append(on_ranks(ranks, size, stage, place, "universal" if stage and ranks != 2 else "saved"))
    return found


if __name__ == "__main__":
    print(json.dumps([moved(stage, others) for stage, others in json.loads(sys.argv[1])]))
