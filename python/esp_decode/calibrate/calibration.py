"""A calibration: from prompts to a profile. Each part is kept when it is finished."""

import datetime
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from esp_decode.calibrate.fit import BUDGETS, fit, joined_calls, tally, with_lists
from esp_decode.calibrate.parts import Parts
from esp_decode.calibrate.prior import successors
from esp_decode.calibrate.replay import Heard, replay
from esp_decode.calibrate.simulate import esp_steps
from esp_decode.calibrate.speed import step_seconds, worth
from esp_decode.calibrate.tune import tune
from esp_decode.decoder import Decoder
from esp_decode.drafters.joined import CANDIDATES
from esp_decode.names import PROBES
from esp_decode.probe import Probe
from esp_decode.profile import Profile
from esp_decode.ratios import ratio, with_interval
from esp_decode.sources import Sources, default_sources
from esp_decode.tree import TreeShape
from esp_decode.weights import fingerprint

MASKS = 3
ANSWERING_BUDGET = 16
JUDGES = 8  # prompts that choose the probe
CHOICE = TreeShape(30, 1, None)  # by what drafter `esp` accepts with it
HELD_OUT = 4  # each fourth prompt judges what the others taught
ANSWERS_END, TUNING_ENDS = 0.4, 0.9  # of the seconds

HEARD = ("tokens", "ids", "logprobs", "mask_ids", "mask_logprobs")

T = TypeVar("T")
Stage = Callable[[str], Callable[[int, int], None]]


@dataclass(frozen=True)
class Answered:
    prompt: list[int]
    answer: list[int]


