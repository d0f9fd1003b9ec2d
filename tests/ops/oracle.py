"""Tree attention in float64, from `parent` alone: what a row sees is found by walking up, so neither
ancestors nor depth nor any code under test has a part in it."""

from collections.abc import Sequence

import torch

from esp_kernels.testing import PADDING

Parents = Sequence[Sequence[int]]


def path(parent: Sequence[int], row: int) -> list[int]:
    """From the root down to the row itself; empty for padding."""
    if parent[row] == PADDING:
        return []
    up = [row]
    while parent[up[-1]] >= 0:
        up.append(parent[up[-1]])
    return up[::-1]


def metadata(parents: Parents) -> tuple[torch.Tensor, torch.Tensor]:
    """ancestors [B, T, W] int64 and depth [B, T] int32."""
    lines = [[path(parent, r) for r in range(len(parent))] for parent in parents]
    width = (len(parents[0]) + 63) // 64
    masks = [[sum(1 << j for j in line) for line in lines_of_one] for lines_of_one in lines]
    words = [[[_signed(mask >> 64 * w) for w in range(width)] for mask in row] for row in masks]
    depth = [[len(line) - 1 for line in lines_of_one] for lines_of_one in lines]
    return torch.tensor(words, dtype=torch.int64), torch.tensor(depth, dtype=torch.int32)


def _signed(bits: int) -> int:
    """The lowest 64 bits as an int64."""
    bits &= (1 << 64) - 1
    return bits - (1 << 64) if bits >> 63 else bits


def visible(
    parents: Parents, prefix_len: Sequence[int], slots: int, window: int | None = None
) -> torch.Tensor:
    """[B, T, slots]: whether a row sees what lies in a slot."""
    seen = torch.zeros(len(parents), len(parents[0]), slots, dtype=torch.bool)
    for b, (parent, prefix) in enumerate(zip(parents, prefix_len, strict=True)):
        for r in range(len(parent)):
            line = path(parent, r)
            if line:
                keys = [*range(prefix), *(prefix + j for j in line)]
                seen[b, r, keys if window is None else keys[-window:]] = True
    return seen


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense float64 attention of q [B, T, Hq, D] to the seen of k and v [B, S, Hkv, D]: out and lse."""
    group = q.shape[2] // k.shape[2]
    keys, values = (x.double().repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bths", q.double(), keys) * (
        q.shape[-1] ** -0.5 if scale is None else scale
    )
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores[~seen[:, :, None].expand_as(scores)] = -torch.inf
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.where(lse.isneginf(), lse, torch.logaddexp(lse, sinks.double()))
    weights = (scores - lse.nan_to_num(neginf=0)[..., None]).exp()
    return torch.einsum("bths,bshd->bthd", weights, values), lse
