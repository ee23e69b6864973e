"""Sparse attention as a first C++ loop writes it: one thread, one number after another. The yardstick of a learner.

Compiled when it is first asked for, with the C++ compiler that the package was built with; forward only, fp32.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_sparse.bench.reasons import Unsupported
from ds_sparse.index import TokenIndex

SOURCE = r"""
#include <cmath>
#include <cstdint>
#include <vector>

extern "C" void attention(const float* q, const float* k, const float* v, const int64_t* columns,
                          const int64_t* offsets, int64_t rows, int64_t depth, float scale, float* out) {
  std::vector<float> scores;
  for (int64_t i = 0; i < rows; ++i) {
    scores.clear();
    float largest = -INFINITY, total = 0;
    for (int64_t n = offsets[i]; n < offsets[i + 1]; ++n) {
      float dot = 0;
      for (int64_t d = 0; d < depth; ++d) dot += q[i * depth + d] * k[columns[n] * depth + d];
      scores.push_back(dot * scale);
      largest = std::fmax(largest, dot * scale);
    }
    for (float& score : scores) total += score = std::exp(score - largest);
    for (int64_t d = 0; d < depth; ++d) out[i * depth + d] = 0;
    for (int64_t n = offsets[i]; n < offsets[i + 1]; ++n)
      for (int64_t d = 0; d < depth; ++d)
        out[i * depth + d] += scores[n - offsets[i]] / total * v[columns[n] * depth + d];
  }
}
"""


def plain_loop(index: TokenIndex) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention of contiguous query, key and value (B, H, T, D) over lists that all heads share, head after head.

    Raises:
        Unsupported: no compiler; when called, another device or dtype.
    """
    attention = _compiled().attention
    lists: tuple[Any, ...] = index.csr()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.device.type != "cpu" or q.dtype != torch.float32:
            raise Unsupported("fp32 on a CPU only")
        output = torch.empty_like(v)
        for matrices in zip(*(x.flatten(0, 1) for x in (q, k, v, output)), strict=True):
            *given, written = (ctypes.c_void_p(x.data_ptr()) for x in matrices)
            numbers = (ctypes.c_void_p(x.data_ptr()) for x in lists)
            sizes = (ctypes.c_int64(n) for n in q.shape[2:])
            attention(*given, *numbers, *sizes, ctypes.c_float(q.shape[3] ** -0.5), written)
        return output

    return call


@cache
def _compiled() -> ctypes.CDLL:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "c++", "clang++"))), None)
    if compiler is None:
        raise Unsupported("no C++ compiler")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "plain_loop.so"
        command = [compiler, "-xc++", "-", "-O3", "-shared", "-fPIC", "-o", str(library)]
        done = subprocess.run(command, input=SOURCE, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unsupported(f"{compiler} does not compile it")
        return ctypes.CDLL(str(library))
