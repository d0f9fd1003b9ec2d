"""Plain and tree decoding compute the same bits: a random model of Llama-3.1-8B's sizes, in bfloat16.

1. Plain decoding, step by step, keeps its logits.
2. The captured step of plain decoding, and of drafts at several budgets, must commit the same tokens.
3. Trees that hold the right continuation among wrong siblings, in random order, are run behind the same
   tokens: the logits of their right rows must be those of plain decoding, bit for bit, and be accepted. A
   random model's masks guess little, so this is where deep rows and commits are put to the test.
"""

import argparse
import json
import random
from pathlib import Path

import torch

import esp_kernels
from bench.gpu.random_model import random_model
from esp_decode.drafters import EspDrafter
from esp_decode.drafters.options import GPU_ROWS
from esp_decode.loop import decode, new_state, prefill, step
from esp_decode.model import Model
from esp_decode.probe import Probe
from esp_decode.roofline import MODELS
from esp_decode.tree import PLAIN, Block, TreeShape, with_metadata

PROMPT = 100
DEEPEST = 12  # right tokens in a tree


def drafter(model: Model, budget: int, rows: int) -> EspDrafter:
    shape = PLAIN if budget == 1 else TreeShape.parse("dynamic", budget, 1, default_budget=budget)
    return EspDrafter(model, shape, rows, Probe("vocab-mean", 0.0), True)


def plain_logits(model: Model, prompt: torch.Tensor, count: int, rows: int) -> torch.Tensor:
    """[count, V], as every step of plain decoding gave them."""
    plain = drafter(model, 1, rows)
    state = new_state(model, plain, 1, prompt.shape[1] + count + 2 * rows)
    prefill(model, plain, prompt, state)
    kept = []
    for _ in range(count):
        hidden = model.forward(state.draft.block, state.draft.probe, state.cache)
        kept.append(model.lm_head(hidden)[0, 0].clone())
        step(model, plain, state)
    return torch.stack(kept)


def decoded(model: Model, prompt: torch.Tensor, count: int, one: EspDrafter) -> tuple[list[int], int]:
    """The first `count` tokens, and the steps that they took."""
    state = new_state(model, one, 1, prompt.shape[1] + count + 3 * one.rows)
    tokens: list[int] = []
    for steps, committed in enumerate(decode(model, one, prompt, state), 1):
        tokens += [t for t in committed[0].tolist() if t >= 0]
        if len(tokens) >= count:
            return tokens[:count], steps
    raise AssertionError("decoding ended")


def tree_of(
    right: list[int], root: int, rng: random.Random, vocabulary: int, rows: int
) -> tuple[Block, list[int]]:
    """A block of root, the right tokens one below the other and wrong siblings, in random order; and the rows
    of the right ones, root first."""
    tokens, parent, path = [root], [-1], [0]
    while len(tokens) < rows:
        left = len(right) + 1 - len(path)
        if left and rng.random() < left / (rows - len(tokens)):
            parent.append(path[-1])
            tokens.append(right[len(path) - 1])
            path.append(len(tokens) - 1)
            continue
        above = rng.choice(path) if rng.random() < 0.5 else 0
        wrong = rng.randrange(vocabulary)
        at = path.index(above)
        if at < len(right) and wrong == right[at]:
            wrong = (wrong + 1) % vocabulary
        parent.append(above)
        tokens.append(wrong)
    block = (torch.tensor([x], dtype=torch.int32) for x in (tokens, parent, [0] * rows))
    return with_metadata(*block, rows), path


def replay(model: Model, prompt: torch.Tensor, logits: torch.Tensor, answer: list[int], rows: int) -> int:
    """How many rows were compared. Raises AssertionError where a bit differs."""
    rng = random.Random(rows)
    plain = drafter(model, 1, rows)
    state = new_state(model, plain, 1, prompt.shape[1] + len(answer) + 2 * rows)
    prefill(model, plain, prompt, state)
    root, at, compared = prompt[0, -1].item(), 0, 0
    while at < len(answer):
        right = answer[at : at + rng.randrange(min(DEEPEST, len(answer) - at - 1, rows - 1) + 1)]
        block, path = tree_of(right, root, rng, model.vocab_size, rows)
        block = Block(*(x.to(model.device) for x in block.tensors))
        mine = model.lm_head(model.forward(block, state.draft.probe[:, :0], state.cache))
        same = torch.equal(mine[0, path], logits[at : at + len(path)])
        assert same, f"the logits of a row of the tree behind token {at} are not plain decoding's"
        choice = esp_kernels.topk_logprobs(mine, 1)[1][..., 0].contiguous()
        walked, accepted, bonus = esp_kernels.verify_tree(
            choice, block.tokens, block.parent, block.mask_ordinal
        )
        state.cache.commit(walked, accepted)
        assert walked[0, : len(path)].tolist() == path and accepted.item() == len(right), (
            f"accepted {walked[0]}"
        )
        at, compared = at + len(path), compared + len(path)
        root = bonus.item()
    return compared


def check_bits(model: Model, count: int, bucket: int, budgets: tuple[int, ...]) -> dict:
    """Raises AssertionError with what differs; all blocks are padded to `bucket` rows."""
    prompt = torch.randint(model.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(1)).int()
    prompt = prompt.to(model.device)
    logits = plain_logits(model, prompt, count, bucket)
    answer = esp_kernels.topk_logprobs(logits, 1)[1][:, 0].tolist()
    tau = {}
    for budget in (1, *budgets):
        tokens, steps = decoded(model, prompt, count, drafter(model, budget, bucket))
        wrong = next((i for i in range(count) if tokens[i] != answer[i]), None)
        assert wrong is None, (
            f"budget {budget}: token {wrong} is {tokens[wrong]}, plain decoding's {answer[wrong]}"
        )
        tau[budget] = count / steps
    compared = replay(model, prompt, logits, answer, bucket)
    return {"tokens": count, "distinct": len(set(answer)), "rows_compared": compared, "tau": tau}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b", help="whose sizes")
    parser.add_argument("--tokens", type=int, default=1000)
    options = parser.parse_args()
    model = random_model(MODELS[options.model], torch.bfloat16, "cuda", context=2 * options.tokens + 1024)
    with options.out.open("w") as file:
        for bucket, budgets, share in ((GPU_ROWS[2], (10, 30, 60), 1), (GPU_ROWS[3], (120,), 4)):
            result = {"bucket": bucket} | check_bits(model, options.tokens // share, bucket, budgets)
            print(json.dumps(result), file=file, flush=True)
            print(result, flush=True)


if __name__ == "__main__":
    main()
