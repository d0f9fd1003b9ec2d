"""What follows each token anywhere: the model's answers behind the token alone."""

from collections.abc import Callable

import torch

import esp_kernels
from esp_decode.model import Model
from esp_decode.tree import with_metadata

ROWS = 256
WIDTH = 8
TOKENS = 16384  # a BPE vocabulary begins with its most frequent ones


@torch.inference_mode()
def successors(
    model: Model, line_break: int, progress: Callable[[int, int], None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [V, 8] int32 and logprobs [V, 8] float32 behind a line break and each of the first V tokens."""
    count = min(TOKENS, model.vocab_size)
    cache = model.new_cache(1, ROWS)
    no_probe = torch.empty((1, 0, model.embedding.shape[1]), device=model.device)
    width = min(WIDTH, model.vocab_size)
    ids = torch.empty((count, width), dtype=torch.int32)
    logprobs = torch.empty((count, width))
    for first in range(0, count, ROWS - 1):
        part = range(first, min(first + ROWS - 1, count))
        tokens = torch.tensor([[line_break, *part]], dtype=torch.int32, device=model.device)
        parent = torch.zeros_like(tokens)
        parent[:, 0] = -1
        block = with_metadata(tokens, parent, torch.zeros_like(tokens), tokens.shape[1])
        hidden = model.forward(block, no_probe, cache)[:, 1:]
        values, indices = esp_kernels.topk_logprobs(model.lm_head(hidden), width)
        logprobs[part], ids[part] = values[0].cpu(), indices[0].cpu()
        progress(part.stop, count)
    return ids, logprobs
