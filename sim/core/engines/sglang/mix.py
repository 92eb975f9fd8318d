"""SGLang's step: a batch of prompts if one can be made, else a decode of all running requests.

One prompt at a time may be cut off and go on in later batches. Requests whose prompts are done join the
running ones a turn later, when the batch they were in is merged. Out of memory, running requests are
retracted: they lose all and wait again, at the end of the queue.

Once a request was turned away for lack of memory or places, the queue is not looked at until one leaves, or
until a batch with a cut-off prompt is merged (`full`). Ceilings of tenants are not SGLang's: a tenant at its
ceiling is passed over.

Source: SGLang 0.5.23, srt/managers/scheduler.py, `get_next_batch_to_run`, and schedule_batch.py.
"""

from __future__ import annotations

from collections.abc import Callable

from pagecast.sim.core.engines.sglang.inbox import Inbox
from pagecast.sim.core.engines.sglang.memory import RadixMemory
from pagecast.sim.core.engines.sglang.new_token_ratio import RETRACT_STEPS, NewTokenRatio
from pagecast.sim.core.engines.sglang.order import SglangFcfs
from pagecast.sim.core.engines.sglang.prefill_adder import AddVerdict, Headroom, PrefillAdder
from pagecast.sim.core.engines.sglang.settings import SglangSettings
from pagecast.sim.core.memory.hit import Hit
from pagecast.sim.core.memory.memory import Memory
from pagecast.sim.core.queue import Queue
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.rules.candidates import TenantCeilings
from pagecast.sim.core.step import Step

NEVER_ADMITTED = "is not admitted by SGLang's rules even alone"
NEVER_AGAIN = "never fits again after it was retracted"


