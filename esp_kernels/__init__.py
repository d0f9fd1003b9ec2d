"""Kernels for training-free multi-token prediction: tree attention over a cached prefix, verification,
draft-tree expansion and what stands between them. Every op works on [B, T, ...] blocks of rows."""

from esp_kernels import _library
from esp_kernels._backend import BackendWarning
from esp_kernels.ops.rms_norm import rms_norm
from esp_kernels.ops.tree_attention import tree_attention

_library.register_fallbacks()

__all__ = [
    "BackendWarning",
    "rms_norm",
    "tree_attention",
]
