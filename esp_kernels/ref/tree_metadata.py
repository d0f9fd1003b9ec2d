import torch

from esp_kernels._block import ROOT


def tree_metadata(parent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, rows = parent.shape
    depth = torch.full_like(parent, -1)
    ancestors = torch.zeros((batch, rows, (rows + 63) // 64), dtype=torch.int64, device=parent.device)
    bit = 1 << torch.arange(rows, device=parent.device) % 64
    sequence = torch.arange(batch, device=parent.device)
    for r in range(rows):
        above = parent[:, r].clamp(0, r)  # r itself still looks like padding, and the root hangs from that
        hangs = (parent[:, r] >= 0) & (depth[sequence, above] >= 0)
        real = hangs if r else parent[:, r] == ROOT
        depth[:, r] = torch.where(real, depth[sequence, above] + 1, -1)
        ancestors[:, r] = torch.where(real[:, None], ancestors[sequence, above], 0)
        ancestors[:, r, r // 64] += torch.where(real, bit[r], 0)
    return depth, ancestors
