from collections.abc import Sequence

import torch

from esp_kernels.ref._slots import locate


def commit_kv(
    caches: Sequence[torch.Tensor],
    path: torch.Tensor,
    accepted: torch.Tensor,
    prefix_len: torch.Tensor,
    block_table: torch.Tensor | None = None,
) -> None:
    step = torch.arange(path.shape[1], device=path.device)
    b, i = ((step >= 1) & (step <= accepted[:, None])).nonzero(as_tuple=True)
    source = locate(b, prefix_len[b] + path[b, i], caches[0], block_table)
    target = locate(b, prefix_len[b] + i, caches[0], block_table)
    for cache in caches:
        cache[target] = cache[source]
