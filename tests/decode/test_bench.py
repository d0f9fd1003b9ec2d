"""`esp bench` and `esp ablate` on a tiny model of bytes."""

import csv
import json
import sys
from pathlib import Path

import pytest

from esp_decode import Decoder
from esp_decode.bench import ablations, cells, datasets, run, structure, table
from esp_decode.bench.cells import Cell
from esp_decode.bench.datasets import Question
from esp_decode.cli import main
from esp_decode.names import DRAFTERS

LINES = [
    ({"question_id": 1, "category": "writing", "turns": ["Write.", "More."]}, Question("writing", "Write.")),
    ({"question": "How many?", "answer": "#### 4"}, Question("gsm8k", "How many?")),
    (
        {"task_id": "HumanEval/0", "prompt": "def f():", "test": "", "entry_point": "f"},
        Question("humaneval", "def f():"),
    ),
    (
        {"instruction": "Who?", "context": "It was Ada.", "response": "Ada", "category": "closed_qa"},
        Question("closed_qa", "Who?\n\nIt was Ada."),
    ),
    ({"instruction": "Who?", "context": "", "response": "Ada"}, Question("dolly", "Who?")),
    ({"prompt": "Hello"}, Question("prompts", "Hello")),
]


@pytest.mark.parametrize(("line", "question"), LINES)
def test_each_publishers_form(line, question, prompt_file):
    assert datasets.load(Path(prompt_file(line))) == [question]


def test_a_file_of_several_categories_is_cut_by_category(prompt_file):
    path = prompt_file(*({"category": c, "turns": [f"{c}{i}"]} for i in range(3) for c in "ab"))
    assert [q.text for q in datasets.load(Path(path), per_category=2)] == ["a0", "b0", "a1", "b1"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "{} holds no question"),
        ("\n{]\n", "{}, line 2: not valid JSON: "),
        ("[1]\n", "{}, line 1: expected a JSON object with turns and category; question and answer; "),
        ('{"turns": []}\n', "{}, line 1: expected a JSON object with turns and category; "),
        ('{"turns": [], "category": "a"}\n', "{}, line 1: turns and category must hold text"),
        ('{"prompt": " "}\n', "{}, line 1: prompt must hold text"),
        ('{"instruction": 1, "context": ""}\n', "{}, line 1: instruction and context must hold text"),
    ],
)
def test_bad_questions(content, sentence, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError) as error:
        datasets.load(path)
    assert str(error.value).startswith(sentence.format(path))


def test_cells_are_drafters_by_budgets_behind_plain_decoding():
    found = cells.parse("esp:masks=2:tree=static:15,4:prune=off,pld,ar,esp:probe=last-k:lam=0.2", [10, 60])
    assert [cell.key for cell in found] == [
        "ar",
        "esp:masks=2:tree=static:15,4:prune=off at 10",
        "esp:masks=2:tree=static:15,4:prune=off at 60",
        "pld at 10",
        "pld at 60",
        "esp:probe=last-k:lam=0.2 at 10",
        "esp:probe=last-k:lam=0.2 at 60",
    ]
    assert found[2].options == {"masks": 2, "tree": "static:15,4", "prune": False}
    assert found[6].options == {"probe": "last-k", "lam": 0.2} and found[6].budget == 60


@pytest.mark.parametrize(
    ("drafters", "sentence"),
    [
        ("tree", f"drafters must be of {', '.join(DRAFTERS)}, got 'tree'"),
        (
            "esp:depth=2",
            "options of a drafter are masks, tree, prune, probe, lam, heads, got 'depth' in 'esp:depth=2'",
        ),
        ("esp:masks=two", "masks cannot be 'two' in 'esp:masks=two'"),
        ("esp:prune=maybe", "prune cannot be 'maybe' in 'esp:prune=maybe'"),
        ("pld,pld", "drafters and budgets name pld at 10 twice"),
    ],
)
def test_bad_drafters(drafters, sentence):
    with pytest.raises(ValueError) as error:
        cells.parse(drafters, [10])
    assert str(error.value) == sentence


CELLS = [Cell("ar", "ar", 1, {}), Cell("pld", "pld", 10, {})]


