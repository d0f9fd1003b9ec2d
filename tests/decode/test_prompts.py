import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esp_decode.prompts import from_file, from_text

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(
    str.strip
)


@pytest.fixture
def write(tmp_path):
    def write(content, name="p.jsonl"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@settings(deadline=None, max_examples=50)
@given(entries=st.lists(TEXT | st.lists(st.integers(), min_size=1), min_size=1, max_size=5), data=st.data())
def test_json_lines_round_trip(entries, data, tmp_path_factory):
    lines = []
    for entry in entries:
        key = data.draw(st.sampled_from(["prompt", "turns"])) if isinstance(entry, str) else "prompt_ids"
        value = [entry, "second"] if key == "turns" else entry
        lines.append(json.dumps({"question_id": 1, key: value}, ensure_ascii=data.draw(st.booleans())))
    ending = data.draw(st.sampled_from(["\n", "\r\n", "\n\n \n"]))
    path = tmp_path_factory.mktemp("p") / data.draw(st.sampled_from(["p.jsonl", "p.JSON", "p.txt", "p"]))
    path.write_bytes(ending.join(lines).encode())
    assert [prompt.content for prompt in from_file(path)] == entries


@settings(deadline=None, max_examples=50)
@given(text=TEXT, newline=st.sampled_from(["", "\n", "\r\n"]))
def test_a_text_file_is_one_prompt_without_its_last_line_break(text, newline, tmp_path_factory):
    text = "The text: " + text.rstrip("\r\n")
    path = tmp_path_factory.mktemp("p") / "p.txt"
    path.write_bytes((text + newline).encode())
    assert [prompt.content for prompt in from_file(path)] == [text]


def test_only_the_line_break_that_ends_the_file_goes(write):
    assert from_file(write("one\r\n\ntwo\n\n", "p.txt"))[0].content == "one\r\n\ntwo\n"
    assert from_file(write("bare\r", "p.txt"))[0].content == "bare\r"


def test_a_byte_order_mark_is_no_text(write):
    assert from_file(write(b"\xef\xbb\xbfHello", "p.txt"))[0].content == "Hello"
    assert from_file(write(b'\xef\xbb\xbf{"prompt": "Hello"}', "p"))[0].content == "Hello"


def test_the_suffix_or_the_first_line_makes_it_json_lines(write):
    assert from_file(write('\n  {"prompt": "a"}\n', "p.md"))[0].content == "a"
    assert from_file(write('[1, 2]\n{"prompt": "a"}', "p.md"))[0].content == '[1, 2]\n{"prompt": "a"}'
    assert from_file(write('{"prompt": "a",\n"x": 1}', "p.md"))[0].content.startswith("{")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "not valid JSON: Expecting property name enclosed in double quotes at column 2"),
        ("[" * 100_000, "not valid JSON: nested too deeply"),
        ("[1, 2]", "expected a JSON object, got list"),
        ("{}", "expected one of turns, prompt and prompt_ids, got none"),
        (
            '{"prompt": "a", "turns": ["b"]}',
            "expected one of turns, prompt and prompt_ids, got turns and prompt",
        ),
        ('{"prompt": 3}', "prompt must be a string, got int"),
        ('{"prompt": " \\n"}', "prompt is empty"),
        ('{"prompt": "\\ud800"}', "prompt is not valid Unicode text"),
        ('{"turns": "text"}', "turns must be a non-empty list of strings"),
        ('{"turns": []}', "turns must be a non-empty list of strings"),
        ('{"turns": ["", "b"]}', "prompt is empty"),
        ('{"prompt_ids": []}', "prompt_ids must be a non-empty list of integers"),
        ('{"prompt_ids": [1, true]}', "prompt_ids must be a non-empty list of integers"),
        ('{"prompt_ids": [1.0]}', "prompt_ids must be a non-empty list of integers"),
        ('{"prompt_ids": 5}', "prompt_ids must be a non-empty list of integers"),
    ],
)
def test_a_broken_line_is_named_by_its_number(line, sentence, write):
    path = write('{"prompt": "good"}\n\n' + line + '\n{"prompt": "good"}\n')
    with pytest.raises(ValueError) as error:
        from_file(path)
    assert str(error.value).startswith(f"{path}, line 3: {sentence}")


@pytest.mark.parametrize(
    ("content", "name", "sentence"),
    [
        (b"\xff\xfe\x00", "p.txt", "the prompt file {} is not UTF-8 text"),
        (b"GGUF\0\0\0\3", "p.gguf", "the prompt file {} is not text but binary"),
        (b"", "p.txt", "{}: prompt is empty"),
        (b" \n\n", "p.txt", "{}: prompt is empty"),
        (b"\n \n", "p.jsonl", "{} holds no prompt"),
    ],
)
def test_files_that_hold_no_text(content, name, sentence, write):
    path = write(content, name)
    with pytest.raises(ValueError) as error:
        from_file(path)
    assert str(error.value) == sentence.format(path)


def test_files_that_cannot_be_read(tmp_path):
    for path, reason in (
        (tmp_path / "none.txt", os.strerror(2)),
        (tmp_path, os.strerror(21)),
        (tmp_path / "a\0b", "embedded null byte"),
    ):
        with pytest.raises(ValueError) as error:
            from_file(path)
        assert str(error.value) == f"cannot read the prompt file {path}: {reason}"


def test_a_prompt_from_the_command_line():
    assert from_text(" why? ").content == " why? "
    for text, sentence in (
        ("", "prompt is empty"),
        (" \t\n", "prompt is empty"),
        ("\udcff", "prompt is not valid Unicode text"),
    ):
        with pytest.raises(ValueError, match=f"^{sentence}$"):
            from_text(text)
