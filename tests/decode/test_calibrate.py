"""`esp calibrate` on a tiny model of bytes, and the profile that it makes."""

import json
from pathlib import Path

import pytest
import torch

from esp_decode import Decoder
from esp_decode.calibrate import tune
from esp_decode.calibrate.calibration import Calibration, split
from esp_decode.calibrate.parts import Parts
from esp_decode.calibrate.replay import replay
from esp_decode.calibrate.speed import worth
from esp_decode.cli import main
from esp_decode.probe import Probe
from esp_decode.profile import Profile, cached_profile
from esp_decode.weights import fingerprint

from .conftest import ids_decoder

CPU = torch.device("cpu")
PROMPTS = ["one two", "three", "four five six", "seven", "eight nine"]


@pytest.fixture(autouse=True)
def no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ESP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def prompts(prompt_file) -> str:
    return prompt_file(*({"prompt": text} for text in PROMPTS))


def calibrate(model: str, prompts: str, *arguments: str) -> int:
    short = ("--max-new-tokens", "24", "--dtype", "float32", "--device", "cpu")
    return main(["calibrate", model, "--prompts", prompts, *short, *arguments])


@pytest.fixture(scope="module")
def made(byte_model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    prompts = folder / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    assert calibrate(byte_model, str(prompts), "--out", str(folder / "profile")) == 0
    return folder / "profile"


def same(a: Profile, b: Profile) -> bool:
    """But for times."""
    tensors = [(a.sources.weights, b.sources.weights), *zip(a.sources.prior, b.sources.prior, strict=True)]
    facts = [(a.facts[name], b.facts[name]) for name in ("tau", "tau by probe", "prompts", "tokens")]
    return (
        all(torch.equal(x, y) for x, y in tensors)
        and a.sources.reach == b.sources.reach
        and a.probe.kind == b.probe.kind
        and all(x == y for x, y in facts)
    )


def test_a_profile_says_what_was_measured(made, byte_model):
    profile = Profile.load(made, CPU)
    facts = profile.facts
    assert profile.model == fingerprint(Path(byte_model))
    assert (facts["prompts"], facts["held out"]) == (5, 1)
    assert max(facts["tau by probe"], key=facts["tau by probe"].get) == profile.probe.kind
    assert set(facts["tau"]) == {"joined", "esp, masks 1", "esp, masks 2", "esp, masks 3"}
    for by_budget in facts["tau"].values():
        for tau, low, high in by_budget.values():
            assert 1 <= low <= tau <= high
    assert all(seconds > 0 for seconds in facts["seconds by rows"].values())
    assert not list(made.parent.glob("*.unfinished"))


def test_its_tau_by_probe_is_that_of_decoding(made, byte_model):
    """All five prompts choose, by a tree of one mask at budget 30."""
    profile = Profile.load(made, CPU)
    for kind in ("vocab-mean", "prompt-mean"):
        decoder = Decoder.from_pretrained(
            byte_model, dtype="float32", device="cpu", budget=30, masks=1, probe=kind
        )
        said = [decoder.generate(text, max_new_tokens=24) for text in PROMPTS]
        tokens, calls = sum(s.new_tokens - 1 for s in said), sum(s.decode_calls for s in said)
        assert profile.facts["tau by probe"][kind] == tokens / calls


@pytest.mark.parametrize("stage", ["_answers", "_choose", "_replayed", "_timed"])
def test_an_interrupted_run_goes_on(stage, made, byte_model, prompts, tmp_path, monkeypatch):
    """In the middle of a stage: the second thing that it keeps is not finished."""
    keep, armed = Parts.keep, []
    before = getattr(Calibration, stage)

    def interrupting(self, *arguments):
        armed.append(True)
        if stage == "_timed":
            raise KeyboardInterrupt
        return before(self, *arguments)

    def counting(self, name, make):
        if armed and not self.has(name):
            armed.append(True)
            if len(armed) > 2:
                raise KeyboardInterrupt
        return keep(self, name, make)

    out = tmp_path / "profile"
    with monkeypatch.context() as broken:
        broken.setattr(Calibration, stage, interrupting)
        broken.setattr(Parts, "keep", counting)
        assert calibrate(byte_model, prompts, "--out", str(out)) == 130
    assert not out.exists()
    kept = {path.name for path in Path(f"{out}.unfinished").iterdir()}
    again: list[str] = []

    def watching(self, name, make):
        if not self.has(name):
            again.append(name)
        return keep(self, name, make)

    monkeypatch.setattr(Parts, "keep", watching)
    assert calibrate(byte_model, prompts, "--out", str(out)) == 0
    assert not {f"{name}.safetensors" for name in again} & kept
    assert same(Profile.load(out, CPU), Profile.load(made, CPU))


def test_other_settings_do_not_mix(byte_model, prompts, tmp_path, capsys, monkeypatch):
    out = tmp_path / "profile"
    with monkeypatch.context() as broken:
        broken.setattr(Calibration, "_choose", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert calibrate(byte_model, prompts, "--out", str(out)) == 130
    capsys.readouterr()
    assert calibrate(byte_model, prompts, "--out", str(out), "--tune") == 2
    sentence = f"esp: {out}.unfinished holds an unfinished run with other settings; finish it or remove it\n"
    assert capsys.readouterr().err == sentence


def test_seconds_end_the_answers_early(byte_model, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(Calibration, "_past", lambda self, share: True)
    assert calibrate(byte_model, prompts, "--out", str(tmp_path / "profile"), "--seconds", "1") == 0
    profile = Profile.load(tmp_path / "profile", CPU)
    assert (profile.facts["prompts"], profile.facts["held out"]) == (1, 0)


def test_the_cached_profile_is_used(byte_model, prompts, capsys):
    assert calibrate(byte_model, prompts) == 0
    folder = cached_profile(fingerprint(Path(byte_model)))
    assert f"The profile lies in {folder}." in capsys.readouterr().out
    decoder = Decoder.from_pretrained(byte_model, dtype="float32", device="cpu", drafter="joined")
    profile = Profile.load(folder, CPU)
    assert decoder.options.profile is not None and same(decoder.options.profile, profile)
    assert decoder.options.probe.kind == profile.probe.kind
    assert torch.equal(decoder._drafter.sources.weights, profile.sources.weights)
    assert decoder._drafter.sources.least == max(profile.pays, profile.sources.least)
    with_budget = decoder.with_drafter("joined", budget=20)
    assert with_budget._drafter.sources.least == profile.sources.least, "a budget asked for is used"
    chosen = decoder.with_drafter("esp", probe="last-k").options
    assert (chosen.probe.kind, chosen.probe.lam) == ("last-k", 0.1)


def test_decoding_with_a_profile_is_exact(made, byte_model):
    options = {"dtype": "float32", "device": "cpu", "profile": str(made)}
    decoder = Decoder.from_pretrained(byte_model, drafter="joined", **options)
    plain = decoder.with_drafter("ar")
    for text in ("Hello", *PROMPTS[:2]):
        result, expected = (d.generate(text, max_new_tokens=64) for d in (decoder, plain))
        assert result.output_ids == expected.output_ids
        assert result.decode_calls <= expected.decode_calls


def test_a_profile_of_another_model_is_refused(made, tiny_folder, capsys):
    arguments = ["--model", str(tiny_folder("qwen3")), "--prompt", "a", "--profile", str(made)]
    assert main(["generate", *arguments]) == 2
    sentence = f"esp: profile {str(made)!r} was made with another model; esp calibrate makes this one's\n"
    assert capsys.readouterr().err == sentence


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("profile.json", "{", "Expecting property name"),
        ("profile.json", '{"form": 0}', "its form is 0, this version reads 1"),
        ("profile.safetensors", "no", "Error while deserializing"),
    ],
)
def test_a_broken_profile_is_refused(name, content, reason, made, byte_model, tmp_path, capsys):
    for file in made.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_text(content)
    assert main(["generate", "--model", byte_model, "--prompt", "a", "--profile", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"esp: profile {str(tmp_path)!r} is not of esp calibrate: {reason}")
    assert err.count("\n") == 1


def test_no_profile_there(byte_model, tmp_path, capsys):
    missing = str(tmp_path / "missing")
    assert main(["generate", "--model", byte_model, "--prompt", "a", "--profile", missing]) == 2
    assert capsys.readouterr().err.startswith(f"esp: profile {missing!r} is not of esp calibrate: ")


def test_bad_prompts_are_named_by_line(byte_model, prompt_file, capsys):
    path = prompt_file({"prompt": "a"}, {"prompt_ids": [999]})
    assert calibrate(byte_model, path) == 2
    sentence = f"esp: {path}, line 2: prompt has token id 999, the vocabulary has 257\n"
    assert capsys.readouterr().err == sentence


def test_answers_too_short_to_teach(byte_model, prompts, tmp_path, capsys):
    arguments = ["--max-new-tokens", "1", "--dtype", "float32", "--out", str(tmp_path / "profile")]
    assert main(["calibrate", byte_model, "--prompts", prompts, *arguments]) == 2
    sentence = "esp: prompts must have answers of at least 2 tokens to calibrate with\n"
    assert capsys.readouterr().err.endswith(sentence)


def test_tuning_lowers_the_loss_and_is_used(byte_model, prompts, tmp_path, capsys):
    out = tmp_path / "tuned"
    assert calibrate(byte_model, prompts, "--out", str(out), "--tune") == 0
    profile = Profile.load(out, CPU)
    assert profile.probe.kind == "tuned" and profile.probe.lam == 0
    assert profile.probe.vectors.shape == (3, 64)
    decoder = Decoder.from_pretrained(byte_model, dtype="float32", device="cpu", profile=str(out), masks=3)
    assert torch.equal(decoder.options.probe.vectors, profile.probe.vectors)
    plain = decoder.with_drafter("ar").generate("Hello", max_new_tokens=64)
    assert decoder.generate("Hello", max_new_tokens=64).output_ids == plain.output_ids


@pytest.mark.parametrize("kind", ["llama3-rope", "qwen3"])
def test_the_loss_is_what_decoding_would_see(kind, tiny_folder):
    """Cross-entropy by transformers, against the log-probabilities of the masks in our own replay."""
    from transformers import AutoModelForCausalLM

    decoder = ids_decoder(tiny_folder(kind), drafter="ar")
    prompt = list(range(1, 20))
    answer = decoder.generate(prompt, max_new_tokens=16).output_ids
    vectors = 0.3 * torch.randn((2, 64), generator=torch.Generator().manual_seed(0))
    heard = replay(decoder.model, prompt, answer, Probe("given", 0.0, vectors), 2, 64)
    expected = []
    for mask in range(2):
        lost = []
        for position, token in enumerate(answer[mask + 1 :]):
            ids, logprobs = (t[position, 0, mask] for t in (heard.mask_ids, heard.mask_logprobs))
            lost.append(-logprobs[ids == token])
        assert any(map(len, lost)), "among the 64 best of 128"
        expected.append(lost)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(kind), dtype=torch.float32)
    one = tune.lesson(model, prompt, answer)
    each = tune.losses(model, vectors, one)
    for mask, lost in enumerate(expected):
        for ours, theirs in zip(lost, each[mask], strict=True):
            if len(ours):
                torch.testing.assert_close(ours[0], theirs, rtol=1e-3, atol=1e-3)
            else:
                assert theirs > 2, "it was not among the 64 best"


def test_what_a_row_is_worth():
    """Ten rows cost a second more than one; a tenth buys what the best budget commits in that time."""
    assert worth({1: 1.0, 11: 2.0}, {11: 4.0}) == pytest.approx(0.1 * 2.0)
    assert worth({1: 1.0, 11: 2.0}, {6: 4.5, 11: 2.0}) == pytest.approx(0.1 * 3.0)
    assert worth({1: 1.0, 11: 1.0}, {6: 2.0}) == 0.0


def test_each_fourth_judges():
    assert split([1, 2, 3]) == ([1, 2, 3], [])
    assert split([1, 2, 3, 4, 5]) == ([1, 2, 3, 5], [4])
