"""Prompts from the command line and from files. A file is judged whole, before anything is decoded."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEYS = ("turns", "prompt", "prompt_ids")


@dataclass(frozen=True)
class Prompt:
    """A text, or token ids (which no chat template touches), and how a message about it begins."""

    content: str | list[int]
    where: str = ""


def from_text(text: str, where: str = "") -> Prompt:
    """A prompt from a text. ValueError when it is blank or cannot be written as UTF-8."""
    if not text.strip():
        raise ValueError(f"{where}prompt is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}prompt is not valid Unicode text") from None
    return Prompt(text, where)


def from_file(path: Path) -> list[Prompt]:
    """The prompts of a text file (one, without its last line break) or of a JSON-lines file (one a line).

    A file is JSON lines when it is named .jsonl or .json, or when its first line that is not blank is a JSON
    object. ValueError, naming the file and the line, on what cannot be read.
    """
    text = read_text(path)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if path.suffix.lower() in (".jsonl", ".json") or (lines and _is_object(lines[0][1])):
        if not lines:
            raise ValueError(f"{path} holds no prompt")
        return [_from_line(line, f"{path}, line {number}: ") for number, line in lines]
    return [from_text(text.removesuffix("\r\n" if text.endswith("\r\n") else "\n"), f"{path}: ")]


def read_text(path: Path) -> str:
    """ValueError, naming the file, when it cannot be read or is not UTF-8 text."""
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"cannot read the prompt file {path}: {reason}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"the prompt file {path} is not UTF-8 text") from None
    if "\0" in text:
        raise ValueError(f"the prompt file {path} is not text but binary")
    return text


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _is_object(line: str) -> bool:
    try:
        return isinstance(_parse(line), dict)
    except ValueError:
        return False


def _from_line(line: str, where: str) -> Prompt:
    try:
        entry = _parse(line)
    except ValueError as error:
        raise ValueError(f"{where}not valid JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ValueError(f"{where}expected a JSON object, got {type(entry).__name__}")
    keys = [key for key in KEYS if key in entry]
    if len(keys) != 1:
        got = " and ".join(keys) or "none"
        raise ValueError(f"{where}expected one of turns, prompt and prompt_ids, got {got}")
    value = entry[keys[0]]
    if keys == ["prompt_ids"]:
        if not (isinstance(value, list) and value and all(type(i) is int for i in value)):
            raise ValueError(f"{where}prompt_ids must be a non-empty list of integers")
        return Prompt(value, where)
    if keys == ["turns"]:
        if not (isinstance(value, list) and value and all(isinstance(turn, str) for turn in value)):
            raise ValueError(f"{where}turns must be a non-empty list of strings")
        value = value[0]
    if not isinstance(value, str):
        raise ValueError(f"{where}prompt must be a string, got {type(value).__name__}")
    return from_text(value, where)
