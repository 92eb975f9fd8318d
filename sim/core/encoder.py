"""Encoder of images and the like: what a step may encode, and the cache of what was encoded.

A step encodes the items that its chunks overlap, unless they are cached. Where the budget or the cache is
used up, a chunk ends ahead of the first item that is not encoded. An entry is held while requests refer to
it, until their chunks have passed it; then it stays until its place is needed, the longest idle first.

Source: vllm/v1/core/encoder_cache_manager.py and sched/scheduler.py, `_try_schedule_encoder_inputs` and
`_free_encoder_inputs` (0.24 to 0.33).
"""

from __future__ import annotations

from dataclasses import dataclass

from pagecast.sim.core.decoders import admission_order
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.running import Running

Item = tuple[str, int]
"""An image: its name and its tokens."""


@dataclass(frozen=True)
class EncoderRules:
    """Differences between versions.

    `encodes_ahead`: an item that begins right after a chunk is encoded with it, where a drafter reads that
    token. `holds_repeats`: an item that a prompt has several times is held until the last of them is passed.
    `passes_over_unencoded`: a request that waits for the encoder is passed over, else it ends the waiting
    pass; a drafter that reads a token ahead does without the item; and all places of an item refer to it.
    """

    encodes_ahead: bool = False
    holds_repeats: bool = False
    passes_over_unencoded: bool = False


FIRST_ENCODER = EncoderRules()


