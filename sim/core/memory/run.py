"""Runs: neighbouring blocks of one segment, the nodes of the block tree.

A run's first blocks may be held by many readers, each from the run's start to a length of its own. At most
one holding, the writer, is still filling it and holds all of it. Blocks that nobody holds are free, and
they are always at the end of the run: whoever holds a block holds every block before it. So the free part
is a stack of pieces, the deepest freed first:

    blocks   [ 0 1 2 3 4 5 6 7 8 9 ]
    held       A A A A              by reader A (length 4)
    free               [...] [...]  pieces 4..7 (freed later) and 7..10 (freed earlier)
    published ------------------>|  how many blocks, from the start, others may find

Runs form a tree: a run's parent holds the block before the run's first one. A parent has children at
different depths, because prompts part from each other anywhere:

    parent   [ 0 1 2 3 4 5 6 7 ]
    child              [ 4 5 ... ]      starts at block 4: it follows the parent's block 3
    child                      [ 8 ... ]
"""

from __future__ import annotations

from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.retention import DEFAULT_PRIORITY, Keep


class Run:
    """Consecutive blocks of one segment: `blocks[i]` is block `start + i` of its sequence.

    `key` is the segment's digest; None: the content is not known (yet), so nobody can find it. `held`
    counts the readers by the length they hold. `next` links runs published under one key, oldest first.
    `rest` is the part that `BlockPool.split` cut off this run's end: readers that hold more than this
    run's length hold blocks of the rest as well. `uses` counts the readers there ever were, and `born` the
    runs before it; that is kept for eviction orders that need the tree (see `Eviction.leaves_first`). `keep`
    is the retention asked for its blocks, `tenant` who computed them, and `keys` what its tokens are (where
    partial reuse needs to know).
    """

    __slots__ = (
        "blocks",
        "born",
        "children",
        "free",
        "held",
        "indexed",
        "keep",
        "key",
        "keys",
        "next",
        "parent",
        "published",
        "rest",
        "start",
        "tenant",
        "uses",
        "writer",
    )

    def __init__(
        self,
        key: bytes | None,
        start: int,
        blocks: list[int],
        writer: Writer | None = None,
        parent: Run | None = None,
    ) -> None:
        self.key = key
        self.start = start
        self.blocks = blocks
        self.published = 0
        self.writer = writer
        self.held: dict[int, int] | None = None
        self.free: list[FreePiece] | None = None
        self.indexed = False
        self.uses = 0
        self.born = 0
        self.tenant = ""
        self.keys: BlockKeys | None = None
        self.keep: Keep | None = None
        self.next: Run | None = None
        self.rest: Run | None = None
        self.children: dict[Run, None] | None = None
        self.parent: Run | None = None
        if parent is not None:
            self.follow(parent)

    @property
    def end(self) -> int:
        """The number, in its sequence, of the block after the last."""
        return self.start + len(self.blocks)

    def owned(self) -> int:
        """How many blocks, from the start, somebody holds: the writer all, or else the longest reader."""
        if self.writer is not None:
            return len(self.blocks)
        return max(self.held) if self.held else 0

    def follow(self, parent: Run) -> None:
        """Makes a run a child of the run that holds the block before its first one."""
        self.parent = parent
        if parent.children is None:
            parent.children = {self: None}
        else:
            parent.children[self] = None

    def leave_tree(self) -> None:
        """Removes a run without blocks; its children, if any are held still, become roots."""
        if self.parent is not None:
            assert self.parent.children is not None
            del self.parent.children[self]
            self.parent = None
        if self.children:
            for child in self.children:
                child.parent = None
            self.children = None

    def move_children(self, rest: Run) -> None:
        """Gives `rest`, just cut off this run's end, the children that follow its blocks."""
        if self.children:
            later = [child for child in self.children if child.start > rest.start]
            for child in later:
                del self.children[child]
                child.parent = rest
            if later:
                rest.children = dict.fromkeys(later)


class Writer:
    """Whoever fills runs: `tail` is the run being filled, `own` are all of them in order.

    `generating`: it decodes. Its full blocks are not published step by step, but made up for when somebody
    looks for them (see `FullGroup.find`).
    """

    __slots__ = ("generating", "own", "tail")

    def __init__(self) -> None:
        self.own: list[Run] = []
        self.tail: Run | None = None
        self.generating = False

    def replace(self, run: Run, rest: Run) -> None:
        """Takes note that `rest` was cut off the end of `run`, which it writes."""
        self.own.insert(self.own.index(run) + 1, rest)
        if self.tail is run:
            self.tail = rest


class FreePiece:
    """Blocks `low` to `high` of a run, freed together: the `Content` that eviction orders rank.

    It shrinks while it stands in the order: blocks are taken from its high end and held again from its low
    end. A split gives it another run. So an order must not sort by what a piece was when it was added.
    `before` and `after` are its neighbours in a ring (`LeastRecentlyUsed`); `level` and `used` are its place
    in a heap, where it has one (`RankedEviction`).
    """

    __slots__ = ("after", "before", "high", "level", "low", "run", "used")

    level: float
    used: int

    def __init__(self, run: Run, low: int, high: int) -> None:
        self.run = run
        self.low = low
        self.high = high
        self.before: FreePiece = self
        self.after: FreePiece = self

    @property
    def start(self) -> int:
        """The number, in its sequence, of its first block."""
        return self.run.start + self.low

    @property
    def end(self) -> int:
        """The number, in its sequence, of the block after its last."""
        return self.run.start + self.high

    @property
    def uses(self) -> int:
        """How many requests have reused its run."""
        return self.run.uses

    @property
    def made(self) -> int:
        """When the first block of its run was taken."""
        return self.run.born

    @property
    def priority(self) -> int:
        """The retention priority of its run."""
        keep = self.run.keep
        return DEFAULT_PRIORITY if keep is None else keep.priority

    def evictable(self) -> int:
        """How many blocks, from the high end, can be taken without cutting off cached blocks that follow.

        A free block that follows in the tree could never be found again. Blocks that somebody holds do not
        count: their holder holds all that precedes them as well.
        """
        run = self.run
        if self.high < len(run.blocks):
            return 0
        low = self.low
        for child in run.children or ():
            if child.blocks and not child.owned():
                low = max(low, child.start - run.start)
                if low >= self.high:
                    return 0
        return self.high - low
