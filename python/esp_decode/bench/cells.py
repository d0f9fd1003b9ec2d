"""What is compared: a drafter with its options at a budget, written `esp:masks=2:probe=prompt-mean`."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from esp_decode.names import DRAFTERS

PLAIN = "ar"
TRAINED = ("medusa", "eagle2")
DEFAULT = tuple(name for name in DRAFTERS if name != PLAIN and name not in TRAINED)

OPTIONS: dict[str, Callable[[str], Any]] = {
    "masks": int,
    "tree": str,
    "prune": lambda text: {"on": True, "off": False}[text],
    "probe": str,
    "lam": float,
    "heads": str,
}


@dataclass(frozen=True)
class Cell:
    """options  of Decoder.with_drafter, with the budget"""

    name: str
    drafter: str
    budget: int
    options: dict[str, Any] = field(hash=False)

    @property
    def key(self) -> str:
        return f"{self.name} at {self.budget}" if self.name != PLAIN else PLAIN


def parse(drafters: str, budgets: Sequence[int]) -> list[Cell]:
    """The cells of drafters `a,b:option=value,...` at each budget, plain decoding first. A comma before a
    digit belongs to a static tree's widths. ValueError on names and values that do not exist."""
    specs = [spec for spec in re.split(r",(?!\d)", drafters) if spec]
    plain = Cell(PLAIN, PLAIN, 1, {})
    cells = [_cell(spec, budget) for spec in specs for budget in budgets if spec != PLAIN]
    twice = next((cell.key for i, cell in enumerate(cells) if cell in cells[:i]), None)
    if twice is not None:
        raise ValueError(f"drafters and budgets name {twice} twice")
    return [plain, *cells]


def _cell(spec: str, budget: int) -> Cell:
    drafter, *parts = re.split(r":(?=[a-z]+=)", spec)
    if drafter not in DRAFTERS:
        raise ValueError(f"drafters must be of {', '.join(DRAFTERS)}, got {drafter!r}")
    options: dict[str, Any] = {}
    for part in parts:
        name, _, value = part.partition("=")
        if name not in OPTIONS:
            raise ValueError(f"options of a drafter are {', '.join(OPTIONS)}, got {name!r} in {spec!r}")
        try:
            options[name] = OPTIONS[name](value)
        except (ValueError, KeyError):
            raise ValueError(f"{name} cannot be {value!r} in {spec!r}") from None
    return Cell(spec, drafter, budget, options)
