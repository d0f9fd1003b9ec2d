"""Trains small Medusa heads or an EAGLE layer for a frozen model on its own greedy outputs, within minutes:

    python -m bench.train_heads eagle2 --prompts examples/demo_prompts.jsonl --seconds 300 --out build/eagle
    esp generate --prompt "Why is the sky blue?" --drafter eagle2 --heads build/eagle --compare

They show that the drafters work; what they accept tells little of heads trained on a GPU for days.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from esp_decode import Decoder, prompts
from esp_decode.loop import PREFILL_ROWS
from esp_decode.model import Model
from esp_decode.tree import chain_block
from esp_decode.weights import Tensors, checkpoint_folder

MEDUSA_HEADS, MEDUSA_DECAY = 4, 0.8  # the loss of head i counts 0.8^i (Medusa, Section 2.2.1)
FEATURE_NOISE, TOKEN_LOSS = 0.2, 0.1  # EAGLE's augmentation and its weight of the classification loss
ROWS_A_STEP = 256
RATE = 1e-3  # of learning, falling to nothing


@dataclass
class Sample:
    """A prompt with what the model says: tokens [N] int64, the prompt's among them, and hidden [N, E]."""

    tokens: torch.Tensor
    prompt_len: int
    hidden: torch.Tensor


def observe(decoder: Decoder, prompt: str | Sequence[int], new_tokens: int) -> Sample:
    said = decoder.generate(prompt, max_new_tokens=new_tokens)
    ids = torch.tensor([said.prompt_ids + said.output_ids], dtype=torch.int32)
    return Sample(ids[0].long(), len(said.prompt_ids), hidden_states(decoder.model, ids))


def hidden_states(model: Model, ids: torch.Tensor) -> torch.Tensor:
    """[N, E] float32, as the LM head takes them, of one sequence [1, N] int32."""
    cache = model.new_cache(1, ids.shape[1])
    chunks, no_probe = [], torch.empty(1, 0, model.embedding.shape[1])
    for tokens in ids.split(PREFILL_ROWS, dim=1):
        block = chain_block(tokens, tokens.shape[1])
        chunks.append(model.forward(block, no_probe, cache)[0].float())
        cache.advance(tokens.shape[1])
    return torch.cat(chunks)


def lm_head_weight(decoder: Decoder) -> torch.Tensor:
    """[V, E] float32."""
    model = decoder.model
    if model.config.tie_word_embeddings:
        return model.embedding.float()
    tensors = Tensors(checkpoint_folder(decoder.model_name), torch.float32, model.device)
    return tensors.get("lm_head.weight", *model.embedding.shape)


@dataclass
class Vocabulary:
    """The tokens that the samples hold; losses are taken over them alone, which makes a step cheap.

    seen [S] int64, place [V] int64 (of a seen token in `seen`), weight [S, E] of the LM head
    """

    seen: torch.Tensor
    place: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample], head: torch.Tensor) -> "Vocabulary":
        seen = torch.cat([sample.tokens for sample in samples]).unique()
        place = torch.zeros(len(head), dtype=torch.int64).scatter_(0, seen, torch.arange(len(seen)))
        return cls(seen, place, head[seen])


class ResBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.silu(self.linear(x))


def train_medusa(decoder: Decoder, samples: Sequence[Sample], schedule: Iterable[float], out: Path) -> float:
    """Saves heads of one residual block and an output layer that starts as the LM head, whose rows of tokens
    never seen stay as they are. Returns the last loss."""
    head = lm_head_weight(decoder)
    width, vocabulary = head.shape[1], Vocabulary.of(samples, head)
    heads = nn.ModuleList()
    for _ in range(MEDUSA_HEADS):
        output = nn.Linear(width, len(vocabulary.seen), bias=False)
        output.weight.data.copy_(vocabulary.weight)
        heads.append(nn.Sequential(ResBlock(width), output))
    hidden, targets = (torch.cat(parts) for parts in zip(*map(_medusa_pairs, samples), strict=True))

    def loss() -> torch.Tensor:
        rows = torch.randint(len(hidden), (ROWS_A_STEP,))
        x, wanted = hidden[rows], vocabulary.place[targets[rows]]
        losses = [F.cross_entropy(one(x), wanted[:, i]) for i, one in enumerate(heads)]
        return torch.stack([MEDUSA_DECAY**i * one for i, one in enumerate(losses)]).sum()

    last = _descend(heads, loss, schedule)
    tensors = dict(heads.state_dict())
    for i in range(MEDUSA_HEADS):
        tensors[f"{i}.1.weight"] = head.index_copy(0, vocabulary.seen, tensors[f"{i}.1.weight"])
    config = {
        "medusa_num_heads": MEDUSA_HEADS,
        "medusa_num_layers": 1,
        "base_model_name_or_path": decoder.model_name,
    }
    _save(out, "medusa_lm_head", tensors, config)
    return last


