"""What users of such kernels were hurt by, in public reports, as one small case each.

The subjects are tested at length beside their ops; a name here says which report a failure repeats.
"""

import inspect
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import esp_kernels
from esp_kernels import PADDING, _backend
from esp_kernels.testing import assert_as_accurate, paged, random_tree
from esp_kernels.triton.tree_attention import matrix_grid

from . import oracle
from .blocks import Block

OPS = ("tree_attention", "rope_append", "commit_kv", "verify_tree", "expand_tree")
BACKENDS = ["ref", "cpp", *(["triton"] if all(map(_backend.has_triton_kernel, OPS)) else [])]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def block(parents: list[list[int]], prefix_len: list[int]) -> Block:
    rows, slots = len(parents[0]), max(prefix_len) + len(parents[0])
    q = torch.randn(len(parents), rows, 4, 32)
    k, v = torch.randn(2, len(parents), slots, 2, 32).unbind()
    return Block(q, k, v, prefix_len, parents)


def assert_exact(case: Block, backend: str, **run) -> None:
    for actual, exact, own in zip(case.run(backend, **run), case.exact(), case.baseline(), strict=True):
        assert_as_accurate(actual, exact, own)


def index(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.int32)


@every_backend
def test_mask_over_the_prefix_filled_every_step_sglang_32050(backend):
    """The mask is ancestors among the rows: its size knows nothing of the prefix."""
    _, ancestors = esp_kernels.tree_metadata(index(*random_tree(60, random.Random(0))), backend=backend)
    assert ancestors.shape == (1, 60, 1)
    assert "mask" not in inspect.signature(esp_kernels.tree_attention).parameters


@every_backend
def test_window_and_rope_by_row_index_sglang_9279_mlxcel_1214(backend, rng):
    """Three siblings stand at one position: the same rotation, the same window."""
    case = block([[-1, 0, 0, 0]], [40])
    case.window = 8
    assert_exact(case, backend)
    q = torch.randn(1, 1, 2, 32).expand(1, 4, 2, 32).contiguous()
    angle = torch.arange(64.0)[:, None] * torch.rand(16)
    cache = torch.zeros(1, 64, 2, 32)
    where = (angle.cos(), angle.sin(), index(40)[0], index(0, 1, 1, 1), cache, cache.clone())
    turned = esp_kernels.rope_append(q, q, q, *where, backend=backend)
    assert torch.equal(turned[:, 1], turned[:, 2]) and torch.equal(turned[:, 1], turned[:, 3])
    assert not torch.equal(turned[:, 0], turned[:, 1])
    assert torch.equal(cache[:, 41], cache[:, 43])


@every_backend
def test_mask_taken_for_causal_and_never_read_flashinfer_4229(backend, rng):
    """An earlier row that is no ancestor is not seen: its key may be anything."""
    case = block([[-1, 0, 0, 1]], [9])
    before, _ = case.run(backend)
    case.k[:, 9 + 2] = 100.0
    after, _ = case.run(backend)
    assert torch.equal(before[:, 3], after[:, 3]) and not torch.equal(before[:, 2], after[:, 2])


@every_backend
def test_stale_mask_on_reuse_flashinfer_1028(backend, rng):
    """The same tensors with other contents give the other result."""
    case = block([[-1, 0, 1, 2]], [5])
    prefix_len = index(5)[0]
    (ancestors, depth), (others, other_depth) = (oracle.metadata(p) for p in (case.parents, [[-1, 0, 0, 0]]))
    first, _ = esp_kernels.tree_attention(
        case.q, case.k, case.v, prefix_len, ancestors, depth, backend=backend
    )
    ancestors.copy_(others)
    depth.copy_(other_depth)
    again, _ = esp_kernels.tree_attention(
        case.q, case.k, case.v, prefix_len, ancestors, depth, backend=backend
    )
    case.parents = [[-1, 0, 0, 0]]
    assert torch.equal(again, case.run(backend)[0]) and not torch.equal(again, first)


@every_backend
@pytest.mark.parametrize("parent", [[-1], [-1, 0, 0, 0, 0], [-1, 0, 1, 2, 3]], ids=["root", "star", "chain"])
def test_trees_of_depth_1_chains_and_k_1_tensorrt_llm_10323_10325(parent, backend, rng):
    assert_exact(block([parent], [7]), backend)
    tokens = index(*range(10, 10 + len(parent)))
    choice = index(*(11 + r for r in range(len(parent))))
    ordinal = index(*[0] * len(parent))
    path, accepted, bonus = esp_kernels.verify_tree(choice, tokens, index(*parent), ordinal, backend=backend)
    taken = len(parent) - 1 if parent == [-1, 0, 1, 2, 3] else min(1, len(parent) - 1)
    assert accepted.tolist() == [taken] and bonus.tolist() == [11 + taken]
    assert path[0, : taken + 1].tolist() == list(range(taken + 1))


@every_backend
def test_expansion_of_one_candidate_tensorrt_llm_10325(backend):
    ids, logprobs = index(5)[:, :, None], torch.tensor([[[-0.5]]])
    tokens, parent, ordinal = esp_kernels.expand_tree(
        index(3)[0], ids, logprobs, 4, 1, [1], True, backend=backend
    )
    assert tokens.tolist() == [[3, 5, -1, -1]]
    assert parent.tolist() == [[-1, 0, 0, 1]] and ordinal.tolist() == [[0, 0, 1, 1]]


