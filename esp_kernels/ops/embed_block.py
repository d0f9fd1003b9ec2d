"""The input rows of a block: token embeddings and probe vectors in one gather."""

import torch

from esp_kernels import _backend
from esp_kernels._check import (
    ANY,
    check_device,
    check_dtype,
    check_float,
    check_index,
    check_rows,
    check_shape,
    require,
)


def embed_block(
    tokens: torch.Tensor,
    mask_ordinal: torch.Tensor,
    embedding: torch.Tensor,
    probe: torch.Tensor,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """x[b, r] = embedding[tokens[b, r]] for a token row, probe[b, i - 1] for mask row i, 0 for padding.

    tokens        [B, T] int32, read in token rows only
    mask_ordinal  [B, T] int32: 0 a token row, i = 1..K the i-th mask of its owner, -1 padding
    embedding     [V, E] float32, bfloat16 or float16; any stride but in the last dimension
    probe         [B, K, E] float32; any stride but in the last dimension
    returns       [B, T, E] contiguous, embedding's dtype

    Raises ValueError on shapes, dtypes, devices or strides that are not as above and, on the CPU, on tokens
    outside the vocabulary and ordinals outside -1..K.
    """
    return _backend.select("embed_block", backend, tokens, "tokens")(tokens, mask_ordinal, embedding, probe)


def check_probe(probe: torch.Tensor, embedding: torch.Tensor, batch: int) -> None:
    check_device(probe, "probe", embedding)
    check_dtype(probe, "probe", torch.float32)
    check_shape(probe, "probe", batch, ANY, embedding.shape[1])
    check_rows(probe, "probe")


def check_embedding(embedding: torch.Tensor) -> None:
    check_float(embedding, "embedding")
    check_shape(embedding, "embedding", ANY, ANY)
    check_rows(embedding, "embedding")


def check(
    tokens: torch.Tensor, mask_ordinal: torch.Tensor, embedding: torch.Tensor, probe: torch.Tensor
) -> None:
    check_embedding(embedding)
    check_index(tokens, "tokens", embedding, ANY, ANY)
    batch, rows = tokens.shape
    check_index(mask_ordinal, "mask_ordinal", embedding, batch, rows)
    check_probe(probe, embedding, batch)
    if embedding.device.type != "cpu":
        return
    vocabulary, masks = embedding.shape[0], probe.shape[1]
    for b, (row, ordinals) in enumerate(zip(tokens.tolist(), mask_ordinal.tolist(), strict=True)):
        for r, (token, ordinal) in enumerate(zip(row, ordinals, strict=True)):
            require(-1 <= ordinal <= masks, f"mask_ordinal[{b}, {r}] must be in -1..{masks}, got {ordinal}")
            require(
                ordinal != 0 or 0 <= token < vocabulary,
                f"tokens[{b}, {r}] must be in the vocabulary of {vocabulary} tokens, got {token}",
            )
