"""How far each source of drafts is to be trusted, learned from what was committed."""

import torch

from esp_kernels import _backend
from esp_kernels._check import ANY, check_index, require
from esp_kernels.ops._memory import Memory, check_memory, check_sources


def learn_weights(
    memory: Memory,
    mask_ids: torch.Tensor,
    mask_logprobs: torch.Tensor,
    prior_ids: torch.Tensor,
    prior_logprobs: torch.Tensor,
    weights: torch.Tensor,
    committed: torch.Tensor,
    rate: float,
    *,
    backend: str = "auto",
) -> None:
    """A step of gradient ascent on the log-probability of each committed token, in order.

    memory .. weights  the sources as join_tree takes them, and takes tokens for candidates; weights
                       [B, 16, 6] float32 are written IN PLACE
    committed          [B, M] int32: the tokens that came, the oldest first, up to the first negative one
    rate               of learning, at least 0

    Committed token i is what a node at depth i should have drafted, whose path is the tokens before it. With
    its features x of each candidate and their probabilities p (see join_tree), the weight of source s grows
    by rate * (x_s of the token - sum of p x_s) and the weight of "something else" by rate * ((1 if the token
    is no candidate, else 0) - p of something else): the gradient of a multinomial logit. Later tokens see the
    weights that earlier ones have left.

    Raises ValueError on shapes, dtypes, devices, strides or numbers that are not as above.
    """
    run = _backend.select("learn_weights", backend, memory.history, "history")
    run(*memory, mask_ids, mask_logprobs, prior_ids, prior_logprobs, weights, committed, rate)


def check(
    history: torch.Tensor,
    length: torch.Tensor,
    heads: torch.Tensor,
    links: torch.Tensor,
    keys: torch.Tensor,
    list_ids: torch.Tensor,
    list_logprobs: torch.Tensor,
    mask_ids: torch.Tensor,
    mask_logprobs: torch.Tensor,
    prior_ids: torch.Tensor,
    prior_logprobs: torch.Tensor,
    weights: torch.Tensor,
    committed: torch.Tensor,
    rate: float,
) -> None:
    memory = Memory(history, length, heads, links, keys, list_ids, list_logprobs)
    check_memory(memory)
    check_sources(memory, mask_ids, mask_logprobs, prior_ids, prior_logprobs, weights)
    check_index(committed, "committed", history, history.shape[0], ANY)
    require(0 <= rate < float("inf"), f"rate must be at least 0, got {rate:g}")
