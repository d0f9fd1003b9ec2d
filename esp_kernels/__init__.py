"""Kernels for training-free multi-token prediction: tree attention over a cached prefix, verification,
draft-tree expansion and what stands between them. Every op works on [B, T, ...] blocks of rows."""

from esp_kernels import _library
from esp_kernels._backend import BackendWarning
from esp_kernels.ops.linear_rows import linear_rows, pack_linear
from esp_kernels.ops.rms_norm import rms_norm
from esp_kernels.ops.topk_logprobs import topk_logprobs

_library.register_fallbacks()

__all__ = [
    "BackendWarning",
    "linear_rows",
    "pack_linear",
    "rms_norm",
    "topk_logprobs",
]
