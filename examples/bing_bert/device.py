"""Chooses the device of a run. Import it before DeepSpeed, which looks for an accelerator when it is imported."""

from __future__ import annotations

import os

import torch

from ds_sparse.ops import BLOCK_OPERATORS, missing_kernels


def choose_device() -> tuple[torch.device, str]:
    """A GPU where all our operations run on it, else the CPU; and a sentence that says which and why.

    The GPU is this rank's, and from here on the current one: collectives that run before DeepSpeed's engine is there
    need that. cuBLAS repeats its sums exactly only with a workspace of fixed size, named before it starts.
    """
    if not torch.cuda.is_available():
        why = "no CUDA GPU is visible"
    elif missing := missing_kernels("cuda", BLOCK_OPERATORS):
        why = f"a GPU is there, but ds_sparse has no CUDA kernel yet for {', '.join(missing)}"
    else:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device, f"Training on {torch.cuda.get_device_name(device)}."
    os.environ["DS_ACCELERATOR"] = "cpu"
    return torch.device("cpu"), f"Training on the CPU with {torch.get_num_threads()} threads: {why}."


def device_name() -> str:
    """The GPU as its driver names it, or CPU."""
    return torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else "CPU"


DEVICE, DEVICE_SENTENCE = choose_device()
