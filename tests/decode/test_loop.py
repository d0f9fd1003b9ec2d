"""The loop itself: batches, chunked prefill, the cache's contents."""

import itertools

import pytest
import torch

import esp_kernels
from esp_decode import loop
from esp_decode.cache import Cache
from esp_decode.drafters import Draft, EspDrafter, Outcome
from esp_decode.loop import State, decode, new_state, prefill, step
from esp_decode.probe import Probe
from esp_decode.tree import PLAIN, Block, TreeShape
from esp_decode.weights import load_model


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(tiny_folder("mistral-window"), torch.float32, torch.device("cpu"))


def prompt(length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, 128, (1, length), generator=generator, dtype=torch.int32)


def esp(model, tree: str = "dynamic", masks: int = 1, rows: int | None = None) -> EspDrafter:
    shape = TreeShape.parse(tree, 24, masks, default_budget=24)
    return EspDrafter(model, shape, rows or shape.rows, Probe("prompt-mean", 0.1), True)


def plain(model, rows: int = 1) -> EspDrafter:
    return EspDrafter(model, PLAIN, rows, Probe("vocab-mean", 0.0), True)


def started(drafter: EspDrafter, tokens: torch.Tensor) -> Draft:
    draft = drafter.new_draft(1, 64)
    drafter.start(tokens, draft)
    return draft


def outcome_of(logits: torch.Tensor, drafter: EspDrafter) -> Outcome:
    logprobs, ids = esp_kernels.topk_logprobs(logits, drafter.candidates)
    return Outcome(ids[..., 0], ids, logprobs, hidden=logits[..., :0])


def tokens_of(model, drafter, tokens: torch.Tensor, count: int) -> list[int]:
    state = new_state(model, drafter, 1, tokens.shape[1] + count + 64)
    committed: list[int] = []
    for step_tokens in decode(model, drafter, tokens, state):
        committed += [t for t in step_tokens[0].tolist() if t >= 0]
        if len(committed) >= count:
            return committed[:count]
    return committed


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_chunked_prefill_changes_nothing(rows, model, monkeypatch):
    tokens, drafter = prompt(70), esp(model)
    whole, chunked = (new_state(model, drafter, 1, 128) for _ in range(2))
    prefill(model, drafter, tokens, whole)
    monkeypatch.setattr(loop, "PREFILL_ROWS", rows)
    prefill(model, drafter, tokens, chunked)
    assert whole.cache.prefix_len.tolist() == chunked.cache.prefix_len.tolist() == [69]
    assert torch.equal(whole.cache.k[:, :, :69], chunked.cache.k[:, :, :69])
    assert torch.equal(whole.cache.v[:, :, :69], chunked.cache.v[:, :, :69])


def test_the_first_block_is_the_last_token_and_its_masks(model):
    draft = started(esp(model, "static:2,1", masks=2, rows=16), prompt(9))
    block = draft.block
    root = prompt(9)[0, -1].item()
    assert block.tokens.tolist() == [[root] + [-1] * 15]
    assert block.mask_ordinal.tolist() == [[0, -1, -1, -1, 1, 2] + [-1] * 10]
    assert block.depth.tolist() == [[0, -1, -1, -1, 1, 2] + [-1] * 10]
    assert draft.probe.shape == (1, 2, 64)


@pytest.mark.parametrize("tree", ["dynamic", "static:4"])
def test_a_pruned_tree_is_full(tree, model):
    """The candidate that repeats its node makes room for the next best, not for padding."""
    drafter = esp(model, tree)
    draft = started(drafter, prompt(9))
    logits = -torch.arange(128.0).repeat(1, drafter.rows, 1)
    drafter.advance(outcome_of(logits, drafter), draft)
    assert draft.block.tokens[0, : drafter.shape.nodes].tolist() == list(range(drafter.shape.nodes))


