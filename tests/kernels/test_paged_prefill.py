"""Prefill attention of chunks over a cached prefix equals float64 attention over the gathered tokens."""

from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagecast.kernels import reference
from pagecast.kernels.merge_pieces import Pieces
from pagecast.kernels.paged_decode import paged_decode
from pagecast.kernels.paged_prefill import paged_prefill
from pagecast.kernels.prefill_plan import (
    KV_TILE,
    SLOTS_PER_SM,
    cut,
    most_rows,
    plan_prefill,
    wide_tiles_pay,
)
from pagecast.kernels.tile_rows import TileRows
from pagecast.sim.core.errors import BadInput

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SLOW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
CHUNKS = st.lists(st.tuples(st.integers(0, 28), st.integers(0, 150)), min_size=1, max_size=3)


def attend(
    cache: Any,
    q: torch.Tensor,
    query_lens: list[int],
    *,
    spare: int = 0,
    processors: int = 0,
    rows: int | None = None,
    **more: Any,
) -> torch.Tensor:
    """`spare`: rows behind the plan that hold what must not be looked at. `processors`: to cut tiles for.
    `rows`: those of a tile, if not the usual ones here."""
    heads, (kv_heads, dim) = q.shape[1], cache.k.shape[2:]
    tile_rows = TileRows(heads, kv_heads, dim, q.dtype, cache.k.dtype, q.device)
    rows = rows or tile_rows.usual
    plan = plan_prefill(
        query_lens, cache.lens, tile_rows.tokens(rows), kv_heads=kv_heads, processors=processors
    )
    if processors:
        more["pieces"] = Pieces(heads, kv_heads, dim, q.dtype, q.device, processors, rows)
        more["pieces"].parts.fill_(float("nan"))
        more["pieces"].sums.fill_(float("nan"))
    tiles = torch.from_numpy(np.pad(plan, ((0, spare), (0, 0)), constant_values=1 << 20)).to(q.device)
    return paged_prefill(
        q, cache.k, cache.v, cache.table, tiles, out=torch.full_like(q, float("nan")), rows=rows, **more
    )


@SLOW
@given(
    seed=st.integers(0, 1000),
    chunks=CHUNKS,
    group=st.integers(1, 8),
    kv_heads=st.integers(1, 2),
    dim=st.sampled_from([64, 80, 96, 128, 256]),
    block_size=st.sampled_from([16, 32, 64, 128, 256]),
    window=st.sampled_from([None, None, 1, 37, 150]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    spare=st.sampled_from([0, 3]),
)
def test_equals_attention_in_float64(
    paged: Callable[..., Any],
    error: Callable[..., float],
    seed: int,
    chunks: list[tuple[int, int]],
    group: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    spare: int,
) -> None:
    query_lens = [new for new, _ in chunks]
    cache = paged([new + cached for new, cached in chunks], kv_heads, dim, block_size, dtype, seed)
    torch.manual_seed(seed)
    q = torch.randn(sum(query_lens), group * kv_heads + 2, dim).to(dtype).to(cache.k.device)[:, 2:]
    out = attend(cache, q, query_lens, window=window, spare=spare)
    expected = reference.paged_prefill(
        q, cache.k, cache.v, cache.table, query_lens, cache.lens, window=window, dtype=torch.float64
    )
    if sum(query_lens):
        assert error(out, expected) < TOLERANCE[dtype]


@SLOW
@given(
    seed=st.integers(0, 1000),
    chunks=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 500)), min_size=1, max_size=2),
    group=st.integers(1, 8),
    kv_heads=st.integers(1, 2),
    dim=st.sampled_from([64, 80, 128]),
    block_size=st.sampled_from([16, 128, 256]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.float8_e4m3fn]),
    processors=st.sampled_from([3, 20, 200]),
    spare=st.sampled_from([0, 3]),
    rows=st.sampled_from([None, 48]),
)
def test_cut_tiles_equal_attention_in_float64(
    paged: Callable[..., Any],
    error: Callable[..., float],
    seed: int,
    chunks: list[tuple[int, int]],
    group: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    dtype: torch.dtype,
    processors: int,
    spare: int,
    rows: int | None,
) -> None:
    query_lens = [new for new, _ in chunks]
    cache = paged([new + cached for new, cached in chunks], kv_heads, dim, block_size, dtype, seed)
    torch.manual_seed(seed)
    fp8 = dtype == torch.float8_e4m3fn
    scales = {name: (torch.rand(kv_heads) + 0.5).to(cache.k.device) for name in ("k_scale", "v_scale") if fp8}
    q = torch.randn(sum(query_lens), group * kv_heads, dim).to(torch.float16 if fp8 else dtype)
    q = q.to(cache.k.device)
    out = attend(cache, q, query_lens, processors=processors, spare=spare, rows=rows, **scales)
    expected = reference.paged_prefill(
        q, cache.k, cache.v, cache.table, query_lens, cache.lens, dtype=torch.float64, **scales
    )
    if sum(query_lens):
        assert error(out, expected) < (2e-3 if fp8 else TOLERANCE[dtype])


