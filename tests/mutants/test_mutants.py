"""Triton kernels and Python made wrong on purpose, each of which a test must notice by what it asserts.

Each runs in a process of its own on a copy of the sources, so `make test` takes two, and `make mutants`
(ESP_MUTANTS=all) takes all.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.device import DEVICE
from tests.emulator import build

ROOT = Path(__file__).parents[2]

ATTENTION, ROPE = "esp_kernels/triton/tree_attention.py", "esp_kernels/triton/rope_append.py"
TOPK, EMBED = "esp_kernels/triton/topk_logprobs.py", "esp_kernels/triton/embed_block.py"
METADATA, NORM = "esp_kernels/triton/tree_metadata.py", "esp_kernels/triton/rms_norm.py"
REF, LOOP = "esp_kernels/ref/", "python/esp_decode/loop.py"
IN_TREE = "ops/test_tree_attention_rows.py::test_a_kernel_verifies_in_a_tree_what_it_decodes_after_its_ancestors"

MUTANTS = [  # file, old text, new text, the test that must fail
    # tree_attention: what a row sees
    (ATTENTION, "(key <= position)", "(key < position)",
     "ops/test_tree_attention.py::test_degenerate_trees[triton-chain-1]"),
    (ATTENTION, "seen = (key >= first) & (key", "seen = (key > first) & (key",
     "ops/test_tree_attention.py::test_degenerate_trees[triton-chain-1]"),
    (ATTENTION, "position - window + 1, 0", "position - window, 0",
     "ops/test_tree_attention.py::test_window_goes_by_depth_not_by_row[triton]"),
    (ATTENTION, "_matrix_part(prefix, own_depth, window)", "_matrix_part(prefix, row, window)",
     "ops/test_tree_attention.py::test_window_goes_by_depth_not_by_row[triton]"),
    (ATTENTION, "visible = visible & (slot[None, :] >= first[:, None])", "visible = visible & True",
     f"{IN_TREE}[271-dtype8-options8]"),
    (ATTENTION, "row // 64 + 1, rows)", "1, rows)",
     "ops/test_tree_attention.py::test_degenerate_trees[triton-65-0]"),
    (ATTENTION, "key < prefix, key, prefix + block_row", "key < prefix, key, key",
     "ops/test_tree_attention.py::test_the_tree_is_read_and_not_assumed[triton]"),
    (ATTENTION, "block_table + sequence * max_pages + slot // PAGE", "block_table + sequence * max_pages + (slot + 1) // PAGE",
     "ops/test_tree_attention.py::test_branches_across_pages[triton-16]"),
    (ATTENTION, "mask=seen[:, None] & (d < D)[None, :], other=0.0)", "mask=seen[:, None] & (d < D)[None, :])",
     "ops/test_tree_attention.py::test_every_multiple_of_16[triton-112]"),
    # tree_attention: what it adds up, and in which order
    (ATTENTION, "tl.minimum(position - DEEPEST, prefix), 0) // 16 * 16", "prefix, 0) // 16 * 16",
     f"{IN_TREE}[32-dtype4-options4]"),
    (ATTENTION, "at = chunk * CHUNK\n", "at = tl.maximum(chunk * CHUNK, start)\n",
     f"{IN_TREE}[271-dtype8-options8]"),
    (ATTENTION, "(64, 64, 4) if packed_rows <= 64", "(64, 32, 4) if packed_rows <= 64",
     "ops/test_tree_attention_rows.py::test_a_kernel_does_the_same_at_all_head_shapes[128-20-dtype1]"),
    (ATTENTION, "split = ((chunk + i) % SPLITS)", "split = (i % SPLITS)",
     "ops/test_tree_attention.py::test_a_prefix_of_more_chunks_than_splits[triton-4500]"),
    (ATTENTION, "v.to(q.dtype), acc * fade[:, None]", "v.to(q.dtype), acc",
     "ops/test_tree_attention.py::test_degenerate_trees[triton-root-1000]"),
    (ATTENTION, "scores = softcap * _tanh(scores)\n    scores = tl.where(visible, scores, float(\"-inf\"))",
     "scores = softcap * _tanh(tl.where(visible, scores, float(\"-inf\")))", "SOFTCAP"),
    (ATTENTION, "total = total * fade + tl.exp2(sink - higher)", "total = total * fade",
     "ops/test_tree_attention.py::test_padding_gives_zero_even_with_sinks[triton]"),
    (ATTENTION, "scale *= tl.load(k_scale + kv_head)", "scale *= tl.load(k_scale)",
     "ops/test_tree_attention.py::test_float8_caches[triton-dtype0-scaled]"),
    # the other kernels
    (ROPE, "position = prefix + own_depth", "position = prefix + row",
     "ops/test_rope_append.py::test_position_is_depth_and_not_row_index[triton]"),
    (ROPE, "slot = prefix + row", "slot = prefix + own_depth",
     "ops/test_rope_append.py::test_position_is_depth_and_not_row_index[triton]"),
    (ROPE, "mask=read[:, None] & turns[None, :], other=0.0", "mask=read[:, None] & turns[None, :]",
     "ops/test_rope_append.py::test_padding_is_harmless[triton]"),
    (ROPE, "kept = kept & (page >= 0) & (page < pages)", "kept = kept & (page >= 0)",
     "ops/test_rope_append.py::test_rows_that_no_check_has_seen_are_harmless"),
    (TOPK, "65535 - ", "",
     "ops/test_topk_logprobs.py::test_ties_go_to_the_lowest_id[triton-5]"),
    (TOPK, "0xFFFFFFFF - ", "",
     "ops/test_topk_logprobs.py::test_ties_go_to_the_lowest_id[triton-5]"),
    (TOPK, "float(\"-inf\")) + 0.0", "float(\"-inf\"))",
     "ops/test_topk_logprobs.py::test_both_zeros_are_one_logit[triton]"),
    (TOPK, "while tl.max(best, 0) >", "if tl.max(best, 0) >",
     "ops/test_topk_logprobs.py::test_sorted_input[triton-256]"),
    (EMBED, "(ordinal.to(tl.int64) - 1) *", "ordinal.to(tl.int64) *",
     "ops/test_embed_block.py::test_bits_pass_through[triton-dtype0]"),
    (EMBED, " & (token < vocabulary)", "",
     "ops/test_embed_block.py::test_ids_that_no_check_has_seen_read_nothing"),
    (METADATA, "walks & (at // 64 == word)", "walks",
     "ops/test_tree_metadata.py::test_chains_and_stars[triton-65]"),
    (NORM, "/ N + eps", "/ BLOCK_N + eps",
     "ops/test_rms_norm.py::test_matches_float64[triton-shape1-dtype0]"),
    ("esp_kernels/triton/advance_block.py", "path, accepted)\n    tree_metadata.launch(parent, depth, ancestors)", "path, accepted)",
     "ops/test_advance_block.py::test_step_after_step[triton-10-10-1-None-True]"),
    # the specification
    (REF + "tree_attention.py", "torch.where(in_block, prefix + depth.gather(1, row), slot)", "slot",
     "ops/test_tree_attention.py::test_window_goes_by_depth_not_by_row[ref]"),
    (REF + "topk_logprobs.py", "wide.sort(dim=-1, descending=True, stable=True).indices[..., :k]", "wide.topk(k, dim=-1).indices",
     "ops/test_topk_logprobs.py::test_ties_go_to_the_lowest_id[ref-5]"),
    (REF + "verify_tree.py", "(mask_ordinal[:, None, :] == 0)", "(mask_ordinal[:, None, :] >= 0)",
     "ops/test_verify_tree.py::test_masks_and_padding_are_never_stepped_to[ref-1]"),
    (REF + "update_probe.py", "in committed.unbind(1)", "in committed.flip(1).unbind(1)",
     "ops/test_update_probe.py::test_tokens_are_applied_in_order[ref]"),
    (REF + "expand_tree.py", "token, score = token[:, :1], score[:, :1]", "pass",
     "ops/test_expand_tree.py::test_pruning_lets_the_next_best_in[ref]"),
    (REF + "advance_block.py", "deepest * masks", "0 * deepest",
     "ops/test_advance_block.py::test_step_after_step[ref-16-12-2-None-True]"),
    # the decoder
    (LOOP, "state.cache.commit(verdict.path, verdict.accepted)", "state.cache.prefix_len += verdict.accepted + 1",
     "decode/test_loop.py::test_the_cache_holds_what_plain_decoding_would"),
    (LOOP, "state.cache.prefix_len.zero_()", "pass",
     "decode/test_loop.py::test_a_state_serves_prompt_after_prompt"),
    (LOOP, "state.probe.copy_(probe)", "pass",
     "decode/test_loop.py::test_a_state_serves_prompt_after_prompt"),
    (LOOP, "prompt[:, :-1].split", "prompt.split",
     "decode/test_loop.py::test_chunked_prefill_changes_nothing[7]"),
    ("python/esp_decode/cache.py", "self.prefix_len += accepted + 1", "self.prefix_len += accepted",
     "decode/test_loop.py::test_the_cache_holds_what_plain_decoding_would"),
    ("python/esp_decode/drafters/esp.py", "min(shape.widest + self.prune,", "min(shape.widest,",
     "DRAFTER"),
    ("python/esp_decode/probe.py", "prompt.shape[1] - masks, prompt.shape[1],", "prompt.shape[1] - masks - 1, prompt.shape[1] - 1,",
     "decode/test_probe.py::test_last_k_in_order"),
]  # fmt: skip
SHORT = [MUTANTS[0], next(mutant for mutant in MUTANTS if mutant[0] == LOOP)]
CHOSEN = MUTANTS if os.environ.get("ESP_MUTANTS") == "all" else SHORT

# A name that is missing, say, is no proof that the test looks. Guards assert inside of interpreted kernels.
ASSERTED = re.compile(r"^FAILED \S+ - (assert |AssertionError|.*\.InterpreterError: AssertionError\()", re.M)

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="kernels run natively on this machine")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources once more, to be changed; the tests as they are."""
    for package in ("esp_kernels", "python"):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    for library in (ROOT / "esp_kernels").glob("*.so"):
        (tmp_path / "esp_kernels" / library.name).symlink_to(library)
    for name in ("tests", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run_tests(copy: Path, nodes: Iterable[str]) -> subprocess.CompletedProcess[str]:
    emulated = {build.LIBRARY: str(build.build())} if build.load() else {}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *(f"tests/{node}" for node in nodes)],
        env=os.environ | emulated | {"PYTHONPATH": f"{copy}:{copy / 'python'}", "COLUMNS": "300"},
        cwd=copy,
        capture_output=True,
        text=True,
    )


def test_without_a_mutation_the_tests_pass(copy: Path):
    done = run_tests(copy, dict.fromkeys(node for *_, node in CHOSEN))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("file", "old", "new", "node"), CHOSEN)
def test_a_mutant_is_caught(file: str, old: str, new: str, node: str, copy: Path):
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new))
    done = run_tests(copy, [node])
    assert done.returncode == 1 and ASSERTED.search(done.stdout), done.stdout + done.stderr
