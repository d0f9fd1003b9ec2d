import io
import json
from types import SimpleNamespace

import pytest

from esp_decode.decoder import Generation
from esp_decode.drafters import DraftOptions
from esp_decode.report import print_comparison, record, speedup


def generation(tokens: int, calls: int, prefill: float, decode: float, first: int = 0) -> Generation:
    return Generation([1, 2], [first, *range(1, tokens)], "text", [1] * calls, prefill, decode)


def setting(**options: object) -> SimpleNamespace:
    """What a report asks of a decoder."""
    return SimpleNamespace(
        options=DraftOptions.check("cpu", **options), model_name="[m]", dtype="float32", device="cpu"
    )


FAST = generation(101, 50, 0.5, 1.5), generation(101, 100, 0.5, 3.5)
SLOW = generation(11, 10, 1.0, 4.0), generation(11, 10, 1.0, 1.0, first=7)
ONE_TOKEN = generation(1, 0, 0.5, 0.0), generation(1, 0, 0.5, 0.0)


def printed(*pairs: tuple[Generation, Generation], **options: object) -> str:
    out = io.StringIO()
    print_comparison(setting(**options), pairs, out)
    return out.getvalue()


def rows(text: str) -> list[list[str]]:
    lines = [line.replace("│", "|") for line in text.splitlines()]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_speedup_is_wall_time_with_prefill():
    assert speedup([FAST]) == 4.0 / 2.0
    assert speedup([SLOW]) == 2.0 / 5.0
    assert speedup([FAST, SLOW]) == 6.0 / 7.0


def test_the_table_and_its_total():
    text = printed(FAST, SLOW, budget=30, masks=2)
    assert "[m], float32 on cpu, esp, tree dynamic, budget 30, masks 2" in " ".join(text.split())
    assert rows(text) == [
        ["1", "101", "2.00", "66.7", "28.6", "2.00x", "yes"],
        ["2", "11", "1.00", "2.5", "10.0", "0.40x", "NO"],
        ["total", "112", "1.83", "20.0", "24.4", "0.86x", "1 of 2"],
    ]
    assert "slower than plain decoding on 1 of 2 prompts." in text
    assert "differs from that of plain decoding on 1 of 2 prompts." in text


def test_one_prompt_has_no_total_and_good_news_no_comment():
    text = printed(FAST)
    assert rows(text) == [["1", "101", "2.00", "66.7", "28.6", "2.00x", "yes"]]
    assert "slower" not in text and "differs" not in text
    assert "slower than plain decoding." in printed(SLOW)


def test_a_prompt_that_needed_no_decode_call():
    assert rows(printed(ONE_TOKEN)) == [["1", "1", "-", "-", "-", "1.00x", "yes"]]


@pytest.mark.parametrize("pair", [FAST, SLOW, ONE_TOKEN])
def test_record(pair):
    line = record(setting(), *pair)
    assert line.endswith("}\n") and line.count("\n") == 1
    entry = json.loads(line)
    assert entry["speedup"] == speedup([pair])
    assert entry["exact"] is (pair is not SLOW)
    assert entry["ar_tokens_per_second"] == pair[1].tokens_per_second
    assert "exact" not in json.loads(record(setting(), pair[0]))
