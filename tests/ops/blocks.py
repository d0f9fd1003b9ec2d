"""Blocks of tree rows behind cached prefixes, for the tests of tree_attention."""

import dataclasses
import random
import re
from collections.abc import Sequence

import pytest
import torch
from hypothesis import strategies as st

import esp_kernels
from esp_kernels import _backend
from esp_kernels.testing import assert_as_accurate, random_tree
from tests.emulator import build

from . import oracle

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KERNELS = ["triton", *(["cuda"] if build.serves_cuda() else [])]
Pair = tuple[torch.Tensor, torch.Tensor]


def dtype_of(backend: str) -> torch.dtype:
    """For what is not about dtypes: "cuda" takes no float32."""
    return torch.bfloat16 if backend == "cuda" else torch.float32


def gap_of(backend: str) -> int:
    """A gap between rows that the backend takes, in elements: "cuda" reads 16 bytes at a time."""
    return 8 if backend == "cuda" else 3


@dataclasses.dataclass
class Block:
    """Rows of trees behind prefixes, with dense caches that hold NaN wherever no row sees."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    prefix_len: list[int]
    parents: list[list[int]]
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    def seen(self) -> torch.Tensor:
        return oracle.visible(self.parents, self.prefix_len, self.k.shape[1], self.window)

    def poisoned_caches(self) -> Pair:
        seen = self.seen().any(1)[:, :, None, None]
        nan = torch.tensor(torch.nan, dtype=self.k.dtype)
        return torch.where(seen, self.k, nan), torch.where(seen, self.v, nan)

    def caches_in(self, dtype: torch.dtype) -> Pair:
        """What the caches stand for."""
        k, v = self.k.to(dtype), self.v.to(dtype)
        k = k if self.k_scale is None else k * self.k_scale[:, None].to(dtype)
        return k, v if self.v_scale is None else v * self.v_scale[:, None].to(dtype)

    def run(
        self, backend: str = "auto", caches: Pair | None = None, table: torch.Tensor | None = None
    ) -> Pair:
        ancestors, depth = oracle.metadata(self.parents)
        prefix_len = torch.tensor(self.prefix_len, dtype=torch.int32)
        k, v = caches or self.poisoned_caches()
        options = (table, self.scale, self.window, self.softcap, self.sinks, self.k_scale, self.v_scale)
        arguments = (self.q, k, v, prefix_len, ancestors, depth, *options)
        why = _backend.refusal("tree_attention", backend, arguments)
        if why is not None:
            with pytest.raises(ValueError, match=re.escape(why)):
                esp_kernels.tree_attention(*arguments, backend=backend)
            pytest.skip(why)
        return esp_kernels.tree_attention(*arguments, backend=backend)

    def exact(self) -> Pair:
        caches = self.caches_in(torch.float64)
        return oracle.attention(self.q, *caches, self.seen(), self.scale, self.softcap, self.sinks)

    def half_an_ulp(self) -> float:
        """Of the largest score, its products taken without signs: what a float32 sum of them may err by at
        each addition, where it has no luck."""
        group = self.q.shape[2] // self.k.shape[2]
        q, k = (x.double().abs().transpose(1, 2) for x in (self.q, self.caches_in(torch.float64)[0]))
        scores = q @ k.repeat_interleave(group, 1).mT * (self.scale or self.q.shape[-1] ** -0.5)
        scores = scores.masked_fill(~self.seen()[:, None], 0)
        return scores.amax().item() * 2.0**-24 if scores.numel() else 0.0

    def baseline(self) -> Pair:
        """PyTorch's own result at q's precision; LSE, which it does not return, in float32."""
        seen = self.seen()
        real = seen.any(-1)[:, :, None]
        seen |= ~real  # PyTorch's bfloat16 products spread the NaN of an empty softmax
        group = self.q.shape[2] // self.k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (self.q, *self.caches_in(self.q.dtype)))
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

        def logits(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            s = q @ k.mT * (self.q.shape[-1] ** -0.5 if self.scale is None else self.scale)
            s = s if self.softcap is None else self.softcap * torch.tanh(s / self.softcap)
            s = s.masked_fill(~seen[:, None], -torch.inf)
            if self.sinks is None:
                return s
            sink = self.sinks.to(s.dtype)[None, :, None, None].expand(*s.shape[:3], 1)
            return torch.cat([s, sink], -1)

        if self.softcap is None and self.sinks is None:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen[:, None], scale=self.scale)
        else:
            out = logits(q, k).softmax(-1)[..., : seen.shape[-1]] @ v
        lse = logits(q.float(), k.float()).logsumexp(-1)
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
        return torch.where(real[..., None], out, 0), torch.where(real, lse, -torch.inf)


def block(
    prefix_len: Sequence[int],
    parents: Sequence[Sequence[int]],
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    **options: object,
) -> Block:
    rows = len(parents[0])
    cache = (len(parents), max(prefix_len) + rows, kv_heads, dim)
    return Block(
        torch.randn(len(parents), rows, heads, dim).to(dtype),
        torch.randn(cache).to(dtype),
        torch.randn(cache).to(dtype),
        list(prefix_len),
        [list(p) for p in parents],
        **options,
    )


def chain(rows: int) -> list[int]:
    return list(range(-1, rows - 1))


def check_accuracy(case: Block, result: Pair, factor: float = 8.0) -> None:
    """The factor is large for cases of few numbers, where PyTorch's own error may be small by luck."""
    for actual, exact, own, least in zip(
        result, case.exact(), case.baseline(), (0.0, case.half_an_ulp()), strict=True
    ):
        assert_as_accurate(actual, exact, own, factor, least)


def assert_same(actual: Pair, expected: Pair) -> None:
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


@st.composite
def blocks(draw: st.DrawFn, small: bool = False) -> tuple[Block, int, bool]:
    """A case, a page size or 0, and whether to leave gaps; `small` for kernels that are interpreted."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    torch.manual_seed(rng.randrange(2**32))
    rows = draw(st.sampled_from([1, 2, 7] if small else [1, 2, 7, 30, 65]))
    batch = draw(st.integers(1, 2 if small else 3))
    shapes = [(2, 1), (1, 3), (1, 17)] if small else [(3, 1), (3, 3), (2, 4), (1, 8)]
    kv_heads, group = draw(st.sampled_from(shapes))
    parents = []
    for _ in range(batch):
        padding = rng.randrange(rows) if draw(st.booleans()) else 0
        parents.append(random_tree(rows, rng, padding, reach=draw(st.sampled_from([None, 1, 4]))))
    case = block(
        [draw(st.sampled_from([0, 1, 63, 64, 65, 300])) for _ in range(batch)],
        parents,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([64, 80, 96, 128, 256])),
        dtype=draw(st.sampled_from(DTYPES)),
        window=draw(st.sampled_from([None, None, 1, 3, 64, 100, 5000])),
        scale=draw(st.sampled_from([None, 0.2])),
        softcap=draw(st.sampled_from([None, None, 2.0, 30.0])),
        sinks=torch.randn(kv_heads * group) if draw(st.booleans()) else None,
    )
    return case, draw(st.sampled_from([0, 1, 16, 64])), draw(st.booleans())
