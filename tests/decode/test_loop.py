"""The loop itself: batches, chunked prefill, the cache's contents."""

import pytest
import torch

from esp_decode import loop
from esp_decode.cache import Cache
from esp_decode.drafters import ArDrafter, EspDrafter
from esp_decode.loop import decode, prefill, step
from esp_decode.tree import Block, TreeShape
from esp_decode.weights import load_model


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(tiny_folder("mistral-window"), torch.float32, torch.device("cpu"))


def prompt(length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, 128, (1, length), generator=generator, dtype=torch.int32)


def esp(model, tokens: torch.Tensor, tree: str = "dynamic", masks: int = 1) -> EspDrafter:
    shape = TreeShape.parse(tree, 24, masks, default_budget=24)
    return EspDrafter(model, tokens, shape, "prompt-mean", 0.1, True)


def tokens_of(model, drafter, tokens: torch.Tensor, count: int) -> list[int]:
    committed: list[int] = []
    for step_tokens in decode(model, drafter, tokens, capacity=tokens.shape[1] + count + 64):
        committed += [t for t in step_tokens[0].tolist() if t >= 0]
        if len(committed) >= count:
            return committed[:count]
    return committed


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_chunked_prefill_changes_nothing(rows, model, monkeypatch):
    tokens = prompt(70)
    whole = model.new_cache(1, 80)
    first, masks = prefill(model, esp(model, tokens), tokens, whole)
    monkeypatch.setattr(loop, "PREFILL_ROWS", rows)
    chunked = model.new_cache(1, 80)
    again, masks_again = prefill(model, esp(model, tokens), tokens, chunked)
    assert torch.equal(first, again) and torch.equal(masks, masks_again)
    assert torch.equal(whole.k[:, :, :70], chunked.k[:, :, :70])
    assert torch.equal(whole.v[:, :, :70], chunked.v[:, :, :70])


def test_the_cache_holds_what_plain_decoding_would(model):
    """Mask rows and rejected drafts leave no trace in the committed slots."""
    tokens = prompt(40)
    drafter = esp(model, tokens)
    cache = model.new_cache(1, 160)
    first, mask_logits = prefill(model, drafter, tokens, cache)
    block = drafter.draft(first, first[:, None], mask_logits)
    committed = [first.item()]
    for _ in range(20):
        verdict, block = step(model, drafter, block, cache)
        committed += [t for t in verdict.committed[0].tolist() if t >= 0]
    length = cache.prefix_len.item()
    assert length == 40 + len(committed) - 1, "all but the next root are cached"
    everything = torch.cat([tokens, torch.tensor([committed[:-1]], dtype=torch.int32)], dim=1)
    plain = model.new_cache(1, 160)
    prefill(model, ArDrafter(model, tokens), everything, plain)
    assert torch.equal(cache.k[:, :, :length], plain.k[:, :, :length])
    assert torch.equal(cache.v[:, :, :length], plain.v[:, :, :length])


def stack_caches(caches: list[Cache]) -> Cache:
    return Cache(
        k=torch.cat([c.k for c in caches], dim=1),
        v=torch.cat([c.v for c in caches], dim=1),
        cos=caches[0].cos,
        sin=caches[0].sin,
        prefix_len=torch.cat([c.prefix_len for c in caches]),
    )


def stack_blocks(blocks: list[Block]) -> Block:
    return Block(*(torch.cat(parts) for parts in zip(*(vars(b).values() for b in blocks), strict=True)))


def test_a_ragged_batch_decodes_as_its_sequences_alone(model):
    """Different prefix lengths and a different tree a sequence, in one forward."""
    prompts = [prompt(5), prompt(33), prompt(64)]
    alone = [tokens_of(model, esp(model, p), p, 40) for p in prompts]
    caches, blocks, firsts = [], [], []
    for p in prompts:
        drafter = esp(model, p)
        caches.append(model.new_cache(1, 256))
        first, mask_logits = prefill(model, drafter, p, caches[-1])
        blocks.append(drafter.draft(first, first[:, None], mask_logits))
        firsts.append((first, drafter.probe))
    batch = esp(model, torch.cat([p[:, :5] for p in prompts]))
    batch.probe = torch.cat([probe for _, probe in firsts])
    cache, block = stack_caches(caches), stack_blocks(blocks)
    together = [[first.item()] for first, _ in firsts]
    while min(map(len, together)) < 40:
        verdict, block = step(model, batch, block, cache)
        for tokens, row in zip(together, verdict.committed.tolist(), strict=True):
            tokens += [t for t in row if t >= 0]
    assert [t[:40] for t in together] == alone
