import pytest
import torch

import esp_kernels
from esp_decode.tree import TreeShape, chain_block


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
    block = chain_block(torch.tensor([[7, 8, 9]], dtype=torch.int32), masks=2)
    assert block.tokens.tolist() == [[7, 8, 9, -1, -1]]
    assert block.parent.tolist() == [[-1, 0, 1, 2, 3]]
    assert block.mask_ordinal.tolist() == [[0, 0, 0, 1, 2]]
    assert block.depth.tolist() == [[0, 1, 2, 3, 4]]
    assert block.ancestors[..., 0].tolist() == [[1, 3, 7, 15, 31]]


def test_the_metadata_of_a_static_tree_is_what_every_step_would_build(tiny_folder):
    """It is built once; the tree's parents must therefore never change."""
    from esp_decode.drafters import EspDrafter
    from esp_decode.weights import load_model

    model = load_model(tiny_folder("llama"), torch.float32, torch.device("cpu"))
    shape = TreeShape.parse("static:7,3", None, 2, default_budget=10)
    drafter = EspDrafter(model, torch.tensor([[5, 6]], dtype=torch.int32), shape, "vocab-mean", 0.0, True)
    root, nothing = torch.tensor([3], dtype=torch.int32), torch.full((1, 1), -1, dtype=torch.int32)
    blocks = [drafter.draft(root, nothing, torch.randn(1, 2, model.vocab_size)) for _ in range(3)]
    for block in blocks:
        depth, ancestors = esp_kernels.tree_metadata(block.parent)
        assert torch.equal(block.depth, depth) and torch.equal(block.ancestors, ancestors)
    assert not torch.equal(blocks[0].tokens, blocks[1].tokens)
