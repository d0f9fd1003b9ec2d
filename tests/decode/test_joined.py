"""Drafter `joined`: exact, batched, within its budget, and small where drafts are hopeless."""

import itertools
from dataclasses import replace

import pytest
import torch

import esp_kernels
from esp_decode.calibrate.prior import successors
from esp_decode.drafters import Outcome
from esp_decode.drafters.joined import JoinedDraft, JoinedDrafter
from esp_decode.loop import State, decode, new_state, prefill, step
from esp_decode.probe import Probe
from esp_decode.sources import Sources, default_sources
from esp_decode.tree import with_metadata
from esp_decode.weights import load_model
from esp_kernels import Memory

from .conftest import TINY, ids_decoder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(tiny_folder("tied"), torch.float32, CPU)


@pytest.fixture(scope="module")
def sources(model) -> Sources:
    """With a prior of all tokens."""
    prior = successors(model, 0, lambda done, total: None)
    return replace(default_sources(CPU), prior=prior)


def prompt(length: int) -> torch.Tensor:
    return torch.randint(1, 128, (1, length), generator=torch.Generator().manual_seed(length)).int()


def joined(model, sources: Sources, budget: int = 24, probe: str = "prompt-mean") -> JoinedDrafter:
    return JoinedDrafter(model, sources, Probe.parse(probe, None), budget, budget)


def committed_by(tokens: torch.Tensor) -> list[int]:
    return [t for t in tokens[0].tolist() if t >= 0]


def tokens_of(model, drafter: JoinedDrafter, tokens: torch.Tensor, count: int) -> list[int]:
    state = new_state(model, drafter, 1, tokens.shape[1] + count + 2 * drafter.rows)
    committed: list[int] = []
    for some in decode(model, drafter, tokens, state):
        committed += committed_by(some)
        if len(committed) >= count:
            break
    return committed[:count]


@pytest.mark.parametrize("kind", TINY)
def test_every_family_equals_plain_decoding(kind, tiny_folder):
    folder, ids = tiny_folder(kind), prompt(40)[0].tolist()
    plain = ids_decoder(folder, drafter="ar").generate(ids, max_new_tokens=60)
    for budget in (2, 10, 60):
        result = ids_decoder(folder, drafter="joined", budget=budget).generate(ids, max_new_tokens=60)
        assert result.output_ids == plain.output_ids, budget
        assert result.decode_calls <= plain.decode_calls


@pytest.mark.parametrize("probe", ["prompt-mean", "vocab-median", "last-k"])
def test_a_prior_and_any_probe_leave_it_exact(probe, model, sources, tiny_folder):
    plain = ids_decoder(tiny_folder("tied"), drafter="ar").generate(prompt(20)[0].tolist(), max_new_tokens=80)
    assert tokens_of(model, joined(model, sources, probe=probe), prompt(20), 80) == plain.output_ids


def test_drafts_are_accepted_and_masks_do_their_part(tiny_folder):
    """What the tests above compare does not all come from the model's own choices."""
    ids = prompt(70)[0].tolist()
    decoder = ids_decoder(tiny_folder("tied"), drafter="joined", budget=60)
    assert decoder.generate(ids, max_new_tokens=80).decode_calls < 60


@pytest.mark.parametrize("budget", [2, 7, 33])
def test_the_budget_is_kept_and_used(budget, model, sources):
    drafter = joined(model, sources, budget)
    state = new_state(model, drafter, 1, 256)
    most = 0
    for _ in itertools.islice(decode(model, drafter, prompt(30), state), 30):
        ordinal = state.draft.block.mask_ordinal
        most = max(most, ordinal.shape[1])
        assert int((ordinal == 0).sum()) >= 1
    assert most == budget


