"""The command line as a process: interrupts, closed pipes, what a start loads."""

import json
import os
import signal
import subprocess
import sys

PROMPTS = 200  # more than a pipe holds of their results: on a busy machine, too, decoding cannot end unread


def process(model: str, *arguments: str, **pipes: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "esp_decode", "generate", "--model", model, "--threads", "1", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **pipes)


def test_an_interrupt_leaves_whole_lines(byte_model, prompt_file):
    path = prompt_file(*[{"prompt": "go on"}] * PROMPTS)
    run = process(byte_model, "--prompt-file", path, "--json", "--max-new-tokens", "32")
    first = run.stdout.readline()
    run.send_signal(signal.SIGINT)
    rest, err = run.communicate(timeout=60)
    assert run.returncode == 130
    lines = (first + rest).splitlines()
    assert 1 <= len(lines) < PROMPTS and all(json.loads(line)["new_tokens"] for line in lines)
    assert "Traceback" not in err and "esp:" not in err


def test_a_closed_pipe_ends_quietly(byte_model, prompt_file):
    path = prompt_file(*[{"prompt": "go on"}] * PROMPTS)
    for form in (["--json"], []):
        run = process(byte_model, "--prompt-file", path, "--max-new-tokens", "32", *form)
        run.stdout.readline()
        run.stdout.close()
        err = run.stderr.read()
        assert run.wait(timeout=60) == 141
        assert "Traceback" not in err and "Exception" not in err and "esp:" not in err


def test_help_into_a_closed_pipe():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "esp_decode", "generate", "--help"]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    run = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=buffered)
    os.close(write)
    assert (run.returncode, run.stderr) == (141, "")


def test_help_and_mistakes_do_not_load_torch():
    check = "import sys; from esp_decode.cli import main; main(['generate', *sys.argv[1:]])"
    check += "; assert not {'torch', 'transformers', 'rich'} & set(sys.modules)"
    for arguments in (["--help"], ["--prompt", "a", "--masks", "-1"], ["--prompt-file", "/none"]):
        subprocess.run([sys.executable, "-c", check, *arguments], check=True, capture_output=True)
