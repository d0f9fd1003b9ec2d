"""What people use: a model, a drafter, and text."""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from esp_decode.drafters import DraftOptions
from esp_decode.drafters.options import DEFAULT_BUDGET
from esp_decode.loop import State, decode, new_state
from esp_decode.model import Model
from esp_decode.profile import profile_of
from esp_decode.weights import checkpoint_folder, load_model, load_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Generation:
    """One finished prompt. output_ids ends with the end token if the model gave it; text leaves it out.

    committed counts the tokens of each forward after prefill, which commits the first token.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    text: str
    committed: list[int]
    prefill_seconds: float
    decode_seconds: float

    @property
    def new_tokens(self) -> int:
        return len(self.output_ids)

    @property
    def decode_calls(self) -> int:
        return len(self.committed)

    @property
    def tau(self) -> float:
        """Acceptance length: tokens committed per decode call (paper, Section 4)."""
        return (self.new_tokens - 1) / self.decode_calls if self.decode_calls else 0.0

    @property
    def tokens_per_second(self) -> float:
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_calls else 0.0


class Decoder:
    """Generates text with ESP, token for token what plain greedy decoding gives.

    >>> decoder = Decoder.from_pretrained("smollm2", budget=30)
    >>> print(decoder.generate("Why is the sky blue?").text)
    """

    def __init__(self, model: Model, tokenizer: Any, options: DraftOptions, model_name: str):
        self.model = model
        self.tokenizer = tokenizer
        self.options = options
        self.model_name = model_name
        self._drafter = options.drafter_for(model)
        self._idle: list[State] = []  # of streams that have ended

    @classmethod
    def from_pretrained(
        cls,
        model: str = "smollm2",
        *,
        dtype: str | None = None,
        device: str | None = None,
        threads: int | None = None,
        profile: str | None = None,
        **draft_options: Any,
    ) -> "Decoder":
        """Loads a model: "smollm2" (the demo), a folder, a hub id, or a .gguf file.

        dtype          "float32", "bfloat16" or "float16"; by default bfloat16 where the device multiplies it
                       natively, else float32
        device         "cpu" or "cuda"; by default cuda if there is a card
        threads        CPU threads of the whole process
        profile        a folder that esp calibrate made for this model; by default the cached one, if any
        draft_options  drafter (one of drafters.DRAFTERS), budget (rows of a block), masks, tree ("dynamic",
                       "static:15,4"), prune, probe, lam, heads (the folder of trained weights, for medusa
                       and eagle2): see DraftOptions.check
        """
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device not in DEFAULT_BUDGET:
            raise ValueError(f"device must be one of {', '.join(DEFAULT_BUDGET)}, got {device!r}")
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device 'cuda' is not available on this machine; use 'cpu'")
        if dtype is None:
            dtype = _native_dtype(device)
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if threads is not None:
            if not 1 <= threads <= 1024:
                raise ValueError(f"threads must be 1 to 1024, got {threads}")
            torch.set_num_threads(threads)
        DraftOptions.check(device, **draft_options)  # a mistake shows before a model is fetched
        folder = checkpoint_folder(model)
        known = profile_of(folder, profile, torch.device(device))
        options = DraftOptions.check(device, profile=known, **draft_options)
        loaded = load_model(folder, DTYPES[dtype], torch.device(device))
        return cls(loaded, load_tokenizer(folder), options, model)

    def with_drafter(self, drafter: str, **draft_options: Any) -> "Decoder":
        """The same model behind other drafts; plain decoding in blocks of the same rows on a GPU."""
        draft_options = {"profile": self.options.profile, **draft_options}
        options = DraftOptions.check(self.device, drafter=drafter, **draft_options)
        if drafter == "ar" and self.device != "cpu":
            options = replace(options, rows=self.options.rows)
        return Decoder(self.model, self.tokenizer, options, self.model_name)

    @property
    def device(self) -> str:
        return self.model.device.type

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def encode(self, prompt: str, *, chat: bool = True) -> list[int]:
        """Token ids of a prompt; as a user's turn of the chat template if there is one and `chat` is set."""
        if not prompt.strip():
            raise ValueError("prompt is empty")
        if chat and self.tokenizer.chat_template:
            turns = [{"role": "user", "content": prompt}]
            text = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.tokenizer(prompt)["input_ids"]

    def generate(
        self, prompt: str | Sequence[int], *, max_new_tokens: int = 256, chat: bool = True
    ) -> Generation:
        """Decodes one prompt, given as text or as token ids (used as they are).

        Stops at the model's end token, at max_new_tokens, or when the model's context is full.
        """
        stream = self.stream(prompt, max_new_tokens=max_new_tokens, chat=chat)
        while True:
            try:
                next(stream)
            except StopIteration as end:
                return end.value

    def stream(
        self, prompt: str | Sequence[int], *, max_new_tokens: int = 256, chat: bool = True
    ) -> Generator[str, None, Generation]:
        """Yields text as it is committed; returns the Generation."""
        prompt_ids = self.encode(prompt, chat=chat) if isinstance(prompt, str) else list(prompt)
        limit = self._check_sizes(prompt_ids, max_new_tokens)
        return self._stream(prompt_ids, limit)

    def _check_sizes(self, prompt_ids: list[int], max_new_tokens: int) -> int:
        """How many tokens may be generated."""
        if not prompt_ids:
            raise ValueError("prompt is empty")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        outside = next((t for t in prompt_ids if not 0 <= t < self.model.vocab_size), None)
        if outside is not None:
            raise ValueError(f"prompt has token id {outside}, the vocabulary has {self.model.vocab_size}")
        room = self.model.context - len(prompt_ids)
        if room < 1:
            raise ValueError(
                f"prompt has {len(prompt_ids)} tokens, the model's context of {self.model.context} "
                f"leaves no room to generate"
            )
        return min(max_new_tokens, room)

    def _stream(self, prompt_ids: list[int], limit: int) -> Generator[str, None, Generation]:
        """Times the forwards alone: what the reader of the text does meanwhile is not ours."""
        text = TextStream(self.tokenizer)
        forwards = self._committed(prompt_ids, limit)
        output: list[int] = []
        committed: list[int] = []
        seconds: list[float] = []
        while True:
            started = time.perf_counter()
            tokens = next(forwards, None)
            if tokens is None:
                break
            seconds.append(time.perf_counter() - started)
            output += tokens
            committed.append(len(tokens))
            yield text.push(tokens)
        yield text.rest()
        prefill, *decoding = seconds
        return Generation(prompt_ids, output, text.text, committed[1:], prefill, sum(decoding))

    def _committed(self, prompt_ids: list[int], limit: int) -> Generator[list[int], None, None]:
        """The tokens of each forward, cut behind the end token and at `limit` tokens."""
        prompt = torch.tensor([prompt_ids], dtype=torch.int32, device=self.model.device)
        state = self._take_state(len(prompt_ids) + limit + 2 * self._drafter.rows)
        try:
            for committed in decode(self.model, self._drafter, prompt, state):
                tokens = [t for t in committed[0].tolist() if t >= 0][:limit]
                end = next((i for i, t in enumerate(tokens) if t in self.model.eos_token_ids), None)
                if end is not None:
                    yield tokens[: end + 1]
                    return
                yield tokens
                limit -= len(tokens)
                if limit == 0:
                    return
        finally:
            self._idle.append(state)

    def _take_state(self, capacity: int) -> State:
        """One that no other stream uses, with room for `capacity` slots; too small ones are dropped."""
        while self._idle:
            state = self._idle.pop()
            if state.capacity >= capacity:
                return state
        return new_state(self.model, self._drafter, 1, -(-capacity // 256) * 256)


class TextStream:
    """Detokenises piece by piece; a piece is held back while it ends within a character.

    Only the tokens since the last piece are decoded again, behind those of the piece before it, which tell
    how the new ones join on.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._pending: list[int] = []
        self.text = ""

    def push(self, tokens: list[int]) -> str:
        self._pending += tokens
        piece = self._piece()
        return "" if piece.endswith("\ufffd") else self._advance(piece)

    def rest(self) -> str:
        return self._advance(self._piece())

    def _piece(self) -> str:
        known = self._decode(self._before)
        return self._decode(self._before + self._pending)[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _advance(self, piece: str) -> str:
        if self._pending:
            self._before, self._pending = self._pending, []
        self.text += piece
        return piece


def _native_dtype(device: str) -> str:
    if device == "cuda":
        return "bfloat16"
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"