def test_a_state_serves_prompt_after_prompt(model, sources):
    """Nothing that one prompt has shown, or taught, is left for the next."""
    drafter = joined(model, sources)
    state = new_state(model, drafter, 1, 256)
    for length in (33, 5, 64):
        fresh = new_state(model, drafter, 1, 256)
        again, once = (
            [committed_by(c) for c in itertools.islice(decode(model, drafter, prompt(length), s), 15)]
            for s in (state, fresh)
        )
        assert again == once
        assert torch.equal(state.draft.weights, fresh.draft.weights)


def stack(states: list[State], rows: int) -> State:
    caches, drafts = [s.cache for s in states], [s.draft for s in states]
    cache = replace(
        caches[0],
        k=torch.cat([c.k for c in caches], dim=1),
        v=torch.cat([c.v for c in caches], dim=1),
        prefix_len=torch.cat([c.prefix_len for c in caches]),
    )
    blocks = [with_metadata(b.tokens, b.parent, b.mask_ordinal, rows) for b in (d.block for d in drafts)]
    parts = zip(*((b.tokens, b.parent, b.mask_ordinal) for b in blocks), strict=True)
    together = {
        name: torch.cat([vars(d)[name] for d in drafts])
        for name in ("probe", "mask_ids", "mask_logprobs", "weights")
    }
    memory = Memory(*(torch.cat(part) for part in zip(*(d.memory for d in drafts), strict=True)))
    block = with_metadata(*(torch.cat(part) for part in parts), rows)
    return State(cache, JoinedDraft(block=block, memory=memory, **together))


def started(model, drafter: JoinedDrafter, prompts: list[torch.Tensor]) -> list[State]:
    states = [new_state(model, drafter, 1, 256) for _ in prompts]
    for tokens, state in zip(prompts, states, strict=True):
        prefill(model, drafter, tokens, state)
    return states


def test_a_ragged_batch_decodes_as_its_sequences_alone(model, sources):
    drafter = joined(model, sources)
    prompts = [prompt(5), prompt(33), prompt(64)]
    alone = [tokens_of(model, drafter, p, 50) for p in prompts]
    batch = stack(started(model, drafter, prompts), drafter.rows)
    together: list[list[int]] = [[], [], []]
    while min(map(len, together)) < 50:
        for tokens, row in zip(together, step(model, drafter, batch).committed.tolist(), strict=True):
            tokens += [t for t in row if t >= 0]
    assert [t[:50] for t in together] == alone


def test_a_padded_sequence_stays_one_and_harms_nobody(model, sources):
    drafter = joined(model, sources)
    expected = tokens_of(model, drafter, prompt(33), 30)
    batch = stack(started(model, drafter, [prompt(33), prompt(33)]), drafter.rows)
    for rows, nothing in zip(batch.draft.block.tensors, (-1, esp_kernels.PADDING, -1, -1, 0), strict=True):
        rows[0] = nothing
    batch.draft.memory.length[0] = 0
    committed: list[int] = []
    while len(committed) < 30:
        verdict = step(model, drafter, batch)
        assert verdict.committed[0].eq(-1).all() and verdict.accepted[0] == -1
        committed += [t for t in verdict.committed[1].tolist() if t >= 0]
    assert committed[:30] == expected


def test_hopeless_drafts_shrink_the_block(model):
    """A model that says something else each time, with confidence: what was sure at first is given up."""
    drafter = joined(model, replace(default_sources(CPU), least=0.02), budget=60)
    state = new_state(model, drafter, 1, 512)
    drafter.start(prompt(40), state.draft)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(120):
        block = state.draft.block
        rows.append(block.tokens.shape[1])
        logits = 4 * torch.randn((1, rows[-1], 128), generator=generator)
        logprobs, ids = esp_kernels.topk_logprobs(logits, drafter.candidates)
        drafter.advance(Outcome(ids[..., 0], ids, logprobs, hidden=logits[..., :0]), state.draft)
    assert sum(rows[:20]) / 20 > 9
    assert sum(rows[-20:]) / 20 < 6, "little more than the root and its masks"
