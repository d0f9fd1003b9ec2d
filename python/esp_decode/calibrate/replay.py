"""Teacher-forced replay: what the model and its masks say at every position of a finished sequence."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import esp_kernels
from esp_decode.loop import PREFILL_ROWS
from esp_decode.model import Model
from esp_decode.probe import Probe
from esp_decode.tree import Block, chain_block, with_metadata


@dataclass
class Heard:
    """What was said behind `tokens`, prompt and answer, of one sequence, from the prompt's last token on.

    tokens         [n] int32, the prompt's `prompt_len` first
    ids, logprobs  [positions, N]: of the model itself
    mask_ids, mask_logprobs  [positions, lags, K, N]: of masks whose probe had followed all tokens but the
                   last `lag`; a single lag stands for all where the probe follows none
    """

    tokens: torch.Tensor
    prompt_len: int
    ids: torch.Tensor
    logprobs: torch.Tensor
    mask_ids: torch.Tensor
    mask_logprobs: torch.Tensor

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt_len :].tolist()

    def masks_at(self, position: int, lag: int) -> tuple[torch.Tensor, torch.Tensor]:
        """ids and logprobs [1, K, N] of the masks behind answer token `position - 1`, 0: the prompt."""
        lag = min(lag, self.mask_ids.shape[1] - 1)
        return self.mask_ids[position, lag][None], self.mask_logprobs[position, lag][None]


@torch.inference_mode()
def replay(
    model: Model, prompt: Sequence[int], answer: Sequence[int], probe: Probe, masks: int, candidates: int
) -> Heard:
    """Bit for bit what decoding hears, since a row's bits depend on its ancestors and prefix alone."""
    tokens = torch.tensor([[*prompt, *answer]], dtype=torch.int32, device=model.device)
    begin, end = len(prompt) - 1, tokens.shape[1] - 1
    lags = masks + 1 if probe.lam else 1
    vectors = _vectors(model, probe, tokens, len(prompt), masks)  # [positions, masks, E]
    cache = model.new_cache(1, tokens.shape[1] + PREFILL_ROWS)
    for part in tokens[:, :begin].split(PREFILL_ROWS, dim=1):
        model.forward(chain_block(part, part.shape[1]), vectors[:1, :0], cache)
        cache.advance(part.shape[1])

    voices = lags * masks
    said = []
    for first in range(begin, end, size := PREFILL_ROWS // (1 + voices)):
        part = tokens[:, first : min(first + size, end)]
        behind = torch.arange(first - begin, first - begin + part.shape[1])[:, None] - torch.arange(lags)
        spoken = vectors[behind.clamp(min=0)].flatten(0, 2)[None]  # [1, rows * lags * masks, E]
        hidden = model.forward(_block(part, lags, masks), spoken, cache)
        cache.advance(part.shape[1])
        said.append(_answers(model, hidden, part.shape[1], voices, candidates))
    ids, logprobs = (torch.cat(parts) for parts in zip(*said, strict=True))  # [positions, 1 + voices, N]
    mask_ids, mask_logprobs = (t[:, 1:].unflatten(1, (lags, masks)).contiguous() for t in (ids, logprobs))
    ids, logprobs = ids[:, 0].contiguous(), logprobs[:, 0].contiguous()
    return Heard(tokens[0], len(prompt), ids, logprobs, mask_ids, mask_logprobs)


def _vectors(model: Model, probe: Probe, tokens: torch.Tensor, prompt_len: int, masks: int) -> torch.Tensor:
    """The probe [positions, masks, E] after the prompt and each answer token but the last."""
    now = probe.initial(model, tokens[:, :prompt_len], masks)
    states = [now.clone()]
    for token in tokens[:, prompt_len:-1].split(1, dim=1):
        if probe.lam:
            esp_kernels.update_probe(now, model.embedding, token.contiguous(), probe.lam)
        states.append(now.clone())
    return torch.cat(states)


def _block(tokens: torch.Tensor, lags: int, masks: int) -> Block:
    """The tokens [1, n] one behind the other, then of each one `lags` chains of `masks` masks."""
    n = tokens.shape[1]
    voices = lags * masks
    row = n + torch.arange(n * voices)
    ordinal = torch.arange(n * voices) % masks
    parent = torch.where(ordinal == 0, (row - n) // voices, row - 1)
    parent = torch.cat([torch.arange(-1, n - 1), parent]).int()[None]
    every = torch.cat([torch.zeros(n), 1 + torch.arange(n * voices)]).int()[None]
    said = torch.cat([tokens, tokens.new_full((1, n * voices), -1)], dim=1)
    return with_metadata(said, parent.to(tokens.device), every.to(tokens.device), n * (1 + voices))


def _answers(
    model: Model, hidden: torch.Tensor, n: int, voices: int, candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and logprobs [n, 1 + voices, candidates]: of each token, then of its masks."""

    def together(said: torch.Tensor) -> torch.Tensor:
        return torch.cat([said[:n, None], said[n:].reshape(n, voices, candidates)], dim=1)

    logprobs, ids = esp_kernels.topk_logprobs(model.lm_head(hidden), candidates)
    return together(ids[0]), together(logprobs[0])
