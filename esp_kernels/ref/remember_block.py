import torch

from esp_kernels.ops._memory import ORDERS, Memory
from esp_kernels.ref._sources import bucket, ending, sequence


def remember_block(
    history: torch.Tensor,
    length: torch.Tensor,
    heads: torch.Tensor,
    links: torch.Tensor,
    keys: torch.Tensor,
    list_ids: torch.Tensor,
    list_logprobs: torch.Tensor,
    tokens: torch.Tensor,
    parent: torch.Tensor,
    mask_ordinal: torch.Tensor,
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    committed: torch.Tensor,
) -> None:
    memory = Memory(history, length, heads, links, keys, list_ids, list_logprobs)
    for b in range(history.shape[0]):
        mine = sequence(memory, b)
        paths: dict[int, list[int]] = {}
        for r, (above, ordinal) in enumerate(zip(parent[b].tolist(), mask_ordinal[b].tolist(), strict=True)):
            if ordinal == 0:
                paths[r] = [*paths[above], int(tokens[b, r])] if above >= 0 else []
                _keep(mine, ending(mine, paths[r]), ids[b, r], logprobs[b, r])
        for token in committed[b].tolist():
            if token >= 0:
                _append(mine, token)


def _keep(memory: Memory, context: list[int], ids: torch.Tensor, logprobs: torch.Tensor) -> None:
    width = min(ids.shape[0], memory.list_ids.shape[2])
    for n in range(1, len(context) + 1):
        gram = context[-n:]
        slot = bucket(gram, memory.keys.shape[1])
        memory.keys[n - 1, slot, :n] = memory.keys.new_tensor(gram)
        memory.list_ids[n - 1, slot] = -1
        memory.list_ids[n - 1, slot, :width] = ids[:width]
        memory.list_logprobs[n - 1, slot, :width] = logprobs[:width]


def _append(memory: Memory, token: int) -> None:
    place = int(memory.length)
    if place >= memory.history.shape[0]:
        return
    memory.history[place] = token
    memory.length.add_(1)
    for n in range(1, min(ORDERS, place + 1) + 1):
        gram = memory.history[place - n + 1 : place + 1].tolist()
        head = bucket(gram, memory.heads.shape[1])
        memory.links[n - 1, place] = memory.heads[n - 1, head]
        memory.heads[n - 1, head] = place
