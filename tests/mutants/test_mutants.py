"""Triton kernels and Python made wrong on purpose, each of which a test must notice by what it asserts.

Each runs in a fork of its own on a copy of the sources: `make test` takes two, `make mutants` each n-th.
"""

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.device import DEVICE
from tests.emulator import build

from .forks import run_tests

ROOT = Path(__file__).parents[2]

TRITON, REF, DECODE = "esp_kernels/triton/", "esp_kernels/ref/", "python/esp_decode/"
ATTENTION, ROPE, TOPK = TRITON + "tree_attention.py", TRITON + "rope_append.py", TRITON + "topk_logprobs.py"
EMBED, LOOP = TRITON + "embed_block.py", DECODE + "loop.py"
OF_ATTENTION, OF_ROWS = "ops/test_tree_attention.py::test_", "ops/test_tree_attention_rows.py::test_a_kernel_"
IN_TREE = OF_ROWS + "verifies_in_a_tree_what_it_decodes_after_its_ancestors"
OF_ROPE, OF_TOPK, OF_LOOP = (
    f"{module}.py::test_" for module in ("ops/test_rope_append", "ops/test_topk_logprobs", "decode/test_loop")
)

OF_JOIN, OF_JOINED = "ops/test_join_tree.py::test_", "decode/test_joined.py::test_"