def record(question: int, cell: Cell, committed: list[int], seconds: float, output: str = "x") -> run.Record:
    category = "even" if question % 2 == 0 else "odd"
    facts = {"question": question, "category": category, "cell": cell.key}
    return facts | {"committed": committed, "seconds": seconds, "output": output}


RECORDS = [
    record(0, CELLS[0], [1] * 8, 4.0),
    record(0, CELLS[1], [2] * 4, 1.0),
    record(1, CELLS[1], [4, 1, 1], 4.0, "y"),
    record(1, CELLS[0], [1] * 6, 2.0),
    record(2, CELLS[0], [1] * 9, 9.0),  # not decoded by the other yet
]


def test_the_table_by_hand():
    rows = {(row.drafter, row.category): row for row in table.rows_of(CELLS, RECORDS)}
    assert set(rows) == {(d, c) for d in ("ar", "pld") for c in ("overall", "even", "odd")}
    pld = rows["pld", "overall"]
    assert (pld.prompts, pld.tau, pld.speedup, pld.exact) == (2, 14 / 7, 6.0 / 5.0, 0.5)
    assert pld.call_reduction == 0.5
    assert (pld.tau_low, pld.tau_high) == (2.0, 2.0)
    assert (pld.speedup_low, pld.speedup_high) == (0.5, 4.0)
    assert (rows["pld", "even"].speedup, rows["pld", "odd"].speedup) == (4.0, 0.5)
    assert rows["pld", "even"].exact == 1.0 and rows["pld", "odd"].exact == 0.0
    assert rows["ar", "overall"].tau == rows["ar", "overall"].speedup == 1.0


def test_acceptance_by_depth_by_hand():
    assert table.depths(CELLS[1], RECORDS) == [5 / 7, 1 / 7, 1 / 7]
    assert table.depths(CELLS[0], RECORDS) == []


def test_forms_agree(tmp_path):
    rows = table.rows_of(CELLS, RECORDS)
    table.write(rows, tmp_path)
    as_json = json.loads((tmp_path / "table.json").read_text())
    with (tmp_path / "table.csv").open() as file:
        as_csv = list(csv.DictReader(file))
    assert [{k: str(v) for k, v in row.items()} for row in as_json] == as_csv
    markdown = (tmp_path / "table.md").read_text()
    assert "| pld | 10 | 2.00 (2.00 to 2.00) | 1.20x (0.50 to 4.00) | 50% | 50% |" in markdown
    assert "| pld | 10 | 2.00, 4.00x | 2.00, 0.50x |" in markdown


def test_cells_take_turns():
    order = list(run.turns([Question("a", "b")] * 3, [*CELLS, Cell("esp", "esp", 10, {})]))
    assert [cell.name for _, cell in order] == ["ar", "pld", "esp", "pld", "esp", "ar", "esp", "ar", "pld"]


@pytest.fixture
def questions(prompt_file) -> str:
    return prompt_file(*({"category": c, "turns": [f"{c} {i}"]} for i in range(2) for c in ("one", "two")))


def bench(model: str, questions: str, out: Path, *more: str) -> int:
    fixed = ["--model", model, "--prompts", questions, "--out", str(out), "--max-new-tokens", "16"]
    machine = ["--dtype", "float32", "--device", "cpu"]
    few = ["--drafters", "joined,pld,esp:masks=2", "--budgets", "8,20"]
    return main(["bench", *fixed, *machine, *few, *more])


def results(folder: Path) -> list[tuple]:
    """The table without times."""
    rows = json.loads((folder / "table.json").read_text())
    return [tuple(v for k, v in row.items() if "speedup" not in k) for row in rows]


