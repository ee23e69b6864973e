"""A training loop around deepspeed.initialize. Writes what it saw to OUT.RANK."""

import argparse
import json
import os
import sys

from deepspeed.ops.sparse_attention import FixedSparsityConfig  # an old import, before any other of DeepSpeed

# isort: split
import deepspeed
import torch
from deepspeed import initialize
from model import make_model, make_samples

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--out", required=True)
parser.add_argument("--h", type=int)
args = deepspeed.add_config_arguments(parser).parse_args()

model = make_model()
engine, *_ = initialize(args=args, model=model, model_parameters=model.parameters())
batch = torch.utils.data.default_collate(make_samples(2))
losses = []
for _ in range(2):
    loss = engine(**{name: x.to(engine.device) for name, x in batch.items()}).loss
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())

seen = {
    "losses": losses,
    "attention": model.config._attn_implementation,
    "block": getattr(model.config, "sparse_attention", None),
    "argv": sys.argv,
    "ranks": [torch.distributed.get_rank(), torch.distributed.get_world_size()],
    "config": deepspeed.DeepSpeedConfig(args.deepspeed_config).sparse_attention,
    "class": FixedSparsityConfig.__module__,
}
with open(f"{args.out}.{os.environ['RANK']}", "w") as file:
    json.dump(seen, file)