def test_the_cache_holds_what_plain_decoding_would(model):
    """Mask rows and rejected drafts leave no trace in the committed slots."""
    tokens, drafter = prompt(40), esp(model)
    state = new_state(model, drafter, 1, 160)
    committed = [
        t
        for some in itertools.islice(decode(model, drafter, tokens, state), 20)
        for t in some[0].tolist()
        if t >= 0
    ]
    length = state.cache.prefix_len.item()
    assert length == 40 + len(committed) - 1, "all but the next root are cached"
    everything = torch.cat([tokens, torch.tensor([committed], dtype=torch.int32)], dim=1)
    other = new_state(model, plain(model), 1, 160)
    prefill(model, plain(model), everything, other)
    assert torch.equal(state.cache.k[:, :, :length], other.cache.k[:, :, :length])
    assert torch.equal(state.cache.v[:, :, :length], other.cache.v[:, :, :length])


@pytest.mark.parametrize("tree", ["dynamic", "static:5,2"])
def test_padding_rows_change_nothing(tree, model):
    """A GPU runs blocks padded to a bucket, for plain decoding too."""
    tokens = prompt(20)
    expected = tokens_of(model, plain(model), tokens, 40)
    assert tokens_of(model, esp(model, tree, masks=2), tokens, 40) == expected
    assert tokens_of(model, esp(model, tree, masks=2, rows=64), tokens, 40) == expected
    assert tokens_of(model, plain(model, rows=16), tokens, 40) == expected


def test_a_state_serves_prompt_after_prompt(model):
    drafter = esp(model)
    state = new_state(model, drafter, 1, 256)
    for length in (33, 5, 64):
        again = [c[0].tolist() for c in itertools.islice(decode(model, drafter, prompt(length), state), 12)]
        fresh = new_state(model, drafter, 1, 256)
        assert again == [
            c[0].tolist() for c in itertools.islice(decode(model, drafter, prompt(length), fresh), 12)
        ]
        assert torch.equal(state.draft.probe, fresh.draft.probe)


def stack(states: list[State]) -> State:
    caches = [s.cache for s in states]
    blocks = [s.draft.block.tensors for s in states]
    return State(
        Cache(
            k=torch.cat([c.k for c in caches], dim=1),
            v=torch.cat([c.v for c in caches], dim=1),
            cos=caches[0].cos,
            sin=caches[0].sin,
            prefix_len=torch.cat([c.prefix_len for c in caches]),
        ),
        Draft(
            Block(*(torch.cat(parts) for parts in zip(*blocks, strict=True))),
            torch.cat([s.draft.probe for s in states]),
        ),
    )


def test_a_ragged_batch_decodes_as_its_sequences_alone(model):
    """Different prefix lengths and a different tree a sequence, in one forward."""
    drafter = esp(model)
    prompts = [prompt(5), prompt(33), prompt(64)]
    alone = [tokens_of(model, drafter, p, 40) for p in prompts]
    states = [new_state(model, drafter, 1, 256) for _ in prompts]
    for p, state in zip(prompts, states, strict=True):
        prefill(model, drafter, p, state)
    together, batch = [[], [], []], stack(states)
    while min(map(len, together)) < 40:
        verdict = step(model, drafter, batch)
        for tokens, row in zip(together, verdict.committed.tolist(), strict=True):
            tokens += [t for t in row if t >= 0]
    assert [t[:40] for t in together] == alone


def test_a_padded_sequence_stays_one_and_harms_nobody(model):
    drafter = esp(model)
    states = [new_state(model, drafter, 1, 256) for _ in range(2)]
    for state in states:
        prefill(model, drafter, prompt(33), state)
    expected = tokens_of(model, drafter, prompt(33), 30)
    batch = stack(states)
    for rows, nothing in zip(batch.draft.block.tensors, (-1, -2, -1, -1, 0), strict=True):
        rows[0] = nothing
    committed: list[int] = []
    while len(committed) < 30:
        verdict = step(model, drafter, batch)
        assert verdict.committed[0].eq(-1).all() and verdict.accepted[0] == -1
        committed += [t for t in verdict.committed[1].tolist() if t >= 0]
    assert committed[:30] == expected and batch.cache.prefix_len[0] == 32
