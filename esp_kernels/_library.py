"""Every op's schema and fake. A `(a!)` marks what an op writes in place."""

from typing import Any

import torch

from esp_kernels import _backend

MEMORY = (
    "Tensor history, Tensor length, Tensor heads, Tensor links, Tensor keys, Tensor list_ids, "
    "Tensor list_logprobs"
)
WRITTEN_MEMORY = (
    "Tensor(a!) history, Tensor(b!) length, Tensor(c!) heads, Tensor(d!) links, Tensor(e!) keys, "
    "Tensor(f!) list_ids, Tensor(g!) list_logprobs"
)
SOURCES = "Tensor mask_ids, Tensor mask_logprobs, Tensor prior_ids, Tensor prior_logprobs"

SCHEMAS = {
    "tree_metadata": "(Tensor parent) -> (Tensor depth, Tensor ancestors)",
    "embed_block": "(Tensor tokens, Tensor mask_ordinal, Tensor embedding, Tensor probe) -> Tensor",
    "rms_norm": "(Tensor x, Tensor weight, float eps, Tensor(a!)? residual=None) -> Tensor",
    "rope_append": "(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor prefix_len, Tensor depth, "
    "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? block_table=None, Tensor? k_scale=None, "
    "Tensor? v_scale=None) -> Tensor",
    "tree_attention": "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor prefix_len, Tensor ancestors, "
    "Tensor depth, Tensor? block_table=None, float? scale=None, int? window=None, float? softcap=None, "
    "Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None) -> (Tensor out, Tensor lse)",
    "swiglu": "(Tensor gate_up) -> Tensor",
    "linear_rows": "(Tensor x, Tensor packed_weight, int out_features, Tensor? bias=None) -> Tensor",
    "topk_logprobs": "(Tensor logits, int k) -> (Tensor logprobs, Tensor ids)",
    "verify_tree": "(Tensor choice, Tensor tokens, Tensor parent, Tensor mask_ordinal) "
    "-> (Tensor path, Tensor accepted, Tensor bonus)",
    "expand_tree": "(Tensor root, Tensor ids, Tensor logprobs, int budget, int masks, int[]? widths=None, "
    "bool prune=True) -> (Tensor tokens, Tensor parent, Tensor mask_ordinal)",
    "update_probe": "(Tensor(a!) probe, Tensor embedding, Tensor committed, float lam) -> ()",
    "advance_block": "(Tensor ids, Tensor logprobs, Tensor(a!) tokens, Tensor(b!) parent, "
    "Tensor(c!) mask_ordinal, Tensor(d!) depth, Tensor(e!) ancestors, Tensor(f!) probe, Tensor embedding, "
    "float lam, int budget, int masks, int[]? widths=None, bool prune=True) "
    "-> (Tensor path, Tensor accepted, Tensor committed)",
    "remember_block": f"({WRITTEN_MEMORY}, Tensor tokens, Tensor parent, Tensor mask_ordinal, Tensor ids, "
    "Tensor logprobs, Tensor committed) -> ()",
    "learn_weights": f"({MEMORY}, {SOURCES}, Tensor(a!) weights, Tensor committed, float rate) -> ()",
    "join_tree": f"({MEMORY}, {SOURCES}, Tensor weights, int budget, float[] reach, float least) "
    "-> (Tensor tokens, Tensor parent, Tensor mask_ordinal, Tensor chance)",
    "commit_kv": "(Tensor(a!)[] caches, Tensor path, Tensor accepted, Tensor prefix_len, "
    "Tensor? block_table=None) -> ()",
}

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _int32(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_empty(shape, dtype=torch.int32)


def tree_metadata(parent: torch.Tensor) -> Pair:
    batch, rows = parent.shape
    return torch.empty_like(parent), parent.new_empty((batch, rows, (rows + 63) // 64), dtype=torch.int64)


def embed_block(
    tokens: torch.Tensor, mask_ordinal: torch.Tensor, embedding: torch.Tensor, probe: torch.Tensor
) -> torch.Tensor:
    return embedding.new_empty((*tokens.shape, embedding.shape[1]))


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    return x.new_empty(x.shape)


def rope_append(q: torch.Tensor, *_: object) -> torch.Tensor:
    return q.new_empty(q.shape)


def tree_attention(q: torch.Tensor, *_: object) -> Pair:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def linear_rows(
    x: torch.Tensor, packed_weight: torch.Tensor, out_features: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


def topk_logprobs(logits: torch.Tensor, k: int) -> Pair:
    shape = (*logits.shape[:-1], k)
    return logits.new_empty(shape, dtype=torch.float32), _int32(logits, *shape)


def verify_tree(choice: torch.Tensor, *_: object) -> Triple:
    return torch.empty_like(choice), _int32(choice, choice.shape[0]), _int32(choice, choice.shape[0])


def expand_tree(
    root: torch.Tensor,
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    budget: int,
    masks: int,
    widths: list[int] | None = None,
    prune: bool = True,
) -> Triple:
    nodes = budget // (masks + 1) if widths is None else 1 + sum(widths)
    shape = (root.shape[0], nodes * (masks + 1))
    return _int32(root, *shape), _int32(root, *shape), _int32(root, *shape)


def update_probe(*_: object) -> None:
    return None


def advance_block(ids: torch.Tensor, logprobs: torch.Tensor, tokens: torch.Tensor, *_: object) -> Triple:
    return torch.empty_like(tokens), _int32(tokens, tokens.shape[0]), torch.empty_like(tokens)


def remember_block(*_: object) -> None:
    return None


def learn_weights(*_: object) -> None:
    return None


def join_tree(history: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    shape = (history.shape[0], args[11])
    rows = [_int32(history, *shape) for _ in range(3)]
    return (*rows, history.new_empty(shape, dtype=torch.float32))


def commit_kv(*_: object) -> None:
    return None


library = torch.library.Library("esp_kernels", "DEF")
for _op, _schema in SCHEMAS.items():
    library.define(_op + _schema)
    torch.library.register_fake(f"esp_kernels::{_op}", globals()[_op], lib=library)

# The CUDA C++ ops have names of their own, since the dispatcher holds one kernel an op and device.
cuda_library = torch.library.Library("esp_kernels_cuda", "DEF")
for _op in _backend.CUDA_OPS:
    cuda_library.define(_op + SCHEMAS[_op])
    torch.library.register_fake(f"esp_kernels_cuda::{_op}", globals()[_op], lib=cuda_library)


def register_fallbacks() -> None:
    """Bind the reference wherever no native op is registered; called once every op is importable."""
    for op in SCHEMAS:
        for device, key in (("cpu", "CPU"), ("cuda", "CUDA")):
            if "cpp" not in _backend.served_by(op, device):
                library.impl(op, _backend.fallback(op, device), key)
