import torch


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    finite = gate.clamp(min=torch.finfo(torch.float32).min)
    return (torch.nn.functional.silu(finite) * up).to(gate_up.dtype)
