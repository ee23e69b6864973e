"""A Transformers Trainer. Writes the loss of its first step and the attention to the output folder."""

import json
import os

from model import make_model, make_samples
from transformers import HfArgumentParser, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
model = make_model()
trainer = Trainer(model=model, args=args, train_dataset=make_samples(4))
trainer.train()
if trainer.is_world_process_zero():
    seen = {"losses": [trainer.state.log_history[0]["loss"]], "attention": model.config._attn_implementation}
    with open(os.path.join(args.output_dir, "trainer.out"), "w") as file:
        json.dump(seen, file)
