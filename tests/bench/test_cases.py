"""The benchmarks' inputs are valid, and peers compute what tree_attention computes."""

import pytest
import torch

from bench import cases
from bench.cases import Size
from bench.gpu import peers
from esp_decode.roofline import Shape

SMALL = Shape(2, 128, 192, 6, 2, 64, 1000)


@pytest.mark.parametrize("rows", [1, 2, 7, 60])
@pytest.mark.parametrize("op", cases.OPS)
def test_every_op_runs_twice(op, rows):
    size = Size("small", SMALL, rows, prefix=70, batch=2)
    run = cases.OPS[op](size, "auto")
    run()
    run()
    moved, flops = size.cost(op)
    assert moved > 0 and flops >= 0


def test_the_tree_is_a_root_drafts_and_their_masks():
    assert cases.esp_parents(Size("small", SMALL, 7, 9)).tolist() == [[-1, 0, 0, 0, 1, 2, -2]]
    assert cases.esp_parents(Size("small", SMALL, 1, 9)).tolist() == [[-1]]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["sdpa", "flex"])
def test_peers_attend_to_the_same_tree(name, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)  # eager is slow, and the same mathematics
    size = Size("small", SMALL, 10, prefix=20, batch=2, dtype=torch.float32)
    torch.manual_seed(0)
    ours = cases.tree_attention(size, "auto")()[0]
    torch.manual_seed(0)
    theirs = getattr(peers, name)(size)()
    torch.testing.assert_close(theirs.transpose(1, 2), ours)