MUTANTS = [  # file, old text, new text, the test that must fail
    # tree_attention: what a row sees
    (ATTENTION, "(key <= position)", "(key < position)", OF_ATTENTION + "degenerate_trees[triton-chain-1]"),
    (ATTENTION, "(key >= first)", "(key > first)", OF_ATTENTION + "degenerate_trees[triton-chain-1]"),
    (ATTENTION, "position - window + 1, 0", "position - window, 0",
     OF_ATTENTION + "window_goes_by_depth_not_by_row[triton]"),
    (ATTENTION, "_matrix_part(prefix, own_depth, window)", "_matrix_part(prefix, row, window)",
     OF_ATTENTION + "window_goes_by_depth_not_by_row[triton]"),
    (ATTENTION, " & (slot[None, :] >= first[:, None])", "", IN_TREE + "[271-dtype8-options8-triton]"),
    (ATTENTION, "row // 64 + 1, rows)", "1, rows)", OF_ATTENTION + "degenerate_trees[triton-65-0]"),
    (ATTENTION, "key, prefix + block_row)", "key, key)",
     OF_ATTENTION + "the_tree_is_read_and_not_assumed[triton]"),
    (ATTENTION, "max_pages + slot // PAGE", "max_pages + (slot + 1) // PAGE",
     OF_ATTENTION + "branches_across_pages[triton-16]"),
    (ATTENTION, "mask=seen[:, None] & (d < D)[None, :], other=0.0", "mask=seen[:, None] & (d < D)[None, :]",
     OF_ATTENTION + "every_multiple_of_16[triton-112]"),
    # tree_attention: what it adds up, and in which order
    (ATTENTION, "tl.minimum(position - DEEPEST, prefix), 0)", "prefix, 0)",
     IN_TREE + "[31-dtype3-options3-triton]"),
    (ATTENTION, "at = chunk * CHUNK\n", "at = tl.maximum(chunk * CHUNK, start)\n",
     IN_TREE + "[700-dtype9-options9-triton]"),
    (ATTENTION, "(64, 64, 4) if packed_rows", "(64, 32, 4) if packed_rows",
     OF_ROWS + "does_the_same_at_all_head_shapes[128-20-dtype1-triton]"),
    (ATTENTION, "split = ((chunk + i) % SPLITS)", "split = ((chunk * 0 + i) % SPLITS)",
     OF_ATTENTION + "each_option_matches_float64[triton-window]"),
    (ATTENTION, "acc * fade[:, None], input", "acc, input",
     OF_ATTENTION + "degenerate_trees[triton-root-1000]"),
    (ATTENTION, "softcap * _tanh(scores)\n    scores = tl.where(visible, scores, float(\"-inf\"))",
     "softcap * _tanh(tl.where(visible, scores, float(\"-inf\")))",
     OF_ATTENTION + "each_option_matches_float64[triton-softcap]"),
    (ATTENTION, " * fade + tl.exp2(sink - higher)", " * fade",
     OF_ATTENTION + "padding_gives_zero_even_with_sinks[triton]"),
    (ATTENTION, "tl.load(k_scale + kv_head)", "tl.load(k_scale)",
     OF_ATTENTION + "float8_caches[dtype0-scaled-triton]"),
    # the other kernels
    (ROPE, "position = prefix + own_depth", "position = prefix + row",
     OF_ROPE + "position_is_depth_and_not_row_index[triton]"),
    (ROPE, "slot = prefix + row", "slot = prefix + own_depth",
     OF_ROPE + "position_is_depth_and_not_row_index[triton]"),
    (ROPE, "& turns[None, :], other=0.0", "& turns[None, :]", OF_ROPE + "padding_is_harmless[triton]"),
    (ROPE, "(page >= 0) & (page < pages)", "(page >= 0)",
     OF_ROPE + "rows_that_no_check_has_seen_are_harmless"),
    (TOPK, "65535 - ", "", OF_TOPK + "ties_go_to_the_lowest_id[triton-5]"),
    (TOPK, "0xFFFFFFFF - ", "", OF_TOPK + "ties_go_to_the_lowest_id[triton-5]"),
    (TOPK, "float(\"-inf\")) + 0.0", "float(\"-inf\"))", OF_TOPK + "both_zeros_are_one_logit[triton]"),
    (TOPK, "while tl.max(best, 0) >", "if tl.max(best, 0) >", OF_TOPK + "sorted_input[triton-256]"),
    (EMBED, "(ordinal.to(tl.int64) - 1)", "ordinal.to(tl.int64)",
     "ops/test_embed_block.py::test_bits_pass_through[triton-dtype0]"),
    (EMBED, " & (token < vocabulary)", "",
     "ops/test_embed_block.py::test_ids_that_no_check_has_seen_read_nothing"),
    (TRITON + "tree_metadata.py", "walks & (at // 64 == word)", "walks",
     "ops/test_tree_metadata.py::test_chains_and_stars[triton-65]"),
    (TRITON + "rms_norm.py", "/ N + eps", "/ BLOCK_N + eps",
     "ops/test_rms_norm.py::test_matches_float64[triton-shape1-dtype0]"),
    (TRITON + "advance_block.py", "tree_metadata.launch(parent, depth, ancestors)", "pass",
     "ops/test_advance_block.py::test_step_after_step[triton-10-10-1-None-True]"),
    # the specification
    (REF + "tree_attention.py", "torch.where(in_block, prefix + depth.gather(1, row), slot)", "slot",
     OF_ATTENTION + "rows_of_other_branches_take_no_room_in_a_window[ref]"),
    (REF + "topk_logprobs.py", "sort(dim=-1, descending=True, stable=True)", "topk(k, dim=-1)",
     OF_TOPK + "ties_go_to_the_lowest_id[ref-5]"),
    (REF + "verify_tree.py", "(mask_ordinal[:, None, :] == 0)", "(mask_ordinal[:, None, :] >= 0)",
     "ops/test_verify_tree.py::test_masks_and_padding_are_never_stepped_to[ref-1]"),
    (REF + "update_probe.py", "committed.unbind(1)", "committed.flip(1).unbind(1)",
     "ops/test_update_probe.py::test_tokens_are_applied_in_order[ref]"),
    (REF + "expand_tree.py", "token, score = token[:, :1], score[:, :1]", "pass",
     "ops/test_expand_tree.py::test_pruning_lets_the_next_best_in[ref]"),
    (REF + "advance_block.py", "deepest * masks", "0 * deepest",
     "ops/test_advance_block.py::test_step_after_step[ref-16-12-2-None-True]"),
    # the decoder
    (LOOP, "state.cache.commit(verdict.path, verdict.accepted)",
     "state.cache.prefix_len += verdict.accepted + 1",
     OF_LOOP + "the_cache_holds_what_plain_decoding_would"),
    (LOOP, "state.cache.prefix_len.zero_()", "pass", OF_LOOP + "a_state_serves_prompt_after_prompt"),
    (DECODE + "drafters/esp.py", "draft.probe.copy_(", "(",
     OF_LOOP + "a_state_serves_prompt_after_prompt"),
    (LOOP, "prompt[:, :-1].split", "prompt.split", OF_LOOP + "chunked_prefill_changes_nothing[7]"),
    (DECODE + "cache.py", "+= accepted + 1", "+= accepted",
     OF_LOOP + "the_cache_holds_what_plain_decoding_would"),
    (DECODE + "drafters/esp.py", "self.shape.widest + self.prune", "self.shape.widest",
     OF_LOOP + "a_pruned_tree_is_full[static:4]"),
    (DECODE + "probe.py", "arange(prompt.shape[1] - masks, prompt.shape[1]",
     "arange(prompt.shape[1] - masks - 1, prompt.shape[1] - 1",
     "decode/test_probe.py::test_last_k_in_order"),
    # the joined drafter, its ops and what is fitted to them
    (REF + "_sources.py", "FADE**i", "1.0", OF_JOIN + "matches_the_oracle[ref-0.0-30]"),
    (REF + "join_tree.py", "rest[node.parent].deepest -= node.chance", "pass",
     OF_JOIN + "matches_the_oracle[ref-0.0-30]"),
    (REF + "join_tree.py", "if kept + sum(", "if sum(", OF_JOIN + "matches_the_oracle[ref-0.0-7]"),
    (REF + "join_tree.py", "-negative < least or ", "", OF_JOIN + "matches_the_oracle[ref-0.02-65]"),
    (REF + "learn_weights.py", "(not known) - other", "-other",
     "ops/test_learn_weights.py::test_matches_autograd[ref-4-0.3]"),
    (REF + "remember_block.py", "= memory.heads[n - 1, head]\n", "= -1\n",
     "ops/test_remember_block.py::test_the_index_finds_every_place[ref-0]"),
    (REF + "remember_block.py", "if ordinal == 0:", "if ordinal >= 0:",
     "ops/test_remember_block.py::test_masks_and_padding_say_nothing[ref]"),
    (DECODE + "drafters/joined.py", "draft.memory.forget(self.sources.lists)", "pass",
     OF_JOINED + "a_state_serves_prompt_after_prompt"),
    (DECODE + "drafters/joined.py", "draft.weights.copy_(self.sources.weights)", "pass",
     OF_JOINED + "a_state_serves_prompt_after_prompt"),
    (DECODE + "calibrate/replay.py", "masks + 1 if probe.lam else 1", "1",
     "decode/test_replay.py::test_steps_of_drafter_esp[dynamic-1-prompt-mean-qwen3]"),
    (DECODE + "drafters/lade.py", "gone = len(committed) - 1", "gone = 0",
     "decode/test_rivals.py::test_the_lookahead_window_moves_with_the_root"),
    (DECODE + "drafters/stand.py", "len(context)), 0, -1)", "len(context)), 1, -1)",
     "decode/test_rivals.py::test_profile_lists_are_known_from_the_start"),
    (DECODE + "bench/table.py", "p[\"seconds\"], m[\"seconds\"]", "m[\"seconds\"], p[\"seconds\"]",
     "decode/test_bench.py::test_the_table_by_hand"),
]  # fmt: skip
SHORT = [MUTANTS[0], next(mutant for mutant in MUTANTS if mutant[0] == LOOP)]
EVERY = int(os.environ.get("ESP_MUTANTS", "0"))
CHOSEN = MUTANTS[::EVERY] if EVERY else SHORT