class Encoder:
    """The budget and the cache of one replica, of `tokens` each.

    In a step: `begin`, then for each chunk `fit` and, if it is computed, `encode`. `release` gives up what a
    request refers to. `reads_ahead`: tokens that a drafter reads after a chunk.
    """

    def __init__(self, tokens: int, rules: EncoderRules, running: Running, reads_ahead: int) -> None:
        self.tokens = tokens
        self._rules = rules
        self._running = running
        self._ahead = reads_ahead
        self._free = self._evictable = tokens
        self._users: dict[Item, set[Request]] = {}  # of what is cached
        self._idle: dict[Item, None] = {}  # what is cached and not referred to, the longest idle first
        self._held: dict[Request, set[int]] = {}  # the items that requests refer to
        self._steps: dict[Request, list[int]] = {}  # the latest two steps with their chunks
        self._known: dict[Request, int] = {}  # how many of their tokens were known at the latest commit
        self._seen = 0  # the first step whose commit was not looked at
        self._budget = tokens
        self._encoded: dict[Request, int] = {}  # tokens that the step encodes
        self._chosen: list[int] = []
        self._repeats: list[int] = []
        self._left = tokens
        self.stalled = False  # the last `fit` left nothing

    def begin(self, step: int) -> None:
        """Starts the step of that number: first, requests give up what their committed chunks have passed."""
        self._budget = self.tokens
        self._encoded.clear()
        in_flight = self._running.in_flight
        committed = in_flight[0].step if in_flight else step
        for number in range(self._seen, committed):
            if not self._held:
                break
            for request in sorted(self._held, key=admission_order):
                self._pass(request, number, committed)
        self._seen = committed

    def _pass(self, request: Request, number: int, committed: int) -> None:
        """Gives up what a request has passed by the commit of a step, where it computed then."""
        steps = self._steps.get(request)
        if steps is None:
            return  # it only found items in the cache
        decodes = request.state is not State.PREFILL and not self._running.speculates(request)
        if number not in steps and not (decodes and number > steps[-1]):
            return
        tokens = request.computed_tokens
        if request.state is not State.PREFILL:
            pipelined = self._running.commit_lag > 0
            if self._running.speculates(request):
                tokens = (self._known[request] if pipelined else request.known_tokens) - 1
                if number >= steps[-1] or number == committed - 1:
                    self._known[request] = request.known_tokens
            elif pipelined:  # each commit from the last chunk's on yields a token
                tokens = request.known_tokens - 1 + max(number - steps[-1], 0)
            else:
                tokens = self._running.planned(request)
        margin = 0 if self._rules.passes_over_unencoded else self._ahead
        for item in sorted(self._held[request]):
            _, offset, length = request.items[item]
            if offset + length + margin <= tokens:
                self._drop(request, item)

    def fit(self, request: Request, start: int, tokens: int) -> int:
        """How many of the next `tokens` tokens after `start` can be computed; 0: none in this step."""
        self._chosen, self._repeats, self._left = [], [], self._budget
        if not tokens:
            return 0
        names: set[Item] = set()
        encoded = 0
        end = start + tokens + self._ahead
        for number, (text, offset, length) in enumerate(request.items):
            if offset + length <= start:
                continue
            name = text, length
            if offset >= end:
                break
            if name in names:
                self._repeats.append(number)
                continue
            if self._refer(request, number):
                continue
            if not self._has_room(length, encoded):
                return self._cut(start, tokens, offset)
            ahead = self._ahead if self._rules.encodes_ahead else 0
            if not min(length, start + tokens + ahead - offset) - max(start - offset, 0):
                continue
            encoded += length
            self._left -= length
            names.add(name)
            self._chosen.append(number)
        return tokens

    def _cut(self, start: int, tokens: int, offset: int) -> int:
        """The tokens ahead of an item that is not encoded."""
        if self._rules.passes_over_unencoded:
            tokens = min(tokens, max(offset - start, 0))
        else:
            tokens = max(offset - start - self._ahead, 0)
        self.stalled = not tokens
        return tokens

    def encode(self, request: Request, step: int) -> None:
        """Takes note that a chunk is computed as it was fitted last, in the step of that number."""
        if self._chosen:
            for number in self._chosen:
                name = _, length = _name(request, number)
                self._users.setdefault(name, set()).add(request)
                self._hold(request, number)
                self._free -= length
                self._evictable -= length
            self._encoded[request] = self._budget - self._left
            self._budget = self._left
            if self._rules.passes_over_unencoded:
                for number in self._repeats:
                    self._refer(request, number)
        self._steps[request] = [*self._steps.get(request, ())[-1:], step]
        self._known.setdefault(request, request.known_tokens)

    def release(self, request: Request) -> None:
        """Gives up all that a request refers to: it has ended, was preempted or finds no blocks."""
        self._budget += self._encoded.pop(request, 0)
        for number in sorted(self._held.get(request, ())):
            self._drop(request, number)
        self._steps.pop(request, None)
        self._known.pop(request, None)

    # ---- the cache

    def _refer(self, request: Request, number: int) -> bool:
        """Lets a request refer to an item, if it is cached."""
        name = _, length = _name(request, number)
        users = self._users.get(name)
        if users is None:
            return False
        if not users:
            del self._idle[name]
            self._evictable -= length
        users.add(request)
        self._hold(request, number)
        return True

    def _hold(self, request: Request, number: int) -> None:
        self._held.setdefault(request, set()).add(number)

    def _has_room(self, length: int, more: int) -> bool:
        """Whether an item can be encoded beside `more` tokens; makes room in the cache."""
        if length > self._left:
            return False
        needed = length + more
        if needed > self._free:
            if needed > self._evictable:
                return False
            while needed > self._free:
                name = next(iter(self._idle))
                self._free += name[1]
                del self._idle[name], self._users[name]
        return True

    def _drop(self, request: Request, number: int) -> None:
        held = self._held[request]
        held.discard(number)
        if not held:
            del self._held[request]
        name = _, length = _name(request, number)
        if self._rules.holds_repeats and any(_name(request, other) == name for other in held):
            return
        users = self._users.get(name)
        if not users:
            return
        users.discard(request)
        if not users:
            self._idle[name] = None
            self._evictable += length


def _name(request: Request, number: int) -> Item:
    name, _, tokens = request.items[number]
    return name, tokens
