import torch
import triton
import triton.language as tl

BLOCK = 1024


# Bytes: a row of embedding or of probe, and y once. Ids that no check has seen read nothing and give 0.
@triton.jit(do_not_specialize=["rows", "vocabulary", "masks"])
def _embed_block_kernel(
    tokens, mask_ordinal, embedding, probe, y,
    rows, vocabulary, masks, n, embedding_row, probe_batch, probe_row,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    ordinal = tl.load(mask_ordinal + row)
    token = tl.load(tokens + row).to(tl.int64)
    is_token = (ordinal == 0) & (token >= 0) & (token < vocabulary)
    is_mask = (ordinal >= 1) & (ordinal <= masks)

    known = tl.load(embedding + token * embedding_row + at, mask=inside & is_token, other=0.0)
    probes = probe + row // rows * probe_batch + (ordinal.to(tl.int64) - 1) * probe_row
    guess = tl.load(probes + at, mask=inside & is_mask, other=0.0).to(known.dtype)
    tl.store(y + row * n + at, tl.where(is_mask, guess, known), mask=inside)


def embed_block(
    tokens: torch.Tensor, mask_ordinal: torch.Tensor, embedding: torch.Tensor, probe: torch.Tensor
) -> torch.Tensor:
    (batch, rows), (vocabulary, n) = tokens.shape, embedding.shape
    y = embedding.new_empty((batch, rows, n))
    if y.numel() == 0:
        return y
    strides = (embedding.stride(0), probe.stride(0), probe.stride(1))
    grid = (batch * rows, triton.cdiv(n, BLOCK))
    _embed_block_kernel[grid](
        tokens, mask_ordinal, embedding, probe, y, rows, vocabulary, probe.shape[1], n, *strides, BLOCK=BLOCK
    )
    return y
