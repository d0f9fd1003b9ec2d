"""The decode loop: one forward a step verifies the last draft and proposes the next."""

from collections.abc import Iterator

import torch

from esp_decode.cache import Cache
from esp_decode.drafters import Drafter
from esp_decode.model import Model
from esp_decode.tree import Block, chain_block
from esp_decode.verify import Verdict, verify
from esp_kernels.nvtx import span

PREFILL_ROWS = 256


def decode(model: Model, drafter: Drafter, prompt: torch.Tensor, capacity: int) -> Iterator[torch.Tensor]:
    """Yields the tokens committed by prefill [B, 1], then by each decode call [B, T] (-1 behind the last).

    prompt    [B, N] int32, N >= 1
    capacity  slots of the cache: the prompt, the tokens to generate and `drafter.rows` more
    """
    cache = model.new_cache(prompt.shape[0], capacity)
    with span("prefill"):
        first, mask_logits = prefill(model, drafter, prompt, cache)
    yield first[:, None]
    block = drafter.draft(first, first[:, None].contiguous(), mask_logits)
    while True:
        with span("step"):
            verdict, block = step(model, drafter, block, cache)
        yield verdict.committed


def prefill(
    model: Model, drafter: Drafter, prompt: torch.Tensor, cache: Cache
) -> tuple[torch.Tensor, torch.Tensor]:
    """Caches the prompt. Returns the first token [B] and the logits [B, masks, V] of the masks behind it."""
    *head, tail = prompt.split(PREFILL_ROWS, dim=1)
    for tokens in head:
        model.forward(chain_block(tokens, masks=0), drafter.probe, cache)
        cache.advance(tokens.shape[1])
    hidden = model.forward(chain_block(tail, drafter.masks), drafter.probe, cache)
    cache.advance(tail.shape[1])
    logits = model.lm_head(hidden[:, tail.shape[1] - 1 :])
    return logits[:, 0].argmax(dim=-1).int(), logits[:, 1:]


def step(model: Model, drafter: Drafter, block: Block, cache: Cache) -> tuple[Verdict, Block]:
    """One decode call. The rows that are not accepted leave no trace: their slots are written over."""
    logits = model.lm_head(model.forward(block, drafter.probe, cache))
    verdict = verify(block, logits)
    cache.commit(verdict.path, verdict.accepted)
    mask_logits = logits_of_masks(logits, verdict.deepest, drafter.masks)
    return verdict, drafter.draft(verdict.bonus, verdict.committed, mask_logits)


def logits_of_masks(logits: torch.Tensor, owner: torch.Tensor, masks: int) -> torch.Tensor:
    """The logits [B, masks, V] of the mask rows that belong to the rows `owner` [B]."""
    nodes = logits.shape[1] // (masks + 1)
    first = nodes + owner.long() * masks
    rows = first[:, None] + torch.arange(masks, device=logits.device)
    return logits.gather(1, rows[..., None].expand(-1, -1, logits.shape[2]))
