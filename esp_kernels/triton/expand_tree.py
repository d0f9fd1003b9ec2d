"""One program drafts one tree. A level that hangs from one node is taken in one pass over its candidates:
those of static trees, and of dynamic trees of one level. Other trees grow best first: every node offers its
best child not drafted yet, and the best of these offers becomes the next row."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from esp_kernels._block import PADDING, ROOT

_ROOT, _PADDING = tl.constexpr(ROOT), tl.constexpr(PADDING)
_NO_OFFER = tl.constexpr(-(2**63))


@triton.jit
def _usable(ids, logprobs, at, mask, token, PRUNE: tl.constexpr):
    """The candidates `at` and whether they may hang from a node that carries `token`."""
    drafted = tl.load(ids + at, mask=mask, other=-1)
    logprob = tl.load(logprobs + at, mask=mask, other=float("nan"))
    usable = mask & (drafted >= 0) & (tl.abs(logprob) < float("inf"))
    if PRUNE:
        usable = usable & (drafted != token)
    return drafted, logprob, usable


@triton.jit
def _offer(
    ids, logprobs, first, candidates, levels, row, token, score, depth, rank,
    BLOCK_N: tl.constexpr, ROWS: tl.constexpr, PRUNE: tl.constexpr,
):  # fmt: skip
    """Node `row`'s best child of those from `rank` on, as a key that is larger for better offers: by score,
    then the smaller depth, then the smaller row. Also the child's rank and score."""
    n = tl.arange(0, BLOCK_N)
    here = (n >= rank) & (n < candidates) & (depth < levels)
    _, logprob, usable = _usable(ids, logprobs, first + depth * candidates + n, here, token, PRUNE)
    best = tl.min(tl.where(usable, n, BLOCK_N), 0)
    reached = score + tl.minimum(tl.sum(tl.where(n == best, logprob, 0.0), 0), 0.0)
    bits = reached.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = (ordered << 32) | (0xFFFFFFFF - ((depth + 1) * ROWS + row).to(tl.int64))
    offered = (best < BLOCK_N) & (reached > float("-inf"))
    return tl.where(offered, key, _NO_OFFER), best, reached


@triton.jit
def _width(level, WIDTHS: tl.constexpr):
    width = level * 0
    for i in tl.static_range(len(WIDTHS)):
        width = tl.where(level == i, WIDTHS[i], width)
    return width


