"""The paper's ablations, as cells for the bench."""

from collections.abc import Sequence

from esp_decode.bench.cells import Cell, parse
from esp_decode.names import PROBES

LAMS = (0, 0.05, 0.1, 0.2, 0.5)
WIDTHS = {10: ("4",), 30: ("14", "7,2"), 60: ("29", "15,4")}  # of static trees, for 1 mask and 2 (Table 3)
STRUCTURE = "structure"
ABLATIONS = ("init", "masks", "tree", "prune", "lam", STRUCTURE)


def cells_of(ablation: str, budgets: Sequence[int]) -> list[Cell]:
    """init: what masks start from; masks: how many a node has; tree: static against dynamic; prune: whether
    a token may be drafted behind itself; lam: the rate of Eq. 5. ValueError on budgets that have no tree."""
    if ablation == "tree":
        return _trees(budgets)
    drafters = {
        "init": [f"esp:probe={probe}" for probe in PROBES],
        "masks": [f"esp:masks={masks}" for masks in (1, 2, 3)],
        "prune": ["esp:prune=on", "esp:prune=off"],
        "lam": [f"esp:probe=prompt-mean:lam={lam}" for lam in LAMS],
    }[ablation]
    return parse(",".join(drafters), budgets)


def _trees(budgets: Sequence[int]) -> list[Cell]:
    cells: list[Cell] = []
    for budget in budgets:
        if budget not in WIDTHS:
            known = ", ".join(map(str, WIDTHS))
            raise ValueError(f"budgets of the ablation 'tree' are {known}, got {budget}")
        for masks, widths in enumerate(WIDTHS[budget], 1):
            drafters = f"esp:masks={masks}:tree=dynamic,esp:masks={masks}:tree=static:{widths}"
            cells += parse(drafters, [budget])[1:]
    return [*parse("", []), *cells]
