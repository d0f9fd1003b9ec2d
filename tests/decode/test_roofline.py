"""The roofline's counts against the tensors that a step's ops really take and return."""

import json

import pytest
import torch

import esp_kernels
from esp_decode import cli, roofline
from esp_decode.drafters import DraftOptions
from esp_decode.loop import new_state, prefill, step
from esp_decode.roofline import CARDS, MODELS, Shape, predict, shape_of, step_costs
from esp_decode.weights import load_model
from esp_kernels import _backend

PREFIX = 21


def size(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()


def real_bytes(op: str, tensors: list[torch.Tensor], out: list[torch.Tensor]) -> int:
    """Inputs and outputs of a call; of caches and tables what it reads or writes, in-place tensors twice."""
    if op == "linear_rows":
        return sum(map(size, tensors)) + size(out[0])
    if op == "embed_block":
        tokens, ordinal, *_ = tensors
        return size(tokens) + size(ordinal) + 2 * size(out[0])
    if op == "rms_norm":
        residual = size(tensors[2]) if len(tensors) > 2 else 0
        return sum(map(size, tensors)) + residual + size(out[0])
    if op == "rope_append":
        q, k, v, cos, _, _, depth, *_ = tensors
        angles = q.shape[1] * 2 * size(cos[0])
        return size(q) + 2 * size(k) + 2 * size(v) + size(depth) + angles + size(out[0])
    if op == "tree_attention":
        q, k, v, _, ancestors, depth = tensors
        cached = [x[:, : PREFIX + q.shape[1]] for x in (k, v)]
        return sum(map(size, (q, *cached, ancestors, depth, *out)))
    if op == "topk_logprobs":
        return size(tensors[0]) + sum(map(size, out))
    assert op == "swiglu"
    return size(tensors[0]) + size(out[0])


@pytest.mark.parametrize("rows", [10, 70])
def test_bytes_are_those_of_the_tensors(rows, tiny_folder, monkeypatch):
    model = load_model(tiny_folder("llama"), torch.bfloat16, torch.device("cpu"))
    drafter = DraftOptions.check("cpu", budget=rows, masks=1).drafter_for(model)
    state = new_state(model, drafter, 1, 256)
    prompt = torch.arange(PREFIX + 1, dtype=torch.int32)[None]
    prefill(model, drafter, prompt, state)
    counted: dict[str, list[int]] = {}
    select = _backend._select

    def counting(op, backend, device):
        run = select(op, backend, device)

        def call(*args):
            out = run(*args)
            outputs = [out] if isinstance(out, torch.Tensor) else list(out or ())
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            if op not in ("advance_block", "commit_kv"):
                counted.setdefault(op, []).append(real_bytes(op, tensors, outputs))
            return out

        return call

    monkeypatch.setattr(_backend, "_select", counting)
    step(model, drafter, state)
    shape = Shape.of(model.config)
    costs = step_costs(shape, drafter.rows, PREFIX, drafter.shape.widest + 1)
    by_op: dict[str, list[int]] = {}
    for cost in costs:
        totals = by_op.setdefault("linear_rows" if cost.is_product else cost.op, [0, 0])
        totals[0] += cost.calls
        totals[1] += cost.bytes
    for op, calls in counted.items():
        assert len(calls) == by_op[op][0], op
        assert sum(calls) == by_op[op][1], op
    assert set(by_op) - counted.keys() == {"advance_block", "commit_kv"}


def test_flops_of_the_products_are_two_a_weight_and_row():
    shape = MODELS["llama-3.1-8b"]
    parameters = 8_030_261_248  # of Llama-3.1-8B
    weights = parameters - 128256 * 4096 - 65 * 4096  # without the embedding table and the norms
    products = [c for c in step_costs(shape, 60, 4096) if c.is_product]
    assert sum(c.flops for c in products) == 2 * 60 * weights
    attention = next(c for c in step_costs(shape, 60, 4096) if c.op == "tree_attention")
    assert attention.flops == 32 * 4 * 60 * (4096 + 60) * 32 * 128


@pytest.mark.parametrize("card", CARDS)
def test_a_step_never_takes_less_than_its_weights(card):
    for name, shape in MODELS.items():
        found = predict(shape, CARDS[card], 4096, 60)
        weights = sum(c.bytes for c in step_costs(shape, 1, 128) if c.is_product)
        assert found["plain_seconds"][128] > weights / CARDS[card].bandwidth, name
        assert all(ratio >= 1 for row in found["ratio"].values() for ratio in row.values()), name


def test_a_longer_prefix_and_more_rows_never_cost_less():
    found = predict(MODELS["qwen3-8b"], CARDS["h100"], 4096, 60)
    plain = list(found["plain_seconds"].values())
    assert plain == sorted(plain)
    for prefix in roofline.PREFIXES:
        column = [found["ratio"][budget][prefix] for budget in roofline.BUDGETS]
        assert column == sorted(column)


def test_shapes_come_from_a_folder_too(tiny_folder):
    assert shape_of(str(tiny_folder("qwen3"))) == Shape(3, 64, 96, 4, 2, 32, 128)


def test_command(capsys):
    assert cli.main(["roofline", "--gpu", "h200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpu"] == "H200" and found["budget"] == 60 and len(found["ops"]) == 14
    assert cli.main(["roofline", "--model", "qwen3-32b", "--prefix", "32768"]) == 0
    out = capsys.readouterr().out
    assert "tree_attention" in out and "32,768" in out and "not measured" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--model no/such/model", "model must be smollm2, llama-3.2-3b"),
        ("--gpu tpu", "invalid choice: 'tpu'"),
        ("--budget 0", "must be an integer of at least 1, got '0'"),
        ("--prefix -1", "must be an integer of at least 1, got '-1'"),
    ],
)
def test_bad_input(arguments, words, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert cli.main(["roofline", *arguments.split()]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1 and "Traceback" not in err


def test_the_fused_op_is_counted_by_its_own_tensors():
    """advance_block reads candidates and block, and writes block, path and committed."""
    rows, candidates = 64, 31
    ids = torch.zeros(1, rows, candidates, dtype=torch.int32)
    block = [torch.full((1, rows), -1, dtype=torch.int32) for _ in range(4)]
    ancestors = torch.zeros(1, rows, 1, dtype=torch.int64)
    out = esp_kernels.advance_block(
        ids, ids.float(), *block, ancestors, torch.zeros(1, 1, 8), torch.zeros(4, 8), 0.0, 60, 1
    )
    inout = sum(map(size, block)) + size(ancestors)
    real = 2 * size(ids) + 2 * inout + size(out[0]) + size(out[2])
    cost = next(c for c in step_costs(MODELS["smollm2"], rows, 1, candidates) if c.op == "advance_block")
    assert cost.bytes == real
