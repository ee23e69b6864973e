"""Which device a run uses. Import it before DeepSpeed, which looks for an accelerator when it is imported."""

from __future__ import annotations

import os

import torch

from ds_sparse.ops import missing_kernels


def choose_device() -> tuple[torch.device, str]:
    """A GPU where all our operations run on it, else the CPU; and a sentence that says which and why."""
    if not torch.cuda.is_available():
        why = "no CUDA GPU is visible"
    elif missing_kernels("cuda"):
        why = f"a GPU is there, but ds_sparse has no CUDA kernel yet for {', '.join(missing_kernels('cuda'))}"
    else:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        return device, f"Training on {torch.cuda.get_device_name(device)}."
    os.environ["DS_ACCELERATOR"] = "cpu"
    return torch.device("cpu"), f"Training on the CPU with {torch.get_num_threads()} threads: {why}."


DEVICE, DEVICE_SENTENCE = choose_device()
