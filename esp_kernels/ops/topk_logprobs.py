"""Log-softmax and top-k in one pass over the vocabulary."""

import torch

from esp_kernels import _backend
from esp_kernels._check import check_float, check_rows, require

MAX_K = 256


def topk_logprobs(
    logits: torch.Tensor, k: int, *, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest values of log_softmax(logits) in descending order, ties to the lowest id.

    logits    [..., V], V at least 1, float32, bfloat16 or float16; any stride but in the last dimension
    k         1 to min(V, 256)
    returns   logprobs [..., k] float32 and ids [..., k] int32, contiguous

    NaN counts as -inf. In a row of nothing but -inf all logprobs are -inf and the ids 0 to k - 1. m logits of
    +inf share the probability: they get -log(m) and all others -inf. A row's result does not depend on the
    other rows. Raises ValueError on shapes, dtypes, strides or a k that are not as above.
    """
    return _backend.select("topk_logprobs", backend, logits, "logits")(logits, k)


def check(logits: torch.Tensor, k: int) -> None:
    check_float(logits, "logits")
    require(logits.dim() >= 1, "logits must have at least 1 dimension, got 0")
    n = logits.shape[-1]
    require(n >= 1, "logits must have at least 1 element in its last dimension, got 0")
    check_rows(logits, "logits")
    require(1 <= k <= min(n, MAX_K), f"k must be between 1 and {min(n, MAX_K)}, got {k}")
