"""Questions as the publishers of SpecBench, GSM8K, HumanEval and Dolly ship them: JSON lines."""

import json
from dataclasses import dataclass
from pathlib import Path

from esp_decode.prompts import read_text

# The keys by which a line is known, and what to make of it.
FORMS = (
    ("turns", "category"),  # SpecBench, MT-bench: question.jsonl
    ("question", "answer"),  # GSM8K: test.jsonl
    ("task_id", "prompt"),  # HumanEval.jsonl
    ("instruction", "context"),  # databricks-dolly-15k.jsonl
    ("prompt",),
)


@dataclass(frozen=True)
class Question:
    category: str
    text: str


def load(path: Path, per_category: int | None = None) -> list[Question]:
    """The questions of a file; the first `per_category` of each category. ValueError names file and line."""
    questions: list[Question] = []
    counts: dict[str, int] = {}
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        question = _from_line(line, f"{path}, line {number}: ")
        counts[question.category] = counts.get(question.category, 0) + 1
        if per_category is None or counts[question.category] <= per_category:
            questions.append(question)
    if not questions:
        raise ValueError(f"{path} holds no question")
    return questions


def _from_line(line: str, where: str) -> Question:
    try:
        entry = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}not valid JSON: {error}") from None
    form = next((f for f in FORMS if isinstance(entry, dict) and all(key in entry for key in f)), None)
    if form is None:
        forms = "; ".join(" and ".join(keys) for keys in FORMS)
        raise ValueError(f"{where}expected a JSON object with {forms}")
    if form[0] == "turns":
        turns = entry["turns"]
        category, text = entry["category"], turns[0] if isinstance(turns, list) and turns else None
    elif form[0] == "question":
        category, text = "gsm8k", entry["question"]
    elif form[0] == "task_id":
        category, text = "humaneval", entry["prompt"]
    elif form[0] == "instruction":
        parts = [entry["instruction"], entry["context"]]
        category, text = entry.get("category", "dolly"), None
        if all(isinstance(part, str) for part in parts):
            text = "\n\n".join(part for part in parts if part.strip())
    else:
        category, text = entry.get("category", "prompts"), entry["prompt"]
    if not (isinstance(category, str) and isinstance(text, str) and text.strip()):
        raise ValueError(f"{where}{' and '.join(form)} must hold text")
    return Question(category, text)
