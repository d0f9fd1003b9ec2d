"""Drafters whose weights were trained: Medusa's heads and EAGLE's layer."""

import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import train_heads
from bench.train_heads import TRAIN, hidden_states, observe
from esp_decode import cli
from esp_decode.drafters import DraftOptions, Outcome
from esp_decode.drafters.eagle2 import Candidates, best_tree
from esp_decode.drafters.eagle_layer import EagleLayer
from esp_decode.drafters.medusa import best_paths
from esp_decode.loop import decode, new_state, prefill, step, tensors_of
from esp_decode.tree import Block, with_metadata
from esp_decode.weights import load_model
from esp_kernels import PADDING

from .conftest import ids_decoder

KIND, VOCAB, WIDTH = "llama", 128, 64
STEPS = 300
FILES = {"medusa": "medusa_lm_head.safetensors", "eagle2": "model.safetensors"}


def prompt(length: int) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def random_medusa(folder, heads: int = 5, layers: int = 2):
    """In the published form: blocks `i.j.linear`, then the output `i.layers`."""
    tensors = {}
    for i in range(heads):
        for j in range(layers):
            tensors[f"{i}.{j}.linear.weight"] = torch.randn(WIDTH, WIDTH) / 8
            tensors[f"{i}.{j}.linear.bias"] = torch.randn(WIDTH) / 8
        tensors[f"{i}.{layers}.weight"] = torch.randn(VOCAB, WIDTH) / 8
    save_file(tensors, folder / FILES["medusa"])
    config = {"medusa_num_heads": heads, "medusa_num_layers": layers, "base_model_name_or_path": "tiny"}
    (folder / "config.json").write_text(json.dumps(config))


def random_eagle(folder, bias: bool = True, **changes: object):
    from transformers import LlamaConfig

    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config = LlamaConfig(**(sizes | heads | changes))
    config.save_pretrained(folder)
    shapes = {
        "embed_tokens.weight": (config.vocab_size, WIDTH),
        "fc.weight": (WIDTH, 2 * WIDTH),
        "layers.0.self_attn.q_proj.weight": (64, WIDTH),
        "layers.0.self_attn.k_proj.weight": (32, WIDTH),
        "layers.0.self_attn.v_proj.weight": (32, WIDTH),
        "layers.0.self_attn.o_proj.weight": (WIDTH, 64),
        "layers.0.mlp.gate_proj.weight": (96, WIDTH),
        "layers.0.mlp.up_proj.weight": (96, WIDTH),
        "layers.0.mlp.down_proj.weight": (WIDTH, 96),
        "layers.0.post_attention_layernorm.weight": (WIDTH,),
    }
    if bias:
        shapes["fc.bias"] = (WIDTH,)
    save_file({name: torch.randn(shape) / 4 for name, shape in shapes.items()}, folder / FILES["eagle2"])


RANDOM = {"medusa": random_medusa, "eagle2": random_eagle}


@pytest.fixture(scope="module")
def heads_folder(tmp_path_factory):
    """The folder of random heads, made once."""
    made = {}

    def folder(drafter: str):
        if drafter not in made:
            made[drafter] = tmp_path_factory.mktemp(drafter)
            torch.manual_seed(0)
            RANDOM[drafter](made[drafter])
        return made[drafter]

    return folder


@pytest.fixture
def broken(heads_folder, tmp_path):
    """A private copy of random heads, to be broken."""
    return lambda drafter: shutil.copytree(heads_folder(drafter), tmp_path / drafter)


@pytest.fixture(scope="module")
def trained(tiny_folder, tmp_path_factory):
    """The folder of heads that have learned by heart what the tiny model says to one prompt."""
    decoder = ids_decoder(tiny_folder(KIND), drafter="ar")
    samples = [observe(decoder, prompt(20), 120)]
    made = {}

    def folder(drafter: str) -> str:
        if drafter not in made:
            made[drafter] = tmp_path_factory.mktemp("trained")
            torch.manual_seed(0)
            schedule = [step / STEPS for step in range(STEPS)]
            TRAIN[drafter](decoder, samples, schedule, made[drafter])
        return str(made[drafter])

    return folder