def test_one_tile_cut_in_many_equals_the_whole(
    paged: Callable[..., Any], error: Callable[..., float], device: str
) -> None:
    """So many pieces that merging them takes several rounds."""
    cache = paged([5, 4000], 1, 64, 16, torch.float32)
    q = torch.randn(9, 2, 64, device=device)
    whole = attend(cache, q, [2, 7])
    assert error(attend(cache, q, [2, 7], processors=100), whole) < 2e-6
    plan = plan_prefill([2, 7], cache.lens, 8, kv_heads=1, processors=100)
    assert list(plan[0, :2]) == [1 + 16, 1]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 5000)), max_size=20),
    st.sampled_from([1, 18, 32, 128]),
    st.sampled_from([1, 2, 8, 32]),
    st.sampled_from([0, 8, 132]),
)
def test_the_plan_covers_every_row_and_key_once(
    chunks: list[tuple[int, int]], tokens: int, kv_heads: int, processors: int
) -> None:
    query_lens = [new for new, _ in chunks]
    plan = plan_prefill(
        query_lens, [new + cached for new, cached in chunks], tokens, kv_heads=kv_heads, processors=processors
    )
    number, merges = int(plan[0, 0]), int(plan[0, 1])
    pieces = [tuple(map(int, piece)) for piece in plan[1 : 1 + number]]
    assert len(plan) == 1 + number + merges
    work = [-((begin - end) // KV_TILE) for *_, begin, end, _slot, _ in pieces]
    assert all(a >= b >= 1 for a, b in pairwise([*work, 1]))
    tiles, waiting = [], 0
    cut_tiles = {tuple(map(int, merge[:4])) for merge in plan[1 + number :]}
    for tile, parts in groupby(sorted(pieces, key=lambda p: (p[:4], p[4])), key=lambda p: p[:4]):
        begins, ends, slots = zip(*((p[4], p[5], p[6]) for p in parts), strict=True)
        _table, row, rows, position = tile
        assert (*begins, position + rows) == (0, *ends)
        assert all(begin % KV_TILE == 0 for begin in begins)
        assert max(ends[0], KV_TILE) - min(e - b for b, e in zip(begins, ends, strict=True)) < 2 * KV_TILE
        if len(slots) == 1:
            assert slots == (-1,)
        else:
            assert slots == tuple(range(slots[0], slots[0] + len(slots)))
            assert (slots[0], len(slots), row, rows) in cut_tiles
            waiting += len(slots)
        tiles.append(tile)
    assert sum(count for _, count, _, _ in cut_tiles) == waiting
    assert waiting * kv_heads <= SLOTS_PER_SM * processors
    assert len(plan) <= most_rows(len(tiles), kv_heads, processors)
    assert all(1 <= rows <= tokens for _, _, rows, _ in tiles)
    covered = sorted((s, row + i, p + i) for s, row, count, p in tiles for i in range(count))
    first, expected = 0, []
    for s, (new, cached) in enumerate(chunks):
        expected += [(s, first + i, cached + i) for i in range(new)]
        first += new
    assert covered == expected


@pytest.mark.parametrize(
    ("lengths", "kv_heads", "pieces"),
    [
        ([227], 8, [16]),  # one round: 128 of 132 programs busy
        ([227], 32, [4]),
        ([1], 8, [1]),
        ([227] * 4, 8, [4] * 4),
        ([227] * 10, 8, [3] * 10),  # two rounds of thirds end before one of wholes
        ([227] * 16, 8, [1] * 16),  # they fill the round as they are
        ([227] * 18, 8, [1] * 16 + [8] * 2),  # only what overflows into a second round is cut
        ([4] * 19, 8, [1] * 19),  # not worth a merge
    ],
)
def test_tiles_are_cut_to_fill_the_last_round(lengths: list[int], kv_heads: int, pieces: list[int]) -> None:
    assert list(cut(np.array(lengths), kv_heads, 132)) == pieces


@pytest.mark.parametrize(
    ("new", "cached", "pays"),
    [
        ([16384], [0], True),
        ([8192, 8192], [0, 0], True),
        ([2048], [14336], True),
        ([4096] * 4, [0] * 4, False),  # few keys for each piece
        ([1024] * 16, [0] * 16, False),
        ([64], [16000], False),  # too few pieces
        ([512], [8192], False),
        ([256] * 8, [4000] * 8, False),  # 6 tiles of 48 tokens each for 256
        ([], [], False),
    ],
)
def test_wide_tiles_for_many_long_pieces(new: list[int], cached: list[int], pays: bool) -> None:
    lens = [a + b for a, b in zip(new, cached, strict=True)]
    assert wide_tiles_pay(new, lens, 32, 48, kv_heads=8, processors=132) == pays


def test_a_cpu_has_no_wide_tiles() -> None:
    rows = TileRows(32, 8, 128, torch.bfloat16, torch.bfloat16, torch.device("cpu"))
    assert rows.of_step([16384], [16384]) == rows.usual == rows.most == 128


def test_a_chunk_of_one_token_equals_decode(
    paged: Callable[..., Any], error: Callable[..., float], device: str
) -> None:
    cache = paged([130, 7, 64], 2, 64, 16, torch.float32)
    q = torch.randn(3, 8, 64, device=device)
    decoded = paged_decode(q, cache.k, cache.v, cache.table, cache.seq_lens)
    assert error(attend(cache, q, [1, 1, 1]), decoded) < 2e-6


def test_fp8_cache_with_scales(paged: Callable[..., Any], error: Callable[..., float], device: str) -> None:
    cache = paged([100, 33], 2, 80, 16, torch.float8_e4m3fn)
    q = torch.randn(60, 8, 80, device=device).half()
    scales = {
        "k_scale": torch.tensor([0.5, 2.0], device=device),
        "v_scale": torch.tensor([1.5, 0.3], device=device),
    }
    expected = reference.paged_prefill(
        q, cache.k, cache.v, cache.table, [40, 20], cache.lens, dtype=torch.float64, **scales
    )
    assert error(attend(cache, q, [40, 20], **scales), expected) < 2e-3


def test_caches_that_do_not_fit_are_refused(paged: Callable[..., Any], device: str) -> None:
    cache = paged([20], 3, 64, 16, torch.float32)
    with pytest.raises(BadInput, match="kv_heads must divide heads"):
        attend(cache, torch.randn(5, 4, 64, device=device), [5])


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.parametrize("window", [None, 50, 300])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("rows", [None, 192])
def test_tiles_cut_everywhere(
    paged: Callable[..., Any],
    error: Callable[..., float],
    dim: int,
    window: int | None,
    heads_first: bool,
    rows: int | None,
) -> None:
    """Chunks that begin and end at every kind of place in a tile, in either order of slots and heads."""
    query_lens = [1, 5, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 1]
    processors = 0 if window else 300
    cached = [0, 0, 97, 128, 3, 65, 64, 300, 1, 0, 127, 256, 1000]
    lens = [a + b for a, b in zip(query_lens, cached, strict=True)]
    cache = paged(lens, 2, dim, 16, torch.bfloat16, seed=dim)
    if heads_first:
        dense = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (cache.k, cache.v)]
        cache = type(cache)(*dense, cache.table, cache.seq_lens, cache.lens)
    for heads in (2, 6, 8):
        q = torch.randn(sum(query_lens), heads, dim, device="cuda").bfloat16()
        out = attend(cache, q, query_lens, window=window, processors=processors, rows=rows)
        expected = reference.paged_prefill(
            q, cache.k, cache.v, cache.table, query_lens, lens, window=window, dtype=torch.float64
        )
        assert error(out, expected) < 8e-3


class _Device:
    """`gl` for code that is run on the CPU, as one program of many."""

    minimum, where = staticmethod(min), staticmethod(np.where)
    static_range = staticmethod(range)

    def __init__(self, program: int, programs: int) -> None:
        self.program_id = lambda _: program
        self.num_programs = lambda _: programs


@pytest.mark.parametrize(
    ("number", "kv_heads", "side", "most_heads"),
    [
        (128, 32, 2, 4),  # 4 x 4096 tokens with 32/32 heads: two heads are too few for 132 programs
        (512, 8, 2, 2),
        (70, 32, 4, 4),
        (60, 32, 2, 8),
        (7, 32, 2, 32),
        (100, 8, 2, 8),  # K and V of eight heads stay in the cache anyway
        (60, 18, 2, 18),  # four heads at once don't divide 18
        (5, 8, 8, 8),
    ],
)
def test_every_piece_is_computed_once_under_every_head_of_which_few_are_under_way(
    number: int, kv_heads: int, side: int, most_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = pytest.importorskip("pagecast.kernels.prefill_work")  # needs Gluon
    programs, items, taken = 132, number * kv_heads, []
    for program in range(programs):
        monkeypatch.setattr(work, "gl", _Device(program, programs))
        turns = -(-(items - program) // programs)
        taken += [(turn, *map(int, work.find_item.fn(turn, items, kv_heads, side))) for turn in range(turns)]
    assert sorted((piece, head) for _, piece, head in taken) == [
        (piece, head) for piece in range(number) for head in range(kv_heads)
    ]
    first = {head for turn, _, head in taken if turn == 0}
    assert len(first) == min(most_heads, programs)


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_heads", "tokens"), [(32, 4096), (32, 1700), (16, 2500), (18, 2000)])
def test_many_heads_of_a_few_long_sequences(
    paged: Callable[..., Any], error: Callable[..., float], kv_heads: int, tokens: int
) -> None:
    lens = [tokens] * 4
    cache = paged(lens, kv_heads, 128, 16, torch.bfloat16)
    q = torch.randn(sum(lens), kv_heads, 128, device="cuda").bfloat16()
    out = attend(cache, q, lens)
    for i in range(0, kv_heads, 2):  # a float64 reference of two heads at a time
        at = slice(i, i + 2)
        expected = reference.paged_prefill(
            q[:, at], cache.k[:, :, at], cache.v[:, :, at], cache.table, lens, lens, dtype=torch.float64
        )
        assert error(out[:, at], expected) < 8e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("slope", [-0.2, 0.01, 0.05, 0.2])
@pytest.mark.parametrize("rows", [None, 192])
def test_scores_that_keep_rising(
    paged: Callable[..., Any], error: Callable[..., float], dim: int, slope: float, rows: int | None
) -> None:
    """As tiles are read, from the last key to the first: the output is rescaled again and again."""
    lens = [1500, 700]
    cache = paged(lens, 2, dim, 16, torch.bfloat16)
    for row, n in enumerate(lens):
        position = torch.arange(n, device="cuda")
        blocks = cache.table[row, position // 16].long()
        cache.k[blocks, position % 16, :, 0] = (-slope * position)[:, None].bfloat16()
    q = torch.randn(sum(lens), 8, dim, device="cuda").bfloat16()
    q[:, :, 0] = dim**0.5
    out = attend(cache, q, lens, rows=rows)
    expected = reference.paged_prefill(q, cache.k, cache.v, cache.table, lens, lens, dtype=torch.float64)
    assert error(out, expected) < 8e-3


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(40))
def test_random_shapes_on_the_gpu(paged: Callable[..., Any], error: Callable[..., float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def pick(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    dtype = pick(torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)
    kv_heads, group, dim = pick(1, 2, 8), pick(1, 2, 3, 4, 5, 7, 8, 16), pick(64, 80, 96, 128, 128, 256)
    query_lens = [pick(0, 1, 15, 128, 129, 700, 2000) for _ in range(pick(1, 4))] + [33]
    cached = [pick(0, 0, 1, 16, 300, 2500) for _ in query_lens]
    window = pick(None, None, 100, 1024)
    processors = 0 if window else pick(0, 132, 1000)
    fp8 = dtype != torch.float32 and pick(False, False, False, True)
    cache = paged(
        [a + b for a, b in zip(query_lens, cached, strict=True)],
        kv_heads,
        dim,
        pick(16, 32, 64, 128, 256),
        torch.float8_e4m3fn if fp8 else dtype,
        seed,
    )
    scales = {"k_scale": torch.rand(kv_heads) + 0.5, "v_scale": torch.rand(kv_heads) + 0.5} if fp8 else {}
    scales = {name: scale.cuda() for name, scale in scales.items()}
    q = torch.randn(sum(query_lens), kv_heads * group, dim, generator=generator).to(dtype).cuda()
    halved = dim == 128 and dtype != torch.float32 and not fp8
    rows = pick(None, 192) if halved else None
    out = attend(cache, q, query_lens, window=window, processors=processors, rows=rows, **scales)
    expected = reference.paged_prefill(
        q, cache.k, cache.v, cache.table, query_lens, cache.lens, window=window, dtype=torch.float64, **scales
    )
    assert error(out, expected) < TOLERANCE[dtype]