# A name that is missing, say, is no proof that the test looks.
ASSERTED = re.compile(r"^FAILED \S+ - (assert |AssertionError|tests\.interpreter\.guards\.GuardError)", re.M)

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="kernels run natively on this machine")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources once more, to be changed; the tests as they are."""
    unwanted = shutil.ignore_patterns("*.so", "__pycache__")
    for package in ("esp_kernels", "python"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=unwanted)
    for library in (ROOT / "esp_kernels").glob("*.so"):
        (tmp_path / "esp_kernels" / library.name).symlink_to(library)
    for name in ("tests", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def status_and_log(copy: Path, nodes: Iterable[str]) -> tuple[int | None, str]:
    changes = {
        "PYTHONPATH": f"{copy}:{copy / 'python'}",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # saves a second
        "COLUMNS": "300",  # or the summary leaves out what failed
    }
    if build.load() is not None:
        changes[build.LIBRARY] = str(build.build())
    return run_tests(copy, nodes, changes)


def test_without_a_mutation_the_tests_pass(copy: Path):
    status, log = status_and_log(copy, dict.fromkeys(node for *_, node in CHOSEN))
    assert status == 0, log


@pytest.mark.parametrize(("file", "old", "new", "node"), CHOSEN)
def test_a_mutant_is_caught(file: str, old: str, new: str, node: str, copy: Path):
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new))
    status, log = status_and_log(copy, [node])
    assert status == 1 and ASSERTED.search(log), log
