"""Where the tests run: on the CPU, with Triton's kernels interpreted, or natively on a card.

ESP_TEST_DEVICE=cuda (`make gpu-check`) selects the tests that take a backend and those marked `on_device`.
"""

import os

import torch

DEVICE = os.environ.get("ESP_TEST_DEVICE", "cpu")
BACKENDS = {"cpu": ("ref", "cpp", "triton", "cuda"), "cuda": ("ref", "triton", "cuda")}[DEVICE]

if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
else:
    torch.set_default_device(DEVICE)
