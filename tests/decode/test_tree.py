import pytest
import torch

from esp_decode.tree import TreeShape, chain_block
from esp_kernels import PADDING


@pytest.mark.parametrize(
    ("tree", "budget", "masks", "nodes", "rows"),
    [
        ("dynamic", 10, 1, 5, 10),
        ("dynamic", 30, 2, 10, 30),
        ("dynamic", 31, 1, 15, 30),
        ("dynamic", None, 1, 6, 12),
        ("static:15,4", 60, 2, 20, 60),
        ("static:15,4", None, 2, 20, 60),
        ("static:29", 128, 1, 30, 60),
        ("static:1", 4, 1, 2, 4),
    ],
)
def test_rows_of_a_budget(tree, budget, masks, nodes, rows):
    shape = TreeShape.parse(tree, budget, masks, default_budget=12)
    assert (shape.nodes, shape.rows, str(shape)) == (nodes, rows, tree)


@pytest.mark.parametrize(
    ("tree", "budget", "masks", "sentence"),
    [
        ("dynamic", 3, 1, "budget must be 4 to 128 rows with masks=1 .* got 3"),
        ("dynamic", -5, 1, "got -5"),
        ("dynamic", 129, 1, "got 129"),
        ("dynamic", 10**12, 1, "got 1000000000000"),
        ("dynamic", 60, 0, "masks must be at least 1, got 0"),
        ("dynamic", 60, 64, "budget must be 130 to 128 rows"),
        ("static:15,4", 30, 2, "tree 'static:15,4' with masks=2 needs a budget of 60 rows, got 30"),
        ("static:500", None, 1, "got 1002"),
        ("static:5,5", 60, 1, "tree 'static:5,5' has 2 levels, masks=1 can draft at most 1"),
        (
            "static:",
            60,
            1,
            "tree must be 'dynamic' or 'static:K1,K2,...' with positive widths, got 'static:'",
        ),
        ("static:0", 60, 1, "positive widths, got 'static:0'"),
        ("static:-3", 60, 1, "positive widths, got 'static:-3'"),
        ("oak", 60, 1, "got 'oak'"),
    ],
)
def test_trees_that_do_not_fit(tree, budget, masks, sentence):
    with pytest.raises(ValueError, match=sentence):
        TreeShape.parse(tree, budget, masks, default_budget=10)


def test_chain_block():
    block = chain_block(torch.tensor([[7, 8, 9]], dtype=torch.int32), rows=5)
    assert block.tokens.tolist() == [[7, 8, 9, -1, -1]]
    assert block.parent.tolist() == [[-1, 0, 1, PADDING, PADDING]]
    assert block.mask_ordinal.tolist() == [[0, 0, 0, -1, -1]]
    assert block.depth.tolist() == [[0, 1, 2, -1, -1]]
    assert block.ancestors[..., 0].tolist() == [[1, 3, 7, 0, 0]]