@pytest.mark.on_device
@pytest.mark.parametrize("drafter", RANDOM)
@pytest.mark.parametrize("budget", [2, 3, 10, 30, 60, 128])
@pytest.mark.parametrize("length", [1, 70])
def test_random_heads_change_nothing(drafter, budget, length, tiny_folder, heads_folder):
    options = {"drafter": drafter, "budget": budget, "heads": str(heads_folder(drafter))}
    decoder = ids_decoder(tiny_folder(KIND), **options)
    plain = decoder.with_drafter("ar").generate(prompt(length), max_new_tokens=40)
    for _ in range(2):  # the second prompt finds the state of the first
        result = decoder.generate(prompt(length), max_new_tokens=40)
        assert result.output_ids == plain.output_ids
        assert result.decode_calls <= plain.decode_calls


@pytest.mark.parametrize("drafter", RANDOM)
def test_a_model_in_bfloat16_takes_the_heads_along(drafter, tiny_folder, trained):
    options = {"drafter": drafter, "budget": 30, "heads": trained(drafter)}
    plain = ids_decoder(tiny_folder(KIND), torch.bfloat16, drafter="ar").generate(
        prompt(20), max_new_tokens=60
    )
    result = ids_decoder(tiny_folder(KIND), torch.bfloat16, **options).generate(prompt(20), max_new_tokens=60)
    assert result.output_ids == plain.output_ids


@pytest.mark.parametrize("drafter", RANDOM)
@pytest.mark.parametrize("budget", [3, 10, 30, 60])
def test_trained_heads_are_accepted_and_change_nothing(drafter, budget, tiny_folder, trained):
    options = {"drafter": drafter, "budget": budget, "heads": trained(drafter)}
    plain = ids_decoder(tiny_folder(KIND), drafter="ar").generate(prompt(20), max_new_tokens=100)
    result = ids_decoder(tiny_folder(KIND), **options).generate(prompt(20), max_new_tokens=100)
    assert result.output_ids == plain.output_ids
    assert result.tau > (1.5 if budget == 3 else 2)


@pytest.mark.parametrize("drafter", RANDOM)
def test_a_batch_decodes_as_its_sequences_alone(drafter, tiny_folder, trained):
    """They accept differently many drafts, so that their prefixes part; one of them is padding in the end."""
    options = {"drafter": drafter, "budget": 10, "heads": trained(drafter)}
    decoder = ids_decoder(tiny_folder(KIND), **options)
    prompts = [prompt(20), prompt(21)[1:]]
    alone = [decoder.generate(p, max_new_tokens=60) for p in prompts]
    assert alone[0].decode_calls != alone[1].decode_calls
    model, way = decoder.model, DraftOptions.check("cpu", **options).drafter_for(decoder.model)
    state = new_state(model, way, 2, 256)
    together, calls = [[], []], [0, 0]
    for committed in decode(model, way, torch.tensor(prompts, dtype=torch.int32), state):
        for b, row in enumerate(committed.tolist()):
            together[b] += [t for t in row if t >= 0]
            calls[b] += len(together[b]) - len(committed[b][committed[b] >= 0]) < 60
        if min(map(len, together)) >= 60:
            break
    assert [t[:60] for t in together] == [a.output_ids for a in alone]
    assert calls == [a.decode_calls + 1 for a in alone], "the first call is counted as prefill's"

    for rows, nothing in zip(state.draft.block.tensors, (-1, PADDING, -1, -1, 0), strict=True):
        rows[0] = nothing
    before = state.cache.prefix_len.tolist()
    for _ in range(3):
        verdict = step(model, way, state)
        assert verdict.accepted[0] == -1 and verdict.committed[0].eq(-1).all() and verdict.accepted[1] >= 0
        assert state.draft.block.parent[0].eq(PADDING).all() and state.draft.block.tokens[0].eq(-1).all()
    assert state.cache.prefix_len[0] == before[0] and state.cache.prefix_len[1] >= before[1] + 3


