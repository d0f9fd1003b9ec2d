import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import esp_kernels
from esp_kernels import PADDING, Memory

from .recall import Case, Recall, paths, random_case

REACH = (0.3, 0.1, 0.05)


def rows_of(
    case: Case, budget: int, reach=REACH, least: float = 0.0, backend: str = "auto"
) -> list[list[tuple]]:
    """Of each sequence its rows, without padding, which is checked here."""
    out = esp_kernels.join_tree(case.memory, *case.sources, budget, reach, least, backend=backend)
    found = []
    for sequence in zip(*(part.tolist() for part in out), strict=True):
        rows = list(zip(*sequence, strict=True))
        assert len(rows) == budget
        used = sum(parent != PADDING for _, parent, _, _ in rows)
        assert all(row == (-1, PADDING, -1, 0.0) for row in rows[used:])
        found.append(rows[:used])
    return found


def assert_as_good(rows: list[tuple], recall: Recall, weights: torch.Tensor, *how: object) -> None:
    """The oracle's tree, or one that differs by ties, which texts that repeat give rise to."""
    expected = recall.tree(weights, *how)
    assert [row[2] == 0 for row in rows] == [row[2] == 0 for row in expected]
    assert [row[3] for row in rows] == pytest.approx([row[3] for row in expected], rel=1e-4, abs=1e-6)
    tokens, parent = ([row[i] for row in rows] for i in (0, 1))
    drafts = sum(row[2] == 0 for row in rows)
    assert len({*zip(tokens[:drafts], parent[:drafts], strict=True)}) == drafts
    assert (tokens[0], parent[0]) == (recall.history[-1], -1)
    below = [0.0] * drafts
    for r, path in enumerate(paths(torch.tensor(tokens[:drafts]), torch.tensor(parent[:drafts]))[1:], 1):
        candidates, logprobs = recall.logprobs(path[:-1], weights)
        chance = rows[parent[r]][3] * logprobs[candidates.index(path[-1])].exp().item()
        assert rows[r][3] == pytest.approx(chance, rel=1e-4, abs=1e-7)
        below[parent[r]] += rows[r][3]
    for r, (token, above, ordinal, chance) in enumerate(rows[drafts:], drafts):
        assert token == -1 and above == (r - 1 if ordinal > 1 else above) < r
        owner = r
        for _ in range(ordinal):
            owner = parent[owner]
        assert owner < drafts
        assert chance == pytest.approx(rows[owner][3] - below[owner], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("budget", [1, 2, 7, 30, 65])
@pytest.mark.parametrize("least", [0.0, 0.02])
def test_matches_the_oracle(budget, least, backend):
    for seed in range(6):
        case = random_case(seed, [20, 1, 7])
        for recall, weights, mine in zip(
            case.recalls, case.weights.double(), rows_of(case, budget, REACH, least, backend), strict=True
        ):
            assert_as_good(mine, recall, weights, budget, REACH, least)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    masks=st.integers(0, 3),
    candidates=st.integers(0, 9),
    prior=st.sampled_from([(8, 4), (0, 0), (5, 0), (0, 3), (10, 1)]),
    budget=st.integers(1, 40),
    reach=st.sampled_from([(), (0.5,), REACH, (1.0, 1.0, 1.0), (0.0, 0.0)]),
    least=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
)
def test_any_sizes(seed, lengths, masks, candidates, prior, budget, reach, least):
    """Against the oracle, on the specification and the C++ kernel; a padded sequence gets no rows."""
    case = random_case(seed, lengths, masks, candidates, prior)
    for backend in ("ref", "cpp"):
        found = rows_of(case, budget, reach, least, backend)
        for recall, weights, mine in zip(case.recalls, case.weights.double(), found, strict=True):
            if recall.history:
                assert_as_good(mine, recall, weights, budget, reach, least)
            else:
                assert mine == []


def test_the_tree_is_well_formed(backend):
    case = random_case(3, [25])
    [rows] = rows_of(case, 40, REACH, 0.0, backend)
    assert rows[0][:3] == (case.recalls[0].history[-1], -1, 0) and rows[0][3] == 1.0
    drafts = [row for row in rows if row[2] == 0]
    assert [row[2] for row in rows] == sorted([0] * len(drafts)) + [o for _, _, o, _ in rows[len(drafts) :]]
    chances = [row[3] for row in drafts]
    assert chances == sorted(chances, reverse=True), "best first"
    siblings = [(parent, token) for token, parent, _, _ in drafts]
    assert len(set(siblings)) == len(siblings)
    for r, (_, parent, ordinal, chance) in enumerate(rows[1:], 1):
        assert 0 <= parent < r
        assert ordinal == 0 or rows[parent][2] == ordinal - 1
        assert ordinal != 0 or chance <= rows[parent][3]