class SglangMix:
    """Batches of prompts and of decodes in turn, over its own memory and queue.

    `batch` are the running requests in SGLang's order, `merging` those of the last batch of prompts, which
    join it in the next turn, `unfinished` is the request whose prompt is cut off.
    """

    def __init__(
        self, settings: SglangSettings, memory: RadixMemory, order: SglangFcfs, inbox: Inbox | None = None
    ) -> None:
        self.settings = settings
        self.memory = memory
        self.inbox = inbox
        self.order = order
        self.batch: list[Request] = []
        self.merging: list[Request] | None = None
        self.unfinished: Request | None = None
        self.full = False
        self.ratio = NewTokenRatio(settings.schedule_conservativeness)
        self._numbered = 0

    def fill(self, step: Step, memory: Memory, queue: Queue) -> None:
        """Makes a batch of prompts, or else of decodes."""
        if self.inbox is not None:
            self._receive(step, queue, self.inbox)
        self._merge(step)
        if self._prefill(step, queue):
            if self.inbox is not None:
                self.inbox.prompts = True
            return
        if self.batch:
            self._decode(step)
        elif not step.lifecycle.requests:
            if not step.running.in_flight:  # else SGLang has a result to process, and is not idle yet
                self.ratio.reset()
        elif not step.running.requests and not step.running.in_flight and not self.memory.used_blocks:
            self._abort_first(step)

    def _receive(self, step: Step, queue: Queue, inbox: Inbox) -> None:
        """Begins a turn. Where nothing is left to compute, turns take no time until one receives."""
        inbox.turn()
        if inbox.requests and not queue.size and not step.running.requests and not step.running.in_flight:
            if not step.limits.pipeline_depth:
                self.ratio.reset()  # an idle turn comes first, as the last result is processed already
            inbox.receive()

    def is_quiet(self, queue: Queue, decoding: int) -> bool:
        """Whether the next turns only decode: nobody joins, leaves or may be admitted.

        `decoding`: how many requests decode. It is fewer than run where the last token of some is in flight.
        """
        waits = queue.size and not self.full
        return not waits and self.merging is None and self.unfinished is None and len(self.batch) == decoding

    def _abort_first(self, step: Step) -> None:
        """Ends the request that is not admitted though nothing else uses memory: SGLang would wait for ever.

        It fitted when it was submitted, but where the whole output is certain SGLang admits nobody who would
        leave no token free. After a retraction its generated tokens may need a page more.
        """
        waiting = self.order.arrange(self.memory)
        if waiting:
            step.abort(waiting[0], NEVER_AGAIN if waiting[0].preemptions else NEVER_ADMITTED)

    # ---- merging

    def _merge(self, step: Step) -> None:
        """Joins the requests of the last batch of prompts; publishes what is done of one that was cut off."""
        running = step.running.requests
        unfinished = self.unfinished
        if unfinished is not None and unfinished not in running:
            self.unfinished = unfinished = None  # it was cancelled
        if unfinished is not None:
            self.memory.publish(unfinished, unfinished.computed_tokens)
        merging, self.merging = self.merging, None
        if merging is not None:
            joining = [each for each in merging if each in running and each is not unfinished]
            if len(joining) < len(merging):
                self.full = False
            if joining and not self.batch:
                self.full = False
            if joining:
                self._number(joining)
                self.batch = self.batch + joining
        batch = [request for request in self.batch if request in running]
        if len(batch) < len(self.batch):
            self.batch = batch
            self.full = False

    def _number(self, requests: list[Request]) -> None:
        """Puts requests after all others: in this order they end where several end in one step."""
        for request in requests:
            self._numbered += 1
            request.order = self._numbered

    # ---- prompts

    def _prefill(self, step: Step, queue: Queue) -> bool:
        """Makes a batch of prompts. False: there is nothing to put in one."""
        if not self.batch:
            self.full = False
        if (self.full or not queue.size) and self.unfinished is None:
            return False
        places = step.limits.max_num_seqs - len(self.batch)
        if places <= 0 and self.unfinished is None:
            self.full = True
            return False
        waiting = self.order.arrange(self.memory)
        adder = self._adder(step)
        if self.unfinished is not None and not adder.add_rest(self.unfinished):
            return False
        self._admit(step, adder, waiting, places)
        if not adder.added:
            return False
        self.unfinished = adder.unfinished
        self._compute(step, adder)
        self._mix_in(step, adder)
        return True

    def _adder(self, step: Step) -> PrefillAdder:
        settings = self.settings
        generated = _generated(step)
        running = [(request, generated(request)) for request in self.batch]
        return PrefillAdder(
            self.memory,
            Headroom(self.ratio.current, ignore_eos=settings.ignore_eos),
            running,
            max_prefill_tokens=settings.max_prefill_tokens,
            chunk_tokens=step.limits.max_num_batched_tokens if settings.chunked_prefill else None,
            mixed=len(self.batch) if settings.mixed_chunk else 0,
            ignore_eos=settings.ignore_eos,
        )

    def _admit(self, step: Step, adder: PrefillAdder, waiting: list[Request], places: int) -> None:
        tenants = step.limits.tenants
        ceilings = TenantCeilings(step) if tenants is not None else None
        for request in waiting:
            if adder.verdict() is AddVerdict.OTHER:
                return
            if len(adder.added) >= places:
                self.full = True
            if self.full:
                return
            if ceilings is not None and not ceilings.opens(request):
                continue
            verdict = adder.add(request)  # on the next prompt: this one may have been added all the same
            if verdict is not AddVerdict.CONTINUE:
                if verdict is AddVerdict.NO_TOKEN:
                    step.failed_allocations += 1
                    self.full = bool(adder.added) or bool(self.batch)
                return
            if ceilings is not None:
                ceilings.enter(request)

    def _compute(self, step: Step, adder: PrefillAdder) -> None:
        size = self.memory.block_size
        for prompt in adder.added:
            if prompt.match is not None:
                step.admit(prompt.request, Hit(prompt.there))
                step.run(prompt.request)
        tokens = sum([prompt.tokens for prompt in adder.added])
        # With pages of several tokens SGLang makes room for one more per request.
        self.memory.make_room(tokens if size == 1 else tokens + len(adder.added) * size)
        for prompt in adder.added:
            step.compute(prompt.request, prompt.tokens)
        self.merging = [prompt.request for prompt in adder.added]

    def _mix_in(self, step: Step, adder: PrefillAdder) -> None:
        """Lets the running requests decode beside the prompts, where their memory is free."""
        if not self.settings.mixed_chunk or not self.batch:
            return
        self._leave_out_ending()
        if not self.batch or not self.memory.make_room(self._next_tokens(step)):
            return
        self._take_tokens(step)
        assert self.merging is not None
        self.merging += self.batch
        self.batch = []

    # ---- decodes

    def _decode(self, step: Step) -> None:
        before = len(self.batch)
        ending = self._leave_out_ending()
        if not self.batch:
            return
        short = not self.memory.make_room(self._next_tokens(step))
        if short and ending:
            self.full = False  # the memory of those that end is free in a moment
            return
        if short:
            step.failed_allocations += 1
            self._retract(step)
        else:
            self.ratio.decode()
        if len(self.batch) < before:
            self.full = False
        if self.batch:
            self._take_tokens(step)

    def _leave_out_ending(self) -> bool:
        """Takes out the requests whose last token is in flight. Returns whether there were any."""
        staying = [request for request in self.batch if request.state is not State.DRAINING]
        ending = len(staying) < len(self.batch)
        if ending:
            self.batch = staying
            self.full = False
        return ending

    def _take_tokens(self, step: Step) -> None:
        """Takes a page for each request that begins one."""
        size = self.memory.block_size
        count = len(self.batch)
        self.memory.make_room(count * size)  # SGLang wants a free page for each
        self.memory.take(len(step.crossing()))
        step.end_decodes()

    def _next_tokens(self, step: Step) -> int:
        """Tokens of the pages that decoding requests begin in this step."""
        return len(step.crossing()) * self.memory.block_size

    def _retract(self, step: Step) -> None:
        """Retracts running requests until the others can decode, the one with the fewest generated first.

        Of equals the one with the longest prompt goes, and of these the last of the batch. One stays; where
        it cannot go on alone, it is aborted.
        """
        generated = _generated(step)
        batch = sorted(
            self.batch, key=lambda request: (generated(request), -request.prompt_tokens), reverse=True
        )
        retracted: list[Request] = []
        while len(batch) > 1 and (not retracted or not self.memory.make_room(self._next_tokens(step))):
            victim = batch.pop()
            step.preempt(victim)
            retracted.append(victim)
            self.memory.make_room(len(batch) * RETRACT_STEPS)
        if len(batch) == 1 and not self.memory.make_room(self._next_tokens(step)):
            step.abort(batch.pop(), "out of KV memory after all others were retracted")
        self._number(batch)
        self.batch = batch
        longest = sum([request.max_tokens for request in batch])
        self.ratio.retract(sum([generated(request) for request in batch]), len(batch), longest)


def _generated(step: Step) -> Callable[[Request], int]:
    """Tells how many tokens a running request is known to have generated: not that of a plan in flight."""
    running = step.running
    flying: set[Request] = set()
    for plan in running.in_flight:
        flying.update(plan.decodes)
        flying.update([chunk.request for chunk in plan.chunks if chunk.last])
    return lambda request: running.planned(request) + 1 - request.prompt_tokens - (request in flying)