@pytest.mark.parametrize("drafter", RANDOM)
def test_padding_rows_change_nothing(drafter, tiny_folder, trained):
    """A GPU runs blocks padded to a bucket."""
    decoder = ids_decoder(tiny_folder(KIND), drafter=drafter, budget=10, heads=trained(drafter))
    exact = decoder._drafter
    padded = (
        replace(exact, rows=32) if drafter == "eagle2" else replace(exact, tree=padded_to(exact.tree, 32))
    )
    committed = []
    for way in (exact, padded):
        state = new_state(decoder.model, way, 1, 256)
        steps = decode(decoder.model, way, torch.tensor([prompt(20)], dtype=torch.int32), state)
        committed.append([[t for t in c[0].tolist() if t >= 0] for c in itertools.islice(steps, 20)])
        assert state.draft.block.tokens.shape == (1, way.rows)
    assert committed[0] == committed[1] and padded.rows == 32


def padded_to(tree: Block, rows: int) -> Block:
    return with_metadata(tree.tokens, tree.parent, tree.mask_ordinal, rows)


@pytest.mark.parametrize("drafter", RANDOM)
def test_a_step_stays_in_place_and_never_waits_for_the_device(drafter, tiny_folder, heads_folder):
    """What a CUDA graph asks for. Fake tensors have no values that a host could read."""
    decoder = ids_decoder(tiny_folder(KIND), drafter=drafter, budget=10, heads=str(heads_folder(drafter)))
    model, way = decoder.model, decoder._drafter
    state = new_state(model, way, 1, 256)
    prefill(model, way, torch.tensor([prompt(20)], dtype=torch.int32), state)
    places = [t.data_ptr() for t in tensors_of(state)]
    for _ in range(2):
        step(model, way, state)
        assert [t.data_ptr() for t in tensors_of(state)] == places
    ids = torch.zeros((1, way.rows, 1), dtype=torch.int32)
    outcome = Outcome(ids[..., 0], ids, ids.float(), torch.zeros(1, way.rows, WIDTH))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        verdict = way.advance(faked(outcome, mode), faked(state.draft, mode))
    assert verdict.committed.shape == (1, way.rows) and way.on_device


def faked(value, mode: FakeTensorMode):
    """A tensor, or a dataclass of tensors, without values."""
    if isinstance(value, torch.Tensor):
        return mode.from_tensor(value)
    return replace(value, **{name: faked(part, mode) for name, part in vars(value).items()})


def test_the_published_tree():
    paths = best_paths(1000, heads=4)
    assert len(paths) == 63 and paths[:6] == [(0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0)]
    assert len(set(paths)) == 63 and {len(path) for path in paths} == {1, 2, 3, 4}
    for i, path in enumerate(paths):
        assert len(path) == 1 or path[:-1] in paths[:i], "parents first: any beginning is a tree"
    assert best_paths(3, heads=1) == [(0,), (1,), (2,)]


def drafted(decoder, ids: list[int], steps: int):
    """Yields all tokens so far, the next root last, and the block that the drafter hung from it."""
    model, way = decoder.model, decoder._drafter
    state = new_state(model, way, 1, 256)
    accepted = 0
    for committed in itertools.islice(
        decode(model, way, torch.tensor([ids], dtype=torch.int32), state), steps
    ):
        tokens = [t for t in committed[0].tolist() if t >= 0]
        ids, accepted = ids + tokens, accepted + len(tokens) - 1
        yield ids, state.draft.block
    assert accepted >= steps, "a test of steps that accept little says little"


