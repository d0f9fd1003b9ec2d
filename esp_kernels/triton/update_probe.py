"""A part of a probe vector stays in registers while every committed token draws on it, in order."""

import torch
import triton
import triton.language as tl

BLOCK = 512


# Bytes: the probe in and out, each committed embedding once a probe vector.
@triton.jit(do_not_specialize=["vocabulary", "length"])
def _update_probe_kernel(
    probe, embedding, committed, lam, vocabulary, length, width, batch_stride, vector_stride, token_stride,
    BLOCK: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    e = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = e < width
    mine = probe + b * batch_stride + tl.program_id(1) * vector_stride + e
    value = tl.load(mine, mask=inside, other=0.0)
    # A block commits few of its rows: what follows the last token is not walked through.
    n = tl.arange(0, LENGTH)
    tokens = tl.load(committed + b * length + n, mask=n < length, other=-1)
    for i in range(tl.max(tl.where(tokens >= 0, n + 1, 0), 0)):
        token = tl.load(committed + b * length + i).to(tl.int64)
        draws = (token >= 0) & (token < vocabulary)
        target = tl.load(embedding + token * token_stride + e, mask=inside & draws, other=0.0).to(tl.float32)
        value = tl.where(draws, value + lam * (target - value), value)
    tl.store(mine, value, mask=inside)


def update_probe(probe: torch.Tensor, embedding: torch.Tensor, committed: torch.Tensor, lam: float) -> None:
    batch, vectors, width = probe.shape
    if probe.numel() == 0 or committed.numel() == 0 or lam == 0:
        return
    length = committed.shape[1]
    grid = (batch, vectors, triton.cdiv(width, BLOCK))
    _update_probe_kernel[grid](
        probe, embedding, committed, lam, embedding.shape[0], length, width,
        probe.stride(0), probe.stride(1), embedding.stride(0),
        BLOCK=BLOCK, LENGTH=triton.next_power_of_2(length), num_warps=4,
    )  # fmt: skip
