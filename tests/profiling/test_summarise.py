"""Nsight's tables, as Nsight prints them, to what to do."""

from pathlib import Path

import pytest

from profiling import summarise
from profiling.ncu import METRICS

DATA = Path(__file__).parent / "data"


def found_kernels() -> dict[str, summarise.Kernel]:
    path = DATA / "ncu.csv"
    return {kernel.name: kernel for kernel in summarise.kernels(summarise.read_table(path), path)}


def test_medians_of_each_kernel_most_time_first():
    found = found_kernels()
    assert list(found)[:3] == [
        "_tree_attention_prefix_kernel",
        "_expand_tree_kernel",
        "_tree_attention_tail_kernel",
    ]
    prefix = found["_tree_attention_prefix_kernel"]
    assert prefix.calls == 2 and prefix.counters["nanoseconds"] == 51_000
    assert prefix.rate == pytest.approx((134_217_728 + 1_310_720) / 51_000)


@pytest.mark.parametrize(
    ("name", "bound", "why"),
    [
        ("_tree_attention_prefix_kernel", "dram", "it is: dram is near its peak"),
        ("_tree_attention_tail_kernel", "l2", "too few programs: 0.91 waves, so SMs stay idle"),
        ("commit_kv_kernel", "l2", "the last of 1.50 waves leaves SMs idle"),
        ("_expand_tree_kernel", "dram", "registers are spilled to local memory"),
        (
            "_topk_logprobs_parts_kernel",
            "dram",
            "waits for loads from memory: more of them in flight, or more warps, with 18 % of the warps",
        ),
        ("_swiglu_kernel", "dram", "waits for barriers: warps wait for each other"),
    ],
)
def test_why_not_more(name, bound, why):
    kernel = found_kernels()[name]
    assert (kernel.bound, kernel.why) == (bound, why)


def test_the_table_of_kernels(capsys):
    assert summarise.main([str(DATA / "ncu.csv")]) == 0
    head, first, *_ = capsys.readouterr().out.splitlines()
    assert head.split() == ["kernel", "calls", "us", "GB/s", "of", "peak", "regs", "why", "not", "more"]
    assert first.split()[:7] == ["_tree_attention_prefix_kernel", "2", "51.0", "2657", "dram", "82", "%"]


def test_the_shares_of_a_step(capsys):
    """The kernels of an op are added up; cuBLAS' are the products."""
    assert summarise.main([str(DATA / "nsys.csv")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1:] == [
        ["products", "2580", "70000.0", "70.0%"],
        ["tree_attention", "1280", "25000.0", "25.0%"],
        ["rms_norm", "1300", "3000.0", "3.0%"],
        ["advance_block", "20", "1000.0", "1.0%"],
        ["others", "20", "1000.0", "1.0%"],
    ]


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("_tree_metadata_kernel", "tree_metadata"),
        ("void esp::commit_kv_kernel<640, unsigned short>(esp::CommitKvParams<640>)", "commit_kv"),
        ("_topk_logprobs_parts_kernel", "topk_logprobs"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16>(cutlass::Params)", "products"),
        ("void at::native::reduce_kernel<512, 1>(int)", "others"),
    ],
)
def test_whose_kernel_it_is(name, op):
    assert summarise.op_of(name) == op


def test_a_counter_that_the_card_lacks_counts_as_0(tmp_path):
    text = (DATA / "ncu.csv").read_text().replace('"84.2"', '"n/a"')
    path = tmp_path / "ncu.csv"
    path.write_text(text)
    first = summarise.kernels(summarise.read_table(path), path)[0]
    assert first.counters["dram"] == pytest.approx(80.2 / 2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "cannot be read: No such file or directory"),
        ("", "has no table of Nsight Compute's raw page or Nsight Systems' kernel summary"),
        ("hello\n", "has no table of Nsight Compute's raw page or Nsight Systems' kernel summary"),
        ('"ID","Kernel Name"\n', "has no kernels"),
        ('"ID","Kernel Name"\n"",""\n', f"lacks {', '.join(METRICS.values())}: collect it by profiling.ncu"),
        (
            "Time (%),Name\n1.0,k\n",
            "lacks the columns Total Time (ns), Instances: write it by profiling.nsys",
        ),
        (
            "Time (%),Total Time (ns),Instances,Name\n1.0,fast,2,k\n",
            "has 'fast' for a number in column 'Total Time (ns)'",
        ),
    ],
)
def test_bad_files(text, sentence, tmp_path, capsys):
    path = tmp_path / "table.csv"
    if text is not None:
        path.write_text(text)
    assert summarise.main([str(path)]) == 2
    assert capsys.readouterr().err == f"{path} {sentence}\n"
