"""No drafts: plain decoding on the same engine."""

import torch

from esp_decode.model import Model
from esp_decode.tree import Block, chain_block


class ArDrafter:
    masks = 0
    rows = 1

    def __init__(self, model: Model, prompt: torch.Tensor):
        self.probe = torch.empty((prompt.shape[0], 0, model.embedding.shape[1]), device=model.device)
        self._block = chain_block(prompt[:, :1], masks=0)

    def draft(self, root: torch.Tensor, committed: torch.Tensor, mask_logits: torch.Tensor) -> Block:
        self._block.tokens = root[:, None].contiguous()
        return self._block
