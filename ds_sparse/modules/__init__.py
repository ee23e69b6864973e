"""Attention as modules of PyTorch, which know neither DeepSpeed nor Transformers."""
