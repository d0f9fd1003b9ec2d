import torch

from esp_kernels._check import require


def capability(t: torch.Tensor) -> tuple[int, int]:
    """The compute capability of t's device; interpreted, that of Hopper."""
    return torch.cuda.get_device_capability(t.device) if t.is_cuda else (9, 0)


def check_float8(cache: torch.Tensor, name: str) -> None:
    """The device converts what `cache` holds."""
    require(
        cache.dtype != torch.float8_e4m3fn or capability(cache) >= (8, 9),
        "{} may be float8_e4m3fn from compute capability 8.9 on, got {}.{}".format(name, *capability(cache)),
    )