def _medusa_pairs(sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states [n, E] that chose the sample's own tokens, and [n, heads] the tokens after those."""
    after, begin = sample.tokens[sample.prompt_len + 1 :], sample.prompt_len - 1
    count = max(0, len(after) - MEDUSA_HEADS + 1)
    targets = torch.stack([after[i : i + count] for i in range(MEDUSA_HEADS)], dim=1)
    return sample.hidden[begin : begin + count], targets


class EagleNet(nn.Module):
    """Its parameters have the published names; the embedding is the model's, and not among them."""

    def __init__(self, config: LlamaConfig, embedding: torch.Tensor):
        super().__init__()
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width)
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.layers[0].input_layernorm = nn.Identity()
        self._rotary = [LlamaRotaryEmbedding(config)]  # in a list: no part of the checkpoint
        self._embedding = embedding

    def forward(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """tokens [N], features [N, E] before each of them; returns the features [N, E] behind them."""
        x = self.fc(torch.cat([self._embedding[tokens], features], dim=-1))[None]
        positions = self._rotary[0](x, torch.arange(len(tokens))[None])
        return self.layers[0](x, position_embeddings=positions)[0]


def train_eagle(decoder: Decoder, samples: Sequence[Sample], schedule: Iterable[float], out: Path) -> float:
    """Saves a layer of the model's own sizes. Returns the last loss."""
    theirs, embedding = decoder.model.config, decoder.model.embedding.float()
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("vocab_size", "rms_norm_eps", "rope_parameters", "max_position_embeddings")
    sizes = {name: getattr(theirs, name) for name in names}
    config = LlamaConfig(num_hidden_layers=1, attn_implementation="sdpa", **sizes)
    net, vocabulary = EagleNet(config, embedding), Vocabulary.of(samples, lm_head_weight(decoder))

    def loss() -> torch.Tensor:
        sample = samples[int(torch.randint(len(samples), ()))]
        noise = (torch.rand_like(sample.hidden) - 0.5) * FEATURE_NOISE * 512 / len(sample.hidden)
        wanted = sample.hidden[1:]
        guessed = net(sample.tokens[1:], (sample.hidden + noise)[:-1])
        begin = sample.prompt_len - 1  # the features of the model's own tokens
        guessed, wanted = guessed[begin:], wanted[begin:]
        chance = (wanted @ vocabulary.weight.T).softmax(dim=-1)
        return F.smooth_l1_loss(guessed, wanted) + TOKEN_LOSS * F.cross_entropy(
            guessed @ vocabulary.weight.T, chance
        )

    last = _descend(net, loss, schedule)
    _save(out, "model", dict(net.state_dict()), config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    return last


def within(seconds: float) -> Iterator[float]:
    """A schedule: the fraction of so many seconds that has gone, until they have."""
    started = time.monotonic()
    while (gone := (time.monotonic() - started) / seconds) < 1:
        yield gone


def _descend(net: nn.Module, loss: Callable[[], torch.Tensor], schedule: Iterable[float]) -> float:
    """A step of AdamW for each fraction of the schedule; returns the mean of the last losses."""
    optimizer = torch.optim.AdamW(net.parameters(), betas=(0.9, 0.95))
    losses: list[float] = []
    for gone in schedule:
        optimizer.param_groups[0]["lr"] = RATE * (1 - gone)
        optimizer.zero_grad()
        value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        losses.append(value.item())
    return sum(losses[-20:]) / len(losses[-20:])


def _save(out: Path, stem: str, tensors: dict[str, torch.Tensor], config: dict) -> None:
    out.mkdir(parents=True, exist_ok=True)
    contiguous = {name: t.detach().contiguous() for name, t in tensors.items()}
    save_file(contiguous, out / f"{stem}.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


TRAIN = {"medusa": train_medusa, "eagle2": train_eagle}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train heads for a frozen model on its own greedy outputs.")
    parser.add_argument("drafter", choices=TRAIN)
    parser.add_argument("--model", default="smollm2", help="folder, hub id or .gguf file")
    parser.add_argument("--prompts", type=Path, required=True, help="what esp generate --prompt-file takes")
    parser.add_argument("--out", type=Path, required=True, help="folder for the heads")
    parser.add_argument("--seconds", type=float, default=600, help="half for decoding, half for training")
    parser.add_argument("--new-tokens", type=int, default=128, help="of each prompt")
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    decoder = Decoder.from_pretrained(arguments.model, dtype="float32", device="cpu")
    half, started = arguments.seconds / 2, time.monotonic()
    samples = []
    for prompt in prompts.from_file(arguments.prompts):
        if time.monotonic() - started > half:
            break
        samples.append(observe(decoder, prompt.content, arguments.new_tokens))
    tokens = sum(len(sample.tokens) - sample.prompt_len for sample in samples)
    print(f"{len(samples)} prompts, {tokens} tokens decoded in {time.monotonic() - started:.0f} s")
    loss = TRAIN[arguments.drafter](decoder, samples, within(half), arguments.out)
    print(f"loss {loss:.3f}; written to {arguments.out}")


if __name__ == "__main__":
    main()
