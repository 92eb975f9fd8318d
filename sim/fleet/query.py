"""A request as a router sees it: lengths, session and the keys of its prompt's blocks."""

from __future__ import annotations

from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.replay.feed import Feed
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

Piece = tuple[bytes, int, int]
"""Blocks `begin` to `end` of a prompt, all of one segment: `(key, begin, end)`. See `core.identity.keys`."""

_MOST_AHEAD = 4096  # keys of requests that are on their way


class Query:
    """One routing question. `row` is the request's row in the trace, `now` the time in nanoseconds.

    `arrival_ns`: when it came to the fleet, if that was earlier. It has no output length: only the future
    knows that.
    """

    __slots__ = ("_arrival_ns", "_prompts", "now", "prompt_tokens", "row", "session")

    def __init__(self, prompts: Prompts, row: int, now: int, arrival_ns: int | None = None) -> None:
        self._prompts = prompts
        self._arrival_ns = now if arrival_ns is None else arrival_ns
        self.row = row
        self.now = now
        self.prompt_tokens = prompts.input_tokens[row]
        self.session = prompts.session(row)

    def path(self, block_tokens: int) -> list[Piece]:
        """The full blocks of the prompt, of `block_tokens` tokens each, segment by segment.

        Of its text alone: who names blocks himself hears of no new revision of the model.
        """
        return self._prompts.path(self.row, block_tokens)

    def engine_path(self, block_tokens: int) -> list[Piece]:
        """The same as the replicas name them in their events: by the model's revision, too."""
        revised = self._prompts.feed(block_tokens).is_revised(self._arrival_ns)
        return self._prompts.path(self.row, block_tokens, revised=revised)


class KeyedFeed(Feed):
    """A feed that keeps the keys it made for a router until the request is made."""

    def __init__(
        self, trace: Trace, block_size: int, scenario: Scenario | None = None, *, lookahead: int = 0
    ) -> None:
        super().__init__(trace, block_size, scenario, lookahead=lookahead)
        self._ahead: dict[tuple[int, bool], BlockKeys] = {}

    def look_ahead(self, row: int, *, revised: bool) -> BlockKeys:
        """The keys of a request that will be made soon."""
        if len(self._ahead) >= _MOST_AHEAD:
            self._ahead.clear()
        keys = self._ahead[row, revised] = super().keys(row, revised=revised)
        return keys

    def keys(self, row: int, *, revised: bool = False) -> BlockKeys:
        """As `Feed.keys`."""
        return self._ahead.pop((row, revised), None) or super().keys(row, revised=revised)


class Prompts:
    """The prompts of a trace for routers, at any block size. Keeps the latest path of each kind."""

    def __init__(self, trace: Trace, scenario: Scenario | None = None) -> None:
        self._trace = trace
        self._scenario = scenario
        self._feeds: dict[tuple[int, int], KeyedFeed] = {}
        self._lookahead: dict[int, int] = {}
        self._last: dict[tuple[int, bool], tuple[int, list[Piece]]] = {}
        self.input_tokens: list[int] = trace.integers("input_tokens").tolist()
        self.output_tokens: list[int] = trace.integers("output_tokens").tolist()
        self._sessions: list[str | None] | None = None
        if "session" in trace.requests:
            names = trace.requests["session"].astype(object)
            self._sessions = names.where(names.notna(), None).tolist()

    def session(self, row: int) -> str | None:
        """The session that a row belongs to; None: none."""
        return None if self._sessions is None else self._sessions[row]

    def feed(self, block_size: int, lookahead: int | None = None) -> KeyedFeed:
        """The trace's requests at a block size, made once.

        `lookahead`: tokens after a block that its key covers; None: as last asked for.
        """
        if lookahead is None:
            lookahead = self._lookahead.get(block_size, 0)
        self._lookahead[block_size] = lookahead
        feed = self._feeds.get((block_size, lookahead))
        if feed is None:
            feed = KeyedFeed(self._trace, block_size, self._scenario, lookahead=lookahead)
            self._feeds[block_size, lookahead] = feed
        return feed

    def path(self, row: int, block_tokens: int, *, revised: bool = False) -> list[Piece]:
        """The full blocks of a prompt, segment by segment; `revised`: for the new revision of its model."""
        kept = self._last.get((block_tokens, revised))
        if kept is not None and kept[0] == row:
            return kept[1]
        keys = self.feed(block_tokens).look_ahead(row, revised=revised)
        path = pieces(keys, (self.input_tokens[row] - keys.lookahead) // block_tokens)
        self._last[block_tokens, revised] = (row, path)
        return path


def pieces(keys: BlockKeys, blocks: int) -> list[Piece]:
    """The first `blocks` blocks that `keys` name, segment by segment."""
    path: list[Piece] = []
    begin = 0
    for key, end in zip(keys.digests, keys.ends, strict=True):
        if begin >= blocks:
            break
        if end > blocks:
            end = blocks
        path.append((key, begin, end))
        begin = end
    return path
