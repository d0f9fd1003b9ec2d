"""The K/V cache of one model and batch, dense, with the rotary tables for its positions."""

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