def paths_of(block: Block) -> list[tuple[int, ...]]:
    """Of every row, the tokens from the root to it."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(block.tokens[0].tolist(), block.parent[0].tolist(), strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else (token,))
    return paths


def test_medusa_drafts_what_its_heads_say(tiny_folder, trained):
    """Published names to heads, ranks of heads to rows of the tree, behind the deepest accepted row."""
    folder = trained("medusa")
    decoder = ids_decoder(tiny_folder(KIND), drafter="medusa", budget=60, heads=folder)
    tensors = load_file(f"{folder}/{FILES['medusa']}")
    for ids, block in drafted(decoder, prompt(20), steps=8):
        chose = hidden_states(decoder.model, torch.tensor([ids], dtype=torch.int32))[-2]
        ranked = [medusa_oracle(tensors, i, 1, chose).argsort(descending=True).tolist() for i in range(4)]
        nodes = [(), *best_paths(59, heads=4)]
        expected = [(ids[-1], *(ranked[i][rank] for i, rank in enumerate(node))) for node in nodes]
        assert paths_of(block) == expected


def medusa_oracle(tensors: dict, head: int, layers: int, x: torch.Tensor) -> torch.Tensor:
    for j in range(layers):
        weight, bias = (tensors[f"{head}.{j}.linear.{kind}"] for kind in ("weight", "bias"))
        x = x + torch.nn.functional.silu(weight @ x + bias)
    return tensors[f"{head}.{layers}.weight"] @ x


def test_medusas_heads_may_have_many_blocks(tiny_folder, heads_folder):
    folder = heads_folder("medusa")
    decoder = ids_decoder(tiny_folder(KIND), drafter="medusa", budget=60, heads=str(folder))
    tensors, x = load_file(folder / FILES["medusa"]), torch.randn(1, 1, WIDTH)
    for i, head in enumerate(decoder._drafter.heads):
        torch.testing.assert_close(head(x)[0, 0], medusa_oracle(tensors, i, 2, x[0, 0]), rtol=1e-4, atol=1e-4)


def eagle_oracle(folder, embedding: torch.Tensor):
    """transformers' layer without its first norm, over the whole sequence at once."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig.from_pretrained(folder, attn_implementation="eager")
    tensors, prefix = load_file(folder / FILES["eagle2"]), "layers.0."
    layer, rotary = LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)
    layer.input_layernorm = torch.nn.Identity()
    layer.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})

    def run(tokens: list[int], features: torch.Tensor) -> torch.Tensor:
        x = torch.cat([embedding[tokens], features], dim=-1) @ tensors["fc.weight"].T
        x = (x + tensors.get("fc.bias", 0))[None]
        length = len(tokens)
        future = torch.full((length, length), float("-inf")).triu(1)[None, None]
        with torch.no_grad():
            return layer(x, attention_mask=future, position_embeddings=rotary(x, torch.arange(length)[None]))[
                0
            ]

    return run


