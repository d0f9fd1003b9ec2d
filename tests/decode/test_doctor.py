import json
import platform

import pytest
import torch

from esp_decode import doctor, weights
from esp_decode.cli import main
from esp_kernels import _backend
from esp_kernels._library import SCHEMAS

V3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
V4 = V3 + " avx512f avx512bw avx512cd avx512dq avx512vl"


def test_json(capsys):
    assert main(["doctor", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["torch"] == torch.__version__
    assert list(found["versions"]) == ["esp_kernels", "python", "torch", "triton", "transformers"]
    assert found["threads"]["torch"] == torch.get_num_threads()
    assert found["native"] == {"built": True, "error": None}
    assert found["cpu"]["clone"] in ("x86-64-v4", "x86-64-v3", "default")
    assert {op: by["cpu"] for op, by in found["ops"].items()} == {op: ["cpp", "ref"] for op in SCHEMAS}
    assert len(found["gpus"]) == torch.cuda.device_count()


def test_text_has_every_fact(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert [line.split("  ")[0] for line in out.splitlines() if not line.startswith("gpu")] == [
        *("esp_kernels", "python", "torch", "triton", "transformers", "cpu", "threads", "native ops"),
        *("cuda kernels", "cpu ops", "demo model"),
    ]
    assert torch.__version__ in out and "by cpp, ref: tree_metadata" in out


def test_what_is_missing_is_said(monkeypatch, capsys):
    monkeypatch.setattr(_backend, "native_error", "libfoo.so:\nnot found")
    monkeypatch.setattr(_backend, "cuda_error", "No module named 'esp_kernels._cuda'")
    monkeypatch.setattr(weights, "locate_demo", lambda: None)
    monkeypatch.setattr(doctor, "version", lambda package: None)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "native ops    not built: libfoo.so: not found\n" in out
    assert "cuda kernels  not built: No module named 'esp_kernels._cuda'\n" in out
    assert "cpu ops       by ref: " in out
    assert "transformers  not installed\n" in out
    assert "demo model    not installed; pip install" in out
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cpu"]["clone"] is None and found["demo_model"] is None


def test_a_gpu(monkeypatch):
    class Properties:
        name, major, minor, total_memory = "H100", 9, 0, 80 * 2**30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    found = doctor.examine()
    assert found["gpus"] == [{"name": "H100", "capability": "9.0", "memory_gib": 80.0}]
    assert found["ops"]["rms_norm"]["cuda"] == _backend.served_by("rms_norm", "cuda")
    text = doctor.as_text(found)
    assert "gpu           H100, capability 9.0, 80.0 GiB\n" in text and "cuda ops" in text


@pytest.mark.parametrize(
    ("flags", "clone"),
    [
        (V4 + " amx_bf16", "x86-64-v4"),
        (V4.replace("avx512vl", ""), "x86-64-v3"),
        (V3, "x86-64-v3"),
        (V4.replace("fma", ""), "default"),
        ("asimd bf16", "default"),
        ("", "default"),
    ],
)
def test_clone(flags, clone):
    assert doctor.clone(set(flags.split())) == clone


def test_cpuinfo(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text(
        "processor\t: 0\nmodel name\t: A: CPU\nflags\t\t: fma avx2\n\nprocessor\t: 1\nmodel name\t: B\n"
    )
    assert doctor.read_cpuinfo(path) == ("A: CPU", {"fma", "avx2"})
    path.write_text("processor\t: 0\nFeatures\t: asimd sve\n")
    assert doctor.read_cpuinfo(path)[1] == {"asimd", "sve"}
    assert doctor.read_cpuinfo(tmp_path / "none")[1] == set()
