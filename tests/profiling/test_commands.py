"""The profilers' command lines, as far as they go without a card."""

import shlex
import shutil

import pytest
import torch

from profiling import ncu, nsys, op

without_a_card = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a card")


def test_ncu_prints_its_command(capsys):
    assert ncu.main(["--print", "--out", "a b.csv", "commit_kv", "--rows", "10"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[0] == "ncu" and words[words.index("--log-file") + 1] == "a b.csv"
    assert words[words.index("--metrics") + 1].split(",") == list(ncu.METRICS.values())
    assert words[-3:] == ["commit_kv", "--rows", "10"]


def test_nsys_prints_its_commands(capsys):
    assert nsys.main(["--print", "--budget", "60", "--graph"]) == 0
    record, count = capsys.readouterr().out.splitlines()
    assert "--trace=cuda,nvtx" in record and record.endswith("--external --budget 60 --graph")
    assert count.endswith("step.nsys-rep > step.csv")


@pytest.mark.parametrize(
    ("run", "words", "sentence"),
    [
        (ncu.main, ["fly"], "argument op: invalid choice: 'fly'"),
        (ncu.main, ["commit_kv"], "ncu (Nsight Compute) is not on PATH"),
        (nsys.main, [], "nsys (Nsight Systems) is not on PATH"),
        (op.main, ["commit_kv", "--rows", "0"], "rows must be at least 1, got 0"),
        (op.main, ["commit_kv", "--prefix", "-1"], "prefix must be at least 0, got -1"),
    ],
)
def test_bad_input(run, words, sentence, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        run(words)
    assert stopped.value.code == 2 and sentence in capsys.readouterr().err


@without_a_card
def test_an_op_without_a_card(capsys):
    with pytest.raises(SystemExit) as stopped:
        op.main(["commit_kv"])
    assert stopped.value.code == 2
    assert "it needs a CUDA card, and torch finds none" in capsys.readouterr().err
