import pytest
import torch
import torch.nn.functional as F

import esp_kernels
from esp_kernels.testing import assert_as_accurate, poisoned, strided

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def int32(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def drawn(probe: torch.Tensor, embedding: torch.Tensor, committed: torch.Tensor, lam: float) -> torch.Tensor:
    """The closed form: each token's embedding times lam (1 - lam)^(tokens after it)."""
    result = probe.double()
    for b, row in enumerate(committed.tolist()):
        tokens = [t for t in row if t >= 0]
        result[b] *= (1 - lam) ** len(tokens)
        for i, t in enumerate(tokens):
            result[b] += lam * (1 - lam) ** (len(tokens) - 1 - i) * embedding[t].double()
    return result


def lerped(probe: torch.Tensor, embedding: torch.Tensor, committed: torch.Tensor, lam: float) -> torch.Tensor:
    """PyTorch's own, one token after the other."""
    probe = probe.clone()
    for b, row in enumerate(committed.tolist()):
        for t in row:
            if t >= 0:
                probe[b] = torch.lerp(probe[b], embedding[t].float(), lam)
    return probe


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lam", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize(
    ("batch", "masks", "n", "length"),
    [(1, 1, 1, 1), (2, 3, 63, 4), (3, 2, 65, 7), (1, 2, 576, 3), (2, 2, 7, 0)],
)
def test_matches_float64(batch, masks, n, length, lam, dtype, backend, rng):
    probe, embedding = torch.randn(batch, masks, n), torch.randn(20, n).to(dtype)
    committed = torch.randint(-1, 20, (batch, length), dtype=torch.int32)
    lam32 = torch.tensor(lam, dtype=torch.float32).item()
    exact, baseline = drawn(probe, embedding, committed, lam32), lerped(probe, embedding, committed, lam)
    assert esp_kernels.update_probe(probe, embedding, committed, lam, backend=backend) is None
    assert_as_accurate(probe, exact, baseline)


def test_tokens_are_applied_in_order(backend):
    embedding = torch.tensor([[0.0], [8.0]])
    probe = torch.zeros(2, 1, 1)
    esp_kernels.update_probe(probe, embedding, int32([0, 1], [1, 0]), 0.5, backend=backend)
    assert probe.flatten().tolist() == [4.0, 2.0]


def test_one_call_is_as_many_single_calls(backend, rng):
    """Bit for bit: what is committed in one step or in several leaves the same probe, on any threads."""
    count = 9 if backend == "triton" else 60
    embedding = torch.randn(30, 577).bfloat16()
    committed = torch.randint(0, 30, (2, count), dtype=torch.int32)
    start = torch.randn(2, 2, 577)
    several, padded, one = start.clone(), start.clone(), start.clone()
    for i in range(count):
        esp_kernels.update_probe(several, embedding, committed[:, i : i + 1].contiguous(), backend=backend)
    spaced = torch.full((2, 2 * count + 9), -1, dtype=torch.int32)
    spaced[:, 3 : 3 + 2 * count : 2] = committed
    esp_kernels.update_probe(padded, embedding, spaced, backend=backend)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        esp_kernels.update_probe(one, embedding, committed, backend=backend)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one, several) and torch.equal(one, padded)
    for b in range(2):
        alone = start[b : b + 1, 1:].clone()
        esp_kernels.update_probe(alone, embedding, committed[b : b + 1], backend=backend)
        assert torch.equal(alone[0, 0], one[b, 1])


def test_tokens_far_behind_each_other(backend, rng):
    committed = torch.full((2, 150), -1, dtype=torch.int32)
    for b, places in enumerate([[3, 63, 64, 127], [128, 149]]):
        committed[b, places] = torch.randint(0, 30, (len(places),), dtype=torch.int32)
    embedding, probe = torch.randn(30, 33), torch.randn(2, 1, 33)
    together = torch.stack([one[one >= 0][:2] for one in committed])
    rest = torch.stack([F.pad(one[one >= 0][2:], (0, 2), value=-1)[:2] for one in committed])
    expected = probe.clone()
    for tokens in (together, rest):
        esp_kernels.update_probe(expected, embedding, tokens, backend=backend)
    esp_kernels.update_probe(probe, embedding, committed, backend=backend)
    assert torch.equal(probe, expected)


def test_any_stride_and_nothing_else_touched(backend, rng):
    probe, embedding, committed = (
        torch.randn(2, 3, 33),
        torch.randn(9, 33).half(),
        int32([1, -1, 8], [-1, 0, 4]),
    )
    base = poisoned((3, 2, 40), torch.float32)
    view = base[..., :33].transpose(0, 1)
    view.copy_(probe)
    esp_kernels.update_probe(probe, embedding, committed, backend=backend)
    esp_kernels.update_probe(view, strided(embedding), committed, backend=backend)
    assert torch.equal(view, probe) and base[..., 33:].isnan().all()


def test_nothing_committed_changes_nothing(backend):
    """Not even what is not finite."""
    probe = torch.tensor([[[torch.inf, -0.0, 1e-42]]])
    before = probe.clone()
    esp_kernels.update_probe(probe, torch.full((1, 3), torch.nan), int32([-1, -1]), backend=backend)
    assert torch.equal(probe, before) and torch.equal(probe.signbit(), before.signbit())


@pytest.mark.parametrize(("batch", "masks"), [(0, 2), (2, 0)])
def test_empty(batch, masks, backend):
    committed = torch.zeros(batch, 2, dtype=torch.int32)
    esp_kernels.update_probe(torch.zeros(batch, masks, 8), torch.zeros(3, 8), committed, backend=backend)


@pytest.mark.on_host
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"embedding": torch.zeros(10, 8).double()},
            "embedding must be float32, bfloat16 or float16, got float64",
        ),
        ({"committed": torch.zeros(2, 3).long()}, "committed must be int32, got int64"),
        ({"committed": int32(1, 2)}, "committed must have shape [*, *], got [2]"),
        ({"probe": torch.zeros(2, 2, 8).half()}, "probe must be float32, got float16"),
        ({"probe": torch.zeros(1, 2, 8)}, "probe must have shape [2, *, 8], got [1, 2, 8]"),
        ({"probe": torch.zeros(2, 2, 9)}, "probe must have shape [2, *, 8], got [2, 2, 9]"),
        ({"lam": 1.5}, "lam must be in 0..1, got 1.5"),
        ({"lam": -0.1}, "lam must be in 0..1, got -0.1"),
        ({"lam": float("nan")}, "lam must be in 0..1, got nan"),
        (
            {"committed": int32([1, 9], [10, 0])},
            "committed[1, 0] must be -1 or in the vocabulary of 10 tokens, got 10",
        ),
        (
            {"committed": int32([1, -2], [0, 0])},
            "committed[0, 1] must be -1 or in the vocabulary of 10 tokens, got -2",
        ),
        ({"probe": None}, "probe must be a tensor, got NoneType"),
    ],
)
def test_bad_input(change, sentence, backend):
    arguments = {
        "probe": torch.zeros(2, 2, 8),
        "embedding": torch.ones(10, 8),
        "committed": int32([1, -1], [3, 4]),
        "lam": 0.1,
    } | change
    with pytest.raises(ValueError) as error:
        esp_kernels.update_probe(**arguments, backend=backend)
    assert str(error.value) == sentence
    assert arguments["probe"] is None or not arguments["probe"].any()


def test_opcheck():
    arguments = (torch.randn(2, 2, 8), torch.randn(10, 8).bfloat16(), int32([1, -1], [3, 4]), 0.1)
    torch.library.opcheck(torch.ops.esp_kernels.update_probe.default, arguments)
