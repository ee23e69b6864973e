"""An accelerate loop: DEEPSPEED_JSON OUT."""

import json
import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from model import make_model, make_samples

accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=sys.argv[1]))
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(make_samples(2), batch_size=2)
engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for batch in loader:
    loss = engine(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
with open(sys.argv[2], "w") as file:
    json.dump({"losses": losses, "attention": model.config._attn_implementation}, file)
