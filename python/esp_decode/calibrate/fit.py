"""Weights of the sources, and what masks are worth, from replayed prompts; tau by replay."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from esp_decode.calibrate.replay import Heard
from esp_decode.calibrate.simulate import JoinedReplay
from esp_decode.ratios import ratio
from esp_decode.sources import Sources

EPOCHS, RATE = 8, 0.003
BUDGETS = (10, 30, 60)
REACHES = (0.05, 0.1, 0.2)
FALL = (1.0, 0.4, 0.2)  # of the reach from mask to mask
LEAST, ONLINE_RATE = 0.001, 0.003


def fit(sources: Sources, sequences: Sequence[Heard], progress: Callable[[int, int], None]) -> Sources:
    """Stochastic gradient ascent on the log-probability of what came (see learn_weights), its rate falling
    to nothing by half a cosine; the weights are the mean of those in the last half of the epochs."""
    sources = replace(sources, least=LEAST, rate=ONLINE_RATE)
    weights = sources.weights.clone()[None]
    kept: list[torch.Tensor] = []
    for epoch in range(EPOCHS):
        rate = RATE * (1 + math.cos(math.pi * epoch / EPOCHS)) / 2
        for heard in sequences:
            JoinedReplay(heard, sources, weights).learn(rate)
        if epoch >= EPOCHS // 2:
            kept.append(weights[0].clone())
        progress(epoch + 1, EPOCHS)
    sources = replace(sources, weights=torch.stack(kept).mean(dim=0))
    masks = sequences[0].mask_ids.shape[2]
    tried = [replace(sources, reach=tuple(r * fall for fall in FALL[:masks])) for r in REACHES]
    return max(tried, key=lambda one: sum(ratio(joined_calls(one, sequences, budget)) for budget in BUDGETS))


def with_lists(sources: Sources, sequences: Iterable[Heard]) -> Sources:
    """What the sequences heard, for others to begin with."""
    for heard in sequences:
        one = JoinedReplay(heard, sources, sources.weights.clone()[None])
        one.hear_all()
        keys, ids, logprobs = (of[0] for of in one.memory.lists)
        sources = replace(sources, lists=(keys, ids, logprobs))
    return sources


def joined_calls(sources: Sources, sequences: Iterable[Heard], budget: int) -> list[tuple[int, int]]:
    """Of each sequence the tokens that decode calls commit, and how many calls."""
    replays = (JoinedReplay(heard, sources, sources.weights.clone()[None]) for heard in sequences)
    return [tally(one.steps(budget)) for one in replays]


def tally(steps: Iterable[int]) -> tuple[int, int]:
    took = list(steps)
    return sum(took), len(took)
