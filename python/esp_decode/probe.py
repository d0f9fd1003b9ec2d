"""The probe: what the mask rows carry instead of a token's embedding (m in the paper, Eq. 4 and 5)."""

from dataclasses import dataclass
from pathlib import Path

import torch

from esp_decode.model import Model
from esp_decode.names import PROBES

FIXED = ("frozen", "vocab-mean", "vocab-median")  # those that are not drawn to what was committed
DEFAULT_LAM = 0.1
VECTORS = ".safetensors"


@dataclass(frozen=True)
class Probe:
    """What masks start from, and how fast they follow what is committed.

    kind     prompt-mean       mean of the prompt tokens' embeddings (Eq. 4), the same for every mask
             frozen            the same, never updated
             last-k            the last prompt embeddings, in order (the first one repeated where too few)
             sample            draws from N(mu, sigma^2) of the embedding table, per dimension; fixed seed
             vocab-mean        mean of the embedding table
             vocab-median      its median in each dimension
             prompt-direction  prompt-mean plus the step from the prompt's first embedding to its second,
                               which is constant where prompts begin with the same template
             or where `vectors` [K, E] float32 come from
    lam      the rate of Eq. 5, 0..1
    """

    kind: str
    lam: float
    vectors: torch.Tensor | None = None

    @classmethod
    def parse(cls, probe: str, lam: float | None) -> "Probe":
        """`probe` is one of PROBES or a safetensors file with a tensor `probe` [K, E]; a lam of None is the
        kind's own. ValueError says what else would do."""
        vectors = None
        if probe.endswith(VECTORS):
            vectors = _read_vectors(Path(probe))
        elif probe not in PROBES:
            raise ValueError(f"probe must be one of {', '.join(PROBES)} or a {VECTORS} file, got {probe!r}")
        if lam is None:
            lam = 0.0 if probe in FIXED or vectors is not None else DEFAULT_LAM
        if not 0 <= lam <= 1:
            raise ValueError(f"lam must be 0 to 1, got {lam}")
        if probe == "frozen" and lam != 0:
            raise ValueError(f"lam must be 0 with probe 'frozen', got {lam}; 'prompt-mean' follows")
        return cls(probe, lam, vectors)

    def check(self, model: Model, masks: int) -> None:
        """ValueError where its vectors do not serve so many masks of this model."""
        if self.vectors is None:
            return
        count, width = self.vectors.shape
        if width != model.embedding.shape[1]:
            raise ValueError(
                f"probe {self.kind!r} is {width} wide, the model's embeddings are {model.embedding.shape[1]}"
            )
        if count < masks:
            raise ValueError(f"probe {self.kind!r} has vectors for {count} masks, got masks={masks}")

    def initial(self, model: Model, prompt: torch.Tensor, masks: int) -> torch.Tensor:
        """The probe [B, masks, E] float32 that a prompt [B, N] starts with."""
        batch = prompt.shape[0]
        if self.vectors is not None:
            return self.vectors[:masks].to(model.device).repeat(batch, 1, 1)
        if self.kind == "vocab-mean":
            return model.vocab_mean.repeat(batch, masks, 1)
        if self.kind == "vocab-median":
            return model.embedding.float().median(dim=0).values.repeat(batch, masks, 1)
        if self.kind == "last-k":
            last = torch.arange(prompt.shape[1] - masks, prompt.shape[1], device=prompt.device).clamp(min=0)
            return model.embedding[prompt[:, last].long()].float()
        if self.kind == "sample":
            std, mean = torch.std_mean(model.embedding.float(), dim=0)
            noise = torch.randn((batch, masks, len(mean)), generator=torch.Generator().manual_seed(0))
            return mean + std * noise.to(mean.device)
        embedded = model.embedding[prompt.long()].float()
        mean = embedded.mean(dim=1, keepdim=True)
        if self.kind == "prompt-direction" and prompt.shape[1] > 1:
            mean = mean + embedded[:, 1:2] - embedded[:, :1]
        return mean.repeat(1, masks, 1)


def _read_vectors(path: Path) -> torch.Tensor:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        vectors = load_file(path).get("probe")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"probe {str(path)!r} is not a readable safetensors file: {error}") from error
    if vectors is None or vectors.dim() != 2 or not vectors.is_floating_point():
        got = "no such tensor" if vectors is None else f"{list(vectors.shape)} {vectors.dtype}"
        raise ValueError(
            f"probe {str(path)!r} must have a tensor 'probe' [masks, width] of floats, got {got}"
        )
    return vectors.float()