@dataclass
class Calibration:
    """stage  begins a stage by its name, and gives what is told of its progress: done, of how many
    seconds that it may take, about; None for as long as it takes
    """

    decoder: Decoder
    checkpoint: Path
    parts: Parts
    stage: Stage
    seconds: float | None

    def run(self, prompts: Sequence[list[int]], new_tokens: int, tuned: bool) -> Profile:
        self._started = time.monotonic()
        sources = replace(default_sources(self.decoder.model.device), prior=self._prior())
        start = Profile(fingerprint(self.checkpoint), Probe.parse("vocab-mean", None), sources, 0.0, {})
        sequences = self._answers(start, prompts, new_tokens)
        probe, tau_by_probe = self._choose(sequences)
        if tuned:
            probe = self._tune(probe, sequences)
        heard = self._replayed(probe, sequences)
        teaching, judging = split(heard)
        sources = fit(sources, teaching, self.stage("fitting the sources"))
        measured = self._measure(with_lists(sources, teaching), judging or teaching)
        seconds = self._timed()
        pays = worth(seconds, {budget: measured["joined"][str(budget)][0] for budget in BUDGETS})
        facts = {
            "prompts": len(heard),
            "held out": len(judging),
            "tokens": sum(len(one.answer) for one in sequences),
            "tau by probe": tau_by_probe,
            "tau": measured,
            "seconds by rows": seconds,
            **self._where(),
        }
        return Profile(start.model, probe, with_lists(sources, heard), pays, facts)

    def _past(self, share: float) -> bool:
        return self.seconds is not None and time.monotonic() - self._started > share * self.seconds

    def _prior(self) -> tuple[torch.Tensor, torch.Tensor]:
        model, progress = self.decoder.model, self.stage("asking what follows each token")
        line_break = self.decoder.tokenizer("\n", add_special_tokens=False)["input_ids"][-1]

        def ask() -> dict[str, torch.Tensor]:
            ids, logprobs = successors(model, line_break, progress)
            return {"ids": ids, "logprobs": logprobs}

        kept = self.parts.keep("prior", ask)
        return kept["ids"].to(model.device), kept["logprobs"].to(model.device)

    def _answers(self, start: Profile, prompts: Sequence[list[int]], new_tokens: int) -> list[Answered]:
        """As many as there is time for, without those that prefill answers alone."""
        progress = self.stage("answering the prompts")
        decoder = self.decoder.with_drafter("joined", budget=ANSWERING_BUDGET, profile=start)
        answered: list[Answered] = []
        for i, prompt in enumerate(prompts):
            if answered and self._past(ANSWERS_END) and not self.parts.has(f"answer-{i}"):
                break

            def answer(prompt: list[int] = prompt) -> dict[str, torch.Tensor]:
                return {"ids": torch.tensor(decoder.generate(prompt, max_new_tokens=new_tokens).output_ids)}

            answered.append(Answered(prompt, self.parts.keep(f"answer-{i}", answer)["ids"].tolist()))
            progress(i + 1, len(prompts))
        answered = [one for one in answered if len(one.answer) > 1]
        if not answered:
            raise ValueError("prompts must have answers of at least 2 tokens to calibrate with")
        return answered

    def _choose(self, sequences: Sequence[Answered]) -> tuple[Probe, dict[str, float]]:
        """The probe that accepts most, and what each accepts."""
        model, progress = self.decoder.model, self.stage("choosing a probe")
        judges = sequences[:: -(-len(sequences) // JUDGES)]
        found = {}
        for i, kind in enumerate(PROBES):
            probe = Probe.parse(kind, None)

            def judge(probe: Probe = probe) -> dict[str, torch.Tensor]:
                heard = (replay(model, s.prompt, s.answer, probe, 1, CHOICE.widest + 1) for s in judges)
                return {"calls": torch.tensor([tally(esp_steps(one, CHOICE, True)) for one in heard])}

            found[kind] = ratio(self.parts.keep(f"probe-{kind}", judge)["calls"].tolist())
            progress(i + 1, len(PROBES))
        return Probe.parse(max(found, key=lambda kind: found[kind]), None), found

    def _tune(self, probe: Probe, sequences: Sequence[Answered]) -> Probe:
        model, progress = self.decoder.model, self.stage("tuning the probe")
        begins = [
            probe.initial(model, torch.tensor([s.prompt], device=model.device), MASKS) for s in sequences
        ]
        start = torch.cat(begins).mean(dim=0).cpu()
        teaching, judging = split([(s.prompt, s.answer) for s in sequences])
        late = lambda: self._past(TUNING_ENDS)  # noqa: E731
        return Probe(
            "tuned", 0.0, tune(self.checkpoint, start, teaching, judging, self.parts, late, progress)
        )

    def _replayed(self, probe: Probe, sequences: Sequence[Answered]) -> list[Heard]:
        model, progress = self.decoder.model, self.stage("replaying the answers")
        candidates = min(CANDIDATES, model.vocab_size)
        heard = []
        for i, one in enumerate(sequences):

            def hear(one: Answered = one) -> dict[str, torch.Tensor]:
                said = vars(replay(model, one.prompt, one.answer, probe, MASKS, candidates))
                return {name: said[name] for name in HEARD}

            kept = self.parts.keep(f"heard-{i}", hear)
            heard.append(Heard(prompt_len=len(one.prompt), **kept))
            progress(i + 1, len(sequences))
        return heard

    def _measure(self, sources: Sources, heard: Sequence[Heard]) -> dict[str, dict[str, list[float]]]:
        """tau with its interval by drafter (joined, esp with 1 to 3 masks) and budget."""
        progress = self.stage("measuring acceptance lengths")
        found: dict[str, dict[str, list[float]]] = {}
        for done, budget in enumerate(BUDGETS):
            by_drafter = {"joined": joined_calls(sources, heard, budget)}
            for masks in range(1, MASKS + 1):
                shape = TreeShape(budget, masks, None)
                by_drafter[f"esp, masks {masks}"] = [tally(esp_steps(one, shape, True)) for one in heard]
            for drafter, calls in by_drafter.items():
                found.setdefault(drafter, {})[str(budget)] = with_interval(calls)
            progress(done + 1, len(BUDGETS))
        return found

    def _timed(self) -> dict[int, float]:
        progress = self.stage("timing forwards")
        seconds = step_seconds(self.decoder.model)
        progress(1, 1)
        return seconds

    def _where(self) -> dict[str, Any]:
        return {
            "dtype": self.decoder.dtype,
            "device": self.decoder.device,
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "date": datetime.date.today().isoformat(),
        }


def split(of: Sequence[T]) -> tuple[list[T], list[T]]:
    """Those that teach, and those that judge, which are none where there are too few."""
    judging = list(of[HELD_OUT - 1 :: HELD_OUT])
    return [one for i, one in enumerate(of) if i % HELD_OUT != HELD_OUT - 1], judging
