import random

import pytest
import torch

from esp_kernels import _backend


@pytest.fixture(params=["ref", "cpp"])
def backend(request: pytest.FixtureRequest) -> str:
    assert request.param == "ref" or _backend.native_error is None, _backend.native_error
    return request.param


@pytest.fixture
def rng() -> random.Random:
    torch.manual_seed(0)
    return random.Random(0)
