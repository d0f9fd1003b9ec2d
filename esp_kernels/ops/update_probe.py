"""The probe drawn towards what was committed (Eq. 5 of the paper)."""

import torch

from esp_kernels import _backend
from esp_kernels._check import ANY, check_index, require
from esp_kernels.ops.embed_block import check_embedding, check_probe


def update_probe(
    probe: torch.Tensor,
    embedding: torch.Tensor,
    committed: torch.Tensor,
    lam: float = 0.1,
    *,
    backend: str = "auto",
) -> None:
    """probe[b, k] += lam * (embedding[t] - probe[b, k]) for every k and each committed token t, in order.

    probe      [B, K, E] float32; any stride but in the last dimension. Written IN PLACE
    embedding  [V, E] float32, bfloat16 or float16; any stride but in the last dimension
    committed  [B, N] int32 tokens, the oldest first; entries of -1 are skipped
    lam        in 0..1

    Computed in float32. Raises ValueError on shapes, dtypes, devices or strides that are not as above, on a
    lam outside 0..1 and, on the CPU, on tokens outside the vocabulary.
    """
    _backend.select("update_probe", backend, probe, "probe")(probe, embedding, committed, lam)


def check(probe: torch.Tensor, embedding: torch.Tensor, committed: torch.Tensor, lam: float) -> None:
    check_embedding(embedding)
    check_index(committed, "committed", embedding, ANY, ANY)
    check_probe(probe, embedding, committed.shape[0])
    require(0 <= lam <= 1, f"lam must be in 0..1, got {lam:g}")
    if embedding.device.type != "cpu":
        return
    vocabulary = embedding.shape[0]
    for b, row in enumerate(committed.tolist()):
        for i, token in enumerate(row):
            require(
                -1 <= token < vocabulary,
                f"committed[{b}, {i}] must be -1 or in the vocabulary of {vocabulary} tokens, got {token}",
            )
