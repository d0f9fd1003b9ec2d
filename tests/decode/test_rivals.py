"""Rival drafters: exact, within the budget, and each its own mechanism against one that scans."""

import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esp_decode.drafters import lade
from esp_decode.drafters.best_first import best_first
from esp_decode.drafters.host import Node, SeenRow
from esp_decode.drafters.lade import LadeProposer
from esp_decode.drafters.options import PROPOSERS
from esp_decode.drafters.pld import PldProposer
from esp_decode.drafters.recycling import RANKS, RecyclingProposer
from esp_decode.drafters.stand import StandProposer
from esp_decode.drafters.suffix import DEEPEST, SuffixProposer
from esp_decode.sources import contexts_of
from esp_kernels import Memory

from .conftest import ids_decoder

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def prompt(length: int) -> list[int]:
    return torch.randint(1, 128, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@pytest.mark.parametrize("drafter", PROPOSERS)
@pytest.mark.parametrize("kind", ["tied", "mistral-window"])
def test_equals_plain_decoding(drafter, kind, tiny_folder):
    folder = tiny_folder(kind)
    plain = ids_decoder(folder, drafter="ar").generate(prompt(40), max_new_tokens=60)
    for budget in (2, 10, 60):
        result = ids_decoder(folder, drafter=drafter, budget=budget).generate(prompt(40), max_new_tokens=60)
        assert result.output_ids == plain.output_ids, budget
        assert result.decode_calls <= plain.decode_calls


@pytest.mark.parametrize("drafter", PROPOSERS)
def test_a_decoder_forgets_between_prompts(drafter, tiny_folder):
    decoder = ids_decoder(tiny_folder("tied"), drafter=drafter, budget=30)
    first, _, again = (decoder.generate(prompt(n), max_new_tokens=40) for n in (20, 33, 20))
    assert (first.output_ids, first.decode_calls) == (again.output_ids, again.decode_calls)


@pytest.mark.parametrize("drafter", ["lade", "stand", "recycling", "suffix"])
def test_drafts_are_accepted(drafter, tiny_folder):
    result = ids_decoder(tiny_folder("tied"), drafter=drafter, budget=60).generate(
        prompt(40), max_new_tokens=80
    )
    assert result.decode_calls < 79


def run(proposer, start: list[int], committed: list[int], choice: int = 0) -> list[list[Node]]:
    """Its proposals when each step commits one token and every row's best token is `choice` and so on."""
    proposer.start(start)
    proposals: list[list[Node]] = [[]]
    tokens = list(start)
    for token in committed:
        others = [t for t in range(8) if t != token][:7]
        rows = [SeenRow(tokens[-1], -1, [token, *others], [-0.1 * i for i in range(8)])]
        said = ([choice + i for i in range(8)], [-1.0 * i for i in range(8)])
        rows += [SeenRow(node.token, node.parent, *said) for node in proposals[-1]]
        proposer.observe([token], rows)
        tokens.append(token)
        proposals.append(proposer.propose())
    return proposals[1:]


@settings(max_examples=25, deadline=None)
@given(start=TEXTS, committed=TEXTS, budget=st.integers(2, 70), drafter=st.sampled_from(list(PROPOSERS)))
def test_proposals_are_trees_within_the_budget(start, committed, budget, drafter):
    for nodes in run(PROPOSERS[drafter][0](budget, {}), start, committed):
        assert len(nodes) <= budget - 1
        assert all(0 <= node.parent <= row for row, node in enumerate(nodes))
        if drafter != "lade":  # whose window may repeat what its pool drafts
            assert len({*map(vars_of, nodes)}) == len(nodes)


def vars_of(node: Node) -> tuple[int, int]:
    return node.parent, node.token


def chain(nodes: list[Node]) -> list[int]:
    assert [node.parent for node in nodes] == list(range(len(nodes)))
    return [node.token for node in nodes]


@settings(max_examples=60, deadline=None)
@given(start=TEXTS, committed=TEXTS)
def test_pld_copies_behind_the_latest_longest_suffix(start, committed):
    for step, nodes in enumerate(run(PldProposer(30), start, committed), 1):
        tokens = start + committed[:step]
        found: list[int] = []
        for n in (3, 2, 1):
            ends = [e for e in range(n, len(tokens)) if tokens[e - n : e] == tokens[-n:]]
            if ends and n <= len(tokens):
                found = tokens[ends[-1] : ends[-1] + 10]
                break
        assert chain(nodes) == found


@settings(max_examples=40, deadline=None)
@given(start=TEXTS, committed=TEXTS)
def test_suffix_drafts_are_the_most_frequent_behind_the_best_suffix(start, committed):
    for step, nodes in enumerate(run(SuffixProposer(9), start, committed), 1):
        tokens = start + committed[:step]
        suffixes = [tokens[-n:] for n in range(1, min(DEEPEST, len(tokens)) + 1)]
        chances = [found for gram in suffixes if (found := frequencies(tokens, gram))]
        paths: list[tuple[int, ...]] = [()]
        for node in nodes:
            paths.append((*paths[node.parent], node.token))
        limits = [min(8, SuffixProposer.PER_TOKEN * n) for n in range(1, len(chances) + 1)]
        expected = [
            sum(sorted(found.values(), reverse=True)[:limit])
            for found, limit in zip(chances, limits, strict=True)
        ]
        best = pytest.approx(max(expected, default=0.0))
        mine = [sum(found.get(path, 0.0) for path in paths[1:]) for found in chances] or [0.0]
        assert best in mine, "what the drafts of one suffix are worth"


def frequencies(tokens: list[int], gram: list[int]) -> dict[tuple[int, ...], float]:
    """Of every continuation of an n-gram how probable it is by frequency, as deep as the tree."""
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for path in iter_growing(chances):
        whole = [*gram, *path]
        n = len(whole)
        behind = (
            [tokens[e] for e in range(n, len(tokens)) if tokens[e - n : e] == whole] if n < DEEPEST else []
        )
        for token in set(behind):
            chances[(*path, token)] = chances[path] * behind.count(token) / len(behind)
    return {path: chance for path, chance in chances.items() if path}


def iter_growing(paths: dict[tuple[int, ...], float]) -> Iterator[tuple[int, ...]]:
    """The keys of a dictionary that grows meanwhile."""
    for i in itertools.count():
        if i == len(paths):
            return
        yield next(itertools.islice(paths, i, None))


def test_recycling_fills_its_tree_from_the_latest_candidates():
    proposer = RecyclingProposer(7, {})
    proposer.start([5])
    first = [SeenRow(5, -1, [1, 2, 3], [0.0] * 3), SeenRow(1, 0, [9, 8, 7], [0.0] * 3)]
    proposer.observe([1], first)
    assert {vars_of(node) for node in proposer.propose()} <= {(0, 9), (0, 8), (0, 7)}, (
        "1 was a rejected draft"
    )
    proposer.observe([5], [SeenRow(1, -1, [5, 6, 7], [0.0] * 3)])
    nodes = proposer.propose()
    for row in range(len(nodes) + 1):
        token = nodes[row - 1].token if row else 5
        below = [node.token for node in nodes if node.parent == row]
        latest = {5: [1, 2, 3], 1: [5, 6, 7]}.get(token, [])
        assert below == latest[: len(below)]
    assert (0, 1) in map(vars_of, nodes) and (1, 5) in map(vars_of, nodes)


def test_the_recycling_tree_holds_the_most_probable_ranks():
    nodes = best_first(lambda path: enumerate(RANKS), 59)
    chance = [1.0]
    for node in nodes:
        chance.append(chance[node.parent] * RANKS[node.token])
    every, level = [], [1.0]
    while level:
        level = [p * q for p in level for q in RANKS if p * q >= chance[-1] * 0.999]
        every += level
    every.sort(reverse=True)
    assert chance[1:] == pytest.approx(every[:59])


def test_profile_lists_are_known_from_the_start():
    memory = Memory.empty(1, 8)
    memory.keys[0, 0, 7, 0] = 5
    memory.list_ids[0, 0, 7] = torch.tensor([4, 3, -1, -1, -1, -1, -1, -1])
    memory.list_logprobs[0, 0, 7, :2] = torch.tensor([-0.1, -3.0])
    known = contexts_of(tuple(part[0] for part in memory.lists))
    assert known == {(5,): [(4, pytest.approx(-0.1)), (3, -3.0)]}
    for proposer in (RecyclingProposer(5, known), StandProposer(5, known)):
        proposer.start([5])
        assert [node.token for node in proposer.propose() if node.parent == 0] == [4, 3]


def test_stand_follows_the_longest_context_by_probability():
    proposer = StandProposer(4, {})
    proposer.start([1, 2])
    proposer.observe([3], [SeenRow(2, -1, [3, 4], [-0.1, -2.0]), SeenRow(3, 0, [7, 8], [-0.7, -0.8])])
    assert [vars_of(node) for node in proposer.propose()] == [(0, 7), (0, 8)], "2 3 was heard as a draft"
    proposer.observe([2], [SeenRow(3, -1, [2, 9], [-0.2, -1.0])])
    assert [vars_of(n) for n in proposer.propose()] == [(0, 3), (1, 2), (2, 3)], "3 2 is new, 2 is not"


def test_the_lookahead_window_moves_with_the_root(monkeypatch):
    """(L, W, G) = (4, 3, 2): three levels. Positions and what each row sees are read off `parent`."""
    monkeypatch.setattr(lade, "SETTINGS", {2: (4, 3, 2)})
    proposer = LadeProposer(20)
    proposer.start([1, 2, 3])
    proposer.observe([4], [SeenRow(3, -1, [4], [0.0])])
    nodes = proposer.propose()
    assert len(nodes) == 2 + 3 + 3, "no n-gram of 4 tokens begins with 4 yet"
    assert [node.parent for node in nodes] == [0, 1, 0, 1, 2, 3, 4, 5]
    tokens = [4, *(node.token for node in nodes)]
    rows = [SeenRow(t, -1 if r == 0 else nodes[r - 1].parent, [50 + r], [0.0]) for r, t in enumerate(tokens)]
    proposer.observe([60, 61], rows)
    second = proposer.propose()
    window = [node.token for node in second][-8:]
    assert window[2:4] == tokens[7:9], "the third level has moved up, and a column on"
    assert window[5:7] == [57, 58], "the model's own choices behind it are the new last level"
    assert window[0] == tokens[5], "what stood two behind the root, on the level below"
    proposer.observe([4], [SeenRow(61, -1, [4], [0.0]), *rows[1:]][:1] + rows[1:])
    third = proposer.propose()
    pooled = [tokens[3], tokens[6], 56]
    assert [node.token for node in third[:3]] == pooled, "column 0's n-gram began with 4"
    assert [node.parent for node in third[:3]] == [0, 1, 2]


@pytest.mark.parametrize(("budget", "rows"), [(2, 2), (9, 2), (10, 10), (30, 30), (60, 60), (128, 60)])
def test_the_lookahead_block_is_full(budget, rows):
    """(L - 1)(W + G) rows, once the pool has enough n-grams that begin differently."""
    proposer = LadeProposer(budget)
    rng = random.Random(0)
    starts = rng.sample(range(1, 100), 60)
    proposer.start([t for start in starts for t in (0, start, *rng.sample(range(1, 100), 5))] + [0])
    proposer.observe([0], [SeenRow(0, -1, [0], [0.0])])
    assert 1 + len(proposer.propose()) == rows
