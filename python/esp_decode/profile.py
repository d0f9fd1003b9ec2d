"""A profile: what `esp calibrate` found out about drafts for one model on one machine."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from esp_decode.probe import Probe
from esp_decode.sources import Sources
from esp_decode.weights import cache_directory, fingerprint

FORM = 1
LISTS = ("list_keys", "list_ids", "list_logprobs")
FACTS, TENSORS = "profile.json", "profile.safetensors"


@dataclass(frozen=True)
class Profile:
    """A folder with profile.json and profile.safetensors.

    model    fingerprint of the weights that it was made with
    probe    what masks start from
    sources  of drafter `joined`
    pays     tokens that a row must be expected to commit to be worth its time on the machine
    facts    what was measured, for people: prompts, probes, tau by drafter and budget with its 95 %
             confidence interval, seconds of a forward by rows, versions and date
    """

    model: str
    probe: Probe
    sources: Sources
    pays: float
    facts: dict[str, Any]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"weights": self.sources.weights}
        tensors["prior_ids"], tensors["prior_logprobs"] = self.sources.prior
        if self.sources.lists is not None:
            tensors |= zip(LISTS, self.sources.lists, strict=True)
        if self.probe.vectors is not None:
            tensors["probe"] = self.probe.vectors
        save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, folder / TENSORS)
        facts = {
            "form": FORM,
            "model": self.model,
            "probe": self.probe.kind,
            "lam": self.probe.lam,
            "reach": list(self.sources.reach),
            "least": self.sources.least,
            "rate": self.sources.rate,
            "pays": self.pays,
            "facts": self.facts,
        }
        (folder / FACTS).write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> "Profile":
        """ValueError where the folder holds none."""
        try:
            facts = json.loads((folder / FACTS).read_text())
            if facts["form"] != FORM:
                raise ValueError(f"its form is {facts['form']}, this version reads {FORM}")
            tensors = load_file(folder / TENSORS, device=str(device))
            keys, ids, logprobs = (tensors[name] for name in LISTS)
            sources = Sources(
                weights=tensors["weights"],
                prior=(tensors["prior_ids"], tensors["prior_logprobs"]),
                reach=tuple(facts["reach"]),
                least=facts["least"],
                rate=facts["rate"],
                lists=(keys, ids, logprobs),
            )
            probe = Probe(facts["probe"], facts["lam"], tensors.get("probe"))
            return cls(facts["model"], probe, sources, facts["pays"], facts["facts"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"profile {str(folder)!r} is not of esp calibrate: {error}") from error


def profile_of(checkpoint: Path, profile: str | None, device: torch.device) -> Profile | None:
    """The profile in folder `profile`, else the one that is cached for this model, if there is one.
    ValueError where it was made with another model."""
    model = fingerprint(checkpoint)
    folder = cached_profile(model) if profile is None else Path(profile)
    if profile is None and not folder.is_dir():
        return None
    found = Profile.load(folder, device)
    if found.model != model:
        raise ValueError(
            f"profile {str(folder)!r} was made with another model; esp calibrate makes this one's"
        )
    return found


def cached_profile(model: str) -> Path:
    """Where esp calibrate keeps the profile of a model, named by its fingerprint."""
    return cache_directory() / "profiles" / model[:32]