@every_backend
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_pages_with_branches_sglang_26972(page_size, backend, rng):
    """Attention over and commits into pages that a branching block straddles."""
    case = block([[-1, 0, 0, 1, 2, 2]], [14])
    (k, table), (v, _) = (paged(x, page_size, random.Random(1)) for x in (case.k, case.v))
    out, lse = case.run(backend, caches=(k, v), table=table)
    assert torch.equal(out, case.run(backend)[0]) and torch.equal(lse, case.run(backend)[1])
    esp_kernels.commit_kv(
        [k, v], index(0, 2, 5, -1, -1, -1), index(2)[0], index(14)[0], table, backend=backend
    )
    slots = k[table.long()].flatten(1, 2)
    assert torch.equal(slots[:, 15:17], case.k[:, [16, 19]])


@every_backend
def test_padded_rows_in_graphs_sglang_33119_tensorrt_llm_17110(backend, rng):
    """Padding rows and padded sequences give 0 and change nobody's bits."""
    whole = block([[-1, 0, PADDING, 1, PADDING], [PADDING] * 5], [6, 0])
    out, lse = whole.run(backend)
    rows = [0, 1, 3]
    slots = [*range(6), *(6 + r for r in rows)]
    alone = Block(whole.q[:1, rows], whole.k[:1, slots], whole.v[:1, slots], [6], [[-1, 0, 1]])
    assert torch.equal(out[:1, rows], alone.run(backend)[0])
    assert out[0, [2, 4]].eq(0).all() and out[1].eq(0).all() and lse[1].isneginf().all()


@every_backend
def test_moves_that_read_past_or_alias_sglang_26866_40734(backend):
    """Sources that are also targets, up to the last slot of the cache."""
    cache = torch.arange(8.0).view(1, 8, 1, 1).repeat(1, 1, 1, 8)
    esp_kernels.commit_kv([cache], index(0, 2, 3, 4, 5), index(4)[0], index(2)[0], backend=backend)
    assert cache[0, :, 0, 0].tolist() == [0, 1, 2, 4, 5, 6, 7, 7]


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_splits_by_row_count_tokenspeed_904_and_m_1_vllm_54506(backend, rng):
    """One row behind a prefix has the bits that it has as the deepest row of a tree, or among sixty."""
    rows = 60 if backend == "cpp" else 20
    prefix = 300
    case = block([random_tree(rows, rng)], [prefix])
    out, _ = case.run(backend)
    for r in (0, 3, rows - 1):
        line = oracle.path(case.parents[0], r)
        slots = [*range(prefix), *(prefix + j for j in line)]
        one = Block(case.q[:, [r]], case.k[:, slots], case.v[:, slots], [prefix + len(line) - 1], [[-1]])
        assert torch.equal(out[:, [r]], one.run(backend)[0])


def test_prefix_in_series_sglang_39316_vllm_51995_flash_attention_176():
    """A block of many rows shares the prefix out to as many programs as one row does."""
    assert matrix_grid(1, 1, 32, 8)[0] == matrix_grid(1, 60, 32, 8)[0] == 16


def test_keys_read_again_for_every_query_head_sglang_26283():
    """The heads of a group stand in one program, whatever their number: as many programs for 8 as for 32."""
    assert matrix_grid(2, 16, 8, 8) == matrix_grid(2, 16, 32, 8)


def test_sampling_verified_greedily_in_silence_sglang_32922(capsys):
    """There is no sampling yet: what asks for it is refused."""
    from esp_decode import Decoder, cli

    with pytest.raises(TypeError, match="temperature"):
        Decoder.from_pretrained("smollm2", device="cpu", temperature=0.7)
    assert cli.main(["generate", "--prompt", "Hi", "--temperature", "0.7"]) == 2
    assert "--temperature" in capsys.readouterr().err


def test_renormalisation_slower_than_the_model_sglang_9345():
    """From logits to the next block one op reads the vocabulary, and none sorts it."""
    from bench.gpu.bits import drafter
    from bench.gpu.random_model import random_model
    from esp_decode.loop import new_state, step
    from esp_decode.roofline import Shape

    vocabulary = 5000
    model = random_model(Shape(1, 16, 16, 1, 1, 16, vocabulary), torch.float32, "cpu", context=64)
    one = drafter(model, budget=30, rows=30)
    state = new_state(model, one, 1, 64)
    one.start(index(7), state.draft)
    with OpsOfSize(30 * vocabulary) as found:
        step(model, one, state)
    found.writing.remove("esp_kernels::linear_rows")
    assert found.reading == ["esp_kernels::topk_logprobs"] and found.writing == []


class OpsOfSize(TorchDispatchMode):
    """The ops that read or return a tensor of at least so many elements."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.reading, self.writing = size, [], []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        for values, names in ((args, self.reading), (result, self.writing)):
            if any(isinstance(t, torch.Tensor) and t.numel() >= self.size for t in tree_leaves(values)):
                names.append(op.name())
        return result
