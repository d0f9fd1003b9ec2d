import torch
from torch.nn.functional import pad


def verify_tree(
    choice: torch.Tensor, tokens: torch.Tensor, parent: torch.Tensor, mask_ordinal: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, rows = choice.shape
    if rows == 0:
        nothing = choice.new_full((batch,), -1)
        return torch.empty_like(choice), nothing, nothing.clone()
    row = torch.arange(rows, dtype=torch.int32, device=choice.device)

    # follower[b, r]: the row that the walk takes after r; `rows` when it stops
    matches = (
        (parent[:, None, :] == row[:, None])
        & (row > row[:, None])
        & (mask_ordinal[:, None, :] == 0)
        & (tokens[:, None, :] == choice[:, :, None])
    )
    follower = pad(torch.where(matches, row, rows).amin(2), (0, 1), value=rows).long()

    # The walk of twice the length is the walk, then the same taken on from where each of its rows leads.
    path = torch.where(mask_ordinal[:, :1] == 0, 0, rows)
    while path.shape[1] < rows:
        path = torch.cat([path, follower.gather(1, path)], 1)
        follower = follower.gather(1, follower)
    path = path[:, :rows]
    taken = path < rows
    accepted = taken.sum(1, dtype=torch.int32) - 1
    last = path.gather(1, accepted[:, None].clamp(min=0).long())
    bonus = pad(choice, (0, 1), value=-1).gather(1, last)
    return torch.where(taken, path, -1).int(), accepted, bonus[:, 0]
