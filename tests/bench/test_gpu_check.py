"""`make gpu-check` as far as it goes without a card."""

import json
import sys

import pytest
import torch

from bench import gpu_check
from bench.gpu import bits, ops
from bench.gpu.bits import check_bits
from bench.gpu.random_model import random_model
from bench.gpu.targets import targets
from bench.gpu.timing import Roof
from bench.gpu_check import OUT, Part, run
from esp_decode.roofline import Shape

TINY = Shape(2, 64, 96, 4, 2, 32, 160)


def python(script: str, *arguments: str, seconds: int = 60) -> Part:
    return Part("part", [sys.executable, "-c", script, *arguments], seconds, {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a card")
def test_without_a_card_it_says_so(capsys):
    assert gpu_check.main([]) == 2
    assert capsys.readouterr().err == "gpu-check needs a CUDA card, and torch finds none\n"


def test_an_unknown_part(capsys):
    with pytest.raises(SystemExit) as stopped:
        gpu_check.main(["speed"])
    assert stopped.value.code == 2
    assert "PART must be one of build, tests, memcheck, racecheck, bits, step, ops, got 'speed'" in (
        capsys.readouterr().err
    )


def test_all_parts_take_nine_minutes_at_most():
    assert sum(part.seconds for part in gpu_check.parts()) <= 540


def test_a_part_that_passes_and_leaves_results():
    script = "import sys; open(sys.argv[1], 'w').write('{\"us\": 1}\\n{\"us\": 2}\\n')"
    result = run(python(script, OUT))
    assert result["ok"] is True and result["results"] == [{"us": 1}, {"us": 2}]


def test_a_part_that_fails_keeps_its_last_words():
    result = run(python("print('working'); raise SystemExit('no such card')"))
    assert result["ok"] is False and result["said"] == "working\nno such card"


def test_a_part_stopped_at_its_limit_keeps_its_results():
    """The last line was not written to its end."""
    script = """
import sys, time
with open(sys.argv[1], "w") as file:
    file.write('{"us": 1}\\n{"us":')
print("measured one", flush=True)
time.sleep(60)
"""
    result = run(python(script, OUT, seconds=2))
    assert result["ok"] is False and result["results"] == [{"us": 1}]
    assert result["said"] == "stopped at its limit of 2 s\nmeasured one"


def test_a_part_that_cannot_run():
    lacking = "compute-sanitizer is not on PATH"
    assert run(Part("part", [], 1, {}, lacking)) == {"ok": None, "said": lacking}


def test_the_results_of_every_part_are_written(monkeypatch, tmp_path, capsys):
    """Also of those behind one that failed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "machine", lambda: {"card": "NVIDIA X1", "date": "2026-01-02"})
    monkeypatch.setattr(gpu_check, "RESULTS", tmp_path / "results")
    row = (
        '{"op": "advance_block", "implementation": "cuda", "model": "llama-3.1-8b", "batch": 1, "rows": 60, '
    )
    row += '"prefix": 4096, "us": 14.0}'
    script = f"import sys; open(sys.argv[1], 'w').write({row!r} + chr(10))"
    good, bad = python(script, OUT), python("raise SystemExit('it broke')")
    named = [Part(name, one.command, 60, {}) for name, one in (("build", bad), ("ops", good))]
    monkeypatch.setattr(gpu_check, "parts", lambda: named)
    assert gpu_check.main([]) == 1
    found = json.loads((tmp_path / "results" / "nvidia-x1-2026-01-02.json").read_text())
    assert [part["ok"] for part in found["parts"].values()] == [False, True]
    assert "met           step control: at most 15 us" in found["targets"]
    printed = capsys.readouterr().out
    assert "build     FAILED" in printed and "it broke" in printed and "ops       passed" in printed


@pytest.mark.parametrize("budgets", [(8, 32)])
def test_bits_of_a_tiny_model(budgets):
    found = check_bits(random_model(TINY, torch.bfloat16, "cpu", context=512), 40, 32, budgets)
    assert found["rows_compared"] == found["tokens"] == 40
    assert found["tau"][1] == 1.0 and all(found["tau"][budget] >= 1 for budget in budgets)


@pytest.mark.parametrize("layer", [0, 1])
def test_bits_that_differ_are_found(layer, monkeypatch):
    """A product that depends on the other rows of its block, in the last bits."""
    model = random_model(TINY, torch.bfloat16, "cpu", context=512)
    down = model.layers[layer].down
    monkeypatch.setattr(
        model.layers[layer], "down", lambda x: down(x) + 1e-2 * x.float().mean(1, True).mean().to(x.dtype)
    )
    with pytest.raises(AssertionError, match="plain decoding"):
        check_bits(model, 40, 32, (8,))


def test_trees_hold_the_right_tokens(rng):
    right = [5, 6, 7]
    block, path = bits.tree_of(right, 4, rng, vocabulary=9, rows=16)
    assert block.tokens[0, path].tolist() == [4, *right]
    assert block.parent[0, path].tolist() == [-1, *path[:-1]]
    for above, token in zip(path, right, strict=False):
        children = block.tokens[0][block.parent[0] == above].tolist()
        assert children.count(token) == 1


def test_rows_of_the_ops_benchmark(monkeypatch):
    """One implementation that fails does not lose the others."""

    def broken():
        raise RuntimeError("out of memory\nand a long story")

    monkeypatch.setattr(ops, "runs", lambda op, size: [("triton", lambda: lambda: None), ("flex", broken)])
    size = ops.Size("small", TINY, 60, 1024)
    good, bad = ops.measure("tree_attention", size, lambda run: 1e-5, Roof(1e12, 1e15))
    moved, _ = size.cost("tree_attention")
    assert good["GB/s"] == pytest.approx(moved / 1e-5 / 1e9) and good["memory_bound"]
    assert good["roof"] == pytest.approx(moved / 1e12 / 1e-5)
    assert bad["error"] == "out of memory" and "us" not in bad
    assert "10.0 us" in ops.as_text(good) and ops.as_text(bad).endswith("failed: out of memory")


def test_the_order_of_sizes_covers_what_targets_ask_for():
    every = [(op, s.model, s.rows, s.prefix, s.batch) for op, s in ops.sizes()]
    asked = set(every)
    assert len(every) == len(asked)
    for rows in (1, 10, 30, 60, 120):
        for prefix in (128, 131072):
            assert ("tree_attention", "llama-3.1-8b", rows, prefix, 1) in asked
    assert ("tree_attention", "qwen3-32b", 120, 1024, 32) in asked


def attention(implementation: str, rows: int, prefix: int, us: float, gb: float, bound: bool = True) -> dict:
    where = {"op": "tree_attention", "model": "llama-3.1-8b", "batch": 1, "rows": rows, "prefix": prefix}
    return where | {"implementation": implementation, "us": us, "GB/s": gb, "memory_bound": bound}


def test_targets_met_missed_and_not_measured():
    measured = [
        attention("triton", 60, 32768, 50.0, 2700.0),
        attention("cuda", 60, 32768, 40.0, 3300.0),
        attention("triton", 1, 32768, 30.0, 4400.0),
        attention("sdpa", 60, 32768, 44.0, 3000.0),
        attention("flex", 60, 32768, 39.0, 3350.0),
    ]
    steps = [{"budget": 60, "over_plain": 1.04, "outside_products": 0.1}]
    said = [str(t) for t in targets(measured, {"bandwidth": 4000e9}, steps, True)]
    assert said == [
        "missed        tree_attention, 60 rows, 32k cached or more: 85 % of a copy "
        "(32768 cached: 0.825 against 0.85)",
        "not measured  tree_attention, 60 rows, 4k cached: 60 % of a copy",
        "missed        tree_attention: at most 1.15 x one row while bound by memory "
        "(60 rows, 32768 cached: 1.33 against 1.15)",
        "missed        tree_attention: ahead of every peer "
        "(flex, llama-3.1-8b 60 rows, 32768 cached, batch 1: 0.975 against 1)",
        "met           step of 60 rows: at most 1.05 x plain",
        "missed        step of 60 rows: at most 8 % outside of products (: 0.1 against 0.08)",
        "not measured  step control: at most 15 us",
        "met           plain and tree decoding: the same bits",
    ]
    assert all(str(t).startswith("not measured") for t in targets([], None, [], None))
