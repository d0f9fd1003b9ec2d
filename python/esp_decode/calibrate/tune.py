"""The probe's own vectors, tuned: the model stays frozen, only they learn to guess."""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from esp_decode.calibrate.parts import Parts

PASSES = 12
RATE = 0.1  # of Adam, in standard deviations of the embeddings; falls to nothing by half a cosine
PATIENCE = 2  # passes that may do no better


@dataclass
class Lesson:
    """A sequence [N] int64, the prompt's `prompt_len` tokens first, and the K/V of all but the last."""

    tokens: torch.Tensor
    prompt_len: int
    cached: list[tuple[torch.Tensor, torch.Tensor]]


@torch.no_grad()
def lesson(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> Lesson:
    tokens = torch.tensor([*prompt, *answer])
    cache = model(tokens[None, :-1], use_cache=True, logits_to_keep=1).past_key_values
    return Lesson(tokens, len(prompt), [(layer.keys, layer.values) for layer in cache.layers])


def losses(model: Any, vectors: torch.Tensor, lesson: Lesson) -> list[torch.Tensor]:
    """The cross-entropies of each mask, whose vectors are [K, E], on the tokens that it should guess: mask i
    behind token t of a sequence, at position t + i, guesses token t + i + 1, if there is one."""
    from transformers import DynamicCache

    masks, last = len(vectors), len(lesson.tokens) - 1
    owner = torch.arange(lesson.prompt_len - 1, last)
    ordinal = torch.arange(1, masks + 1)
    position = owner[:, None] + ordinal  # [owners, masks]
    rows = position.numel()
    owns, which = owner.repeat_interleave(masks), ordinal.repeat(len(owner))
    prefix = torch.arange(last) <= owns[:, None]
    block = (owns == owns[:, None]) & (which <= which[:, None])
    visible = torch.cat([prefix, block], dim=1)
    mask = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(lesson.cached):
        cache.update(keys, values, layer)
    hidden = model.model(
        inputs_embeds=vectors.repeat(len(owner), 1)[None],
        attention_mask=mask[None, None],
        position_ids=position.reshape(1, rows),
        use_cache=True,
        **{_cache_argument(model): cache},
    ).last_hidden_state[0]
    target = position + 1
    known = target <= last
    logits = model.lm_head(hidden[known.flatten()])
    each = F.cross_entropy(logits, lesson.tokens[target[known]], reduction="none")
    return [each[which[known.flatten()] == i] for i in ordinal]


def _cache_argument(model: Any) -> str:
    """transformers renames it in version 5."""
    return "cache" if "cache" in inspect.signature(model.model.forward).parameters else "past_key_values"


def loss(model: Any, vectors: torch.Tensor, lesson: Lesson) -> torch.Tensor:
    """The mean over the masks."""
    return torch.stack([each.mean() for each in losses(model, vectors, lesson) if len(each)]).mean()


def tune(
    folder: Path,
    start: torch.Tensor,
    sequences: Sequence[tuple[list[int], list[int]]],
    held_out: Sequence[tuple[list[int], list[int]]],
    parts: Parts,
    out_of_time: Callable[[], bool],
    progress: Callable[[int, int], None],
) -> torch.Tensor:
    """The vectors [K, E] float32 that guess best on the sequences held out, from `start`; a sequence is a
    prompt and its answer. Ends early where PATIENCE passes do no better, or when time is out."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    learning, judging = ([lesson(model, *one) for one in part] for part in (sequences, held_out))
    vectors = nn.Parameter(start.clone())
    adam = torch.optim.Adam([vectors], RATE * float(model.get_input_embeddings().weight.std()))
    base = adam.param_groups[0]["lr"]
    steps, order = PASSES * len(learning), torch.Generator()

    def judged() -> float:
        with torch.no_grad():
            return float(torch.stack([loss(model, vectors, one) for one in judging or learning]).mean())

    def one_pass(number: int) -> dict[str, torch.Tensor]:
        for i, which in enumerate(torch.randperm(len(learning), generator=order.manual_seed(number))):
            done = number * len(learning) + i
            adam.param_groups[0]["lr"] = base * (1 + math.cos(math.pi * done / steps)) / 2
            adam.zero_grad()
            loss(model, vectors, learning[which]).backward()
            adam.step()
            progress(done + 1, steps)
        state = adam.state[vectors]
        now = {"vectors": vectors.detach(), "loss": torch.tensor(judged())}
        return now | {name: state[name] for name in ("step", "exp_avg", "exp_avg_sq")}

    passes = [{"vectors": start, "loss": torch.tensor(judged())}]
    for number in range(PASSES):
        if out_of_time() and not parts.has(f"pass-{number}"):
            break
        kept = parts.keep(f"pass-{number}", functools.partial(one_pass, number))
        vectors.data.copy_(kept["vectors"])
        adam.state[vectors] = {name: kept[name] for name in ("step", "exp_avg", "exp_avg_sq")}
        passes.append(kept)
        best = min(range(len(passes)), key=lambda i: float(passes[i]["loss"]))
        if len(passes) - 1 - best >= PATIENCE:
            break
    return min(passes, key=lambda one: float(one["loss"]))["vectors"]
