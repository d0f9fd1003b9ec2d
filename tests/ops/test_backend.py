"""The choice of a backend, with and without native ops."""

import importlib
import os
import subprocess
import sys

import pytest
import torch

import esp_kernels
from esp_kernels import _backend, _library
from profiling import nvcc_resources
from tests.emulator import build

WITHOUT_NATIVE = """
import sys, warnings
sys.modules["esp_kernels._C"] = None  # importing it fails, as where it was never built
import torch
import esp_kernels
from esp_kernels import _backend
"""


def run(script: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_NATIVE + script],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    )


def test_every_op_has_its_files_and_is_exported():
    for op in _library.SCHEMAS:
        assert callable(getattr(esp_kernels, op))
        assert callable(_backend.in_python(op, "ref"))


def test_the_native_ops_are_built():
    assert _backend.native_error is None
    for op in _library.SCHEMAS:
        assert _backend.served_by(op, "cpu") == ["cpp", "ref"]
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"esp_kernels::{op}", "CPU")


def test_auto_falls_back_to_the_reference_and_says_so_once():
    done = run(
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always')\n"
        "    y = [esp_kernels.swiglu(torch.ones(1, 4)) for _ in range(3)]\n"
        "    esp_kernels.rms_norm(torch.ones(1, 4), torch.ones(4))\n"
        "assert torch.equal(y[0], esp_kernels.swiglu(torch.ones(1, 4), backend='ref'))\n"
        "print([str(w.message) for w in said if w.category is esp_kernels.BackendWarning])\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("esp_kernels runs on the PyTorch reference, since faster ops are missing") == 1


def test_a_named_backend_serves_or_says_why_not():
    done = run("esp_kernels.swiglu(torch.ones(1, 4), backend='cpp')")
    assert "ValueError: backend 'cpp' cannot serve swiglu: the native ops are not built" in done.stderr


def test_fallbacks_check_their_arguments():
    done = run("torch.ops.esp_kernels.rms_norm(torch.ones(1, 4), torch.ones(3), 0.0)")
    assert "ValueError: weight must have shape [4], got [3]" in done.stderr


def test_an_unknown_backend():
    with pytest.raises(ValueError, match="backend must be one of auto, ref, cpp, triton, cuda, got 'fast'"):
        esp_kernels.swiglu(torch.ones(1, 4), backend="fast")


def test_cpp_serves_the_cpu_only():
    with pytest.raises(
        ValueError, match="backend 'cpp' cannot serve swiglu: it runs on cpu, got a tensor on meta"
    ):
        esp_kernels.swiglu(torch.ones(1, 4, device="meta"), backend="cpp")


def test_triton_serves_the_cpu_only_interpreted():
    done = run("esp_kernels.swiglu(torch.ones(1, 4), backend='triton')")
    assert "cannot serve swiglu: it runs on cuda, or interpreted on cpu" in done.stderr


@pytest.mark.skipif(not build.SANITIZE, reason="for `make sanitize`")
def test_the_sanitized_build_is_the_one_tested():
    assert "sanitized" in str(importlib.import_module("esp_kernels._C").__file__)


@pytest.mark.skipif(build.SANITIZE, reason="kernels are not sanitized, only emulated ones")
@pytest.mark.skipif(nvcc_resources.find_nvcc() is None, reason="no nvcc")
def test_the_cuda_ops_are_built_where_nvcc_is():
    assert _backend.cuda_error is None
    for op in _backend.CUDA_OPS:
        assert _backend.has_cuda_kernel(op, "cuda")
        assert "cuda" in _backend.served_by(op, "cuda")


def test_cuda_serves_cuda_only():
    done = run("i = torch.zeros(1, 1).int(); esp_kernels.commit_kv([], i, i[0], i[0], backend='cuda')")
    sentence = "ValueError: backend 'cuda' cannot serve commit_kv: it runs on cuda, got a tensor on cpu"
    assert sentence in done.stderr


def test_cuda_has_kernels_of_few_ops():
    with pytest.raises(ValueError, match="backend 'cuda' cannot serve swiglu: it has no kernel for it"):
        esp_kernels.swiglu(torch.ones(1, 4), backend="cuda")


def test_auto_passes_over_a_kernel_that_refuses(monkeypatch):
    """As on a GPU, though with tensors on the CPU."""
    q, cache = torch.zeros(1, 1, 2, 16), torch.zeros(1, 9, 2, 16)
    prefix_len, depth = torch.zeros(2, 1, dtype=torch.int32)
    given = (q, cache, cache, prefix_len, torch.ones(1, 1, 1, dtype=torch.int64), depth[None])
    ran = []
    monkeypatch.setattr(_backend, "unchecked", lambda op, kind: lambda *args: ran.append(kind))
    monkeypatch.setattr(_backend, "served_by", lambda op, device: ["cuda", "triton", "ref"])
    run = _backend.fallback("tree_attention", "cuda")
    run(*given)
    run(*(t.half() if t.is_floating_point() else t for t in given))
    assert ran == ["triton", "cuda"]

    monkeypatch.setattr(_backend, "served_by", lambda op, device: ["cuda", "ref"])
    why = "backend 'cuda' cannot serve tree_attention: it takes bfloat16 and float16, got float32"
    with pytest.warns(esp_kernels.BackendWarning, match=f"on the PyTorch reference, since {why}"):
        run(*given)
    assert ran == ["triton", "cuda", "ref"]


def test_auto_takes_triton_first_where_no_card_has_compared(monkeypatch):
    monkeypatch.setattr(_backend, "why_not", lambda op, backend, device: None)
    assert _backend.served_by("tree_attention", "cuda") == ["triton", "cuda", "ref"]
    assert _backend.served_by("commit_kv", "cuda") == ["cuda", "triton", "ref"]


def test_auto_never_interprets_or_emulates():
    assert _backend.served_by("swiglu", "cpu") == _backend.served_by("commit_kv", "cpu") == ["cpp", "ref"]
