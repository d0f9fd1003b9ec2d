"""Every op at the sizes of a model, as one call. The bytes and FLOPs are those of `esp roofline`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

import esp_kernels
from esp_decode.roofline import MODELS, Shape, step_costs

Run = Callable[[], object]
ACCEPTED = 2  # tokens that a step commits


@dataclass(frozen=True)
class Size:
    """A block of `rows` rows behind `prefix` cached tokens, in each of `batch` sequences."""

    model: str
    shape: Shape
    rows: int
    prefix: int
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def of(cls, model: str, rows: int, prefix: int, batch: int = 1) -> "Size":
        return cls(model, MODELS[model], rows, prefix, batch)

    @property
    def candidates(self) -> int:
        """What a block with one mask a node asks for."""
        return max(1, self.rows // 2)

    @property
    def masks(self) -> int:
        return min(1, self.rows - 1)

    def cost(self, op: str) -> tuple[int, int]:
        """Least bytes and FLOPs of one call: of norms, the one with a residual."""
        costs = step_costs(self.shape, self.rows, self.prefix, self.candidates)
        one = {c.op: (c.bytes // c.calls, c.flops // c.calls) for c in costs} | self._costs_within_advance()
        moved, flops = one[op]
        return moved * self.batch, flops * self.batch

    def _costs_within_advance(self) -> dict[str, tuple[int, int]]:
        """Of the ops that a step has in advance_block, and the roofline not by themselves."""
        row, words, width = 4 * self.rows, -(-self.rows // 64), self.shape.hidden_size
        return {
            "tree_metadata": (2 * row + 8 * self.rows * words, 0),
            "verify_tree": (5 * row + 8, 0),
            "update_probe": (8 * width + ACCEPTED * (self.dtype.itemsize * width + 4), 3 * ACCEPTED * width),
            "expand_tree": (8 * self.candidates + 3 * row + 4, 0),
        }

    def cache_bytes(self) -> int:
        """Of one layer's K and V."""
        slots = self.batch * (self.prefix + self.rows)
        return 2 * slots * self.shape.num_key_value_heads * self.shape.head_dim * self.dtype.itemsize