@pytest.fixture(scope="module")
def whole(byte_model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    path = folder / "q.jsonl"
    entries = ({"category": c, "turns": [f"{c} {i}"]} for i in range(2) for c in ("one", "two"))
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert bench(byte_model, str(path), folder / "out") == 0
    return folder / "out"


def test_what_it_writes(whole, byte_model):
    names = {path.name for path in whole.iterdir()}
    pictures = {f"by_{what}.{form}" for what in ("budget", "category", "depth") for form in ("png", "svg")}
    assert names == {"settings.json", "cells.jsonl", "table.json", "table.csv", "table.md", *pictures}
    assert all((whole / name).stat().st_size > 1000 for name in pictures)
    assert (whole / "by_depth.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((whole / "table.json").read_text())
    assert all(row["exact"] == 1.0 and row["speedup"] > 0 for row in rows)
    decoder = Decoder.from_pretrained(byte_model, dtype="float32", device="cpu", drafter="pld", budget=20)
    said = [decoder.generate(f"{c} {i}", max_new_tokens=16) for i in range(2) for c in ("one", "two")]
    tau = sum(s.new_tokens - 1 for s in said) / sum(s.decode_calls for s in said)
    assert (
        next(r for r in rows if (r["drafter"], r["budget"], r["category"]) == ("pld", 20, "overall"))["tau"]
        == tau
    )


@pytest.mark.parametrize("after", [0, 1, 11, 27])
def test_an_interrupted_run_goes_on_to_the_same_table(
    after, whole, byte_model, questions, tmp_path, capsys, monkeypatch
):
    out, add, decoded = tmp_path / "out", run.Results.add, []

    def adding(self, entry):
        if len(decoded) == after:
            with (out / run.RECORDS).open("a") as file:
                file.write('{"question": 0, "cel')  # an interrupt in the middle of a line
            raise KeyboardInterrupt
        decoded.append(entry)
        add(self, entry)

    with monkeypatch.context() as broken:
        broken.setattr(run.Results, "add", adding)
        assert bench(byte_model, questions, out) == 130
    err = capsys.readouterr().err.rstrip()
    assert err.endswith(f"esp: what is finished is kept in {out}; the same command goes on")
    more = []
    monkeypatch.setattr(run.Results, "add", lambda self, entry: (more.append(entry), add(self, entry)))
    assert bench(byte_model, questions, out) == 0
    assert len(more) == 28 - after, "nothing is decoded twice"
    assert results(out) == results(whole)


def test_other_settings_do_not_mix(whole, byte_model, questions, capsys):
    assert bench(byte_model, questions, whole, "--max-new-tokens", "17") == 2
    sentence = f"esp: {whole} holds results with other settings; choose another folder\n"
    assert capsys.readouterr().err == sentence


def test_a_drafter_can_join_later(whole, byte_model, questions, capsys):
    assert bench(byte_model, questions, whole, "--drafters", "stand", "--budgets", "8") == 0
    assert "| stand | 8 |" in capsys.readouterr().out
    assert bench(byte_model, questions, whole) == 0


def test_without_matplotlib_there_is_a_table(whole, byte_model, questions, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench(byte_model, questions, tmp_path / "out", "--drafters", "pld", "--budgets", "8") == 0
    out, err = capsys.readouterr()
    assert "| pld | 8 |" in out and err.endswith("esp: no plots: matplotlib is not installed\n")


def test_every_ablation_is_a_list_of_cells():
    for name in ablations.ABLATIONS:
        if name != ablations.STRUCTURE:
            found = ablations.cells_of(name, [10, 30, 60])
            assert found[0] == CELLS[0] and len(found) > 3
            assert {cell.drafter for cell in found[1:]} == {"esp"}
    with pytest.raises(ValueError, match="budgets of the ablation 'tree' are 10, 30, 60, got 20"):
        ablations.cells_of("tree", [20])


@pytest.mark.parametrize("name", ["masks", "tree"])
def test_ablations_run(name, byte_model, questions, tmp_path, capsys):
    fixed = ["--model", byte_model, "--prompts", questions, "--out", str(tmp_path), "--max-new-tokens", "8"]
    assert main(["ablate", name, *fixed, "--dtype", "float32", "--device", "cpu", "--per-category", "1"]) == 0
    assert "| esp:masks=2" in capsys.readouterr().out


def test_the_ablation_of_structure(capsys):
    assert main(["ablate", "structure", "--budgets", "8"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 3
    times = structure.microseconds(60, 32768)
    assert times["bits"] < times["naive"]


def test_an_ablation_without_prompts(capsys):
    assert main(["ablate", "init"]) == 2
    assert capsys.readouterr().err == "esp: the ablation 'init' needs --prompts\n"
