"""The ranges that a profiler sees."""

import os
import subprocess
import sys

import pytest
import torch

import esp_kernels
from esp_kernels import _backend, nvtx


class Recorder:
    """A domain that writes down what happens, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def get_event_attributes(self, message: str) -> str:
        return message

    def push_range(self, name: str) -> None:
        self.events.append(name)

    def pop_range(self) -> None:
        self.events.append("end")


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(nvtx, "_domain", Recorder())
    _backend._select.cache_clear()
    yield nvtx._domain
    _backend._select.cache_clear()


@pytest.mark.parametrize("backend", ["auto", "ref", "triton"])
def test_each_op_is_a_range_within_those_of_the_caller(backend, recorder):
    with nvtx.span("step"):
        esp_kernels.swiglu(torch.ones(2, 8), backend=backend)
        esp_kernels.rms_norm(torch.ones(2, 8), torch.ones(8), backend=backend)
    assert recorder.events == ["step", "swiglu", "end", "rms_norm", "end", "end"]


def test_a_range_ends_when_its_op_fails(recorder):
    with pytest.raises(ValueError, match="gate_up"):
        esp_kernels.swiglu(torch.ones(2, 7))
    assert recorder.events == ["swiglu", "end"]


@pytest.mark.parametrize(
    ("environment", "on"),
    [
        ({}, False),
        ({"ESP_NVTX": "1"}, True),
        ({"NVTX_INJECTION64_PATH": "/a/tool.so"}, True),
        ({"NVTX_INJECTION64_PATH": "/a/tool.so", "ESP_NVTX": "0"}, False),
    ],
)
def test_ranges_are_on_where_a_profiler_listens(environment, on, monkeypatch):
    for name in ("ESP_NVTX", "NVTX_INJECTION64_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (nvtx._domain_if_listening() is not None) is on


def test_off_an_op_is_called_as_it_is():
    assert nvtx.ranged("swiglu", len) is len


def test_the_real_package():
    script = "import torch, esp_kernels; print(esp_kernels.swiglu(torch.ones(1, 4)).shape)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"ESP_NVTX": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "torch.Size([1, 2])", done.stderr
