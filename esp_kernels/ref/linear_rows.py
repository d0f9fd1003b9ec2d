import torch


def unpack_linear(packed_weight: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
    """The [out_features, in_features] weight that `pack_linear` packed."""
    panels = packed_weight.transpose(1, 2).flatten(0, 1)
    return panels.flatten(1)[:out_features, :in_features]


def linear_rows(
    x: torch.Tensor, packed_weight: torch.Tensor, out_features: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    weight = unpack_linear(packed_weight, out_features, x.shape[-1]).float()
    y = x.new_empty((*x.shape[:-1], out_features))
    # One product a row: a matrix product sums in an order that depends on the number of rows.
    for row, out in zip(x.reshape(-1, x.shape[-1]), y.view(-1, out_features), strict=True):
        total = weight.mv(row.float())
        out.copy_(total if bias is None else total + bias.float())
    return y
