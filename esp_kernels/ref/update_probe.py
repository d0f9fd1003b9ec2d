import torch


def update_probe(probe: torch.Tensor, embedding: torch.Tensor, committed: torch.Tensor, lam: float) -> None:
    for token in committed.unbind(1):
        (b,) = (token >= 0).nonzero(as_tuple=True)
        target = embedding[token[b]].float()[:, None]
        probe[b] += lam * (target - probe[b])
