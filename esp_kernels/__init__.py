"""Kernels for training-free multi-token prediction: tree attention over a cached prefix, verification,
draft-tree expansion and what stands between them. Every op works on [B, T, ...] blocks of rows."""

from esp_kernels import _library
from esp_kernels._backend import BackendWarning
from esp_kernels.ops.commit_kv import commit_kv
from esp_kernels.ops.embed_block import embed_block
from esp_kernels.ops.rms_norm import rms_norm
from esp_kernels.ops.rope_append import rope_append
from esp_kernels.ops.swiglu import swiglu
from esp_kernels.ops.update_probe import update_probe

_library.register_fallbacks()

__all__ = [
    "BackendWarning",
    "commit_kv",
    "embed_block",
    "rms_norm",
    "rope_append",
    "swiglu",
    "update_probe",
]
