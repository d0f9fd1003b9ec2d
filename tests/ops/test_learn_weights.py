import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import esp_kernels
from esp_kernels import Memory

from .recall import Case, Recall, random_case


def climbed(recall: Recall, weights: torch.Tensor, committed: list[int], rate: float) -> torch.Tensor:
    """By autograd in float64, one token after the other."""
    weights = weights.double()
    path: list[int] = []
    for token in committed:
        if token < 0:
            break
        moving = weights.clone().requires_grad_()
        tokens, logprobs = recall.logprobs(path, moving)
        came = tokens.index(token) if token in tokens else len(tokens)
        logprobs[came].backward()
        weights = weights + rate * moving.grad
        path.append(token)
    return weights


def learned(case: Case, committed: torch.Tensor, rate: float, backend: str) -> torch.Tensor:
    weights = case.weights.clone()
    sources = (*case.sources[:4], weights)
    assert esp_kernels.learn_weights(case.memory, *sources, committed, rate, backend=backend) is None
    return weights


@pytest.mark.parametrize("rate", [0.0, 0.003, 0.3])
@pytest.mark.parametrize("steps", [0, 1, 4, 7])
def test_matches_autograd(rate, steps, backend):
    for seed in range(4):
        case = random_case(seed, [20, 1, 7])
        committed = torch.randint(0, 12, (3, steps), generator=torch.Generator().manual_seed(seed)).int()
        mine = learned(case, committed, rate, backend)
        for recall, before, after, tokens in zip(case.recalls, case.weights, mine, committed, strict=True):
            expected = climbed(recall, before, tokens.tolist(), rate)
            torch.testing.assert_close(after.double(), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    masks=st.integers(0, 3),
    candidates=st.integers(0, 9),
    prior=st.sampled_from([(8, 4), (0, 0), (5, 0), (10, 1)]),
    steps=st.integers(0, 6),
)
def test_any_sizes(seed, lengths, masks, candidates, prior, steps):
    case = random_case(seed, lengths, masks, candidates, prior)
    rng = torch.Generator().manual_seed(seed)
    committed = torch.randint(-1, 12, (len(lengths), steps), generator=rng).int()
    for backend in ("ref", "cpp"):
        mine = learned(case, committed, 0.1, backend)
        for recall, before, after, tokens in zip(case.recalls, case.weights, mine, committed, strict=True):
            expected = climbed(recall, before, tokens.tolist(), 0.1) if recall.history else before.double()
            torch.testing.assert_close(after.double(), expected, rtol=1e-4, atol=1e-5)


def test_what_came_becomes_more_probable(backend):
    case = random_case(4, [20])
    tokens, _ = case.recalls[0].logprobs([], case.weights[0].double())
    committed = torch.tensor([[tokens[1]]]).int()
    chances = []
    for _ in range(20):
        chances.append(float(case.recalls[0].logprobs([], case.weights[0].double())[1][1].exp()))
        case.weights = learned(case, committed, 0.1, backend)
    assert chances == sorted(chances) and chances[-1] > 2 * chances[0]


def test_nothing_behind_the_first_negative_counts(backend):
    case = random_case(1, [12])
    short, long = torch.tensor([[3, -1]]).int(), torch.tensor([[3, -1, 5, 6]]).int()
    assert torch.equal(learned(case, short, 0.1, backend), learned(case, long, 0.1, backend))


def test_a_padded_sequence_learns_nothing(backend):
    case = random_case(1, [12, 0])
    mine = learned(case, torch.tensor([[3, 4], [3, 4]]).int(), 0.1, backend)
    assert torch.equal(mine[1], case.weights[1]) and not torch.equal(mine[0], case.weights[0])


def test_only_the_pattern_at_hand_is_touched(backend):
    case = random_case(6, [30])
    mine = learned(case, torch.tensor([[2]]).int(), 0.1, backend)
    changed = (mine != case.weights).any(dim=2)[0].nonzero().flatten().tolist()
    assert changed == [case.recalls[0].features([])[1]]


def test_a_sequence_does_not_depend_on_others(backend):
    case = random_case(8, [30, 5, 17])
    committed = torch.randint(0, 12, (3, 4), generator=torch.Generator().manual_seed(0)).int()
    together = learned(case, committed, 0.1, backend)
    for b in range(3):
        one = slice(b, b + 1)
        memory = Memory(*(part[one].contiguous() for part in case.memory))
        alone = Case(
            case.recalls[one],
            memory,
            case.mask_ids[one],
            case.mask_logprobs[one],
            case.prior_ids,
            case.prior_logprobs,
            case.weights[one],
        )
        assert torch.equal(learned(alone, committed[one], 0.1, backend)[0], together[b]), "bit for bit"


@pytest.mark.on_host
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rate": -0.1}, "rate must be at least 0, got -0.1"),
        ({"rate": float("nan")}, "rate must be at least 0, got nan"),
        ({"rate": float("inf")}, "rate must be at least 0, got inf"),
        ({"committed": torch.zeros(2, 3).long()}, "committed must be int32, got int64"),
        ({"committed": torch.zeros(3, 3).int()}, "committed must have shape [2, *], got [3, 3]"),
        ({"weights": torch.zeros(2, 15, 6)}, "weights must have shape [2, 16, 6], got [2, 15, 6]"),
        ({"weights": torch.zeros(2, 6, 16).mT}, "weights must be contiguous, got strides [96, 1, 16]"),
        ({"mask_ids": torch.zeros(2, 3)}, "mask_ids must be int32, got float32"),
    ],
)
def test_bad_input(change, sentence, backend):
    case = random_case(0, [5, 9])
    names = ("mask_ids", "mask_logprobs", "prior_ids", "prior_logprobs", "weights")
    arguments = dict(zip(names, case.sources, strict=True))
    arguments |= {"committed": torch.zeros(2, 3).int(), "rate": 0.1} | change
    with pytest.raises(ValueError) as error:
        esp_kernels.learn_weights(case.memory, **arguments, backend=backend)
    assert str(error.value) == sentence


def test_opcheck():
    case = random_case(0, [5, 0, 9])
    arguments = (*case.memory, *case.sources, torch.zeros(3, 3).int(), 0.1)
    torch.library.opcheck(torch.ops.esp_kernels.learn_weights.default, arguments)
