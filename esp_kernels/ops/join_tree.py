"""The next block of a decode, drafted from all sources together under one row budget."""

from collections.abc import Sequence

import torch

from esp_kernels import _backend
from esp_kernels._check import require
from esp_kernels.ops._memory import MAX_MASKS, Memory, check_memory, check_sources

MAX_BUDGET = 256


def join_tree(
    memory: Memory,
    mask_ids: torch.Tensor,
    mask_logprobs: torch.Tensor,
    prior_ids: torch.Tensor,
    prior_logprobs: torch.Tensor,
    weights: torch.Tensor,
    budget: int,
    reach: Sequence[float],
    least: float = 0.0,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draft the tree that commits the most tokens in expectation, now and by its masks in the next step.

    memory         what the sequence has shown; the last token of its history is the root
    mask_ids       [B, K, N] int32, K <= 3, N <= 64: what masks 1..K of the deepest accepted row said, which
                   are the candidates at depths 1..K; -1 throughout for a mask that the row did not have
    mask_logprobs  [B, K, N] float32
    prior_ids      [V, P] int32, P <= 16: the tokens that follow each token anywhere, best first; V or P may
                   be 0
    prior_logprobs [V, P] float32
    weights        [B, 16, 6] float32: of the sources, for each pattern
    budget         1 to 256: the most rows that the block may have
    reach          a value for each mask that a node may have, at most 3, descending: the tokens that mask i
                   of the deepest accepted row adds to the next step
    least          a row that is not expected to commit so many tokens is left out
    returns        tokens, parent, mask_ordinal [B, budget] int32 and chance [B, budget] float32, in rows
                   [root | drafts | masks of row 0 | masks of row 1 | ...] and padding (token -1, parent
                   PADDING, ordinal -1, chance 0) behind them. The chance of a draft is the probability that
                   it is accepted, of a mask that its row is the deepest accepted one

    Five sources say what may follow a node: 0 the mask of its depth, 1 the prior of its token, 2 the list
    that memory keeps behind its token and 3 behind the longest context of 4 to 2 tokens that has one, 4
    copying: the tokens behind the (at most 8) latest places in the history where the longest context of 4
    to 1 tokens occurs, with the log of their share when place i counts 0.6^i and 0.5 are nobody's. Of
    each, the feature of a token is x_s = max(0, logprob + 9) (+ 4 for copying), 0 where it is not listed; a
    listed token is a candidate. With the weights w of the pattern, 4 * (the mask's number, 0 without one) +
    min(3, length of the copied context), the probability of a candidate is

        exp(sum_s w_s x_s) / (exp(w_5) + sum over candidates of exp(sum_s w_s x_s)),

    a weighted product of experts, with w_5 for all other tokens. Probabilities multiply along paths.

    Drafts are the most probable nodes, best first, by (chance descending, depth, parent's row, rank, where
    equal probabilities rank by the first source that lists them and its order). Of n drafts so found, the
    first d are kept: the most for which root, drafts and those masks whose value, chance * reach, is not
    below the chance of draft d fit the budget; rows left over go to the most valuable masks.

    Raises ValueError on shapes, dtypes, devices, strides or numbers that are not as above.
    """
    run = _backend.select("join_tree", backend, memory.history, "history")
    sources = (mask_ids, mask_logprobs, prior_ids, prior_logprobs, weights)
    return run(*memory, *sources, budget, reach, least)


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
    budget: int,
    reach: Sequence[float],
    least: float,
) -> None:
    memory = Memory(history, length, heads, links, keys, list_ids, list_logprobs)
    check_memory(memory)
    check_sources(memory, mask_ids, mask_logprobs, prior_ids, prior_logprobs, weights)
    require(1 <= budget <= MAX_BUDGET, f"budget must be 1 to {MAX_BUDGET}, got {budget}")
    require(len(reach) <= MAX_MASKS, f"reach must have at most {MAX_MASKS} values, got {len(reach)}")
    falling = all(0 <= b <= a for a, b in zip([1.0, *reach], reach, strict=False))
    require(falling, f"reach must descend from at most 1 to at least 0, got {list(reach)}")
    require(0 <= least <= 1, f"least must be in 0..1, got {least:g}")
