"""Which drafter, and how it drafts."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from esp_decode.drafters.base import Drafter
from esp_decode.drafters.eagle2 import Eagle2Drafter
from esp_decode.drafters.esp import EspDrafter
from esp_decode.drafters.host import HostDrafter
from esp_decode.drafters.medusa import MedusaDrafter
from esp_decode.drafters.pld import PldProposer
from esp_decode.probe import Probe
from esp_decode.tree import MAX_BUDGET, PLAIN, TreeShape

if TYPE_CHECKING:
    from esp_decode.model import Model

# Drafters that think on the host: their proposer, and how many of a row's best tokens it reads.
PROPOSERS = {"pld": (PldProposer, 1)}

# Drafters whose weights were trained for the model and lie in a folder of their own.
TRAINED: dict[str, type[MedusaDrafter] | type[Eagle2Drafter]] = {
    "medusa": MedusaDrafter,
    "eagle2": Eagle2Drafter,
}

DRAFTERS = ("ar", "esp", *PROPOSERS, *TRAINED)

# Rows that ride along for (nearly) nothing while a step is bound by reading the weights.
DEFAULT_BUDGET = {"cpu": 10, "cuda": 60}

GPU_ROWS = (16, 32, 64, 128)


@dataclass(frozen=True)
class DraftOptions:
    """How drafts are made.

    budget  the most rows of a block that are no padding
    shape   of the trees of drafter `esp`, else None
    rows    of every block: on a GPU those of the budget, padded, for plain decoding too. Equal products then
            give equal bits, and as long as a step is bound by reading the weights they cost the same.
    heads   folder of the trained weights of drafters `medusa` and `eagle2`, else None
    """

    drafter: str
    budget: int
    shape: TreeShape | None
    rows: int
    probe: Probe
    prune: bool
    heads: str | None = None

    @classmethod
    def check(
        cls,
        device: str,
        drafter: str = "esp",
        budget: int | None = None,
        masks: int = 1,
        tree: str = "dynamic",
        prune: bool = True,
        probe: str = "vocab-mean",
        lam: float | None = None,
        heads: str | None = None,
    ) -> "DraftOptions":
        """Raises ValueError with one sentence when an option is off or does not fit another."""
        if drafter not in DRAFTERS:
            raise ValueError(f"drafter must be one of {', '.join(DRAFTERS)}, got {drafter!r}")
        _check_heads(drafter, heads)
        carried = Probe.parse(probe, lam)
        default = DEFAULT_BUDGET.get(device, DEFAULT_BUDGET["cuda"])
        shape = None
        if drafter in PROPOSERS or drafter in TRAINED:
            wanted = budget = _check_budget(default if budget is None else budget)
        else:
            shape = TreeShape.parse(tree, budget, masks, default)
            wanted, budget = shape.rows, shape.budget
        if drafter == "ar":
            shape, budget = None, 1
        rows = min(wanted, budget) if device == "cpu" else next(size for size in GPU_ROWS if size >= wanted)
        return cls(drafter, budget, shape, rows, carried, prune, heads)

    def drafter_for(self, model: "Model") -> Drafter:
        if self.drafter in PROPOSERS:
            proposer, candidates = PROPOSERS[self.drafter]
            return HostDrafter(lambda: proposer(self.budget), self.rows, candidates, model.device)
        if self.heads is not None:
            return TRAINED[self.drafter].load(Path(self.heads), model, self.budget, self.rows)
        return EspDrafter(model, self.shape or PLAIN, self.rows, self.probe, self.prune)


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
