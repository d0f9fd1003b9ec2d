import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import esp_kernels
from esp_kernels import PADDING, Memory

from .recall import Recall, listed, paths, random_block

VOCABULARY = 12


def remember(memory: Memory, block: tuple[torch.Tensor, ...], committed: list[int], backend: str) -> None:
    tokens = torch.tensor([committed], dtype=torch.int32).reshape(1, len(committed))
    esp_kernels.remember_block(memory, *(part[None].contiguous() for part in block), tokens, backend=backend)


def no_block() -> tuple[torch.Tensor, ...]:
    none = torch.zeros(0, dtype=torch.int32)
    return none, none, none, none[:, None], none[:, None].float()


def kept(memory: Memory, gram: tuple[int, ...]) -> list[tuple[int, float]] | None:
    """The list of a context, found by looking at every slot."""
    keys = memory.keys[0, len(gram) - 1, :, : len(gram)]
    slots = (keys == torch.tensor(gram)).all(dim=1).nonzero().flatten().tolist()
    assert len(slots) <= 1
    lists = zip(
        memory.list_ids[0, len(gram) - 1, slots], memory.list_logprobs[0, len(gram) - 1, slots], strict=True
    )
    return next((listed(*one) for one in lists), None)


def occurrences(memory: Memory, gram: list[int]) -> list[int]:
    """Where the n-gram ends in the history, by walking the bucket that its latest place heads."""
    n, history = len(gram), memory.history[0].tolist()
    found = []
    for head in memory.heads[0, n - 1].tolist():
        while head >= 0:
            if history[head - n + 1 : head + 1] == gram:
                found.append(head)
            head = int(memory.links[0, n - 1, head])
    return found


def steps(seed: int, count: int, width: int, backend: str, slots: int = 4096) -> tuple[Memory, Recall]:
    """A prompt of 3 tokens and some steps with random blocks."""
    rng = torch.Generator().manual_seed(seed)
    memory, recall = Memory.empty(1, 64, slots=slots, width=width), Recall()
    prompt = torch.randint(0, VOCABULARY, (3,), generator=rng).tolist()
    remember(memory, no_block(), prompt, backend)
    recall.history += prompt
    for _ in range(count):
        rows = int(torch.randint(1, 9, (), generator=rng))
        block = random_block(rng, recall.history[-1], rows, VOCABULARY, 5)
        for path, ordinal, ids, logprobs in zip(paths(*block[:2]), *block[2:], strict=True):
            if ordinal == 0:
                recall.hear(path, listed(ids[:width], logprobs[:width]))
        committed = torch.randint(
            0, VOCABULARY, (int(torch.randint(1, 4, (), generator=rng)),), generator=rng
        )
        remember(memory, block, committed.tolist(), backend)
        recall.history += committed.tolist()
    return memory, recall


@pytest.mark.parametrize("width", [1, 5, 8])
@pytest.mark.parametrize("seed", range(4))
def test_every_context_has_its_latest_list(seed, width, backend):
    memory, recall = steps(seed, 8, width, backend, slots=1 << 16)  # enough for nobody to share one
    for gram, said in recall.lists.items():
        assert kept(memory, gram) == [(t, pytest.approx(p)) for t, p in said], gram
    slots = [(memory.keys[0, n, :, 0] >= 0).sum().item() for n in range(4)]
    assert slots == [sum(len(g) == n + 1 for g in recall.lists) for n in range(4)], "and nothing else has"


@pytest.mark.parametrize("seed", range(4))
def test_the_index_finds_every_place(seed, backend):
    memory, recall = steps(seed, 12, 4, backend)
    history = recall.history
    assert memory.history[0, : len(history)].tolist() == history and memory.length.tolist() == [len(history)]
    for n in range(1, 5):
        for end in range(n, len(history) + 1):
            gram = history[end - n : end]
            ends = [e for e in range(n - 1, len(history)) if history[e - n + 1 : e + 1] == gram]
            assert occurrences(memory, gram) == ends[::-1], "the latest first"


def test_a_slot_is_taken_by_the_latest(backend):
    """One slot an order: its list is of whatever was heard last."""
    memory, recall = steps(7, 6, 4, backend, slots=1)
    for n in range(1, 5):
        latest = tuple(memory.keys[0, n - 1, 0, :n].tolist())
        assert kept(memory, latest) == [(t, pytest.approx(p)) for t, p in recall.lists[latest]]
        assert latest == [gram for gram in recall.lists if len(gram) == n][-1]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6), count=st.integers(0, 10), width=st.integers(0, 6), slots=st.integers(1, 40)
)
def test_cpp_is_the_specification_bit_for_bit(seed, count, width, slots):
    native, specified = (steps(seed, count, width, backend, slots)[0] for backend in ("cpp", "ref"))
    known = specified.list_ids >= 0
    for name in Memory._fields:
        mine, theirs = getattr(native, name), getattr(specified, name)
        if name == "list_logprobs":
            mine, theirs = mine[known], theirs[known]
        if name == "links":  # those behind the history are of nobody
            mine, theirs = (t[..., : int(specified.length)] for t in (mine, theirs))
        assert torch.equal(mine, theirs), name


def test_masks_and_padding_say_nothing(backend):
    memory = Memory.empty(1, 8)
    remember(memory, no_block(), [3], backend)
    block = (
        torch.tensor([3, -1, -1]).int(),
        torch.tensor([-1, 0, PADDING]).int(),
        torch.tensor([0, 1, -1]).int(),
        torch.tensor([[5], [6], [7]]).int(),
        torch.tensor([[-0.5], [-0.5], [-0.5]]),
    )
    remember(memory, block, [], backend)
    assert kept(memory, (3,)) == [(5, -0.5)]
    assert (memory.keys >= 0).sum() == 1


