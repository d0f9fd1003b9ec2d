"""The probe: what the mask rows carry instead of a token's embedding (m in the paper, Eq. 4 and 5)."""

import torch

from esp_decode.model import Model

PROBES = ("prompt-mean", "vocab-mean", "last-k", "sample")
DEFAULT_LAM = 0.1


def initial_probe(kind: str, model: Model, prompt: torch.Tensor, masks: int) -> torch.Tensor:
    """The probe [B, masks, E] float32 that a prompt [B, N] starts with.

    prompt-mean  mean of the prompt tokens' embeddings (Eq. 4), the same for every mask
    vocab-mean   mean of the embedding table
    last-k       the last `masks` prompt embeddings, in order (the first one repeated where there are fewer)
    sample       independent draws from N(mu, sigma^2) of the embedding table, per dimension; fixed seed
    """
    batch, width = prompt.shape[0], model.embedding.shape[1]
    if kind == "prompt-mean":
        mean = model.embedding[prompt.long()].float().mean(dim=1, keepdim=True)
        return mean.repeat(1, masks, 1)
    if kind == "vocab-mean":
        return model.vocab_mean.repeat(batch, masks, 1)
    if kind == "last-k":
        last = torch.arange(prompt.shape[1] - masks, prompt.shape[1], device=prompt.device).clamp(min=0)
        return model.embedding[prompt[:, last].long()].float()
    if kind == "sample":
        std, mean = torch.std_mean(model.embedding.float(), dim=0)
        noise = torch.randn((batch, masks, width), generator=torch.Generator().manual_seed(0))
        return mean + std * noise.to(mean.device)
    raise ValueError(f"probe must be one of {', '.join(PROBES)}, got {kind!r}")
