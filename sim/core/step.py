"""One scheduler step while the rules fill it, and the only maker of a StepPlan.

Rules let running requests compute, admit waiting ones and preempt. `seal` turns the result into a plan.
"""

from __future__ import annotations

from pagecast.sim.core.decoders import admission_order
from pagecast.sim.core.drafter import DraftingRules
from pagecast.sim.core.events import EventLog
from pagecast.sim.core.lifecycle import Lifecycle
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.head_start import NO_START, HeadStart, StartKind
from pagecast.sim.core.memory.hit import Hit
from pagecast.sim.core.plan import Chunk, StepPlan, Transfer, counts_as_decode
from pagecast.sim.core.queue import Queue
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.running import Running
from pagecast.sim.core.swap_space import SwapCopy
from pagecast.sim.core.tiers.offloading import Offloading

Moved = tuple[tuple[Transfer, ...], tuple[Transfer, ...], tuple[int, ...], tuple[SwapCopy, ...]]
"""The parts of a plan that move blocks: loads, stores, stores that must be done before, and swaps."""

NOTHING_MOVED: Moved = ((), (), (), ())


class Step:
    """The step being planned. One object serves all steps of a scheduler: `begin` clears it.

    Rules read `running`, `limits`, `now`, `preempted` and `left_out`, whether requests speculate (`drafting`)
    or may be passed over (`gated`), and call the methods below. Running requests come first: those that
    decode get their token from `decode_all` or `decode`, those with chunks to come from `compute`. Then
    `end_decodes` closes the decoding requests' part, and admissions follow (`admit`, `run`, `compute`).

    A decoding request computes one token unless it is left out or preempted, whether or not a rule names it:
    `decode` has to be called only for those that begin or fill a block. Where requests speculate nobody is a
    decoding request in this sense: all go on in chunks.
    """

    def __init__(self, lifecycle: Lifecycle, rules: DraftingRules) -> None:
        memory, drafter = lifecycle.memory, lifecycle.drafter
        self.lifecycle = lifecycle
        self.limits: Limits = lifecycle.limits
        self.running: Running = lifecycle.running
        self.now = 0
        self.chunks: list[Chunk] = []
        self.preempted: list[Request] = []
        self.left_out: set[Request] = set()
        self.loads: list[Transfer] = []  # blocks to bring from host memory
        self.stores: list[Transfer] = []  # blocks to copy to host memory after the step
        self.flushed: tuple[int, ...] = ()  # stores that must be done before the step
        self.offloading = lifecycle.offloading
        self.failed_allocations = 0
        self.aborted: list[Request] = []  # until somebody takes note of them
        self._newcomers: list[Request] = []  # whose whole block tables are new in this step
        self._memory = memory
        self._writers = memory.writers
        self._queue: Queue = lifecycle.queue
        self._log: EventLog = lifecycle.log
        self._drafter = drafter
        self.drafting = drafter is not None
        self.gated = self.limits.gated
        # Whether plans may have more parts than computing and preempted requests.
        self._moves = self.offloading is not None or lifecycle.swap is not None
        self._budget = self.limits.max_num_batched_tokens
        self._lookahead = 0
        self.slots = 0  # tokens of the budget that a request takes beside those that it computes
        self._padding = 0
        self._rules = rules
        if drafter is not None:
            self._lookahead = drafter.lookahead
            if rules.slots_per_request:
                self.slots = drafter.reserved
            else:
                self._budget -= drafter.reserved * self.limits.max_num_seqs
            if rules.pads_joining:
                self._padding = drafter.padding
        self._joins_decodes = self._pads = False
        self.in_turn = False  # decoding requests take their tokens one by one, among those with chunks
        self.turns = 0  # how many have done so, where they do
        self.transfer_plans = 0  # plans so far that moved blocks alone
        self._computing = 0  # tokens of all chunks
        self._tick = 0
        self._decodes: tuple[Request, ...] = ()
        self._context = 0
        self._longest = 0

    def begin(self, now: int) -> None:
        """Starts the next step."""
        self.now = now
        self.chunks.clear()
        self.preempted.clear()
        self._computing = 0
        self._tick = self.running.tick
        if self.left_out:
            self.left_out = set()
        if self.offloading is not None:
            self.loads = []
            self.stores = []
            self.flushed = ()
            self._newcomers = []
        self._decodes = ()
        self._context = 0
        self._longest = 0

    # ---- tokens

    def budget(self) -> int:
        """Tokens left for the next admission once `end_decodes` has closed the decoding requests' part.

        The draft slots of the request about to join are taken off too.
        """
        return self._budget - len(self._decodes) - self._computing - self.slots * (len(self.chunks) + 1)

    def left(self) -> int:
        """Tokens of the budget that are left for the next running request with chunks to come."""
        decoders = self.running.decoders
        decodes = self.turns if self.in_turn else decoders.count
        if self.left_out and not self.in_turn:
            decodes -= sum([request in decoders.requests for request in self.left_out])
        return self._budget - decodes - self._computing

    def all_in_turn(self) -> list[Request]:
        """All requests that may compute, in admission order: from now on they take tokens in turn."""
        self.in_turn = True
        self.turns = 0
        running = self.running
        return sorted([*running.decoders.requests, *running.chunked], key=admission_order)

    def next_chunk(self, request: Request) -> int:
        """Tokens that a running request with chunks to come computes now; 0 where the budget is used up."""
        budget = self.left()
        if self._drafter is None:
            return max(min(request.known_tokens - request.computed_tokens, budget), 0)
        budget -= self.slots * (len(self.chunks) + 1)
        if request.in_flight_tokens and request.known_tokens + 1 >= request.total_tokens:
            return 0  # even if every draft token in flight is rejected, its last token is
        expected_tokens = request.known_tokens + request.in_flight_tokens
        longest = self.limits.max_model_len
        if longest is not None:
            budget = min(budget, longest - 1 - request.computed_tokens)
        return max(min(expected_tokens + request.drafts - request.computed_tokens, budget), 0)

    def with_lookahead(self, tokens: int) -> int:
        """For how many tokens a request needs blocks that computes its first `tokens`."""
        if not self._lookahead:
            return tokens
        self._memory.step_end = tokens
        longest = self.limits.max_model_len
        return tokens + self._lookahead if longest is None else min(tokens + self._lookahead, longest)

    @property
    def draft_step(self) -> int:
        """Tokens beyond those known that a request needs blocks for in a step of drafts; 0 without drafts."""
        drafter = self._drafter
        return 0 if drafter is None else 1 + drafter.most + drafter.lookahead

    def read_from(self, request: Request, computed: int) -> int:
        """The first position that a step in flight may still compute: blocks out of its window are free.

        `computed`: tokens that plans so far compute.
        """
        return computed if self.limits.held_batches == 1 else self.running.processed(request, computed)

    def joining_tokens(self, computed: int, tokens: int, budget: int) -> int:
        """Tokens to schedule for a request that joins with `tokens` to compute after `computed` cached ones.

        At least one is left of the budget. 0: its padded row exceeds the budget, so it waits (see
        `DraftingRules`).
        """
        if (
            not self._pads
            or tokens != 1
            or not (self._joins_decodes or (self._rules.pads_cached and computed))
        ):
            return min(tokens, budget)
        row = 1 + self._padding
        longest = self.limits.max_model_len
        if longest is not None and computed + row + self._rules.pads_cached > longest:
            return int(self._rules.pads_cached)
        return row if row <= budget else 0

    def head_start(self, request: Request, hit: Hit) -> HeadStart:
        """Tokens that a waiting request need not compute, beyond its prefix hit."""
        if request.parent is None and not request.swapped_tokens and self._memory.partial_reuse is None:
            return NO_START
        return self._memory.head_start(request, hit)

    def compute(self, request: Request, tokens: int, start: HeadStart = NO_START) -> None:
        """Lets a request compute its next `tokens` tokens; the caller checked that their blocks are free.

        `start`: what it has beyond its prefix hit, in the step that admits it.
        """
        end = request.computed_tokens + tokens
        drafts = 0
        if self._drafter is None:
            self._memory.grow(request, end)
        else:
            self._memory.grow(request, self.with_lookahead(end))
            drafts = max(end - request.known_tokens - request.in_flight_tokens, 0)
            request.drafts = 0
        self._computing += tokens
        self.chunks.append(self.lifecycle.compute(request, tokens, start, drafts=drafts))

    def computes(self, request: Request) -> bool:
        """Whether a request has a chunk in this step."""
        return any(chunk.request is request for chunk in self.chunks)

    # ---- decoding requests

    def crossing(self) -> dict[Request, None]:
        """The decoding requests that need a block in this step, in admission order."""
        return self.running.decoders.crossing(self.running.tick)

    def filling(self) -> dict[Request, None]:
        """The decoding requests that fill a block in this step, in admission order."""
        return self.running.decoders.filling(self.running.tick)

    def decode_all(self) -> bool:
        """Allocates for all decoding requests that begin a block in this step, and publishes full blocks.

        Who computes a token is settled by `end_decodes`: all that were not left out.

        False: there are not enough free blocks, and nothing was done.
        """
        running = self.running
        crossing = running.decoders.crossing(running.tick)
        if crossing and len(crossing) * self._memory.crossing_blocks > self._memory.free_blocks:
            return False
        # Full blocks are published when somebody looks for them, except where order counts: of requests that
        # write the same, or compute as a prompt what another generates, the first to fill a block is found. A
        # log and keys per block need them published now, too.
        writers = self._writers
        if not (
            running.decoders.explicit
            or writers.rivals
            or self._log.events is not None
            or (running.chunked and writers.quoted(running.chunked))
        ):
            if crossing:
                self._memory.grow_many(list(crossing), len(crossing))
        else:
            at_once = not running.commit_lag or running.knows_ahead()
            filling = self.filling() if at_once else {}
            if crossing or filling:
                for request in sorted({**crossing, **filling}, key=admission_order):
                    self.decode(request, begins=request in crossing, fills=request in filling)
            if running.commit_lag == 2:
                # Pipeline depth 1 and `at_commit`: blocks filled two steps ago are committed now. A prompt is
                # published by its own commit.
                for request in running.decoders.crossing(running.tick - 1):
                    committed = running.planned(request) - 1
                    if committed >= request.known_tokens:
                        self._memory.publish(request, committed)
        if running.knows_ahead():
            self.publish_known()
        return True

    def publish_known(self) -> None:
        """Publishes the blocks that this step fills, of requests whose last token is known already.

        With plans in flight a block is published a step after it is filled, for its last token is known only
        then. Requests without a token in flight (left out of the last plan, or nothing flies) need not wait.
        """
        running = self.running
        for request in self.filling():
            if running.knows(request):
                self._memory.publish(request, running.planned(request) + 1)

    def publish_behind(self) -> None:
        """Publishes what requests without a token in flight have filled, ahead of all turns.

        Their last token became known with a commit, and no plan in flight will publish it.
        """
        running = self.running
        for request in running.decoders.crossing(running.tick):
            if running.knows(request):
                self._memory.publish(request, running.planned(request))

    def decode(self, request: Request, *, begins: bool, fills: bool) -> None:
        """Takes a block for a decoding request whose token begins one, and publishes one that it fills."""
        running = self.running
        computed = running.planned(request)
        if begins:
            self._memory.grow(request, computed + 1)
            if running.commit_lag == 1:  # the block before is full since the last step
                self._memory.publish(request, computed)
        if fills and running.publishes_at_once(request):
            self._memory.publish(request, computed + 1)

    def leave_out(self, requests: list[Request]) -> None:
        """Lets decoding requests sit this step out: they stay running and keep their blocks."""
        self.left_out.update(requests)

    def end_decodes(self) -> None:
        """Closes the decoding requests' part of the step: all that were not left out compute a token."""
        running = self.running
        decoders = running.decoders
        tick = running.tick
        if self._padding:
            self._joins_decodes = bool(self.chunks)
            self._pads = not any(chunk.request.state is State.PREFILL for chunk in self.chunks)
        if self.left_out:
            on_time = [request for request in decoders.requests if request not in self.left_out]
            if not on_time and not self.chunks:
                return
            contexts = [running.planned(request) for request in on_time]
            self._decodes = tuple(on_time)
            self._context = sum(contexts)
            self._longest = max(contexts, default=0)
            for request in self.left_out:
                if request.state is State.DECODE and request in decoders.requests:
                    decoders.delay(request)
        else:
            self._decodes = decoders.snapshot()
            self._context, self._longest = decoders.contexts(tick)
        running.tick = tick + 1

    @property
    def number(self) -> int:
        """The number of the plan being made."""
        return self._log.step

    @property
    def executed(self) -> int:
        """Steps that computed so far."""
        return self._log.step - self.transfer_plans

    def bound(self, tokens: int) -> None:
        """Lowers the token budget of all steps to at most `tokens`."""
        self._budget = min(self._budget, tokens)

    def computing(self) -> list[Request]:
        """The requests that compute in this step; to be asked after `end_decodes`."""
        return [*self._decodes, *(chunk.request for chunk in self.chunks)]

    # ---- requests come and go

    def admit(self, request: Request, hit: Hit, start: HeadStart = NO_START) -> None:
        """Gives a waiting request its cached prefix. `run` has to follow.

        `start`: what it has beyond the hit (see `compute`). A block that becomes its own is taken at once:
        by the time of its chunk others may have it.
        """
        self.lifecycle.admit(request, hit, self.now, start.tokens)
        if start.kind is StartKind.TAKE:
            reuse = self._memory.partial_reuse
            assert reuse is not None and start.extent is not None
            reuse.take_over(request, start.extent)
        if self.offloading is not None:
            self._newcomers.append(request)

    def load(self, request: Request, hit: Hit, tokens: int, room_tokens: int) -> None:
        """Lets a waiting request load `tokens` tokens beyond its hit; it stays in the queue meanwhile.

        It gets blocks for `room_tokens`.
        """
        self.loads.append(self.lifecycle.load(request, hit, tokens, room_tokens))
        self._newcomers.append(request)

    def admit_loaded(self, request: Request) -> None:
        """Lets a waiting request go on after what a load has brought. `run` has to follow."""
        self.lifecycle.admit_loaded(request, self.now)
        self._newcomers.append(request)

    def run(self, request: Request) -> None:
        """Moves an admitted request from the queue to the running ones.

        vLLM's mix calls it at once, nano-vLLM's with the last chunk of the prompt.
        """
        self._queue.remove(request)
        self.running.requests[request] = None

    def refuse(self, request: Request, hit: Hit) -> None:
        """Takes note that the first waiting request can't be admitted now.

        The queue is blocked, and nobody asks again until a request comes or goes, unless the request's hit or
        need may change before (`Memory.refusal_may_change`).
        """
        self.failed_allocations += 1
        running = self.running
        # The hit may grow by the output of requests whose prompts this step completes, and by prompts in
        # flight where their commit publishes them.
        coming = bool(running.joining)
        if running.at_commit and not coming:
            coming = any(plan.chunks for plan in running.in_flight)
        self._queue.blocked = not self._memory.refusal_may_change(request, hit, coming=coming)

    def abort(self, request: Request, reason: str) -> None:
        """Ends a request that can't go on: as cancelled, or as rejected where it was never admitted."""
        request.reason = reason
        if request.state is State.WAITING and not request.preemptions:
            self.lifecycle.reject(request, self.now)
        else:
            self.lifecycle.cancel(request.id, self.now)
        self.aborted.append(request)

    def preempt(self, request: Request, *, had_turn: bool = False) -> None:
        """Takes a running request's blocks and queues it again.

        `had_turn`: it had its token, or its chunk, in this step already, and gives it back.
        """
        if self.in_turn and had_turn and request.state is State.DECODE and not self.drafting:
            self.turns -= 1
        self.lifecycle.preempt(request, had_turn=had_turn)
        self.left_out.discard(request)
        self.preempted.append(request)
        for number, chunk in enumerate(self.chunks):
            if chunk.request is request:
                del self.chunks[number]
                self._computing -= chunk.tokens
                break

    # ---- the plan

    def seal(self) -> StepPlan | None:
        """Makes the plan of what the rules decided; None if there is nothing to compute or to transfer.

        A plan whose `computes` is False only moves blocks: it is executed, and not committed.
        """
        decodes = self._decodes
        n = len(decodes)
        chunks = self.chunks
        if self.offloading is not None:
            self._offload(self.offloading)
            if not n and not chunks and (self.loads or self.stores or self.flushed):
                return self._seal_transfers()
        if not n and not chunks:
            return None
        context = self._context
        longest = self._longest
        prefill = []
        for chunk in chunks:
            tokens = chunk.tokens
            start = chunk.start
            if counts_as_decode(tokens):
                n += 1
                context += start
                longest = max(longest, start)
            else:
                prefill.append((tokens, start))
        lifecycle = self.lifecycle
        running = self.running
        loads, stores, flushed, swaps = self._moved() if self._moves else NOTHING_MOVED
        number = self._log.step
        plan = StepPlan._make(  # half the time of a call
            (
                number,
                1,
                self._tick,
                n,
                context,
                longest,
                tuple(prefill),
                len(running.requests),
                self._queue.size,
                self._memory.used_blocks,
                tuple(chunks),
                decodes,
                tuple(self.preempted),
                loads,
                stores,
                flushed,
                swaps,
            )
        )
        if self.left_out or running.left_out:
            left_out = [request for request in self.left_out if request.state is State.DECODE]
            running.left_out = frozenset(left_out)
        self._log.step = number + 1
        at_end = running.decoders.pop_ended(running.tick - 1)
        if at_end:
            lifecycle.drain(at_end, number)
        if running.joining:
            for request in running.joining:
                lifecycle.begin_decode(request)
            running.joining.clear()
        if self._drafter is not None:
            lifecycle.await_tokens(plan)
        running.in_flight.append(plan)
        return plan

    def _moved(self) -> Moved:
        """The blocks that move with this step."""
        swap = self.lifecycle.swap
        swaps = () if swap is None else swap.take_swaps()
        return tuple(self.loads), tuple(self.stores), self.flushed, swaps

    def _offload(self, offloading: Offloading) -> None:
        preempted = bool(self.preempted)
        self.stores = offloading.stores(self.chunks, self._decodes, self._newcomers, preempted=preempted)
        self.flushed = offloading.take_flushed()

    def _seal_transfers(self) -> StepPlan:
        """A plan of transfers alone: nobody commits it."""
        used = self._memory.used_blocks
        running, waiting = len(self.running.requests), self._queue.size
        preempted, loads = tuple(self.preempted), tuple(self.loads)
        plan = StepPlan(
            self._log.step, 1, self._tick, 0, 0, 0, (), running, waiting, used, (), (), preempted, loads
        )
        self._log.step += 1
        self.transfer_plans += 1
        return plan._replace(stores=tuple(self.stores), flushed=self.flushed)

    def seal_stretch(self, steps: int, count: int, context: int, longest: int, crossings: int) -> StepPlan:
        """Makes the plan of `steps` decode steps in a row.

        `count` requests have `context` tokens of context at the first step, the longest of them `longest`.
        The stretch will take `crossings` blocks. Unlike `seal` it changes nothing: that is left to
        `Stride.settle`.
        """
        running = self.running
        return StepPlan._make(  # half the time of a call
            (
                self._log.step,
                steps,
                running.tick,
                count,
                context,
                longest,
                (),
                len(running.requests),
                self._queue.size,
                self._memory.used_blocks + crossings,
                (),
                running.decoders.snapshot(),
                (),
                (),
                (),
                (),
                (),
            )
        )