def test_sequences_do_not_mix_and_nothing_is_skipped(backend):
    """Ragged, one of them padded: no rows, nothing committed. Negative tokens between others are skipped."""
    memory = Memory.empty(3, 16)
    none = torch.zeros((3, 0), dtype=torch.int32)
    first = torch.tensor([[1, 2, -1], [-1, -1, -1], [-1, 4, 5]]).int()
    esp_kernels.remember_block(
        memory, none, none, none, none[..., None], none[..., None].float(), first, backend=backend
    )
    assert memory.length.tolist() == [2, 0, 2]
    assert memory.history[0, :2].tolist() == [1, 2] and memory.history[2, :2].tolist() == [4, 5]
    tokens = torch.tensor([[2], [-1], [5]]).int()
    parent = torch.tensor([[-1], [PADDING], [-1]]).int()
    ordinal = torch.tensor([[0], [-1], [0]]).int()
    ids, logprobs = torch.tensor([[[8]], [[9]], [[10]]]).int(), torch.full((3, 1, 1), -1.0)
    esp_kernels.remember_block(memory, tokens, parent, ordinal, ids, logprobs, none, backend=backend)
    for b, (context, token) in enumerate([((1, 2), 8), ((0, 0), None), ((4, 5), 10)]):
        alone = Memory(*(t[b : b + 1] for t in memory))
        assert (alone.keys >= 0).sum() == (0 if token is None else 3)
        if token is not None:
            assert kept(alone, context) == kept(alone, context[1:]) == [(token, -1.0)]


def test_forgetting(backend):
    memory, _ = steps(3, 5, 4, backend)
    lists = tuple(part[0].clone() for part in memory.lists)
    memory.forget()
    assert memory.length.item() == 0 and (memory.heads == -1).all() and (memory.keys == -1).all()
    memory.forget(lists)
    assert memory.length.item() == 0 and (memory.heads == -1).all()
    assert all(torch.equal(mine[0], given) for mine, given in zip(memory.lists, lists, strict=True))


def arguments(**change: object) -> tuple[Memory, list[torch.Tensor]]:
    memory = Memory.empty(2, 8)._replace(**{k: v for k, v in change.items() if k in Memory._fields})
    rows = torch.tensor([[0, 1], [2, 3]]).int()
    block = {
        "tokens": rows,
        "parent": torch.tensor([[-1, 0], [-1, 0]]).int(),
        "mask_ordinal": torch.zeros_like(rows),
        "ids": rows[..., None].contiguous(),
        "logprobs": rows[..., None].float().contiguous(),
        "committed": rows,
    }
    return memory, list((block | {k: v for k, v in change.items() if k in block}).values())


@pytest.mark.on_host
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tokens": torch.zeros(2, 2)}, "tokens must be int32, got float32"),
        ({"parent": torch.zeros(2, 3).int()}, "parent must have shape [2, 2], got [2, 3]"),
        ({"mask_ordinal": torch.zeros(1, 2).int()}, "mask_ordinal must have shape [2, 2], got [1, 2]"),
        ({"ids": torch.zeros(2, 2).int()}, "ids must have shape [2, 2, *], got [2, 2]"),
        ({"logprobs": torch.zeros(2, 2, 2)}, "logprobs must have shape [2, 2, 1], got [2, 2, 2]"),
        ({"logprobs": torch.zeros(2, 2, 1).half()}, "logprobs must be float32, got float16"),
        ({"committed": torch.zeros(3, 2).int()}, "committed must have shape [2, *], got [3, 2]"),
        (
            {"parent": torch.tensor([[-1, 0], [-1, 1]]).int()},
            "parent[1, 1] must be negative or an earlier row, got 1",
        ),
        (
            {"length": torch.tensor([0, 7]).int()},
            "history has room for 8 tokens, sequence 1 has 7 and 2 are committed",
        ),
        ({"length": torch.tensor([0, 9]).int()}, "length[1] must be 0 to 8, the capacity, got 9"),
        ({"heads": torch.zeros(2, 4, 0).int()}, "heads must have at least 1 bucket, got 0"),
        ({"heads": torch.zeros(2, 3, 8).int()}, "heads must have shape [2, 4, *], got [2, 3, 8]"),
        ({"links": torch.zeros(2, 4, 7).int()}, "links must have shape [2, 4, 8], got [2, 4, 7]"),
        ({"keys": torch.zeros(2, 4, 9, 3).int()}, "keys must have shape [2, 4, *, 4], got [2, 4, 9, 3]"),
        (
            {"list_ids": torch.zeros(2, 4, 9, 8).int()},
            "list_ids must have shape [2, 4, 4096, *], got [2, 4, 9, 8]",
        ),
        (
            {"list_ids": torch.zeros(2, 4, 4096, 17).int()},
            "list_ids must have at most 16 tokens a list, got 17",
        ),
    ],
)
def test_bad_input(change, sentence, backend):
    memory, block = arguments(**change)
    with pytest.raises(ValueError) as error:
        esp_kernels.remember_block(memory, *block, backend=backend)
    assert str(error.value) == sentence
    assert (Memory.empty(2, 8).history == memory.history).all()


def test_opcheck():
    memory, block = arguments()
    torch.library.opcheck(torch.ops.esp_kernels.remember_block.default, (*memory, *block))
