import torch


def embed_block(
    tokens: torch.Tensor, mask_ordinal: torch.Tensor, embedding: torch.Tensor, probe: torch.Tensor
) -> torch.Tensor:
    x = torch.zeros((*tokens.shape, embedding.shape[1]), dtype=embedding.dtype, device=embedding.device)
    token_row = mask_ordinal == 0
    x[token_row] = embedding[tokens[token_row]]
    b, r = (mask_ordinal >= 1).nonzero(as_tuple=True)
    x[b, r] = probe[b, mask_ordinal[b, r] - 1].to(x.dtype)
    return x
