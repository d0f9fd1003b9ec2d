"""Kernels for training-free multi-token prediction: tree attention over a cached prefix, verification,
draft-tree expansion and what stands between them. Every op works on [B, T, ...] blocks of rows."""

from esp_kernels import _library
from esp_kernels._backend import BackendWarning
from esp_kernels._block import PADDING
from esp_kernels.ops._memory import Memory
from esp_kernels.ops.advance_block import advance_block
from esp_kernels.ops.commit_kv import commit_kv
from esp_kernels.ops.embed_block import embed_block
from esp_kernels.ops.expand_tree import expand_tree
from esp_kernels.ops.join_tree import join_tree
from esp_kernels.ops.learn_weights import learn_weights
from esp_kernels.ops.linear_rows import linear_rows, pack_linear
from esp_kernels.ops.remember_block import remember_block
from esp_kernels.ops.rms_norm import rms_norm
from esp_kernels.ops.rope_append import rope_append
from esp_kernels.ops.swiglu import swiglu
from esp_kernels.ops.topk_logprobs import topk_logprobs
from esp_kernels.ops.tree_attention import tree_attention
from esp_kernels.ops.tree_metadata import tree_metadata
from esp_kernels.ops.update_probe import update_probe
from esp_kernels.ops.verify_tree import verify_tree

_library.register_fallbacks()

__all__ = [
    "PADDING",
    "BackendWarning",
    "Memory",
    "advance_block",
    "commit_kv",
    "embed_block",
    "expand_tree",
    "join_tree",
    "learn_weights",
    "linear_rows",
    "pack_linear",
    "remember_block",
    "rms_norm",
    "rope_append",
    "swiglu",
    "topk_logprobs",
    "tree_attention",
    "tree_metadata",
    "update_probe",
    "verify_tree",
]
