"""Nsight Compute on one op: its hardware counters, and what keeps each kernel from its peak.

python -m profiling.ncu tree_attention --rows 60 --prefix 32768
python -m profiling.ncu --print tree_attention                     # the command line alone
"""

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from profiling import op, summarise

# Counters, by the names that profiling.summarise gives them. All of them are in the raw page of a report.
METRICS = {
    "nanoseconds": "gpu__time_duration.sum",
    "dram_read": "dram__bytes_read.sum",
    "dram_written": "dram__bytes_write.sum",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_hits": "lts__t_sector_hit_rate.pct",
    "sm": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "waves": "launch__waves_per_multiprocessor",
    "registers": "launch__registers_per_thread",
    "shared": "launch__shared_mem_per_block",
    "local_loads": "smsp__inst_executed_op_local_ld.sum",
    "local_stores": "smsp__inst_executed_op_local_st.sum",
    "wait_memory": "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "wait_shared": "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio",
    "wait_barrier": "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "wait_tensor": "smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio",
    "wait_fixed": "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",
}


def command(out: Path, words: list[str]) -> list[str]:
    return [
        "ncu",
        "--profile-from-start", "off",
        "--clock-control", "none",
        "--cache-control", "all",
        "--metrics", ",".join(METRICS.values()),
        "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(out),
        sys.executable, "-m", "profiling.op", *words,
    ]  # fmt: skip


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.ncu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="The rest is for profiling.op: an op, --model, --rows, --prefix, --batch, --backend, --calls.",
    )
    parser.add_argument("--print", action="store_true", help="print the command line and run nothing")
    parser.add_argument("--out", type=Path, default=Path("ncu.csv"), help="where the counters go (ncu.csv)")
    options, rest = parser.parse_known_args(words)
    op.arguments().parse_args(rest)
    line = command(options.out, rest)
    if options.print:
        print(shlex.join(line))
        return 0
    if shutil.which("ncu") is None:
        parser.error("ncu (Nsight Compute) is not on PATH")
    status = subprocess.run(line).returncode
    if status != 0:
        print(f"ncu ended with status {status}; {options.out} has what it said", file=sys.stderr)
        return 2
    return summarise.main([str(options.out)])


if __name__ == "__main__":
    sys.exit(main())
