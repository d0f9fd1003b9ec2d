import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    h = x if residual is None else residual.add_(x)
    wide = h.float() if h.dtype != torch.float64 else h
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.to(wide.dtype)).to(x.dtype).contiguous()
