"""What every Triton kernel takes on each architecture, compiled ahead of time: no GPU is needed.

    python -m profiling.resources            compile, check limits, compare with the report in this folder
    python -m profiling.resources --update   write the report of this Triton version

The launchers run on CPU tensors, and what they would launch is compiled through Triton's own JIT for a
driver that only names its target: signature, specialisation and options are those of a real launch. Registers,
stack, spills, shared memory and classes of instructions are read from the machine code. Spills, stack and
more shared memory than the card has fail; so does any difference from the report of this Triton version.
"""

import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

REPORTS = Path(__file__).parent / "resources"
TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "sm_100": ("cuda", 100, 32),
           "gfx942": ("hip", "gfx942", 64)}  # fmt: skip
CAPABILITY = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0), "gfx942": (9, 4)}
SHARED_LIMIT = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
INSTRUCTIONS = {  # of SASS, by the start of their names
    "wgmma": "HGMMA",
    "tcgen05": "UTC.MMA",
    "mma": "HMMA",
    "load128": r"LDG[.\w]*\.128",
    "async": "LDGSTS|UTMALDG|UBLKCP",
    "spill": "STL|LDL",
    "atomic": "ATOM|RED(?!UX)",
}
NAME = re.compile(r"^\s+(?:/\*[0-9a-f]+\*/)?\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]+)", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--update", action="store_true", help="write the report instead of comparing with it")
    update = parser.parse_args().update
    import triton

    with ProcessPoolExecutor(max_workers=min(len(TARGETS), os.cpu_count() or 1)) as pool:
        lines = [line for found in pool.map(report, TARGETS) for line in found]
    text = "".join(f"{line}\n" for line in lines)
    path = REPORTS / f"triton-{'.'.join(triton.__version__.split('.')[:2])}.txt"
    beyond = [line for line in lines if is_beyond(line)]
    for line in beyond:
        print(f"spills, stack or too much shared memory: {line}")
    if update:
        path.write_text(text)
        print(f"wrote {len(lines)} kernels to {path}")
    elif path.exists():
        known = path.read_text()
        sys.stdout.writelines(
            difflib.unified_diff(known.splitlines(True), text.splitlines(True), str(path), "now")
        )
        if known != text:
            print("If the new code is meant: python -m profiling.resources --update")
            return 1
        print(f"{len(lines)} kernels as in {path}")
    else:
        print(f"{len(lines)} kernels compile; there is no report of this Triton version to compare with")
    return 1 if beyond else 0


def is_beyond(line: str) -> bool:
    target, fields = line.split()[0], dict(re.findall(r"(\w+)=(\d+)", line))
    waste = sum(int(fields.get(name, 0)) for name in ("stack", "spill", "vgpr_spill", "sgpr_spill"))
    return waste > 0 or int(fields["shared"]) > SHARED_LIMIT[target]


def report(target: str) -> list[str]:
    """One line a kernel and case, in the order of the cases."""
    lines: list[str] = []
    for case, run in cases():
        if target == "gfx942" and case.startswith("gemma"):
            continue  # heads of 256 take more shared memory than it has
        for kernel in compiled(run, target):
            found = resources(kernel, target)
            fields = " ".join(f"{name}={value}" for name, value in found.items())
            name = kernel.metadata.name.removeprefix("_").removesuffix("_kernel")
            line = f"{target:7} {name:26} {case:44} {fields}"
            if line not in lines:
                lines.append(line)
    return lines


def compiled(run: Callable[[], Any], target: str) -> list[Any]:
    """The kernels that `run` would launch on the target."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from esp_kernels.triton import tree_attention

    class Named:
        """A driver of a card that is not there."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget(*TARGETS[target])

        def get_current_device(self) -> str:
            return target

        def get_current_stream(self, device: str) -> int:
            return 0

    kernels: list[Any] = []

    def compile_only(self: JITFunction, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: kernels.append(self.warmup(*args, grid=grid, **kwargs))

    launch, capability = JITFunction.__getitem__, tree_attention.capability
    JITFunction.__getitem__ = compile_only
    tree_attention.capability = lambda q: CAPABILITY[target]
    driver.set_active(Named())
    try:
        run()
    finally:
        JITFunction.__getitem__, tree_attention.capability = launch, capability
    return kernels


def resources(kernel: Any, target: str) -> dict[str, int]:
    shared = {"warps": kernel.metadata.num_warps, "shared": kernel.metadata.shared}
    if target.startswith("gfx"):
        code = kernel.asm["amdgcn"]
        fields = ("vgpr_count", "sgpr_count", "vgpr_spill_count", "sgpr_spill_count")
        found = {f.removesuffix("_count"): int(re.search(rf"\.{f}:\s+(\d+)", code)[1]) for f in fields}
        return shared | found | {
            "mfma": len(re.findall(r"v_mfma", code)),
            "load128": len(re.findall(r"(?:global|buffer)_load_(?:dwordx4|b128)", code)),
        }  # fmt: skip
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = tool("cuobjdump", "--dump-resource-usage", file.name)
        code = tool("nvdisasm", "-c", file.name)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    names = NAME.findall(code)
    counts = {name: sum(bool(re.match(p, n)) for n in names) for name, p in INSTRUCTIONS.items()}
    return shared | {"registers": registers, "stack": stack} | counts


def tool(name: str, *arguments: str) -> str:
    """Output of one of the NVIDIA tools that come with Triton."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Launches of shapes that matter: heads of Llama-3.1-8B, SmolLM2 and Gemma, blocks of 1 and 64 rows."""
    import torch

    from esp_kernels import _backend

    def triton_op(name: str) -> Callable[..., Any]:
        return _backend.in_python(name, "triton")

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def ints(*shape: int) -> torch.Tensor:
        return zeros(*shape, dtype=torch.int32)

    def block(rows: int) -> tuple[torch.Tensor, ...]:
        return (
            ints(1, rows),
            zeros(1, rows, (rows + 63) // 64, dtype=torch.int64),
        )

    heads = {"llama": (32, 8, 128), "smollm2": (9, 3, 64), "gemma": (16, 8, 256)}

    def attention(model: str, rows: int, dtype: torch.dtype, page: int | None = None, **options: Any) -> Any:
        q_heads, kv_heads, dim = heads[model]
        depth, ancestors = block(rows)
        cache = [
            zeros(*((1, 4096) if page is None else (64, page)), kv_heads, dim, dtype=dtype) for _ in range(2)
        ]
        table = None if page is None else ints(1, 64)
        q = zeros(1, rows, q_heads, dim, dtype=dtype)
        return triton_op("tree_attention")(
            q,
            *cache,
            ints(1),
            ancestors,
            depth,
            table,
            None,
            *(options.get(k) for k in ("window", "softcap", "sinks")),
        )

    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    for rows in (1, 64):
        yield f"llama rows={rows} bf16", lambda rows=rows: attention("llama", rows, bf16)
    yield "llama rows=64 bf16 pages of 16", lambda: attention("llama", 64, bf16, page=16)
    yield "smollm2 rows=64 f16", lambda: attention("smollm2", 64, f16)
    yield "smollm2 rows=64 f32", lambda: attention("smollm2", 64, f32)
    options = {"window": 4096, "softcap": 50.0, "sinks": zeros(16, dtype=f32)}
    yield "gemma rows=64 bf16 window softcap sinks", lambda: attention("gemma", 64, bf16, **options)

    def rope(page: int | None) -> Any:
        qkv = zeros(1, 64, 48, 128)
        angles = zeros(4096, 64, dtype=f32)
        cache = [zeros(*((1, 4096) if page is None else (64, page)), 8, 128) for _ in range(2)]
        table = None if page is None else ints(1, 64)
        q, k, v = qkv.split((32, 8, 8), dim=2)
        return triton_op("rope_append")(q, k, v, angles, angles, ints(1), ints(1, 64), *cache, table)

    def advance(masks: int, widths: list[int] | None) -> Any:
        candidates = max(widths) + 1 if widths else 60 // (masks + 1)
        ids = ints(1, 64, candidates)
        depth, ancestors = block(64)
        tree = (ints(1, 64), ints(1, 64), ints(1, 64) - 1, depth, ancestors)
        probe, embedding = zeros(1, masks, 4096, dtype=f32), zeros(256, 4096)
        logprobs = zeros(1, 64, candidates, dtype=f32)
        return triton_op("advance_block")(ids, logprobs, *tree, probe, embedding, 0.1, 60, masks, widths)

    hidden, heads_rows = zeros(1, 64, 4096), zeros(1, 64, 40, 128)
    rows_of = {
        "embed_block": ("E=4096", (ints(1, 64), ints(1, 64), zeros(256, 4096), zeros(1, 1, 4096, dtype=f32))),
        "rms_norm": ("E=4096 with residual", (hidden, zeros(4096), 1e-5, hidden.clone())),
        "swiglu": ("n=14336", (zeros(1, 64, 28672),)),
        "topk_logprobs": ("V=128256 k=30", (zeros(1, 64, 128256), 30)),
    }
    for op, (case, arguments) in rows_of.items():
        yield case, lambda op=op, arguments=arguments: triton_op(op)(*arguments)
    yield "heads of 128", lambda: triton_op("rms_norm")(heads_rows, zeros(128), 1e-6)
    yield "llama", lambda: rope(None)
    yield "llama pages of 16", lambda: rope(16)
    yield "rows=64 masks=1", lambda: advance(1, None)
    yield "rows=64 masks=3", lambda: advance(3, None)
    yield "rows=64 static 9,4", lambda: advance(2, [9, 4])
    caches = [zeros(1, 4096, 8, 128) for _ in range(4)]
    pages = [zeros(64, 16, 8, 128) for _ in range(4)]
    yield "dense", lambda: triton_op("commit_kv")(caches, ints(1, 64), ints(1), ints(1))
    yield "pages of 16", lambda: triton_op("commit_kv")(pages, ints(1, 64), ints(1), ints(1), ints(1, 64))


if __name__ == "__main__":
    sys.exit(main())
