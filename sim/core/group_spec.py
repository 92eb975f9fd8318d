"""Groups of layers that keep KV alike: their specifications, and the rules of each kind.

Blocks, tiers and budgets ask these rules; only names of kinds in outputs, and their bytes (`sim/machine`), go
by the kind itself. So a new kind is a member of `KvKind`, a class below and a line of `KINDS`, where its
tables lose blocks at their beginning alone and its hits are found in a way of `Found`. Null places anywhere
need a `LayerGroup` of their own too (`CheckpointGroup`), another way to find hits a case in `Lookup.find`.
The kinds carry vLLM's names (`KVCacheSpecKind`).

Source of the rules: vllm/v1/core/single_type_kv_cache_manager.py (0.24).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import gcd, lcm

from pagecast.sim.core.errors import BadInput

_FOREVER = 1 << 62


class KvKind(Enum):
    """Kinds of layers, by the tokens whose KV they keep."""

    FULL = "full_attention"  # the KV of every token
    LATENT = "mla_attention"  # one latent of every token
    WINDOW = "sliding_window"  # the newest `window` tokens
    CHUNK = "chunked_local_attention"  # the tokens of the current chunk of `window` tokens
    STATE = "mamba"  # one recurrent state, however long the sequence is
    RING = "ring"  # the tokens that are still to be pooled into one key of an indexer
    CHECKPOINT = "mamba_align"  # the newest recurrent state, and others at the ends of blocks to be found

    __hash__ = object.__hash__  # kinds are alike by identity; Enum's own takes as long as a rule of `KINDS`


class Found(Enum):
    """Ways to look for a cached prefix in a group (`Lookup.find`)."""

    FROM_START = "start"  # every block from the first one needed on, without a gap
    FROM_END = "end"  # the last blocks that fill what the layers read


@dataclass(frozen=True)
class GroupSpec:
    """Layers that share a block table. `block_size` is in tokens; `window` is the window's or chunk's length.

    A group of recurrent states holds `states` blocks per request; its `block_size` does not count. With
    checkpoints it holds them at most, `drafts` of them for draft tokens, and `exported` says where kernels
    export a state within a chunk: at multiples of so many tokens after its start; 0: nowhere.
    """

    kind: KvKind
    block_size: int = 16
    window: int = 0
    states: int = 1
    drafts: int = 0
    exported: int = 0

    @classmethod
    def checkpoints(cls, block_size: int, drafts: int = 0, exported: int = 0) -> GroupSpec:
        """Recurrent states whose prefixes are cached: the newest, the one before, and one exported."""
        states = 2 + drafts + (exported > 0)
        return cls(KvKind.CHECKPOINT, block_size, 2, states, drafts, exported)

    @property
    def rules(self) -> KindRules:
        """The rules of its kind."""
        return KINDS[self.kind]

    @property
    def kind_name(self) -> str:
        """The kind in vLLM's vocabulary, which calls recurrent states of both kinds, and rings, `mamba`."""
        return KvKind.STATE.value if self.kind in (KvKind.RING, KvKind.CHECKPOINT) else self.kind.value

    def skipped_tokens(self, computed: int) -> int:
        """Tokens, from the start, that no layer of the group reads once `computed` tokens are computed."""
        return KINDS[self.kind].skipped_tokens(self, computed)

    def skipped_blocks(self, computed: int) -> int:
        """Whole blocks, from the start, that no layer reads once `computed` tokens are computed."""
        return KINDS[self.kind].skipped_tokens(self, computed) // self.block_size

    def blocks_of(self, tokens: int) -> int:
        """Places that a block table of so many tokens has."""
        return KINDS[self.kind].blocks_of(self, tokens)

    def most_blocks(self, held_tokens: int, max_model_len: int | None) -> int:
        """Blocks that a request holds at most, however long it is: vLLM's cap in the admission check.

        `held_tokens`: those of the steps that are planned at a time.
        """
        longest = _FOREVER if max_model_len is None else max_model_len
        return KINDS[self.kind].most_blocks(self, held_tokens, longest)

    def check(self) -> None:
        """Errors: BadInput for a size that cannot be."""
        if self.block_size < 1:
            raise BadInput(f"a KV group has block_size {self.block_size}; it must be at least 1")
        if self.rules.windowed and self.window < 1:
            raise BadInput(f"a KV group of kind {self.kind.value} needs a window of at least 1 token")


