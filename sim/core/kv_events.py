"""KV events in vLLM's vocabulary: which contents can be found in the cache, for routers and monitors.

A `KvEventStream` is given to `Scheduler(kv_events=...)`. It gets an event when blocks become findable, when
one of them is given up, and when the cache is emptied, in the order and with the fields of vLLM's own events.
Hashes are those of `BlockKeys.block_key`, equal for equal contents in every group.

Source: vllm/distributed/kv_events.py and vllm/v1/core/block_pool.py (0.24).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pagecast.sim.core.group_spec import GroupSpec, KvKind
from pagecast.sim.core.request import Request

DEVICE = "GPU"  # the tiers, as vLLM names them
HOST = "CPU"


class BlockStored(NamedTuple):
    """Blocks of one request that became findable together.

    `parent_block_hash` is the content before the first place looked at; None at the start of a sequence.
    `token_count` tokens were looked at: places that no hit can ask for have no hash among `block_hashes`.
    `extra_keys`: what beside tokens tells a block from others (salt, LoRA, multimodal inputs), where known.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_count: int
    block_size: int
    medium: str = DEVICE
    lora_name: str | None = None
    extra_keys: tuple[tuple[str, ...] | None, ...] | None = None
    group_idx: int = 0
    kv_cache_spec_kind: str = KvKind.FULL.value
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(NamedTuple):
    """A block whose content was given up."""

    block_hashes: tuple[bytes, ...]
    medium: str = DEVICE
    group_idx: int = 0


class AllBlocksCleared(NamedTuple):
    """The whole cache was emptied."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class StepCounter(Protocol):
    """Has the number of the step that is being made or committed."""

    step: int


class KvEventStream:
    """The KV events of one replica since they were last taken.

    `counter` is set by the event log; `steps` has the step of each event.
    """

    def __init__(self) -> None:
        self.events: list[KvEvent] = []
        self.steps: list[int] = []
        self.counter: StepCounter | None = None
        self._contents: dict[int, tuple[bytes, int]] = {}  # of each findable block: its hash and group
        # Of blocks that can be found by other hashes too: these hashes, and the group.
        self._names: dict[int, list[tuple[bytes, int]]] = {}

    def take(self) -> list[KvEvent]:
        """The events so far, which are forgotten."""
        return self.take_with_steps()[1]

    def take_with_steps(self) -> tuple[list[int], list[KvEvent]]:
        """The steps of the events so far, and the events, which are forgotten."""
        steps = self.steps
        events = self.events
        self.steps = []
        self.events = []
        return steps, events

    def _add(self, event: KvEvent) -> None:
        self.events.append(event)
        self.steps.append(self.counter.step if self.counter else 0)

    def stored(
        self,
        request: Request,
        first: int,
        last: int,
        places: list[int],
        blocks: list[int],
        group: int,
        spec: GroupSpec,
    ) -> None:
        """Of places `first` to `last` of a request's table, these have become findable, in these blocks."""
        keys = request.keys
        units = spec.block_size // keys.block_size
        hashes = [keys.block_key((place + 1) * units - 1) for place in places]
        for content, block in zip(hashes, blocks, strict=True):
            self._contents[block] = (content, group)
        self._add(
            BlockStored(
                tuple(hashes),
                keys.block_key(first * units - 1) if first else None,
                (last - first) * spec.block_size,
                spec.block_size,
                lora_name=request.adapter or None,
                group_idx=group,
                kv_cache_spec_kind=spec.kind_name,
                kv_cache_spec_sliding_window=spec.window if spec.kind is KvKind.WINDOW else None,
            )
        )

    def named(self, request: Request, key: int, block: int, group: int, spec: GroupSpec) -> None:
        """A block can also be found by a request's key number `key`, which ends within it."""
        keys = request.keys
        content = keys.block_key(key - 1)
        self._names.setdefault(block, []).append((content, group))
        self._add(
            BlockStored(
                (content,),
                keys.block_key(key - 2) if key > 1 else None,
                keys.block_size,
                keys.block_size,
                lora_name=request.adapter or None,
                group_idx=group,
                kv_cache_spec_kind=spec.kind_name,
            )
        )

    def renamed(self, block: int) -> None:
        """A block can no longer be found by the names given to it so far (`named`)."""
        for content, group in self._names.pop(block, ()):
            self._add(BlockRemoved((content,), group_idx=group))

    def removed(self, blocks: list[int]) -> None:
        """The contents of these blocks were given up."""
        for block in blocks:
            contents = [self._contents.pop(block)] if block in self._contents else []
            for content, group in (*contents, *self._names.pop(block, ())):
                self._add(BlockRemoved((content,), group_idx=group))

    def offloaded(self, content: bytes, group: int) -> None:
        """A block of content can be loaded from host memory from now on.

        As in vLLM such an event says nothing but the content's hash, the group and the tier.
        """
        self._add(BlockStored((content,), None, 0, 0, medium=HOST, group_idx=group))

    def left_host(self, contents: list[tuple[bytes, int]]) -> None:
        """Contents gave way together in host memory: an event for each of their groups (as vLLM)."""
        by_group: dict[int, list[bytes]] = {}
        for content, group in contents:
            by_group.setdefault(group, []).append(content)
        for group, hashes in by_group.items():
            self._add(BlockRemoved(tuple(hashes), medium=HOST, group_idx=group))

    def cleared(self) -> None:
        """Every content was given up at once."""
        self._contents.clear()
        self._names.clear()
        self._add(AllBlocksCleared())
