import torch


def topk_logprobs(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    wide = logits.float().nan_to_num(-torch.inf, torch.inf, -torch.inf)
    highest = wide.amax(-1, keepdim=True)
    below = torch.where(wide == highest, 0.0, wide - highest)
    logprobs = below - below.exp().sum(-1, keepdim=True).log()
    logprobs = torch.where(highest == -torch.inf, -torch.inf, logprobs)
    # By logit: different logits may round to one logprob. torch.topk leaves ties to chance.
    ids = wide.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return logprobs.gather(-1, ids), ids.int()
