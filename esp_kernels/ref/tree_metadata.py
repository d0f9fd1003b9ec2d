import torch
from torch.nn.functional import pad

from esp_kernels._block import ROOT


def tree_metadata(parent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, rows = parent.shape
    row = torch.arange(rows, device=parent.device)
    word = torch.arange((rows + 63) // 64, device=parent.device)
    own = torch.where(row[:, None] // 64 == word, 1 << row[:, None] % 64, 0)

    # One slot more, which stands above every root: it is no row, and it hangs from itself.
    above = pad(torch.where((parent >= 0) & (parent < row), parent, rows), (0, 1), value=rows).long()
    seen = pad(own, (0, 0, 0, 1)).expand(batch, -1, -1)
    count = pad(torch.ones_like(parent), (0, 1))
    rooted = pad((parent == ROOT) & (row == 0), (0, 1))

    # After j turns a row has gathered the 2^j rows of its path that begin with itself.
    for _ in range(rows.bit_length()):
        seen = seen | seen.gather(1, above[:, :, None].expand_as(seen))
        count = count + count.gather(1, above)
        rooted = rooted | rooted.gather(1, above)
        above = above.gather(1, above)
    seen, count, rooted = seen[:, :rows], count[:, :rows], rooted[:, :rows]
    return torch.where(rooted, count - 1, -1), torch.where(rooted[:, :, None], seen, 0)
