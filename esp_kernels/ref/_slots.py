import torch


def locate(
    b: torch.Tensor, slot: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The page and the row in it, as indices into `cache`, of each slot of its sequence b."""
    if block_table is None:
        return b, slot
    page_size = cache.shape[1]
    return block_table[b, slot // page_size], slot % page_size
