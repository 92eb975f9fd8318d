"""Life cycle: what can happen to a request, and what changes with it in queue, memory and running set."""

from __future__ import annotations

from collections.abc import Iterable

from pagecast.sim.core.decoders import admission_order, arrival_order
from pagecast.sim.core.drafter import RESERVED, Drafter, DraftingRules
from pagecast.sim.core.encoder import Encoder
from pagecast.sim.core.events import EventKind, EventLog
from pagecast.sim.core.intake import Intake
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.head_start import NO_START, HeadStart, StartKind
from pagecast.sim.core.memory.hit import Hit
from pagecast.sim.core.memory.memory import Memory
from pagecast.sim.core.plan import DONE, Chunk, Outcome, StepPlan, Transfer
from pagecast.sim.core.queue import Queue
from pagecast.sim.core.request import NEVER, Request, State
from pagecast.sim.core.running import Running
from pagecast.sim.core.swap_space import SwapSpace
from pagecast.sim.core.tiers.offloading import Offloading


class Lifecycle:
    """Moves requests from state to state. `requests` are the live ones by id.

    The states and who moves a request on:

        WAITING --admit--> PREFILL --begin_decode--> DECODE --drain--> DRAINING --finish--> FINISHED
           ^                  |                         |                  |
           +-----preempt------+-------------------------+------------------+      cancel, fail: from any

    A request leaves PREFILL with the plan that computes the last of its prompt, which also yields its first
    token; where that is its only one, it goes to DRAINING at once. DRAINING: its last token is planned, but
    not committed. A request that stops early finishes from DECODE, or from WAITING where it was preempted
    meanwhile. With a drafter it finishes from DECODE too, since only a commit tells how far it is: it goes
    on in chunks and publishes at once what is known to be right. A failed request ends as a cancelled one,
    with a `reason`.

    With a host tier (`offloading`) a request may go from WAITING to LOADING: it stays in the queue and holds
    the blocks that a load fills. From there it is admitted as any other; where the load failed and it has no
    prefix hit either, it is WAITING again.
    """

    def __init__(
        self,
        limits: Limits,
        memory: Memory,
        queue: Queue,
        running: Running,
        log: EventLog,
        drafter: Drafter | None = None,
        offloading: Offloading | None = None,
        *,
        drafting: DraftingRules = RESERVED,
    ) -> None:
        self.limits = limits
        self.memory = memory
        self.queue = queue
        self.running = running
        self.log = log
        self.requests: dict[str, Request] = {}
        self.preemptions = 0
        self.intake: Intake | None = None
        self.clips_max_tokens = False  # those beyond the model's length are lowered, not refused
        self.drafter = drafter
        self.swap = SwapSpace(limits.swap_blocks, limits.block_size) if limits.swap_blocks else None
        self.offloading = offloading
        self.encoder: Encoder | None = None
        self._trims_computed = drafting.trims_computed
        # Where requests speculate.
        self._publishes_output = drafting.publishes_output or limits.pipeline_depth > 0
        self._admissions = 0
        self._surely_fits = self._never_refused()
        self._leaves = bool(limits.groups)  # blocks may leave a window

    # ---- coming

    def submit(self, request: Request) -> bool:
        """Queues a request; False: it was rejected, and `request.reason` says why. Errors: ValueError."""
        prompt = request.prompt_tokens
        output = request.output_tokens
        if prompt < 1 or output < 1:
            raise ValueError(f"request {request.id}: prompt and output must have at least one token")
        if request.id in self.requests:
            raise ValueError(f"request {request.id} is live already; ids may repeat only after the end")
        reason = "" if prompt + output <= self._surely_fits else self._never_fits(request)
        if not reason and request.max_tokens > output:
            reason = self._bound_output(request)
        if not reason and self.intake is not None:
            reason = self.intake.refusal(request, self.running, self.queue)
        if reason:
            request.state = State.REJECTED
            request.reason = reason
            self.log.add(EventKind.REJECTED, request.id, detail=reason)
            return False
        request.state = State.WAITING
        request.queue_depth = self.queue.size
        self.requests[request.id] = request
        self._enqueue(request)
        return True

    def _enqueue(self, request: Request) -> None:
        self.queue.add(request)

    @property
    def coming(self) -> int:
        """Live requests that are neither running nor in the queue yet."""
        return 0

    def _bound_output(self, request: Request) -> str:
        """Lowers `max_tokens` to what can ever be held; why it is refused, where the engine does that."""
        longest = self.limits.max_model_len
        if longest is not None and request.most_tokens > longest and not self.clips_max_tokens:
            return (
                f"{request.prompt_tokens} prompt + {request.max_tokens} max_tokens exceed "
                f"max_model_len {longest}"
            )
        request.max_tokens = max(min(request.max_tokens, self._most_output(request)), request.output_tokens)
        return ""

    def _most_output(self, request: Request) -> int:
        """The longest output that a replica can hold beside a prompt."""
        limits = self.limits
        pool = limits.num_blocks // self.memory.crossing_blocks * limits.block_size
        longest = pool if limits.max_model_len is None else min(pool, limits.max_model_len)
        return longest - request.prompt_tokens

    def _never_refused(self) -> int:
        """The tokens of a request, prompt and output, up to which `_never_fits` has nothing to say."""
        lookahead = 0 if self.drafter is None else self.drafter.lookahead
        return self.limits.surely_fits(self.memory.crossing_blocks, lookahead)

    def _never_fits(self, request: Request) -> str:
        """Why a request can never be served; empty where it can."""
        return self.limits.refusal(
            request.prompt_tokens,
            request.output_tokens,
            self.memory.crossing_blocks,
            self.drafter.lookahead if self.drafter is not None else 0,
            tenant=request.tenant,
        )

    def admit(self, request: Request, hit: Hit, now: int, head_start_tokens: int = 0) -> None:
        """Gives a waiting request its cached prefix and starts its prefill.

        `head_start_tokens`: tokens beyond the hit that need not be computed (see `compute`).
        """
        self._start(request, hit.tokens + head_start_tokens, 0, now)
        if hit.tokens:
            self.memory.claim(request, hit)

    def _start(self, request: Request, tokens: int, external: int, now: int) -> None:
        """Starts a prefill after `tokens` cached tokens, of which `external` came from a lower tier."""
        request.state = State.PREFILL
        self._admissions += 1
        request.order = self._admissions
        request.computed_tokens = tokens
        request.reused_tokens += tokens
        if request.first_token_ns == NEVER:
            request.hit_tokens = tokens
        if request.cached_tokens == NEVER:
            request.cached_tokens = tokens
            request.admitted_ns = now
            if external:
                request.external_tokens = external
                request.disk_tokens = min(request.last_disk, external)
        elif tokens < request.lost_tokens:
            request.recomputed_tokens += request.lost_tokens - tokens
        if self.intake is not None:
            self.intake.admitted(request, tokens, now)
        if self.log.events is not None:
            detail = f"cached={tokens}"
            if external:
                detail += f" external={external}"
            self.log.add(EventKind.ADMITTED, request.id, detail=detail)

    def load(self, request: Request, hit: Hit, tokens: int, room_tokens: int) -> Transfer:
        """Begins to load what follows a waiting request's hit; it gets blocks for `room_tokens`."""
        assert self.offloading is not None
        request.state = State.LOADING
        request.computed_tokens = hit.tokens + tokens
        request.last_external = tokens
        self.memory.claim(request, hit._replace(tokens=request.computed_tokens))
        self.offloading.memory.grow_for_load(request, request.computed_tokens)
        self.memory.grow(request, max(room_tokens, request.computed_tokens))
        return self.offloading.load(request, tokens)

    def receive(self, request: Request) -> None:
        """Takes note of the end of a request's load: what it brought can be found from now on.

        The last known token is always left to compute.
        """
        assert self.offloading is not None
        if self.offloading.take_failed(request):
            request.last_external = 0
            if not request.computed_tokens:
                # It goes on to count as one that holds blocks (as vLLM).
                self.memory.release(request)
                request.state = State.WAITING
                return
            self.memory.publish(request, request.computed_tokens)
            return
        if not self.offloading.take_arrived(request):
            return
        self.memory.publish(request, request.computed_tokens)
        if request.computed_tokens == request.known_tokens:
            request.computed_tokens -= 1
            request.last_external -= 1

    def admit_loaded(self, request: Request, now: int) -> None:
        """Starts the prefill of a request that a load has brought tokens to, after its prefix hit."""
        assert self.offloading is not None
        self.offloading.end_holding(request)
        self._start(request, request.computed_tokens, request.last_external, now)

    # ---- computing

    def compute(
        self, request: Request, tokens: int, beyond: HeadStart = NO_START, *, drafts: int = 0
    ) -> Chunk:
        """Plans a chunk of a request's next tokens; its blocks are allocated already.

        `beyond`: what it has beyond its prefix hit, where this is its first chunk.
        """
        running = self.running
        start = request.computed_tokens
        copied = self._begin(request, start, beyond) if beyond.tokens else None
        if self.swap is not None and request.swapped_tokens:
            self.swap.drop(request)  # all of it was still cached
        request.computed_tokens = end = start + tokens
        known_tokens = request.known_tokens
        last = end >= known_tokens
        if not running.at_commit:
            self.memory.publish(request, known_tokens if last else end)
        if request.state is State.PREFILL:
            if last:
                if running.chunked:
                    running.chunked.pop(request, None)
                running.joining[request] = None
            else:
                running.chunked[request] = None
        padded = drafts > 0 and request.state is State.PREFILL
        return Chunk(request, start, tokens, last, copied, drafts, padded)

    def _begin(self, request: Request, start: int, beyond: HeadStart) -> int | None:
        """Takes up a head start. Returns the block to be copied over the one in which the chunk begins."""
        if beyond.kind is StartKind.SWAP:
            assert self.swap is not None
            self.swap.bring_back(request, beyond.tokens)
            self.log.add(EventKind.SWAPPED_IN, request.id, detail=f"tokens={beyond.tokens}")
            return None
        number = start // self.limits.block_size
        own = self.memory.blocks(request)[number]
        if beyond.kind is StartKind.FORK:
            assert request.parent is not None
            copied = self.memory.blocks(request.parent)[number]
            self.log.add(EventKind.COPIED, request.id, [copied, own])
            return copied
        return self._begin_partly(request, own, beyond)

    def _begin_partly(self, request: Request, own: int, beyond: HeadStart) -> int | None:
        """Goes on in a block that matches partly: a copy of it, or the block itself."""
        partial = self.memory.partial_reuse
        assert partial is not None
        partial.tokens += beyond.tokens
        if request.preemptions == 0:
            request.partial_tokens = beyond.tokens
        detail = f"partial={beyond.tokens}"
        if beyond.source == own:
            # Taken over, or evicted for the request itself.
            partial.taken_blocks += 1
            self.log.add(EventKind.REUSED, request.id, [own], detail)
            return None
        # Even if the block was evicted meanwhile: it is copied before anybody writes to it.
        partial.copied_blocks += 1
        self.log.add(EventKind.COPIED, request.id, [beyond.source, own], detail)
        return beyond.source

    def begin_decode(self, request: Request) -> None:
        """Moves a request on to decode: the plan just made computes the last of its prompt.

        That plan yields the first token of what is left, and the last token is never computed, so the
        request decodes for one tick less than it has tokens to generate.
        """
        running = self.running
        if self.queue.forks.count:
            self.queue.release_forks(request)
        if self.drafter is not None:
            request.state = State.DECODE
            running.chunked[request] = None
            return
        known_tokens = request.known_tokens
        ticks = request.prompt_tokens + request.output_tokens - known_tokens - 1
        if not ticks:
            request.state = State.DRAINING
            # `Step.seal` has counted the plan already: its number is one less.
            ending = running.draining.setdefault(self.log.step - 1, [])
            ending.append(request)
            ending.sort(key=admission_order)  # prompts may take turns among decoding requests
            return
        request.state = State.DECODE
        self.memory.generate(request)
        running.begin_decode(request, ticks, self.limits.max_num_seqs)

    def await_tokens(self, plan: StepPlan) -> None:
        """Counts the tokens that a plan may yield to requests that speculate (`Request.in_flight_tokens`).

        At pipeline depth 1 it also asks the drafter: the next plan leaves room for the draft tokens before
        they are known. At depth 0 the commit asks.
        """
        assert self.drafter is not None
        ahead = self.limits.pipeline_depth > 0
        for chunk in plan.chunks:
            if chunk.last:
                request = chunk.request
                request.in_flight_tokens += 1 + chunk.drafts
                if ahead:
                    request.drafts = self.drafter.draft(request, len(plan.chunks))

    def drain(self, requests: list[Request], last_step: int) -> None:
        """Moves decoding requests on whose last token is planned: they end with that step's commit."""
        for request in requests:
            request.state = State.DRAINING
            request.computed_tokens = request.prompt_tokens + request.output_tokens - 1
        self.running.draining[last_step] = requests

    # ---- going back

    def preempt(self, request: Request, *, had_turn: bool = False) -> None:
        """Takes a running request's blocks away and queues it again, to be computed anew.

        `had_turn`: it had its turn in the step being made, and gives its token back. In that turn it
        published all blocks whose content was known.
        """
        self.preemptions += 1
        request.preemptions += 1
        running = self.running
        computed = running.planned(request)
        swappable = 0 if self.swap is None else running.committed(request)
        if self.drafter is not None:
            computed = min(computed, request.known_tokens)
            request.drafts = 0
        elif running.output_at_end:
            # TensorRT-LLM keeps all blocks whose last token is known, even those of a prompt that are still
            # to be computed.
            known = request.known_tokens if request.state is State.PREFILL else computed + 1
            self.memory.publish(request, known - 1 - self._yields(request))
            if request.state is not State.PREFILL:
                self.memory.withdraw(request, computed)
        elif request.state is not State.PREFILL:
            self._publish_turns(request, computed, had_turn=had_turn)
            if running.at_commit:
                self.memory.withdraw(request, computed)
        running.remove(request)
        if request.state is State.DRAINING:
            # Its last token is in flight; the commit will find it waiting and end it.
            request.known_tokens = request.total_tokens
        request.lost_tokens = computed
        request.computed_tokens = 0
        if self.swap is not None and request.state is not State.DRAINING:
            self.swap.put(request, swappable)
            if request.swapped_tokens:
                self.log.add(EventKind.SWAPPED_OUT, request.id, detail=f"tokens={swappable}")
        if self.offloading is not None:
            self.offloading.preempted(request)
        if self.encoder is not None:
            self.encoder.release(request)
        self.log.add(EventKind.PREEMPTED, request.id)
        self._give_back(request)
        request.state = State.WAITING
        self.queue.put_back(request)

    def _yields(self, request: Request) -> int:
        """How many tokens of the request plans in flight yield."""
        return sum([plan.yields_token(request) for plan in self.running.in_flight])

    def _publish_turns(self, request: Request, computed: int, *, had_turn: bool) -> None:
        """Publishes the blocks that the engine, which publishes step by step, has published by now.

        `computed`: tokens of the decoding request that are computed or planned. With a decode in flight that
        is one token less: the token was not known when its step was planned, and the next turn, which would
        publish its block, does not come. A request served in this step has had that turn.
        """
        late = not had_turn and self.limits.pipeline_depth > 0 and self._flies(request)
        self.memory.publish(request, computed - late)

    def _flies(self, request: Request) -> bool:
        """Whether a decode of the request is in flight."""
        return any(request in plan.decodes for plan in self.running.in_flight)

    def _give_back(self, request: Request) -> None:
        """Gives a request's blocks back.

        With a host tier nobody may get them while a plan in flight still writes to them, for a load is not
        ordered behind it: they are kept until the newest plan is committed (as vLLM's deferred frees).
        """
        if self.keeps_blocks_of(request):
            assert self.offloading is not None
            newest = self.running.in_flight[-1].step
            self.offloading.keep(newest, self.offloading.memory.detach(request))
        else:
            self.memory.release(request)

    def keeps_blocks_of(self, request: Request) -> bool:
        """Whether a request's blocks would be kept, were it to give them back now."""
        return self.offloading is not None and self._is_computed(request)

    def _end_offloaded(self, offloading: Offloading, request: Request, computed: int | None) -> None:
        """Gives the blocks of a request that has ended back, those that left a window first (as vLLM)."""
        if self._leaves and self.memory.holds(request):
            in_flight = self.running.in_flight if self.limits.held_batches > 1 else ()
            flying = [plan.tokens_of(request) for plan in in_flight]
            self.memory.leave(request, request.computed_tokens - sum(flying))
        if offloading.ended(request, computed):
            self._give_back(request)

    def _is_computed(self, request: Request) -> bool:
        """Whether a plan in flight computes tokens of the request."""
        return any(plan.includes(request) for plan in self.running.in_flight)

    def give_back_deferred(self, plan: StepPlan) -> None:
        """Gives back the blocks that were kept for a plan that has been executed."""
        if self.offloading is not None and self.offloading.give_back_kept(plan.step):
            self.queue.blocked = False

    # ---- ending

    def commit(self, plan: StepPlan, outcome: Outcome, now: int) -> list[Request]:
        """Applies the outcome of a plan that was executed. Returns the requests that ended, in order."""
        running = self.running
        if self.drafter is not None:
            return self._commit_drafts(self.drafter, plan.chunks, outcome, now)
        chunks = plan.chunks
        if chunks:
            self._commit_chunks(chunks, now)
        finished = running.draining.pop(plan.step + plan.steps - 1, [])
        if outcome is not DONE and outcome.stopped:
            early = [request for request in self._live(outcome.stopped) if request not in finished]
            for request in early:
                request.output_tokens = self._emitted(request)
            # Blocks become free in the order of admission, whatever it is that ends a request.
            finished = sorted([*finished, *early], key=admission_order)
        if running.output_at_end:
            finished.sort(key=arrival_order)
        for request in self._with_fillers(finished):
            if request in finished:
                self.finish(request, now)
            else:
                self.memory.publish(request, running.planned(request))
        if running.output_at_end and chunks:
            self._publish_prompts(chunks)
        return finished

    def _with_fillers(self, finished: list[Request]) -> list[Request]:
        """Requests that end, among those that filled a block with this plan and are in no plan after it.

        Both publish with the commit, in the order of admission; others have done so with the next plan.
        """
        running = self.running
        if not finished or running.output_at_end or not running.knows_ahead():
            return finished
        filled = running.decoders.crossing(running.tick)
        full = [request for request in filled if running.knows(request) and request not in finished]
        return sorted([*finished, *full], key=admission_order) if full else finished

    def _commit_chunks(self, chunks: tuple[Chunk, ...], now: int) -> None:
        running = self.running
        for chunk in chunks:
            request = chunk.request
            last = chunk.last
            if (
                running.at_commit
                and not running.output_at_end
                and request.alive
                and self.memory.holds(request)
            ):
                self.memory.publish(request, chunk.start + chunk.tokens)
            if last and request.first_token_ns == NEVER:
                request.first_token_ns = now

    def _publish_prompts(self, chunks: tuple[Chunk, ...]) -> None:
        """Makes prompts findable as TensorRT-LLM: with what is in flight, but for the last token."""
        for chunk in chunks:
            request = chunk.request
            if request.alive and self.memory.holds(request):
                end = chunk.start + chunk.tokens
                if not chunk.last:
                    end = max(end, min(request.computed_tokens, request.known_tokens - 1))
                self.memory.publish(request, end)

    def _commit_drafts(
        self, drafter: Drafter, chunks: tuple[Chunk, ...], outcome: Outcome, now: int
    ) -> list[Request]:
        """Applies a plan of requests that speculate: each gets its accepted draft tokens and one token more.

        A preempted request gets its tokens too; it computes them again.
        """
        endings = []
        accepted_of = dict(outcome.accepted)
        stopped = set(outcome.stopped)
        ended_after = dict(outcome.ended_after)
        ahead = self.limits.pipeline_depth > 0
        for chunk in chunks:
            request = chunk.request
            if not chunk.last or not request.alive:
                continue
            if request.first_token_ns == NEVER:
                request.first_token_ns = now
            accepted = accepted_of.get(request.id, chunk.drafts)
            request.in_flight_tokens -= 1 + chunk.drafts
            tokens = min(1 + accepted, ended_after.get(request.id, 1 + accepted))
            tokens = min(tokens, request.total_tokens - request.known_tokens)
            request.known_tokens += tokens
            if request.id in stopped:
                request.output_tokens = request.known_tokens - request.prompt_tokens
            runs = request.state is State.DECODE
            if runs:
                request.computed_tokens -= chunk.drafts - accepted
                if self._trims_computed:
                    request.computed_tokens -= 1 + accepted - tokens
                if self._publishes_output:
                    self.memory.publish(request, request.known_tokens - 1)
            if request.known_tokens == request.total_tokens:
                self.finish(request, now)
                endings.append(request)
            elif runs and not ahead:
                request.drafts = drafter.draft(request, len(chunks))
        return endings

    def finish(self, request: Request, now: int) -> None:
        """Ends a request that has all its output; what it computed stays findable."""
        total = request.prompt_tokens + request.output_tokens
        if self.drafter is None:
            self.memory.publish(request, total - 1)
        self._take_out(request)
        request.known_tokens = total
        self._end(request, State.FINISHED, EventKind.FINISHED, now)

    def cancel(self, id: str, now: int) -> bool:
        """Ends a request in any state and gives its blocks back. False: no such live request."""
        request = self.requests.get(id)
        if request is None:
            return False
        self._cancel(request, now, keeps_planned=self.running.keeps_planned)
        return True

    def _cancel(self, request: Request, now: int, *, keeps_planned: bool) -> None:
        """`keeps_planned`: what plans in flight compute stays findable."""
        running = self.running
        computed = running.planned(request)
        if request.state is not State.LOADING and self.memory.holds(request):
            if not keeps_planned:
                committed = running.committed(request)
                findable = committed if running.output_at_end else running.findable(request)
                self.memory.publish(request, min(committed, findable))
                self.memory.withdraw(request, committed)
            elif self.drafter is None and request.state is not State.PREFILL:
                self._publish_turns(request, computed, had_turn=False)
        request.output_tokens = max(self._emitted(request), 0)
        self._take_out(request)
        self._end(request, State.CANCELLED, EventKind.CANCELLED, now, computed)

    def reject(self, request: Request, now: int) -> None:
        """Ends a request that waits and can never be admitted."""
        self._take_out(request)
        self._end(request, State.REJECTED, EventKind.REJECTED, now, 0)

    def _emitted(self, request: Request) -> int:
        """Output tokens that the plans committed so far have yielded."""
        emitted = self.running.emitted(request)
        if request.state is State.WAITING and not request.in_flight_tokens:
            # It was preempted, and counts the tokens of plans in flight as known.
            emitted -= self._yields(request)
        return emitted

    def fail(self, outcome: Outcome, now: int) -> list[Request]:
        """Ends what failed in the plan that is about to be committed, whose blocks count as not computed.

        The newest goes first: it may hold blocks that an older one was to fill.
        """
        reasons = dict(outcome.failed)
        failed = self._live(reasons)[::-1]
        for request in failed:
            request.reason = reasons[request.id]
            self._cancel(request, now, keeps_planned=False)
        return failed

    def _live(self, ids: Iterable[str]) -> list[Request]:
        """The live ones of these requests, in admission order."""
        live = dict.fromkeys(self.requests[id] for id in ids if id in self.requests)
        return sorted(live, key=admission_order)

    def _take_out(self, request: Request) -> None:
        """Takes a request out of running set or queue; its blocks are not touched."""
        running = self.running
        if request not in running.requests:
            self.queue.remove(request)
        # In `nano-vllm` a prompt in chunks is in the queue and in `running.chunked` at once.
        running.remove(request)
        if running.draining:
            running.forget_end(request)

    def _end(
        self, request: Request, state: State, kind: EventKind, now: int, computed: int | None = None
    ) -> None:
        """`computed`: tokens that plans computed of a request that did not come to its end by itself."""
        request.finished_ns = now
        if self.swap is not None and request.swapped_tokens:
            self.swap.drop(request)
        if self.offloading is None:
            self.memory.release(request)
        else:
            self._end_offloaded(self.offloading, request, computed)
        if self.encoder is not None:
            self.encoder.release(request)
        request.state = state
        request.parent = None
        del self.requests[request.id]
        self.queue.blocked = False
        if self.log.events is not None:
            self.log.add(kind, request.id, detail=request.reason)
        if self.queue.forks.count:
            self.queue.release_forks(request)