@pytest.mark.parametrize("bias", [True, False])
def test_eagles_layer_equals_transformers(bias, tiny_folder, tmp_path):
    """A prompt in two pieces, then a tree in two levels; every branch against a run of its own."""
    torch.manual_seed(1)
    random_eagle(tmp_path, bias, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    model = load_model(tiny_folder(KIND), torch.float32, torch.device("cpu"))
    oracle = eagle_oracle(tmp_path, model.embedding)
    layer = EagleLayer.load(tmp_path, model)
    cache = layer.new_cache(1, 64)
    tokens, features = torch.tensor([prompt(12)]).int(), torch.randn(1, 12, WIDTH)

    def run(begin: int, end: int, parent: list[int]) -> torch.Tensor:
        above = torch.tensor([parent], dtype=torch.int32)
        return layer.forward(tokens[:, begin:end], features[:, begin:end], above, cache)[0]

    read = [run(0, 4, [-1, 0, 1, 2])]
    cache.advance(4)
    read += [run(4, 7, [-1, 0, 1])]
    cache.advance(2)  # token 6 stays outside as the root of the tree, row 0
    levels = [run(7, 9, [-1, 0, 0]), run(9, 12, [-1, 0, 0, 2, 1, 2])]
    got = torch.cat(read + levels)
    branches = {6: [], 7: [7], 8: [8], 9: [8, 9], 10: [7, 10], 11: [8, 11]}
    for node, branch in branches.items():
        path = [*range(7), *branch]
        expected = oracle(tokens[0, path].tolist(), features[0, path])
        torch.testing.assert_close(got[node], expected[-1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got[:7], expected[:7], rtol=1e-4, atol=1e-4)


def test_eagle_reads_what_was_decided_and_grows_by_confidence(tiny_folder, trained):
    """Every step's tree against one grown by hand from the oracle over all that was decided."""
    folder = trained("eagle2")
    decoder = ids_decoder(tiny_folder(KIND), drafter="eagle2", budget=30, heads=folder)
    oracle = eagle_oracle(Path(folder), decoder.model.embedding)
    for ids, block in drafted(decoder, prompt(20), steps=6):
        assert set(paths_of(block)) == grown_by_hand(oracle, decoder.model, ids, width=10, levels=6, nodes=29)


def grown_by_hand(oracle, model, ids: list[int], width: int, levels: int, nodes: int) -> set[tuple[int, ...]]:
    """The root and the most probable of all candidates, as paths of tokens."""
    known = hidden_states(model, torch.tensor([ids], dtype=torch.int32))[:-1]
    frontier, found = [(0.0, [], known)], []
    for _ in range(levels):
        candidates = []
        for score, path, features in frontier:
            features = torch.cat([features, oracle(ids[1:] + path, features)[-1:]])
            logprobs = model.lm_head(features[-1:]).log_softmax(-1)[0]
            best = logprobs.topk(width)
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                candidates.append((score + value, [*path, token], features))
        found += candidates
        frontier = sorted(candidates, key=lambda c: -c[0])[:width]
    found.sort(key=lambda c: -c[0])
    return {(ids[-1], *path) for _, path, _ in [(0.0, [], None), *found[:nodes]]}


@pytest.mark.parametrize("certain", [0.0, 0.5, 1.0])
def test_the_best_tree_is_closed_under_ancestors(certain):
    """Also where scores tie, as those of certain tokens (log-probability 0) do with their parents'."""
    torch.manual_seed(2)
    for _ in range(20):
        above = torch.cat([torch.full((1, 4), -1), torch.arange(20)[None] // 2], dim=1)
        scores = torch.zeros(1, 24)
        for i, parent in enumerate(above[0].tolist()):
            step_score = -torch.rand(()) * (torch.rand(()) >= certain)
            scores[0, i] = step_score + (scores[0, parent] if parent >= 0 else 0)
        found = Candidates(torch.arange(24, dtype=torch.int32)[None], scores, above)
        block = best_tree(torch.tensor([99], dtype=torch.int32), found, budget=10, rows=16)
        chosen = block.tokens[0, 1:10].tolist()
        assert block.tokens[0].tolist() == [99, *chosen, *[-1] * 6]
        for token, parent in zip(chosen, block.parent[0, 1:10].tolist(), strict=True):
            assert block.tokens[0, parent] == (99 if above[0, token] < 0 else above[0, token])
        assert sorted(scores[0, chosen].tolist()) == sorted(scores[0].tolist())[-9:]


def sentence(folder, drafter: str, heads) -> str:
    with pytest.raises(ValueError) as error:
        ids_decoder(folder, drafter=drafter, heads=heads)
    return str(error.value)


def test_heads_are_asked_for_and_refused_elsewhere(tiny_folder, heads_folder):
    folder = tiny_folder(KIND)
    for drafter in RANDOM:
        for wrong in (None, "nowhere"):
            expected = f"heads must be the folder of weights trained for drafter {drafter!r}, got {wrong!r}"
            assert sentence(folder, drafter, wrong) == expected
    for drafter in ("ar", "esp", "pld"):
        assert (
            sentence(folder, drafter, "x")
            == f"heads are for drafters medusa and eagle2, got 'x' with {drafter!r}"
        )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--drafter", "medusa"],
            "heads must be the folder of weights trained for drafter 'medusa', got None",
        ),
        (["--heads", "x"], "heads are for drafters medusa and eagle2, got 'x' with 'joined'"),
    ],
)
def test_the_command_says_what_it_lacks(arguments, complaint, capsys):
    assert cli.main(["generate", "--prompt", "Hi", *arguments]) == 2
    assert capsys.readouterr().err == f"esp: {complaint}\n"


def test_the_command_decodes_with_heads(byte_model, tmp_path, capsys):
    """Blocks, masks and probes are no matter of theirs: the options are there and do nothing."""
    torch.manual_seed(0)
    random_eagle(tmp_path, vocab_size=257)
    arguments = ["generate", "--model", byte_model, "--prompt", "Hi", "--max-new-tokens", "8", "--json"]
    assert cli.main([*arguments, "--drafter", "eagle2", "--heads", str(tmp_path), "--compare"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["exact"] and record["drafter"] == "eagle2"
    assert record["masks"] == 0 and record["tree"] is record["probe"] is None


@pytest.mark.parametrize("drafter", RANDOM)
def test_the_trainer_writes_what_the_command_reads(drafter, byte_model, prompt_file, tmp_path, capsys):
    path, out = prompt_file({"prompt": "Hi"}, {"prompt": "there"}), str(tmp_path / "heads")
    train = ["--model", byte_model, "--prompts", path, "--seconds", "1", "--new-tokens", "30", "--out", out]
    train_heads.main([drafter, *train])
    assert re.match(r"2 prompts, 60 tokens decoded .*\nloss [0-9.]+; written to ", capsys.readouterr().out)
    arguments = ["generate", "--model", byte_model, "--prompt", "Hi", "--max-new-tokens", "30", "--json"]
    assert cli.main([*arguments, "--drafter", drafter, "--heads", out, "--compare"]) == 0
    assert json.loads(capsys.readouterr().out)["exact"]


@pytest.mark.parametrize("drafter", RANDOM)
def test_pickles_are_refused(drafter, tiny_folder, broken):
    folder = broken(drafter)
    pickled = {"medusa": "medusa_lm_head.pt", "eagle2": "pytorch_model.bin"}[drafter]
    (folder / FILES[drafter]).rename(folder / pickled)
    assert sentence(tiny_folder(KIND), drafter, str(folder)) == (
        f"heads {str(folder)!r} hold {pickled}, a pickle, which is not read; convert it: "
        f"safetensors.torch.save_file(torch.load({pickled!r}, weights_only=True), {FILES[drafter]!r})"
    )


@pytest.mark.parametrize(
    ("drafter", "missing"),
    [("medusa", "2.0.linear.weight"), ("medusa", "0.2.weight"), ("eagle2", "fc.weight")],
)
def test_a_missing_tensor_is_named(drafter, missing, tiny_folder, broken):
    folder = broken(drafter)
    tensors = load_file(folder / FILES[drafter])
    del tensors[missing]
    save_file(tensors, folder / FILES[drafter])
    expected = f"{folder} is not a whole checkpoint: {missing} is missing"
    assert sentence(tiny_folder(KIND), drafter, str(folder)) == expected


def test_heads_of_another_model(tiny_folder, heads_folder, broken, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    random_eagle(other, vocab_size=100)
    expected = f"heads {str(other)!r} are for a vocabulary of 100, the model has 128"
    assert sentence(tiny_folder(KIND), "eagle2", str(other)) == expected
    random_eagle(other, hidden_size=48)
    expected = f"heads {str(other)!r} are for a hidden size of 48, the model has 64"
    assert sentence(tiny_folder(KIND), "eagle2", str(other)) == expected
    folder = broken("medusa")
    tensors = load_file(folder / FILES["medusa"])
    tensors["0.0.linear.weight"] = torch.zeros(32, 32)
    save_file(tensors, folder / FILES["medusa"])
    assert sentence(tiny_folder(KIND), "medusa", str(folder)) == (
        f"{folder / FILES['medusa']} does not fit the model: 0.0.linear.weight is [32, 32], expected [64, 64]"
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "heads '{folder}' have no config.json"),
        ("[1, 2", "{folder}/config.json is not a readable config: "),
        ("[1, 2]", "{folder}/config.json is not a readable config: "),
        (
            '{"medusa_num_layers": 1}',
            "{folder}/config.json must have medusa_num_heads of at least 1, got None",
        ),
        (
            '{"medusa_num_heads": 2, "medusa_num_layers": 0}',
            "{folder}/config.json must have medusa_num_layers of at least 1, got 0",
        ),
    ],
)
def test_medusas_config(text, complaint, tiny_folder, broken):
    folder = broken("medusa")
    (folder / "config.json").unlink() if text is None else (folder / "config.json").write_text(text)
    assert sentence(tiny_folder(KIND), "medusa", str(folder)).startswith(complaint.format(folder=folder))