def test_a_copy_that_is_trusted_is_followed(backend):
    """Of a text that repeats, with weight on copying alone."""
    memory = Memory.empty(1, 32)
    none = torch.zeros((1, 0), dtype=torch.int32)
    text = torch.tensor([[1, 2, 3, 4, 5, 6, 1, 2, 3]]).int()
    esp_kernels.remember_block(memory, none, none, none, none[..., None], none[..., None].float(), text)
    weights = torch.zeros(1, 16, 6)
    weights[..., 4] = 3.0
    nothing = torch.zeros((1, 0, 0), dtype=torch.int32)
    sources = (nothing, nothing.float(), none[:0], none[:0].float(), weights)
    tokens, parent, _, chance = esp_kernels.join_tree(memory, *sources, 6, (), 0.0, backend=backend)
    assert tokens.tolist() == [[3, 4, 5, 6, 1, 2]] and parent.tolist() == [[-1, 0, 1, 2, 3, 4]]
    assert chance[0, 1] > 0.9


def test_hopeless_drafts_are_left_out(backend):
    """With weight on something else, the budget is not used up."""
    case = random_case(5, [20])
    case.weights[..., :5], case.weights[..., 5] = 0.1, 20.0
    [rows] = rows_of(case, 40, REACH, 0.01, backend)
    assert [row[2] for row in rows] == [0, 1, 2, 3], "the root and its masks"


def test_a_row_does_not_depend_on_other_sequences(backend):
    case = random_case(11, [30, 9, 0, 17])
    together = rows_of(case, 24, backend=backend)
    for b in range(4):
        alone = Case(
            case.recalls[b : b + 1],
            Memory(*(part[b : b + 1].contiguous() for part in case.memory)),
            case.mask_ids[b : b + 1],
            case.mask_logprobs[b : b + 1],
            case.prior_ids,
            case.prior_logprobs,
            case.weights[b : b + 1],
        )
        assert rows_of(alone, 24, backend=backend) == [together[b]], "bit for bit"


def test_a_broken_memory_ends(backend):
    """Links that lead in circles, heads and lists that lead nowhere: harmless."""
    case = random_case(2, [20])
    rng = torch.Generator().manual_seed(0)
    for part in (case.memory.heads, case.memory.links):
        part.copy_(torch.randint(-5, 60, part.shape, generator=rng))
    case.memory.list_ids.copy_(torch.randint(-3, 1000, case.memory.list_ids.shape, generator=rng))
    case.prior_ids.copy_(torch.randint(-3, 1000, case.prior_ids.shape, generator=rng))
    [rows] = rows_of(case, 30, backend=backend)
    assert 1 <= len(rows) <= 30


@pytest.mark.on_host
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"budget": 0}, "budget must be 1 to 256, got 0"),
        ({"budget": 257}, "budget must be 1 to 256, got 257"),
        ({"reach": (0.1,) * 4}, "reach must have at most 3 values, got 4"),
        ({"reach": (0.1, 0.2)}, "reach must descend from at most 1 to at least 0, got [0.1, 0.2]"),
        ({"reach": (1.5,)}, "reach must descend from at most 1 to at least 0, got [1.5]"),
        ({"reach": (float("nan"),)}, "reach must descend from at most 1 to at least 0, got [nan]"),
        ({"least": -0.1}, "least must be in 0..1, got -0.1"),
        ({"mask_ids": torch.zeros(2, 4, 5).int()}, "mask_ids must have at most 3 masks, got 4"),
        (
            {"mask_ids": torch.zeros(2, 3, 65).int()},
            "mask_ids must have at most 64 candidates a mask, got 65",
        ),
        ({"mask_ids": torch.zeros(1, 3, 6).int()}, "mask_ids must have shape [2, *, *], got [1, 3, 6]"),
        ({"mask_logprobs": torch.zeros(2, 3, 5)}, "mask_logprobs must have shape [2, 3, 6], got [2, 3, 5]"),
        ({"prior_ids": torch.zeros(8, 17).int()}, "prior_ids must have at most 16 tokens a list, got 17"),
        ({"prior_ids": torch.zeros(8, 4)}, "prior_ids must be int32, got float32"),
        ({"prior_logprobs": torch.zeros(7, 4)}, "prior_logprobs must have shape [8, 4], got [7, 4]"),
        ({"weights": torch.zeros(2, 16, 5)}, "weights must have shape [2, 16, 6], got [2, 16, 5]"),
        ({"weights": torch.zeros(2, 16, 6).double()}, "weights must be float32, got float64"),
        ({"length": torch.tensor([0, 49]).int()}, "length[1] must be 0 to 48, the capacity, got 49"),
    ],
)
def test_bad_input(change, sentence, backend):
    case = random_case(0, [5, 9])
    memory = case.memory._replace(**{k: v for k, v in change.items() if k in Memory._fields})
    names = ("mask_ids", "mask_logprobs", "prior_ids", "prior_logprobs", "weights")
    arguments = dict(zip(names, case.sources, strict=True)) | {"budget": 8, "reach": REACH, "least": 0.0}
    arguments |= {k: v for k, v in change.items() if k in arguments}
    with pytest.raises(ValueError) as error:
        esp_kernels.join_tree(memory, **arguments, backend=backend)
    assert str(error.value) == sentence


def test_opcheck():
    case = random_case(0, [5, 0, 9])
    arguments = (*case.memory, *case.sources, 8, REACH, 0.01)
    torch.library.opcheck(torch.ops.esp_kernels.join_tree.default, arguments)