# Bytes: 8 a candidate, 12 a row. Turns: a level, or a row where the tree grows best first.
@triton.jit(do_not_specialize=["rows", "levels", "candidates", "nodes"])
def _expand_tree_kernel(
    root, ids, logprobs, path, accepted, tokens, parent, mask_ordinal,
    rows, levels, candidates, nodes,
    MASKS: tl.constexpr, PRUNE: tl.constexpr, WIDTHS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_NODES: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    out = b * rows
    if path is None:
        first = b * levels * candidates
    else:  # the rows of the masks of the deepest accepted row
        deepest = tl.load(path + out + tl.maximum(tl.load(accepted + b), 0))
        guesses = tl.minimum(nodes + tl.maximum(deepest, 0) * MASKS, rows - levels)
        first = (out + guesses) * candidates

    row = tl.arange(0, BLOCK_ROWS)
    owner = tl.where(row < nodes, row, (row - nodes) // MASKS if MASKS > 0 else nodes)
    owner = tl.where(row < nodes * (MASKS + 1), owner, nodes)
    token = tl.load(root + b)
    alive = token >= 0
    tl.store(tokens + out, token, mask=alive)
    tl.store(parent + out, _ROOT, mask=alive)
    real = (owner == 0) & alive

    if len(WIDTHS) > 0:
        n = tl.arange(0, BLOCK_N)
        above = token * 0
        start = above + 1
        score = above.to(tl.float32)
        for level in range(len(WIDTHS)):  # not unrolled: that takes minutes to compile for long trees
            width = _width(level, WIDTHS)
            here = (n < candidates) & alive
            at = first + level * candidates + n
            drafted, logprob, usable = _usable(ids, logprobs, at, here, token, PRUNE)
            reached = score + tl.minimum(logprob, 0.0)
            usable = usable & (reached > float("-inf"))
            place = tl.cumsum(usable.to(tl.int32), 0) - 1
            kept = usable & (place < width)
            tl.store(tokens + out + start + place, drafted, mask=kept)
            tl.store(parent + out + start + place, place * 0 + above, mask=kept)
            count = tl.sum(kept.to(tl.int32), 0)
            real |= (owner >= start) & (owner < start + count)
            best = kept & (place == 0)
            token = tl.sum(tl.where(best, drafted, 0), 0)
            score = tl.sum(tl.where(best, reached, 0.0), 0)
            alive = alive & (count > 0)
            above = start
            start += width
    else:
        node = tl.arange(0, BLOCK_NODES)
        carried = tl.where(node == 0, token, -1)
        depths = node * 0
        scores = tl.zeros([BLOCK_NODES], tl.float32)
        nil = token * 0
        key, rank, score = _offer(
            ids, logprobs, first, candidates, levels, nil, token, nil.to(tl.float32), nil, nil,
            BLOCK_N, BLOCK_ROWS, PRUNE,
        )  # fmt: skip
        offers = tl.where((node == 0) & alive, key, _NO_OFFER)
        ranks = tl.where(node == 0, rank, 0)
        reached = tl.where(node == 0, score, 0.0)
        best = tl.max(offers, 0)
        drafts = nil + 1
        while (drafts < nodes) & (best != _NO_OFFER):
            mine = offers == best
            v = tl.sum(tl.where(mine, node, 0), 0)
            depth = tl.sum(tl.where(mine, depths, 0), 0) + 1
            rank = tl.sum(tl.where(mine, ranks, 0), 0)
            score = tl.sum(tl.where(mine, reached, 0.0), 0)
            above_token = tl.sum(tl.where(mine, carried, 0), 0)
            above_score = tl.sum(tl.where(mine, scores, 0.0), 0)
            token = tl.load(ids + first + (depth - 1) * candidates + rank)
            tl.store(tokens + out + drafts, token)
            tl.store(parent + out + drafts, v)

            own = node == drafts
            carried = tl.where(own, token, carried)
            depths = tl.where(own, depth, depths)
            scores = tl.where(own, score, scores)
            key, next_rank, next_score = _offer(
                ids, logprobs, first, candidates, levels, v, above_token, above_score, depth - 1, rank + 1,
                BLOCK_N, BLOCK_ROWS, PRUNE,
            )  # fmt: skip
            offers = tl.where(mine, key, offers)
            ranks = tl.where(mine, next_rank, ranks)
            reached = tl.where(mine, next_score, reached)
            key, next_rank, next_score = _offer(
                ids, logprobs, first, candidates, levels, drafts, token, score, depth, nil,
                BLOCK_N, BLOCK_ROWS, PRUNE,
            )  # fmt: skip
            offers = tl.where(own, key, offers)
            ranks = tl.where(own, next_rank, ranks)
            reached = tl.where(own, next_score, reached)
            best = tl.max(offers, 0)
            drafts += 1
        real |= (owner < drafts) & alive

    inside = row < rows
    masked = inside & (row >= nodes)
    ordinal = (row - nodes) % MASKS + 1 if MASKS > 0 else row * 0
    hangs_from = tl.where(ordinal == 1, owner, row - 1)
    spare = tl.full([BLOCK_ROWS], -1, tl.int32)
    tl.store(tokens + out + row, spare, mask=inside & (masked | ~real))
    tl.store(parent + out + row, tl.where(real, hangs_from, _PADDING), mask=inside & (masked | ~real))
    tl.store(mask_ordinal + out + row, tl.where(real, tl.where(masked, ordinal, 0), -1), mask=inside)


def _warps(block: int) -> int:
    """One, in which nothing waits for another warp, as long as its registers hold the block."""
    return 1 if block <= 128 else 4 if block <= 512 else 8


def launch(
    root: torch.Tensor,
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    block: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    levels: int,
    nodes: int,
    masks: int,
    widths: Sequence[int] | None,
    prune: bool,
    path: torch.Tensor | None = None,
    accepted: torch.Tensor | None = None,
) -> None:
    """Writes the tree and padding to `block`: tokens, parent and mask_ordinal, each [B, T]. With a path the
    candidates [B, T, N] are all rows', those that count the masks' of the last row on it."""
    batch, rows = block[0].shape
    if batch == 0:
        return
    if widths is None:
        widths = (nodes - 1,) if levels == 1 else ()
    candidates = ids.shape[-1]
    block_n = triton.next_power_of_2(max(1, candidates))
    block_rows = triton.next_power_of_2(rows)
    _expand_tree_kernel[(batch,)](
        root, ids, logprobs, path, accepted, *block, rows, levels, candidates, nodes,
        MASKS=masks, PRUNE=prune, WIDTHS=tuple(widths),
        BLOCK_N=block_n, BLOCK_NODES=triton.next_power_of_2(nodes), BLOCK_ROWS=block_rows,
        num_warps=_warps(max(block_n, block_rows)),
    )  # fmt: skip


def expand_tree(
    root: torch.Tensor,
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    budget: int,
    masks: int,
    widths: Sequence[int] | None = None,
    prune: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    nodes = budget // (masks + 1) if widths is None else 1 + sum(widths)
    shape = (root.shape[0], nodes * (masks + 1))
    block = (root.new_empty(shape), root.new_empty(shape), root.new_empty(shape))
    launch(root, ids, logprobs, block, ids.shape[1], nodes, masks, widths, prune)
    return block
