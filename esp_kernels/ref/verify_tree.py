import torch


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
    follower = torch.where(matches, row, rows).amin(2)
    follower = torch.nn.functional.pad(follower, (0, 1), value=rows)

    here = torch.where(mask_ordinal[:, :1] == 0, 0, rows)
    walk = [here]
    for _ in range(rows - 1):
        here = follower.gather(1, here)
        walk.append(here.long())
    path = torch.cat(walk, 1)
    taken = path < rows
    accepted = taken.sum(1, dtype=torch.int32) - 1
    last = path.gather(1, accepted[:, None].clamp(min=0).long())
    bonus = torch.nn.functional.pad(choice, (0, 1), value=-1).gather(1, last)
    return torch.where(taken, path, -1).int(), accepted, bonus[:, 0]
