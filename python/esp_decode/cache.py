"""The K/V cache of one model and batch, dense, with the rotary tables for its positions."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import esp_kernels


@dataclass
class Cache:
    """Slots [0, prefix_len[b]) of sequence b are its prefix; the block of a step is written behind it.

    k, v        [layers, B, capacity, Hkv, D], the model's dtype
    cos, sin    [capacity, R / 2] float32, one row a position
    prefix_len  [B] int32
    """

    k: torch.Tensor
    v: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    prefix_len: torch.Tensor

    @classmethod
    def empty(
        cls, shape: Sequence[int], like: torch.Tensor, inverse_frequencies: torch.Tensor, rope_scale: float
    ) -> "Cache":
        """shape [layers, B, capacity, Hkv, D], of the dtype and on the device of `like`."""
        _, batch, capacity = shape[:3]
        angles = (
            torch.arange(capacity, dtype=torch.float32, device=like.device)[:, None] * inverse_frequencies
        )
        return cls(
            k=like.new_empty(shape),
            v=like.new_empty(shape),
            cos=angles.cos() * rope_scale,
            sin=angles.sin() * rope_scale,
            prefix_len=torch.zeros(batch, dtype=torch.int32, device=like.device),
        )

    @property
    def layers(self) -> list[torch.Tensor]:
        return [*self.k.unbind(), *self.v.unbind()]

    def commit(self, path: torch.Tensor, accepted: torch.Tensor) -> None:
        """Keep the root and the accepted rows of the block just run, and nothing else of it."""
        esp_kernels.commit_kv(self.layers, path, accepted, self.prefix_len)
        self.prefix_len += accepted + 1

    def advance(self, rows: int) -> None:
        """Keep the first `rows` rows of the block just run: a chain, already in place."""
        self.prefix_len += rows
