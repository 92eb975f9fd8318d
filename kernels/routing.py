"""Routing of a mixture of experts: the experts of each token, and the tokens of each expert, in two launches.

The first launch takes the likeliest experts of every token and counts how many tokens each expert has so far;
the second lays the rows of one expert next to another's and cuts them into tiles. The host never learns how
many there are: the tile table has room for any outcome, and what is left of it names no expert.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from pagecast.kernels.launch import Launch, after_predecessor, next_power_of_2, require
from torch import Tensor

TILE_FIELDS = 4
"""Numbers of a tile: its expert (-1: no such tile), its first row, the row after its last, and padding."""
_CHOOSE_TOKENS = 4
_SORT_ENTRIES = 32
_MOST_EXPERTS = 1024


@dataclass(frozen=True, slots=True)
class Routes:
    """Where a step's tokens go. Rows are (token, expert) pairs in the order of experts.

    `weights` float32 and `rows` int32 are [tokens, active]: of each token's experts, the weight, and the row
    (-1: none, for the token is padding or the expert is another GPU's). `tokens` int32 [tokens * active]:
    each row's token. `tiles` int32 [most tiles, TILE_FIELDS]: rows of one expert, at most `tile_rows` each.
    """

    weights: Tensor
    rows: Tensor
    tokens: Tensor
    tiles: Tensor
    tile_rows: int


def most_tiles(entries: int, experts: int, tile_rows: int) -> int:
    """The most tiles of `tile_rows` that `entries` rows of `experts` experts can make."""
    return min(entries, entries // tile_rows + min(entries, experts))


@triton.jit(do_not_specialize=["tokens"])
def _choose(
    logits,
    slots,
    counts,
    ids,
    ranks,
    weights,
    tokens,
    EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    ACTIVE: tl.constexpr,
    ACTIVE_POW2: tl.constexpr,
    FIRST: tl.constexpr,
    LOCAL: tl.constexpr,
    NORMALISED: tl.constexpr,
    TOKENS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The likeliest experts of TOKENS tokens, their weights, and how many entries an expert had before.

    A logit and its expert make one integer key: keys of one token differ, order as the logits do, and of
    equal logits the one of the lower expert is the greater.
    """
    after_predecessor(OVERLAP)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS_POW2)
    live = token < tokens
    inside = live[:, None] & (expert < EXPERTS)[None, :]
    at = token.to(tl.int64)[:, None] * EXPERTS + expert[None, :]
    value = tl.load(logits + at, mask=inside, other=-float("inf")).to(tl.float32)
    most = tl.max(value, 1)
    # The sign bit decides how the bits of a float order; flipped so that integers order like floats.
    bits = value.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    LAST: tl.constexpr = EXPERTS_POW2 - 1
    key = (ordered.to(tl.int64) << 32) | (LAST - expert).to(tl.int64)[None, :]
    NOTHING: tl.constexpr = -0x7FFFFFFFFFFFFFFF
    key = tl.where((expert < EXPERTS)[None, :], key, NOTHING)
    place = tl.arange(0, ACTIVE_POW2)
    experts = tl.zeros([TOKENS, ACTIVE_POW2], tl.int32)
    logit = tl.full([TOKENS, ACTIVE_POW2], -float("inf"), tl.float32)
    for turn in tl.static_range(ACTIVE):
        best = tl.max(key, 1)
        key = tl.where(key == best[:, None], NOTHING, key)
        top = (best >> 32).to(tl.int32)
        top = (top ^ ((top >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        number = LAST - (best & 0x7FFFFFFF).to(tl.int32)
        here = (place == turn)[None, :]
        experts = tl.where(here, number[:, None], experts)
        logit = tl.where(here, top[:, None], logit)
    share = tl.where((place < ACTIVE)[None, :], tl.exp(logit - most[:, None]), 0.0)
    if NORMALISED:
        total = tl.sum(share, 1)
    else:
        total = tl.sum(tl.exp(value - most[:, None]), 1)
    if slots is not None:
        live = live & (tl.load(slots + token, mask=live, other=-1) >= 0)
    local = experts - FIRST
    wanted = live[:, None] & (place < ACTIVE)[None, :] & (local >= 0) & (local < LOCAL)
    rank = tl.atomic_add(counts + tl.where(wanted, local, 0), 1, mask=wanted, sem="relaxed")
    to = token[:, None] * ACTIVE + place[None, :]
    stored = (token < tokens)[:, None] & (place < ACTIVE)[None, :]
    tl.store(weights + to, share / total[:, None], mask=stored)
    tl.store(ids + to, tl.where(wanted, local, -1), mask=stored)
    tl.store(ranks + to, rank, mask=wanted)


@triton.jit(do_not_specialize=["entries", "most"])
def _sort(
    counts,
    ids,
    ranks,
    rows,
    row_tokens,
    tiles,
    entries,
    most,
    LOCAL: tl.constexpr,
    LOCAL_POW2: tl.constexpr,
    ACTIVE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    FIELDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The rows of ENTRIES entries, and as many lines of the tile table."""
    after_predecessor(OVERLAP)
    expert = tl.arange(0, LOCAL_POW2)[None, :]
    count = tl.load(counts + expert, mask=expert < LOCAL, other=0)
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    id = tl.load(ids + entry, mask=entry < entries, other=-1)
    goes = id >= 0
    row = tl.load(ranks + entry, mask=goes, other=0)
    row += tl.sum(tl.where(expert < id[:, None], count, 0), 1)
    tl.store(rows + entry, tl.where(goes, row, -1), mask=entry < entries)
    tl.store(row_tokens + row, entry // ACTIVE, mask=goes)
    # Line `entry` of the table, as a tile.
    ends = tl.cumsum((count + TILE_ROWS - 1) // TILE_ROWS, 1)
    mine = tl.sum((ends <= entry[:, None]).to(tl.int32), 1)
    before = expert < mine[:, None]
    start = tl.sum(tl.where(before, count, 0), 1)
    earlier = tl.sum(tl.where(before, (count + TILE_ROWS - 1) // TILE_ROWS, 0), 1)
    own = tl.sum(tl.where(expert == mine[:, None], count, 0), 1)
    first = start + (entry - earlier) * TILE_ROWS
    line = tiles + entry * FIELDS
    inside = entry < most
    tl.store(line, tl.where(mine < LOCAL, mine, -1), mask=inside)
    tl.store(line + 1, first, mask=inside)
    tl.store(line + 2, tl.minimum(first + TILE_ROWS, start + own), mask=inside)


_launches: dict[Any, Launch] = {}


def route(
    logits: Tensor,
    counts: Tensor,
    active: int,
    tile_rows: int,
    *,
    normalised: bool,
    first: int = 0,
    slots: Tensor | None = None,
) -> Routes:
    """Routes of tokens by their dense router logits [tokens, experts]: each goes to its `active` likeliest.

    Weights are the softmax over all experts in float32, scaled to a sum of one if `normalised`. `counts`
    int32 [experts here] must be zero; it is left with each expert's rows, and the grouped products zero it
    again. It says too how many of the experts are here, from number `first` on. Tokens with a negative one
    of `slots` [tokens] go nowhere.
    """
    tokens, experts = logits.shape
    local = counts.shape[0]
    require(
        logits.is_contiguous() and 0 < active <= experts <= _MOST_EXPERTS and 0 <= first <= experts - local,
        f"route: dense logits [tokens, experts] of at most {_MOST_EXPERTS} experts are needed, not "
        f"{tuple(logits.shape)} with {active} active, of which {local} from {first} on are here",
    )
    entries = tokens * active
    most = most_tiles(entries, local, tile_rows)
    empty = {"dtype": torch.int32, "device": logits.device}
    ids, ranks, rows = (torch.empty(tokens, active, **empty) for _ in range(3))
    weights = torch.empty(tokens, active, dtype=torch.float32, device=logits.device)
    routes = Routes(
        weights, rows, torch.empty(entries, **empty), torch.empty(most, TILE_FIELDS, **empty), tile_rows
    )
    if not tokens:
        return routes
    key = (logits.device, logits.dtype, experts, active, first, local, normalised, slots is None)
    choose = _launches.get(key)
    if choose is None:
        choose = _launches[key] = _choice(logits, active, first, local, normalised)
    sort = _launches.get((logits.device, active, local, tile_rows))
    if sort is None:
        sort = _launches[logits.device, active, local, tile_rows] = _sorting(
            logits.device, active, local, tile_rows
        )
    choose(-(-tokens // _CHOOSE_TOKENS), (logits, slots, counts, ids, ranks, weights), tokens)
    sort(-(-entries // _SORT_ENTRIES), (counts, ids, ranks, rows, routes.tokens, routes.tiles), entries, most)
    return routes


def _choice(logits: Tensor, active: int, first: int, local: int, normalised: bool) -> Launch:
    experts = logits.shape[1]
    constants = {
        "EXPERTS": experts,
        "EXPERTS_POW2": next_power_of_2(experts),
        "ACTIVE": active,
        "ACTIVE_POW2": next_power_of_2(active),
        "FIRST": first,
        "LOCAL": local,
        "NORMALISED": normalised,
        "TOKENS": _CHOOSE_TOKENS,
    }
    return Launch(_choose, constants, logits.device, num_warps=1)


def _sorting(device: torch.device, active: int, local: int, tile_rows: int) -> Launch:
    constants = {
        "LOCAL": local,
        "LOCAL_POW2": next_power_of_2(local),
        "ACTIVE": active,
        "TILE_ROWS": tile_rows,
        "ENTRIES": _SORT_ENTRIES,
        "FIELDS": TILE_FIELDS,
    }
    return Launch(_sort, constants, device, num_warps=4)
