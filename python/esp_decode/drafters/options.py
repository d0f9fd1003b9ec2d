"""Which drafter, and how it drafts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from esp_decode.drafters import recycling, stand
from esp_decode.drafters.base import Drafter
from esp_decode.drafters.eagle2 import Eagle2Drafter
from esp_decode.drafters.esp import EspDrafter
from esp_decode.drafters.host import HostDrafter, Proposer
from esp_decode.drafters.joined import JoinedDrafter
from esp_decode.drafters.lade import LadeProposer
from esp_decode.drafters.medusa import MedusaDrafter
from esp_decode.drafters.pld import PldProposer
from esp_decode.drafters.recycling import RecyclingProposer
from esp_decode.drafters.stand import StandProposer
from esp_decode.drafters.suffix import SuffixProposer
from esp_decode.names import DRAFTERS
from esp_decode.probe import Probe
from esp_decode.sources import Contexts, Sources, contexts_of, default_sources
from esp_decode.tree import MAX_BUDGET, PLAIN, TreeShape

if TYPE_CHECKING:
    from esp_decode.model import Model
    from esp_decode.profile import Profile

# Drafters that think on the host: their proposer, which takes the budget and what the profile heard behind
# contexts, and how many of a row's best tokens it reads.
PROPOSERS: dict[str, tuple[Callable[[int, Contexts], Proposer], int]] = {
    "pld": (lambda budget, _: PldProposer(budget), 1),
    "lade": (lambda budget, _: LadeProposer(budget), 1),
    "stand": (StandProposer, stand.KEPT),
    "recycling": (RecyclingProposer, recycling.KEPT),
    "suffix": (lambda budget, _: SuffixProposer(budget), 1),
}

# Drafters whose weights were trained for the model and lie in a folder of their own.
TRAINED: dict[str, type[MedusaDrafter] | type[Eagle2Drafter]] = {
    "medusa": MedusaDrafter,
    "eagle2": Eagle2Drafter,
}

# Rows that ride along for (nearly) nothing while a step is bound by reading the weights.
DEFAULT_BUDGET = {"cpu": 10, "cuda": 60}
DEFAULT_PROBE = "vocab-mean"

GPU_ROWS = (16, 32, 64, 128)


@dataclass(frozen=True)
class DraftOptions:
    """How drafts are made.

    budget  the most rows of a block that are no padding
    shape   of the trees of drafter `esp`, else None
    rows    of every block: on a GPU those of the budget, padded, for plain decoding too. Equal products then
            give equal bits, and as long as a step is bound by reading the weights they cost the same.
    heads   folder of the trained weights of drafters `medusa` and `eagle2`, else None
    profile of the model, else None
    thrifty whether drafter `joined` leaves out rows that do not pay on the profile's machine
    """

    drafter: str
    budget: int
    shape: TreeShape | None
    rows: int
    probe: Probe
    prune: bool
    heads: str | None = None
    profile: "Profile | None" = None
    thrifty: bool = False

    @classmethod
    def check(
        cls,
        device: str,
        drafter: str | None = None,
        budget: int | None = None,
        masks: int | None = None,
        tree: str | None = None,
        prune: bool = True,
        probe: str | None = None,
        lam: float | None = None,
        heads: str | None = None,
        profile: "Profile | None" = None,
    ) -> "DraftOptions":
        """Raises ValueError with one sentence when an option is off or does not fit another. A probe of None
        is the profile's, and so is a budget of None for drafter `joined`: as many rows as pay. The default
        drafter is `joined` on the CPU, `esp` on a GPU, where the ops of `joined` have no kernels yet, and
        where masks or a tree are given, which are its own."""
        if drafter is None:
            drafter = "joined" if device == "cpu" and masks is None and tree is None else "esp"
        if drafter not in DRAFTERS:
            raise ValueError(f"drafter must be one of {', '.join(DRAFTERS)}, got {drafter!r}")
        _check_heads(drafter, heads)
        if probe is None and lam is None and profile is not None:
            carried = profile.probe
        else:
            carried = Probe.parse(DEFAULT_PROBE if probe is None else probe, lam)
        default = DEFAULT_BUDGET.get(device, DEFAULT_BUDGET["cuda"])
        thrifty = drafter == "joined" and budget is None and profile is not None
        if thrifty:
            budget = DEFAULT_BUDGET["cuda"]
        shape = None
        if drafter == "joined" or drafter in PROPOSERS or drafter in TRAINED:
            wanted = budget = _check_budget(default if budget is None else budget)
        else:
            masks, tree = (1 if masks is None else masks), (tree or "dynamic")
            shape = TreeShape.parse(tree, budget, masks, default)
            wanted, budget = shape.rows, shape.budget
        if drafter == "ar":
            shape, budget = None, 1
        rows = min(wanted, budget) if device == "cpu" else next(size for size in GPU_ROWS if size >= wanted)
        return cls(drafter, budget, shape, rows, carried, prune, heads, profile, thrifty)

    @property
    def masks(self) -> int:
        """The most mask rows of a node."""
        if self.drafter == "joined":
            return len(self.profile.sources.reach if self.profile else Sources.reach)
        return self.shape.masks if self.shape else 0

    def drafter_for(self, model: "Model") -> Drafter:
        """ValueError where the probe does not serve the model."""
        if self.drafter in PROPOSERS:
            proposer, candidates = PROPOSERS[self.drafter]
            lists = self.profile.sources.lists if self.profile else None
            known = contexts_of(lists) if lists else {}
            candidates = min(candidates, model.vocab_size)
            return HostDrafter(lambda: proposer(self.budget, known), self.rows, candidates, model)
        if self.heads is not None:
            return TRAINED[self.drafter].load(Path(self.heads), model, self.budget, self.rows)
        if self.drafter == "joined":
            sources = self._sources(model)
            self.probe.check(model, len(sources.reach))
            return JoinedDrafter(model, sources, self.probe, self.budget, self.rows)
        shape = self.shape or PLAIN
        self.probe.check(model, shape.masks)
        return EspDrafter(model, shape, self.rows, self.probe, self.prune)

    def _sources(self, model: "Model") -> Sources:
        if self.profile is None:
            return default_sources(model.device)
        sources = self.profile.sources
        return replace(sources, least=max(sources.least, self.profile.pays)) if self.thrifty else sources


def _check_budget(budget: int) -> int:
    if not 2 <= budget <= MAX_BUDGET:
        raise ValueError(f"budget must be 2 to {MAX_BUDGET} rows (a root and a draft at least), got {budget}")
    return budget


def _check_heads(drafter: str, heads: str | None) -> None:
    if drafter not in TRAINED and heads is not None:
        raise ValueError(f"heads are for drafters {' and '.join(TRAINED)}, got {heads!r} with {drafter!r}")
    if drafter in TRAINED and (heads is None or not Path(heads).is_dir()):
        raise ValueError(
            f"heads must be the folder of weights trained for drafter {drafter!r}, got {heads!r}"
        )