def esp_parents(size: Size) -> torch.Tensor:
    """[B, T]: the root, drafts that hang from it, one mask of each of these; an odd row is padding."""
    nodes = max(1, size.rows // 2)
    parent = [-1, *[0] * (nodes - 1), *range(nodes * size.masks)]
    parent += [esp_kernels.PADDING] * (size.rows - len(parent))
    return torch.tensor([parent] * size.batch, dtype=torch.int32)


def _random(size: Size, *dims: int) -> torch.Tensor:
    return torch.randn(dims).to(size.dtype)


def _index(size: Size, value: int) -> torch.Tensor:
    return torch.full((size.batch,), value, dtype=torch.int32)


def _block(size: Size) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens, parent and mask_ordinal."""
    parent = esp_parents(size)
    masked = torch.arange(size.rows) >= max(1, size.rows // 2)
    ordinal = torch.where(parent == esp_kernels.PADDING, -1, masked.int())
    tokens = torch.randint(size.shape.vocab_size, parent.shape, dtype=torch.int32)
    return torch.where(masked, -1, tokens), parent, ordinal


def _caches(size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    dims = (size.batch, size.prefix + size.rows, size.shape.num_key_value_heads, size.shape.head_dim)
    k, v = (torch.empty(dims, dtype=size.dtype).normal_() for _ in range(2))
    return k, v


def _candidates(size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(size.batch, size.rows, 512)
    logprobs, ids = logits.log_softmax(-1).topk(min(size.candidates, 512))
    return ids.int(), logprobs


def tree_metadata(size: Size, backend: str) -> Run:
    parent = esp_parents(size)
    return lambda: esp_kernels.tree_metadata(parent, backend=backend)


def embed_block(size: Size, backend: str) -> Run:
    tokens, _, ordinal = _block(size)
    embedding = _random(size, size.shape.vocab_size, size.shape.hidden_size)
    probe = torch.randn(size.batch, 1, size.shape.hidden_size)
    return lambda: esp_kernels.embed_block(tokens, ordinal, embedding, probe, backend=backend)


def rms_norm(size: Size, backend: str) -> Run:
    x, residual = (_random(size, size.batch, size.rows, size.shape.hidden_size) for _ in range(2))
    weight = _random(size, size.shape.hidden_size)
    return lambda: esp_kernels.rms_norm(x, weight, 1e-5, residual=residual, backend=backend)


def rope_append(size: Size, backend: str) -> Run:
    shape = size.shape
    q = _random(size, size.batch, size.rows, shape.num_attention_heads, shape.head_dim)
    k, v = (_random(size, size.batch, size.rows, shape.num_key_value_heads, shape.head_dim) for _ in range(2))
    cos, sin = torch.randn(2, size.prefix + size.rows, shape.head_dim // 2).unbind()
    depth, _ = esp_kernels.tree_metadata(esp_parents(size))
    where = (cos, sin, _index(size, size.prefix), depth, *_caches(size))
    return lambda: esp_kernels.rope_append(q, k, v, *where, backend=backend)


def tree_attention(size: Size, backend: str) -> Run:
    shape = size.shape
    q = _random(size, size.batch, size.rows, shape.num_attention_heads, shape.head_dim)
    depth, ancestors = esp_kernels.tree_metadata(esp_parents(size))
    where = (*_caches(size), _index(size, size.prefix), ancestors, depth)
    return lambda: esp_kernels.tree_attention(q, *where, backend=backend)


def swiglu(size: Size, backend: str) -> Run:
    gate_up = _random(size, size.batch, size.rows, 2 * size.shape.intermediate_size)
    return lambda: esp_kernels.swiglu(gate_up, backend=backend)


def topk_logprobs(size: Size, backend: str) -> Run:
    logits = _random(size, size.batch, size.rows, size.shape.vocab_size)
    return lambda: esp_kernels.topk_logprobs(logits, size.candidates, backend=backend)


def verify_tree(size: Size, backend: str) -> Run:
    block = _block(size)
    choice = torch.randint(size.shape.vocab_size, block[0].shape, dtype=torch.int32)
    return lambda: esp_kernels.verify_tree(choice, *block, backend=backend)


def update_probe(size: Size, backend: str) -> Run:
    probe = torch.randn(size.batch, 1, size.shape.hidden_size)
    embedding = _random(size, 512, size.shape.hidden_size)
    committed = torch.full((size.batch, size.rows), -1, dtype=torch.int32)
    committed[:, :ACCEPTED] = 7
    return lambda: esp_kernels.update_probe(probe, embedding, committed, 0.1, backend=backend)


def expand_tree(size: Size, backend: str) -> Run:
    root = _index(size, 7)
    ids, logprobs = (x[:, :1].contiguous() for x in _candidates(size))
    return lambda: esp_kernels.expand_tree(root, ids, logprobs, size.rows, size.masks, backend=backend)


def advance_block(size: Size, backend: str) -> Run:
    """Each call verifies the block that the one before has made."""
    tokens, parent, ordinal = _block(size)
    depth, ancestors = esp_kernels.tree_metadata(parent)
    block = (*_candidates(size), tokens, parent, ordinal, depth, ancestors)
    probe = torch.randn(size.batch, 1, size.shape.hidden_size)
    embedding = _random(size, 512, size.shape.hidden_size)
    options = (probe, embedding, 0.1, size.rows, size.masks, None, False)
    return lambda: esp_kernels.advance_block(*block, *options, backend=backend)


def commit_kv(size: Size, backend: str) -> Run:
    """One draft was accepted, and moves in all layers."""
    shape = size.shape
    dims = (
        2 * shape.num_hidden_layers,
        size.batch,
        size.rows + 64,
        shape.num_key_value_heads,
        shape.head_dim,
    )
    caches = list(torch.zeros(dims, dtype=size.dtype).unbind())
    path = torch.full((size.batch, size.rows), -1, dtype=torch.int32)
    path[:, 0], path[:, 1:2] = 0, size.rows - 1
    plan = (path, _index(size, min(1, size.rows - 1)), _index(size, 64))
    return lambda: esp_kernels.commit_kv(caches, *plan, backend=backend)


OPS: dict[str, Callable[[Size, str], Run]] = {
    op.__name__: op
    for op in (
        tree_metadata,
        embed_block,
        rms_norm,
        rope_append,
        tree_attention,
        swiglu,
        topk_logprobs,
        verify_tree,
        update_probe,
        expand_tree,
        advance_block,
        commit_kv,
    )
}
