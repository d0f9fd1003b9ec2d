"""The decode loop: one forward a step verifies the last draft and proposes the next."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

import esp_kernels
from esp_decode.cache import Cache
from esp_decode.drafters import Draft, Drafter, Outcome, Verdict
from esp_decode.graph import StepGraph
from esp_decode.model import Model
from esp_decode.tree import chain_block
from esp_kernels.nvtx import span

PREFILL_ROWS = 256


@dataclass
class State:
    """A batch that is being decoded. Its tensors keep their addresses where the drafter is `on_device`.

    graph  the step as a CUDA graph over these tensors, once it is captured
    """

    cache: Cache
    draft: Draft
    graph: StepGraph | None = None

    @property
    def capacity(self) -> int:
        return self.cache.k.shape[2]


def new_state(model: Model, drafter: Drafter, batch: int, capacity: int) -> State:
    """capacity: the slots of a sequence; its tokens and twice `drafter.rows` more."""
    return State(model.new_cache(batch, capacity), drafter.new_draft(batch, capacity))


def decode(model: Model, drafter: Drafter, prompt: torch.Tensor, state: State) -> Iterator[torch.Tensor]:
    """Yields the tokens [B, T] that each forward commits, -1 behind the last; the first one commits one.

    prompt [B, N] int32, N >= 1
    """
    with span("prefill"):
        prefill(model, drafter, prompt, state)
    if model.device.type == "cuda" and drafter.on_device:
        if state.graph is None:
            state.graph = StepGraph(lambda: step(model, drafter, state).committed, tensors_of(state))
        yield from state.graph.replays()
    while True:
        with span("step"):
            verdict = step(model, drafter, state)
        yield verdict.committed


def prefill(model: Model, drafter: Drafter, prompt: torch.Tensor, state: State) -> None:
    """Caches the prompt but for its last token, which is the root of the first block."""
    drafter.start(prompt, state.draft)
    state.cache.prefix_len.zero_()
    no_probe = state.draft.probe[:, :0]
    for tokens in prompt[:, :-1].split(PREFILL_ROWS, dim=1):
        # On a GPU equal prompts must meet equal products, whatever the drafter.
        rows = PREFILL_ROWS if model.device.type == "cuda" else tokens.shape[1]
        hidden = model.forward(chain_block(tokens, rows), no_probe, state.cache)
        state.cache.advance(tokens.shape[1])
        drafter.read(tokens, hidden[:, : tokens.shape[1]], state.draft)


def step(model: Model, drafter: Drafter, state: State) -> Verdict:
    """One decode call. The rows that are not accepted leave no trace: their slots are written over."""
    hidden = model.forward(state.draft.block, state.draft.probe, state.cache)
    logprobs, ids = esp_kernels.topk_logprobs(model.lm_head(hidden), drafter.candidates)
    verdict = drafter.advance(Outcome(ids[..., 0], ids, logprobs, hidden), state.draft)
    state.cache.commit(verdict.path, verdict.accepted)
    return verdict


def tensors_of(state: State) -> list[torch.Tensor]:
    """What a step changes, but for slots behind the prefix."""
    return [state.cache.prefix_len, *state.draft.tensors]