class KindRules:
    """Rules of one kind of group, without state. As they stand: those of layers that keep every token.

    `keeps_all`: nothing leaves before the end, so what is found can only be cut. `windowed`: blocks leave
    while the request runs. `grows`: a table gets a block per `block_size` tokens; else it has a fixed number.
    `cached`: its content can be found again. `found`: the way to look for it. `offloaded`: a host tier serves
    it. `scattered`: tables may have null places anywhere, for a chunk takes a block at its end only; their
    group is a `CheckpointGroup`.

    A kind that is `windowed` needs more than the defaults. Its specifications have a `window`: nothing leaves
    before so many tokens are computed. `skipped_tokens` and `most_blocks` say what leaves and what stays;
    `window_blocks` and `reachable`, or `first_read`, what a hit has to have. `offsets` and `leaves_at_once`
    say when decoding requests give blocks back: at other offsets they are not visited. `leave_offset` and
    `offloaded` are for windows of the newest `window` tokens, which `Windows` and `OffloadedGroup` assume:
    another kind keeps None, and sets False.
    """

    keeps_all: bool = True
    windowed: bool = False
    grows: bool = True
    cached: bool = True
    offloaded: bool = True
    scattered: bool = False
    found: Found = Found.FROM_START

    def skipped_tokens(self, spec: GroupSpec, computed: int) -> int:
        """Tokens, from the start, that no layer reads once `computed` tokens are computed."""
        return 0

    def blocks_of(self, spec: GroupSpec, tokens: int) -> int:
        """Places that a block table of so many tokens has."""
        return -(-tokens // spec.block_size)

    def most_blocks(self, spec: GroupSpec, held_tokens: int, longest: int) -> int:
        """Blocks that a request holds at most, of at most `longest` tokens."""
        return _FOREVER

    def first_read(self, spec: GroupSpec, tokens: int) -> int:
        """The first block that a hit of `tokens` tokens has to have (`FROM_START`)."""
        return 0

    def window_blocks(self, spec: GroupSpec) -> int:
        """Blocks at its end that a hit has to have (`FROM_END`)."""
        return 0

    def reachable(self, spec: GroupSpec, aligned: int, *, dropping: bool) -> int:
        """How many of the last blocks of each piece of `aligned` tokens a hit can ever ask for.

        `dropping`: hits leave out their last block.
        """
        return max(aligned // spec.block_size, 1)

    def offsets(self, spec: GroupSpec, unit: int) -> set[int]:
        """Offsets in a key block of `unit` tokens at which a decoding request has a block to give back.

        Those at which it begins or fills a block are known.
        """
        return set()

    def leave_offset(self, spec: GroupSpec, unit: int) -> int | None:
        """The only such offset; None: there are several, or a block leaves as soon as it is full.

        For kinds that are `windowed`.
        """
        return None

    def leaves_at_once(self, spec: GroupSpec) -> int:
        """Blocks that a request may give back in one step beside one for each that it begins."""
        return 0


class Full(KindRules):
    """Layers that attend to the whole sequence."""


class Latent(KindRules):
    """Layers that keep one latent of every token: as `Full`, in blocks of another shape."""


class Window(KindRules):
    """Layers that read the newest `window` tokens."""

    keeps_all: bool = False
    windowed: bool = True
    found: Found = Found.FROM_END

    def skipped_tokens(self, spec: GroupSpec, computed: int) -> int:
        """Tokens before the window of the next one."""
        return max(0, computed - spec.window + 1)

    def most_blocks(self, spec: GroupSpec, held_tokens: int, longest: int) -> int:
        """Blocks of the window and the step; it may begin inside a block."""
        return -(-min(spec.window - 1 + held_tokens, longest) // spec.block_size) + 1

    def window_blocks(self, spec: GroupSpec) -> int:
        """Blocks that the next token reads."""
        return -(-(spec.window - 1) // spec.block_size)

    def reachable(self, spec: GroupSpec, aligned: int, *, dropping: bool) -> int:
        """Those of a window, and the one left out."""
        return self.window_blocks(spec) + dropping

    def offsets(self, spec: GroupSpec, unit: int) -> set[int]:
        """The one at which the window passes the end of a block."""
        return {(spec.window - 1) % unit}

    def leave_offset(self, spec: GroupSpec, unit: int) -> int | None:
        """That offset, of blocks of one key that the window exceeds."""
        return (spec.window - 1) % unit if spec.window > spec.block_size == unit else None


class Chunk(KindRules):
    """Layers that read the tokens of the current chunk of `window` tokens."""

    keeps_all: bool = False
    windowed: bool = True
    offloaded: bool = False

    def skipped_tokens(self, spec: GroupSpec, computed: int) -> int:
        """Whole chunks."""
        return computed // spec.window * spec.window

    def most_blocks(self, spec: GroupSpec, held_tokens: int, longest: int) -> int:
        """Blocks of a chunk and the step."""
        return -(-min(spec.window + held_tokens, longest) // spec.block_size)

    def first_read(self, spec: GroupSpec, tokens: int) -> int:
        """The first of the chunk; nothing before it is read."""
        return self.skipped_tokens(spec, tokens) // spec.block_size

    def offsets(self, spec: GroupSpec, unit: int) -> set[int]:
        """All, where a chunk may end anywhere; none beside the start of a block, where it ends there."""
        return set(range(unit)) if spec.window % unit else set()

    def leaves_at_once(self, spec: GroupSpec) -> int:
        """A whole chunk."""
        return self.blocks_of(spec, spec.window)


class RecurrentState(KindRules):
    """Layers with one recurrent state, however long the sequence is."""

    keeps_all: bool = False
    grows: bool = False
    cached: bool = False
    offloaded: bool = False

    def blocks_of(self, spec: GroupSpec, tokens: int) -> int:
        """The blocks of the states."""
        return min(tokens, 1) * spec.states


class Ring(RecurrentState):
    """Layers with the tokens of a key that an indexer is still pooling: as a state, in one block of them."""


class Checkpoint(Window):
    """Recurrent layers whose states can be found at the ends of blocks (vLLM's `mamba_cache_mode` align).

    The next token reads the state behind the token before it, as with a window of 2 tokens.
    """

    scattered: bool = True

    def blocks_of(self, spec: GroupSpec, tokens: int) -> int:
        """Places for the states at the ends of blocks, and for those of draft tokens."""
        return -(-tokens // spec.block_size) + spec.drafts

    def most_blocks(self, spec: GroupSpec, held_tokens: int, longest: int) -> int:
        """Those that a request holds at a time; the other places are null."""
        return spec.states

    def leave_offset(self, spec: GroupSpec, unit: int) -> int | None:
        """None: blocks that cannot be found leave too."""
        return None


KINDS: dict[KvKind, KindRules] = {
    KvKind.FULL: Full(),
    KvKind.LATENT: Latent(),
    KvKind.WINDOW: Window(),
    KvKind.CHUNK: Chunk(),
    KvKind.STATE: RecurrentState(),
    KvKind.RING: Ring(),
    KvKind.CHECKPOINT: Checkpoint(),
}
"""The rules of each kind."""


def unit_tokens(groups: tuple[GroupSpec, ...]) -> int:
    """Tokens per block key: the greatest common divisor of the groups' block sizes."""
    return gcd(*_sizes(groups)) or 1


def aligned_tokens(groups: tuple[GroupSpec, ...]) -> int:
    """Prefix hits are multiples of this many tokens: the least common multiple of the block sizes."""
    return lcm(*_sizes(groups)) or 1


def _sizes(groups: tuple[GroupSpec, ...]) -> list[int]:
    return [group.block_size for group in groups if group.rules.grows]


def check_groups(groups: tuple[GroupSpec, ...], block_size: int, *, caching: bool) -> None:
    """Errors: BadInput where the groups do not fit together, or into keys of `block_size` tokens."""
    for group in groups:
        group.check()
    if not _sizes(groups):
        raise BadInput("KV groups of recurrent states alone are not simulated; one must keep KV per token")
    if any(size % block_size for size in _sizes(groups)):
        raise BadInput(
            f"block_size {block_size} does not divide the KV groups' block sizes {_sizes(groups)}; "
            f"use {unit_tokens(groups)}"
        )
    if not caching:
        return
    if any(group.kind is KvKind.RING for group in groups):
        raise BadInput(
            "prefix caching of models whose indexer pools keys (GLM-5.3 Flash) is not simulated; "
            "turn enable_prefix_caching off"
        )
    if not all(group.rules.cached for group in groups):
        raise BadInput(
            "prefix caching of recurrent states is not simulated for this engine and version; "
            "turn enable_prefix_caching off"
        )
    chunked = [group.block_size for group in groups if group.kind is KvKind.CHUNK]
    if chunked and set(_sizes(groups)) != {chunked[0]}:
        raise BadInput("chunked local attention needs one block size in all KV groups (as in vLLM)")
