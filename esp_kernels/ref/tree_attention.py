import torch


def tree_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    prefix_len: torch.Tensor,
    ancestors: torch.Tensor,
    depth: torch.Tensor,
    block_table: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, rows, heads, dim = q.shape
    if q.numel() == 0:
        return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    slots = int(prefix_len.max()) + rows
    keys, values = (_by_slot(cache, block_table, slots).to(wide) for cache in (k_cache, v_cache))
    keys = keys if k_scale is None else keys * k_scale[:, None]
    values = values if v_scale is None else values * v_scale[:, None]
    visible = _visible(prefix_len, ancestors, depth, slots, window)

    # What no row sees may never have been written.
    seen = visible.any(1)[:, :, None, None]
    group = heads // keys.shape[2]
    keys, values = (torch.where(seen, x, 0).repeat_interleave(group, 2) for x in (keys, values))

    scores = torch.einsum("bthd,bshd->bths", q.to(wide), keys) * (dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, :, None], -torch.inf)
    logits = scores
    if sinks is not None:
        sink = sinks.to(wide)[:, None].expand(batch, rows, heads, 1)
        logits = torch.cat([scores, sink], -1)
    real = visible.any(-1)[:, :, None]
    out = torch.einsum("bths,bshd->bthd", logits.softmax(-1)[..., :slots], values)
    out = torch.where(real[..., None], out, 0).to(q.dtype)
    lse = torch.where(real, logits.logsumexp(-1), -torch.inf)
    return out.contiguous(), lse.contiguous()


def _by_slot(cache: torch.Tensor, block_table: torch.Tensor | None, slots: int) -> torch.Tensor:
    """[B, slots, H, D]; what lies beyond a sequence's pages in use is any page."""
    if block_table is None:
        return cache[:, :slots]
    slot = torch.arange(slots, device=cache.device)
    page = block_table[:, slot // cache.shape[1]].clamp(0, cache.shape[0] - 1)
    return cache[page, slot % cache.shape[1]]


def _visible(
    prefix_len: torch.Tensor, ancestors: torch.Tensor, depth: torch.Tensor, slots: int, window: int | None
) -> torch.Tensor:
    """[B, T, slots]: whether a row sees what lies in a slot."""
    rows = depth.shape[1]
    prefix = prefix_len[:, None].long()
    slot = torch.arange(slots, device=depth.device).expand(depth.shape[0], slots)
    row = (slot - prefix).clamp(0, rows - 1)
    in_block = (slot >= prefix) & (slot < prefix + rows)
    bit = torch.arange(rows, device=depth.device)
    named = (ancestors[:, :, bit // 64] >> (bit % 64) & 1).bool()
    in_tree = named.gather(2, row[:, None].expand(-1, rows, -1)) & in_block[:, None]
    in_prefix = (slot < prefix)[:, None] & named.any(-1, keepdim=True)
    visible = in_prefix | in_tree
    if window is not None:
        position = torch.where(in_block, prefix + depth.gather(1, row), slot)
        visible &= position[:, None] > (prefix + depth)[:, :, None] - window
    return visible
