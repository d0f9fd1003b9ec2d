"""The command line, called in this process, on a tiny random model with a byte tokenizer."""

import io
import json
from pathlib import Path

import pytest
import torch

from esp_decode import Decoder
from esp_decode.cli import main
from esp_decode.drafters.options import PROPOSERS, TRAINED
from esp_decode.generate import _with_progress
from esp_decode.names import DRAFTERS

from .conftest import BYTE_CONTEXT

DRAFTS = ["drafter", "budget", "masks", "probe", "tree"]
RESULTS = ["prompt_ids", "output_ids", "text", "new_tokens", "decode_calls", "tau"]
TIMES = ["prefill_seconds", "decode_seconds", "tokens_per_second"]
FIELDS = [*RESULTS, *TIMES, *DRAFTS, "dtype", "device", "model"]
COMPARED = ["exact", "speedup", "ar_tokens_per_second"]


@pytest.fixture(scope="module")
def decoder(byte_model) -> Decoder:
    return Decoder.from_pretrained(byte_model, device="cpu", dtype="float32")


@pytest.fixture
def esp(byte_model, capsys):
    """Runs `esp generate` on the tiny model; returns the exit status, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        fixed = ("--model", byte_model, "--dtype", "float32", "--device", "cpu", "--max-new-tokens", "24")
        status = main(["generate", *fixed, *arguments])
        return status, *capsys.readouterr()

    return run


def test_text_is_what_the_decoder_generates(esp, decoder):
    expected = decoder.generate("Hello", max_new_tokens=24)
    assert esp("--prompt", "Hello") == (0, expected.text + "\n", "")


def test_json_is_the_generation_and_nothing_else(esp, decoder, byte_model):
    expected = decoder.generate("Hello", max_new_tokens=24)
    status, out, err = esp("--prompt", "Hello", "--json")
    entry = json.loads(out)
    assert (status, err, out.count("\n")) == (0, "", 1)
    assert list(entry) == FIELDS
    assert entry["prompt_ids"] == expected.prompt_ids and entry["output_ids"] == expected.output_ids
    assert entry["text"] == expected.text and entry["decode_calls"] == expected.decode_calls
    assert entry["new_tokens"] == len(expected.output_ids)
    assert entry["tau"] == (entry["new_tokens"] - 1) / entry["decode_calls"]
    assert entry["prefill_seconds"] > 0 and entry["decode_seconds"] > 0
    settings = {"drafter": "joined", "budget": 10, "masks": 3, "probe": "vocab-mean", "tree": None}
    settings |= {"dtype": "float32", "device": "cpu", "model": byte_model}
    assert {name: entry[name] for name in settings} == settings


def test_options_reach_the_decoder(esp):
    cores = torch.get_num_threads()
    options = f"--masks 2 --tree static:7,2 --budget 31 --no-prune --probe last-k --lam 0.5 --threads {cores}"
    few = ("--dtype", "bfloat16", "--max-new-tokens", "3")
    status, out, _ = esp("--prompt", "Hello", "--json", *options.split(), *few)
    entry = json.loads(out)
    assert status == 0 and entry["new_tokens"] <= 3
    settings = {"budget": 31, "masks": 2, "probe": "last-k", "tree": "static:7,2", "dtype": "bfloat16"}
    assert {name: entry[name] for name in settings} == settings


def test_plain_decoding_is_a_block_of_one_row(esp):
    entry = json.loads(esp("--prompt", "Hello", "--json", "--drafter", "ar")[1])
    settings = {"drafter": "ar", "budget": 1, "masks": 0, "probe": None, "tree": None, "tau": 1.0}
    assert {name: entry[name] for name in settings} == settings


def test_prompts_of_a_file_in_order_and_templates_where_they_belong(esp, prompt_file, decoder):
    ids = [5, 6, 7]
    path = prompt_file({"turns": ["one", "later"]}, {"prompt_ids": ids}, {"prompt": "two"})
    for chat in (True, False):
        status, out, err = esp("--prompt-file", path, "--json", "--chat" if chat else "--no-chat")
        got = [json.loads(line)["prompt_ids"] for line in out.splitlines()]
        assert status == 0 and "decoding" in err and "100%" in err
        assert got == [decoder.encode("one", chat=chat), ids, decoder.encode("two", chat=chat)]
    assert decoder.encode("one", chat=True) != decoder.encode("one", chat=False)


def test_a_text_file_is_one_prompt(esp, tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("Hello\n")
    assert esp("--prompt-file", str(path)) == esp("--prompt", "Hello")


def test_compare_adds_plain_decoding_to_json(esp, prompt_file):
    path = prompt_file({"prompt": "a"}, {"prompt": "b"})
    status, out, _ = esp("--prompt-file", path, "--json", "--compare")
    assert status == 0
    for line in out.splitlines():
        entry = json.loads(line)
        assert list(entry) == FIELDS + COMPARED
        assert entry["exact"] is True and entry["speedup"] > 0 and entry["ar_tokens_per_second"] > 0


def test_compare_ends_with_a_table(esp, prompt_file, decoder):
    path = prompt_file({"prompt": "a"}, {"prompt": "b"})
    status, out, _ = esp("--prompt-file", path, "--compare")
    texts = "".join(decoder.generate(p, max_new_tokens=24).text + "\n" for p in "ab")
    assert status == 0 and out.startswith(texts)
    table = out[len(texts) :]
    assert "total" in table and "2 of 2" in table and "S/R" in table


def test_a_terminal_gets_headings_instead_of_a_bar(capsys):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert list(_with_progress(["s", "t"], Terminal())) == ["s", "t"]
    assert "prompt 2 of 2" in capsys.readouterr().err
    assert list(_with_progress(["s"], Terminal())) == ["s"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--model /dev/null", "model '/dev/null' is not a folder, a .gguf file or a hub id"),
        ("--model none.gguf", "model 'none.gguf' is not a file"),
        ("--budget 1", "budget must be 2 to 128 rows (a root and a draft at least), got 1"),
        ("--drafter esp --budget 3", "budget must be 4 to 128 rows with masks=1"),
        ("--budget 99999999999999999999", "budget must be 2 to 128 rows"),
        ("--budget -1", "argument --budget: must be an integer of at least 1, got '-1'"),
        ("--masks 0", "argument --masks: must be an integer of at least 1, got '0'"),
        ("--masks 64", "budget must be 130 to 128 rows with masks=64"),
        ("--max-new-tokens 1e3", "argument --max-new-tokens: must be an integer of at least 1, got '1e3'"),
        ("--threads 99999999999999999999", "threads must be 1 to 1024, got 99999999999999999999"),
        ("--lam nan", "lam must be 0 to 1, got nan"),
        ("--lam x", "argument --lam: invalid float value: 'x'"),
        ("--dtype int8", "argument --dtype: invalid choice: 'int8'"),
        ("--device tpu", "argument --device: invalid choice: 'tpu'"),
        ("--drafter x", "argument --drafter: invalid choice: 'x'"),
        ("--tree bush", "tree must be 'dynamic' or 'static:K1,K2,...'"),
        ("--tree static:15,4 --masks 2 --budget 30", "tree 'static:15,4' with masks=2 needs a budget of 60"),
        ("--tree static:2,2", "tree 'static:2,2' has 2 levels"),
        ("--prompt-file b", "argument --prompt-file: not allowed with argument --prompt"),
        ("--bogus", "unrecognized arguments: --bogus"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence, esp):
    status, out, err = esp("--prompt", "a", *arguments.split())
    assert (status, out) == (2, "")
    assert err.startswith(f"esp: {sentence}") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "one of the arguments --prompt --prompt-file is required (see esp generate --help)"),
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", " \n"], "prompt is empty"),
        (["--prompt", "a" * BYTE_CONTEXT], "prompt has 166 tokens, the model's context of 160 leaves"),
        (["--prompt-file", "/dev/null/x"], "cannot read the prompt file /dev/null/x: Not a directory"),
    ],
)
def test_a_bad_prompt_is_one_sentence(arguments, sentence, esp):
    status, out, err = esp(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"esp: {sentence}") and err.count("\n") == 1


def test_a_gpu_that_is_not_there(esp, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, _, err = esp("--prompt", "a", "--device", "cuda")
    assert (status, err) == (2, "esp: device 'cuda' is not available on this machine; use 'cpu'\n")


@pytest.mark.parametrize(
    ("last", "sentence"),
    [
        ({"prompt": 3}, "line 3: prompt must be a string, got int"),
        ({"prompt_ids": [257]}, "line 3: prompt has token id 257, the vocabulary has 257"),
        ({"prompt_ids": [-1]}, "line 3: prompt has token id -1, the vocabulary has 257"),
        ({"prompt_ids": [10**30]}, f"line 3: prompt has token id {10**30}, the vocabulary has 257"),
        ({"prompt_ids": [1] * BYTE_CONTEXT}, "line 3: prompt has 160 tokens, the model's context of 160"),
    ],
)
def test_every_prompt_is_judged_before_one_is_decoded(last, sentence, esp, prompt_file):
    path = prompt_file({"prompt": "a"}, {"prompt": "b"}, last)
    status, out, err = esp("--prompt-file", path, "--json")
    assert (status, out) == (2, "")
    assert err.startswith(f"esp: {path}, {sentence}") and err.count("\n") == 1


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_broken_checkpoint_is_one_sentence(broken, byte_model, tmp_path, esp):
    for source in Path(byte_model).iterdir():
        data = source.read_bytes()
        (tmp_path / source.name).write_bytes(data[: len(data) // 2] if source.name == broken else data)
    status, out, err = esp("--prompt", "a", "--model", str(tmp_path))
    assert (status, out) == (2, "")
    assert err.startswith(f"esp: {tmp_path}") and err.count("\n") == 1


def test_what_libraries_print_stays_out_of_the_output(esp, monkeypatch):
    load = Decoder.from_pretrained

    def noisy(*arguments: object, **options: object) -> Decoder:
        print("noise")
        return load(*arguments, **options)

    monkeypatch.setattr(Decoder, "from_pretrained", noisy)
    status, out, err = esp("--prompt", "a", "--json")
    assert status == 0 and json.loads(out) and err == "noise\n"


def test_warnings_are_one_line(esp, monkeypatch, recwarn):
    import warnings

    load = Decoder.from_pretrained

    def warns(*arguments: object, **options: object) -> Decoder:
        warnings.warn("slow today", UserWarning, stacklevel=1)
        return load(*arguments, **options)

    monkeypatch.setattr(Decoder, "from_pretrained", warns)
    assert esp("--prompt", "a")[2] == "esp: warning: slow today\n"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (MemoryError(), "not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "not enough memory: Default"),
        (ModuleNotFoundError("no", name="gguf"), "gguf is not installed; pip install 'esp-kernels[decode]'"),
        (OSError("first\nsecond"), "first second"),
    ],
)
def test_what_the_machine_lacks_is_one_sentence(error, sentence, esp, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Decoder, "from_pretrained", fails)
    status, out, err = esp("--prompt", "a")
    assert (status, out) == (2, "")
    assert err.startswith(f"esp: {sentence}") and err.count("\n") == 1


def test_a_bug_keeps_its_traceback(esp, monkeypatch):
    monkeypatch.setattr(Decoder, "stream", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        esp("--prompt", "a")


def test_help_tells_every_option_and_its_default(capsys):
    assert main(["generate", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for word in ("--compare", "(default: smollm2)", "default: joined", "(default: 256)", "examples:"):
        assert word in text
    assert main(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out


def test_no_command(capsys):
    assert main([]) == 2
    sentence = "esp: the following arguments are required: COMMAND (see esp --help)\n"
    assert capsys.readouterr().err == sentence


def test_names_are_those_that_exist():
    """The command line knows them without torch."""
    assert set(DRAFTERS) == {"ar", "esp", "joined", *PROPOSERS, *TRAINED}
