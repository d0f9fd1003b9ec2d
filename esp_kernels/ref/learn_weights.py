import torch

from esp_kernels.ops._memory import SOURCES, Memory
from esp_kernels.ref._sources import Sources, sequence


def learn_weights(
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
    for b in range(history.shape[0]):
        if int(length[b]) == 0:
            continue
        mine = Sources(sequence(memory, b), mask_ids[b], mask_logprobs[b], prior_ids, prior_logprobs)
        path: list[int] = []
        for token in committed[b].tolist():
            if token < 0:
                break
            mixture = mine.behind(path)
            chances, other = mixture.probabilities(weights[b])
            known = token in mixture.tokens
            seen = mixture.features[mixture.tokens.index(token)] if known else [0.0] * SOURCES
            gradient = [
                x - sum(p * row[s] for p, row in zip(chances, mixture.features, strict=True))
                for s, x in enumerate(seen)
            ]
            weights[b, mixture.pattern] += rate * weights.new_tensor([*gradient, (not known) - other])
            path.append(token)
