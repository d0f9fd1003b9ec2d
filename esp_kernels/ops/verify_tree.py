"""Greedy verification of a draft tree."""

import torch

from esp_kernels import _backend
from esp_kernels._check import ANY, check_index, require


def verify_tree(
    choice: torch.Tensor,
    tokens: torch.Tensor,
    parent: torch.Tensor,
    mask_ordinal: torch.Tensor,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk from the root to the child that carries the current row's choice, as long as there is one.

    choice        [B, T] int32: the model's own next token after each row, by argmax or one draw
    tokens        [B, T] int32: the token that each row holds
    parent        [B, T] int32: the earlier row that each row hangs from
    mask_ordinal  [B, T] int32: 0 for token rows, the only ones that the walk can reach; i >= 1 for masks;
                  -1 for padding, in row 0 for a padded sequence
    returns       path [B, T] int32: the rows of the walk, 0 first, then -1
                  accepted [B] int32: the draft rows in it, root not counted; -1 for a padded sequence
                  bonus [B] int32: the choice of its last row, the next root; -1 for a padded sequence

    Of siblings with the same token the lowest row is taken. All tensors are contiguous. Raises ValueError on
    shapes, dtypes, devices or strides that are not as above, and on the CPU when row 0 is neither a root nor
    padding; on other devices it is then padding.
    """
    run = _backend.select("verify_tree", backend, choice, "choice")
    return run(choice, tokens, parent, mask_ordinal)


def check(
    choice: torch.Tensor, tokens: torch.Tensor, parent: torch.Tensor, mask_ordinal: torch.Tensor
) -> None:
    check_index(choice, "choice", choice, ANY, ANY)
    check_index(tokens, "tokens", choice, *choice.shape)
    check_index(parent, "parent", choice, *choice.shape)
    check_index(mask_ordinal, "mask_ordinal", choice, *choice.shape)
    if choice.device.type == "cpu" and choice.shape[1] > 0:
        for b, ordinal in enumerate(mask_ordinal[:, 0].tolist()):
            require(
                ordinal in (0, -1),
                f"mask_ordinal[{b}, 0] must be 0 (the root) or -1 (a padded sequence), got {ordinal}",
            )
