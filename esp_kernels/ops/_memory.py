"""What a sequence has shown, and the sources of drafts that read it."""

from typing import NamedTuple

import torch

from esp_kernels._check import (
    ANY,
    check_contiguous,
    check_device,
    check_dtype,
    check_index,
    check_shape,
    require,
)

ORDERS = 4  # contexts of 1 to 4 tokens
PATTERNS = 16  # 4 * levels behind a mask (0: none, 1..3) + length of the copied context (0..3, 3 for longer)
SOURCES = 5  # mask, prior, recycled, context, copy
MAX_MASKS, MAX_CANDIDATES, MAX_LIST = 3, 64, 16


Lists = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""keys, list_ids and list_logprobs."""


class Memory(NamedTuple):
    """The tokens of each sequence, indexed by the 1 to 4 tokens before them, and what the model said behind
    contexts of 1 to 4 tokens, the latest answer for each. All contiguous.

    history        [B, C] int32: prompt and committed tokens, the next root last
    length         [B] int32: how many; 0 for a padded sequence
    heads          [B, 4, H] int32: where the latest n-gram of a bucket ends, -1 for none; n - 1 is the index
    links          [B, 4, C] int32: where the n-gram before it in the same bucket ends, -1 for none
    keys           [B, 4, S, 4] int32: whose list is kept in a slot, n tokens, the oldest first; -1 for none
    list_ids       [B, 4, S, L] int32, the most probable tokens behind it, best first; -1 behind the last
    list_logprobs  [B, 4, S, L] float32

    The bucket of an n-gram among H (or S) is floor(h H / 2^32), where h = 0, and for each of its tokens, the
    oldest first, h = (h xor (token + 1)) * 0x9E3779B1 mod 2^32, then h = h xor (h >> 15).
    """

    history: torch.Tensor
    length: torch.Tensor
    heads: torch.Tensor
    links: torch.Tensor
    keys: torch.Tensor
    list_ids: torch.Tensor
    list_logprobs: torch.Tensor

    @classmethod
    def empty(
        cls,
        batch: int,
        capacity: int,
        device: torch.device | str = "cpu",
        *,
        slots: int = 4096,
        width: int = 8,
    ) -> "Memory":
        """Room for `capacity` tokens a sequence, and for `slots` lists of `width` tokens of each order."""

        def ints(*shape: int) -> torch.Tensor:
            return torch.full((batch, *shape), -1, dtype=torch.int32, device=device)

        return cls(
            history=ints(capacity),
            length=torch.zeros(batch, dtype=torch.int32, device=device),
            heads=ints(ORDERS, capacity),
            links=ints(ORDERS, capacity),
            keys=ints(ORDERS, slots, ORDERS),
            list_ids=ints(ORDERS, slots, width),
            list_logprobs=ints(ORDERS, slots, width).float(),
        )

    @property
    def lists(self) -> "Lists":
        return self.keys, self.list_ids, self.list_logprobs

    def forget(self, lists: "Lists | None" = None) -> None:
        """Empties it in place; every sequence then has these lists, of one sequence, if they are given."""
        self.length.zero_()
        self.heads.fill_(-1)
        self.keys.fill_(-1)
        if lists is not None:
            for mine, given in zip(self.lists, lists, strict=True):
                mine.copy_(given)


def check_memory(memory: Memory) -> None:
    history = memory.history
    check_index(history, "history", history, ANY, ANY)
    batch, capacity = history.shape
    check_index(memory.length, "length", history, batch)
    check_index(memory.heads, "heads", history, batch, ORDERS, ANY)
    require(memory.heads.shape[2] >= 1, "heads must have at least 1 bucket, got 0")
    check_index(memory.links, "links", history, batch, ORDERS, capacity)
    check_index(memory.keys, "keys", history, batch, ORDERS, ANY, ORDERS)
    slots = memory.keys.shape[2]
    require(slots >= 1, "keys must have at least 1 slot, got 0")
    check_index(memory.list_ids, "list_ids", history, batch, ORDERS, slots, ANY)
    width = memory.list_ids.shape[3]
    require(width <= MAX_LIST, f"list_ids must have at most {MAX_LIST} tokens a list, got {width}")
    check_like_ids(memory.list_logprobs, "list_logprobs", memory.list_ids)
    if history.device.type == "cpu":
        for b, length in enumerate(memory.length.tolist()):
            require(
                0 <= length <= capacity, f"length[{b}] must be 0 to {capacity}, the capacity, got {length}"
            )


def check_sources(
    memory: Memory,
    mask_ids: torch.Tensor,
    mask_logprobs: torch.Tensor,
    prior_ids: torch.Tensor,
    prior_logprobs: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    history = memory.history
    batch = history.shape[0]
    check_index(mask_ids, "mask_ids", history, batch, ANY, ANY)
    masks, candidates = mask_ids.shape[1:]
    require(masks <= MAX_MASKS, f"mask_ids must have at most {MAX_MASKS} masks, got {masks}")
    require(
        candidates <= MAX_CANDIDATES,
        f"mask_ids must have at most {MAX_CANDIDATES} candidates a mask, got {candidates}",
    )
    check_like_ids(mask_logprobs, "mask_logprobs", mask_ids)
    check_index(prior_ids, "prior_ids", history, ANY, ANY)
    width = prior_ids.shape[1]
    require(width <= MAX_LIST, f"prior_ids must have at most {MAX_LIST} tokens a list, got {width}")
    check_like_ids(prior_logprobs, "prior_logprobs", prior_ids)
    check_device(weights, "weights", history)
    check_dtype(weights, "weights", torch.float32)
    check_shape(weights, "weights", batch, PATTERNS, SOURCES + 1)
    check_contiguous(weights, "weights")


def check_like_ids(logprobs: torch.Tensor, name: str, ids: torch.Tensor) -> None:
    check_device(logprobs, name, ids)
    check_dtype(logprobs, name, torch.float32)
    check_shape(logprobs, name, *ids.shape)
    check_contiguous(logprobs, name)
