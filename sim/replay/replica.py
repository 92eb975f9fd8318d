"""One server as a SimPy process: it plans, waits as long as the step takes, and commits.

The host makes a plan and launches it (`host_ns`), then the device computes (`device_ns`). At pipeline depth
0 the host waits for the device; at depth 1 it makes the next plan meanwhile:

    depth 0   host  [plan k]........[plan k+1]........        depth 1   host   [k+1]......[k+2]......
              device        [ k    ]          [ k+1  ]                  device [   k     ][   k+1   ]

Arrivals are handled by the host between steps, one after another, and join the first plan made after
them. Where the scheduler says that nothing will be decided for a while, those steps are one flight, which
`cut` shortens to the steps begun by now when somebody wants to look in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import simpy
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.pipeline import Pipeline
from pagecast.sim.core.plan import DONE, StepPlan
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.core.stride import Stride
from pagecast.sim.core.tiers.tiered_offloading import TieredOffloading
from pagecast.sim.costs.step_costs import Batch, DecodeLine, StepCosts
from pagecast.sim.machine.host_link import HostLinks
from pagecast.sim.replay.clients import NEVER_NS, Arrivals
from pagecast.sim.replay.disk_transfers import DiskTransfers
from pagecast.sim.replay.feed import Feed
from pagecast.sim.replay.recorder import Recorder
from pagecast.sim.replay.stretch_launches import StretchLaunches
from pagecast.sim.replay.transfers import Ended, Transfers
from pagecast.sim.speculation.costs import shape_of
from pagecast.sim.speculation.speculation import Speculation
from simpy.events import URGENT

FlightTimes = tuple[int, int, int]
"""A plan under way: planned at, host free to plan the next step at, done at. In nanoseconds."""

_MOST_IDLE_TURNS = 2_000  # in which somebody waits for the disk and nothing is computed
UNREADABLE = "waited for ever for blocks that the disk could not read, as in vLLM 0.24"
_COMMITS_PER_EVENT = 1024
"""A lone replica runs ahead of the environment's clock; so often it lets the environment catch up."""


class Replica:
    """Serves what `arrivals` brings, with a scheduler's decisions and a cost model's times.

    `fast_forward=False` makes every step a flight of its own; the outcome is the same to the nanosecond.
    `after_step` is called between steps, for checks. `speculation`: the drafter of the scheduler, if any.
    `links`: what its host tier is reached by, if it has one.
    `swap_ns_per_token`: the time that a token of a preempted request takes to host memory, or back.
    `scrub_ns_per_block`: the time to overwrite an evicted block of a tenant; then there are no stretches.

    Where `arrivals.open` is true, somebody adds requests while the replica runs, at the environment's time,
    and calls `wake` after each; the replica waits where it has nothing to do. `clock` is the time of its
    latest change, which may be ahead of the environment's.
    """

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        costs: StepCosts,
        arrivals: Arrivals,
        feed: Feed,
        recorder: Recorder,
        *,
        fast_forward: bool = True,
        after_step: Callable[[], None] | None = None,
        speculation: Speculation | None = None,
        links: HostLinks | None = None,
        swap_ns_per_token: float = 0.0,
        scrub_ns_per_block: float = 0.0,
    ) -> None:
        self.scrub_ns_per_block = scrub_ns_per_block
        self.swap_ns_per_token = swap_ns_per_token
        self.env = env
        self.scheduler = scheduler
        self.costs = costs
        self.arrivals = arrivals
        self.feed = feed
        self.recorder = recorder
        self.after_step = after_step
        self.speculation = speculation
        # Host time of a step of so many requests; KV offloading may take some in every step.
        self._host_ns: Callable[[int], int] = costs.host_ns
        if links is not None and links.step_ns:
            self._host_ns = partial(_offloading_host_ns, costs, links.step_ns)
        self._memory = scheduler.memory
        # A step that overwrites evicted blocks is no part of a stretch.
        self._strides = fast_forward and not scrub_ns_per_block
        self._expiry = scheduler.memory.expiry
        self.transfers = None if scheduler.offloading is None else Transfers(_checked(links))
        self.disk = _disk_of(scheduler, links)
        self._idle_turns = 0
        # Ends of transfers by the step that reports them. Those that end during a stretch are added when it
        # can't be cut any more.
        self._transfer_ends: deque[tuple[int, Ended]] = deque()
        self._launches: StretchLaunches | None = None  # of the newest stretch, where transfers run
        self._submitting_ns = 0  # time to submit transfers, before the first step of the newest stretch
        self._pipeline: Pipeline[FlightTimes] = Pipeline(scheduler)
        self._device_free = 0
        self._base = 0  # when the first step of the newest stretch begins
        self._prompt_tokens = 0  # tokens of the last step planned, if it had prompts
        self._idle: simpy.Event | None = None  # what it waits for where it has nothing to do
        self._stopped = False
        self.clock = 0
        self.look: Callable[[int], None] | None = None  # called before the first change at or after `look_ns`
        self.look_ns = NEVER_NS
        self.process = env.process(self._run())

    def cut(self, now: int) -> None:
        """Ends the stretch in flight with the steps begun before `now`, so that the scheduler is as of `now`.

        To be called by another process of the environment, at its time. What the replica does afterwards is
        the same as without.
        """
        plan = self.scheduler.stride.open
        if plan is None:
            return
        start_ns, _, _ = self._pipeline.newest[1]
        line, gap = self._pace(plan.decode_n)
        shorter = self.scheduler.cut(plan, self._begun(plan, line, gap, now))
        if shorter is not plan:
            launched = start_ns + self._host_ns(plan.decode_n) + self._submitting_ns
            self._pipeline.replace_newest(shorter, self._times(shorter, line, start_ns, launched, gap))
            self.process.interrupt()

    def _pace(self, requests: int) -> tuple[DecodeLine, int]:
        """The device time of a stretch's steps, and what each takes more than that."""
        gap = -self._saved(requests)
        if not self._pipeline.depth:
            gap += self._host_ns(requests)
        return self.costs.decode_line(requests), gap

    def _begun(self, plan: StepPlan, line: DecodeLine, gap: int, now: int) -> int:
        """How many steps of the open stretch begin before `now`."""
        within = now - self._base
        if not self._pipeline.depth:
            return line.steps_begun(plan.decode_ctx, plan.decode_max, within, plan.steps, gap)
        if within > 0 and plan.steps > 1:
            return 1 + line.steps_begun(plan.decode_ctx, plan.decode_max, within, plan.steps - 1, gap)
        return 1

    def used_blocks(self, now: int) -> int:
        """Blocks that requests hold at `now`, not before the latest change. It changes nothing."""
        scheduler = self.scheduler
        used = self._memory.used_blocks
        plan = scheduler.stride.open
        if plan is None:
            return used
        steps = self._begun(plan, *self._pace(plan.decode_n), now)
        running = scheduler.running
        return used + self._memory.blocks_added(running.decoders, running.tick, steps)

    @property
    def device_free_ns(self) -> int:
        """When the device will have computed all that was launched."""
        return self._device_free

    def wake(self, now: int) -> None:
        """Takes note that `arrivals` has a new entry, which joins the first step planned from `now` on."""
        if self._idle is not None:
            self._idle.succeed()
            self._idle = None
        elif self.scheduler.stride.open is not None:
            self.cut(now)

    def stop(self) -> None:
        """Ends the process now: the steps in flight are lost. To be called by another process."""
        self._note_ended_steps(int(self.env.now))
        self._stopped = True
        if self._idle is not None:
            self._idle.succeed()
            self._idle = None
        elif self.process.is_alive:
            self.process.interrupt()

    def _note_ended_steps(self, now: int) -> None:
        """Notes the steps of stretches in flight that ended before `now`, and the blocks held at `now`."""
        self.cut(now)
        flights = self._pipeline.flights
        for plan, (start_ns, last_begins_ns, _) in flights:
            if plan.steps == 1:
                continue
            if plan is flights[-1][0]:
                line, gap = self._pace(plan.decode_n)
                context, longest, most = plan.decode_ctx, plan.decode_max, plan.steps
                ended = line.steps_begun(context, longest, now - self._base, most, gap) - 1
                end_ns = self._base + line.ns(context, longest, ended) + gap * ended
            else:  # the plan after it was made when its last step began
                ended, end_ns = plan.steps - 1, last_begins_ns
            if ended:
                self.recorder.step(plan._replace(steps=ended), start_ns, end_ns)
        self.recorder.held(self._memory.used_blocks)

    # ---- the loop

    def _run(self) -> Generator[Any, Any, None]:
        env = self.env
        others = env._queue  # what other processes have to do; `env.peek` is slow where it is empty
        pipeline = self._pipeline
        flights = pipeline.flights
        depth = pipeline.depth
        arrivals = self.arrivals
        transfers = self.transfers
        ends = self._transfer_ends
        speculation = self.speculation
        note_step = self.recorder.step
        now = int(env.now)  # the host's clock: ahead of the environment's while nobody else is due
        unseen = 0  # commits since the environment's clock was moved
        while not self._stopped:
            if len(flights) <= depth:
                goal = flights[-1][1][1] if flights else now
                if goal < now:
                    goal = now
                if others and self._others_first(goal) and (yield from self._cut_short(goal)):
                    continue
                now = goal
                if flights and transfers is not None and (ends or self._launches is not None):
                    self._report_before(transfers, flights[-1][0], now)
                if arrivals.next_ns <= now:
                    now = self._take_in(now)
                    if others and others[0][0] <= now:
                        continue  # more may arrive while these are handled
                launched = self._plan(now)
                if launched is not None:
                    now = launched
                    if len(flights) <= depth:
                        continue
                elif not flights:
                    if transfers is not None and self._transferring(transfers):
                        now = yield from self._wait_for_transfer(transfers, now)
                        continue
                    goal = arrivals.next_ns
                    if goal == NEVER_NS:
                        if not arrivals.open:
                            break
                        self._idle = env.event()
                        yield self._idle
                        now = max(now, int(env.now))
                        continue
                    if not (others and others[0][0] <= goal and (yield from self._cut_short(goal))):
                        now = goal
                    continue
            plan, (start_ns, _, end_ns) = flights[0]
            if end_ns > now:
                if (others and others[0][0] <= end_ns) or unseen > _COMMITS_PER_EVENT:
                    unseen = 0
                    if (yield from self._cut_short(end_ns)):
                        continue
                now = end_ns
            unseen += 1
            if now >= self.look_ns and self.look is not None:
                self.look(now)
            self.clock = now
            outcome = DONE if speculation is None else speculation.outcome(plan, now)
            if transfers is not None and (ends or self._launches is not None):
                self._report_before(transfers, plan, now)
            endings = pipeline.commit(outcome, now)
            note_step(plan, start_ns, end_ns)
            if ends:
                self._report_ended(plan, now)
            for request in endings:
                self._ended(request, now)
            if self.after_step is not None:
                self.after_step()
        if now > env.now and not self._stopped:
            yield env.timeout(now - env.now)

    def _wait_for_transfer(self, transfers: Transfers, now: int) -> Generator[Any, Any, int]:
        """Lets time pass until a transfer ends or something arrives, where nothing can be computed before."""
        transfers.begin(None, now, self._device_free)
        ends = [transfers.next_ns]
        if self.disk is not None:
            ends += [self.disk.next_ns, now + max(self._host_ns(1), 1) if self.disk.disk.has_news else None]
            self._check_progress(self.disk, now)
        goal = max(now, min(self.arrivals.next_ns, *(end for end in ends if end is not None)))
        others = self.env._queue
        if others and others[0][0] <= goal:
            self._idle = self.env.event()
            yield self._idle | self.env.timeout(max(goal - self.env.now, 0))
            self._idle = None
            goal = max(now, min(goal, int(self.env.now)))
        done = transfers.ended(goal)
        if done is not None:
            self._tell(done, goal)
            goal += self._host_ns(1)
        return goal

    def _transferring(self, transfers: Transfers) -> bool:
        """Whether transfers are under way, or the disk has answered, so that planning again may help."""
        return transfers.busy or (self.disk is not None and self.disk.disk.busy)

    def _report_before(self, transfers: Transfers, plan: StepPlan, now: int) -> None:
        """Tells the scheduler of the transfers whose ends are reported before the last step of `plan`.

        `plan` is the one made last, or one before it. If it is a stretch it is not cut any more.
        """
        launches = self._launches
        ends = self._transfer_ends
        if launches is not None and launches.step == plan.step:
            self._launches = None
            ends += launches.ends(transfers, plan.steps)
        while ends and ends[0][0] < plan.last:
            self._tell(ends.popleft()[1], now)

    def _report_ended(self, plan: StepPlan, now: int) -> None:
        """Tells the scheduler of the transfers whose ends the last step of `plan` reports."""
        ends = self._transfer_ends
        while ends and ends[0][0] <= plan.last:
            self._tell(ends.popleft()[1], now)

    def _tell(self, ended: Ended, now: int) -> None:
        """Tells the scheduler of transfers that have ended."""
        for request in self.scheduler.transferred(*ended, now):
            self._ended(request, now)
        if self.disk is not None:
            self.disk.take(now)

    def _advance_disk(self, disk: DiskTransfers, now: int) -> None:
        """Tells the scheduler of the jobs between host and disk that have ended."""
        disk.advance(now)

    def _check_progress(self, disk: DiskTransfers, now: int) -> None:
        """Ends requests that wait for ever for what the disk can't read. Errors: BadInput where others do."""
        self._idle_turns += 1
        if self._idle_turns <= _MOST_IDLE_TURNS or not self.scheduler.requests:
            return
        if not disk.disk.lost_promotions:
            raise BadInput(
                "requests wait for blocks from the disk for ever: those of one prompt do not fit in the host "
                "tier together, and give way to one another (as in vLLM 0.24); raise kv_offloading_size"
            )
        self._idle_turns = 0
        for request in list(self.scheduler.requests.values()):
            if request.state is State.WAITING:
                self._give_up(request, now)

    def _give_up(self, request: Request, now: int) -> None:
        """Ends a waiting request in its client's place."""
        request.reason = UNREADABLE
        self.scheduler.cancel(request.id, now)
        self._ended(request, now)

    def _others_first(self, goal: int) -> bool:
        """Whether other processes have something to do before a step planned at `goal`: earlier, or urgently
        at that time, as arrivals are."""
        time, priority, *_ = self.env._queue[0]
        return bool(time < goal or (time == goal and (priority == URGENT or goal > self.env.now)))

    def _cut_short(self, goal: int) -> Generator[Any, Any, bool]:
        """Waits until `goal`. True: a flight was cut meanwhile, and its times are others now."""
        try:
            yield self.env.timeout(goal - self.env.now)
        except simpy.Interrupt:
            return True
        return False

    def _take_in(self, now: int) -> int:
        """Handles what has arrived, and who has gone, one after another; each takes the host some time."""
        arrivals = self.arrivals
        scheduler = self.scheduler
        if now >= self.look_ns and self.look is not None:
            self.look(now)
        while arrivals.next_ns <= now and (due := arrivals.take(now)) is not None:
            row, arrival_ns = due
            if arrival_ns is None:
                request = scheduler.requests.get(str(row))
                if request is not None and scheduler.cancel(request.id, now):
                    self._ended(request, now)
                continue
            request = self.feed.request(row, arrival_ns)
            now += self.costs.arrival_ns(request.prompt_tokens)
            if not scheduler.submit(request):
                request.finished_ns = now
                self._ended(request, now)
        return now

    # ---- planning

    def _plan(self, now: int) -> int | None:
        """Plans at `now` and launches. Returns when that is done; None: nothing can be planned."""
        if now >= self.look_ns and self.look is not None:
            self.look(now)
        self.clock = now
        if self.disk is not None:
            self._advance_disk(self.disk, now)
        # The step after a prompt step has a penalty of its own, so it is not part of a stretch.
        warm = self.costs.warm_ns(self._prompt_tokens) if self._prompt_tokens else 0
        if self._expiry is not None:
            self.scheduler.refresh(now)
        if self._strides and not warm:
            stride = self.scheduler.stride
            quiet = stride.quiet()
            if quiet:
                return self._plan_stretch(stride, now, quiet)
            plan = self.scheduler.decide(now)
        else:
            plan = self.scheduler.plan(now)
        if self.scheduler.aborted:
            self._end_aborted(now)
        if self.disk is not None:
            self.disk.take(now)
        if plan is None:
            return None
        if self.transfers is not None and not plan.computes:
            return self.transfers.begin(plan, now + self._host_ns(1), self._device_free)
        return self._launch(plan, now, warm)

    def _launch(self, plan: StepPlan, now: int, warm: int) -> int:
        """Times one step. It ends no sooner than its last kernel is launched."""
        costs = self.costs
        n = plan.decode_n
        prefill = plan.prefill
        launched = host = now + self._host_ns(len(plan.decodes) + len(plan.chunks))
        transfers = self.transfers
        if transfers is not None:
            self._idle_turns = 0
            if transfers.busy or plan.loads or plan.stores:
                launched = host = self._transfer(transfers, plan, host)
        saved = self._saved(n)
        if self.speculation is not None:
            return self._launch_drafts(self.speculation, plan, now, host, warm - saved)
        if prefill:
            batch = Batch(n, plan.decode_ctx, plan.decode_max, prefill, self._prompt_tokens)
            if saved:
                # Prompts share blocks too, but do not read them together.
                saved = min(saved, costs.shared_ns(plan.decode_ctx, n))
            duration = costs.device_ns(batch) - saved
            launched += costs.launch_ns(batch)
            tokens = n
            for chunk in prefill:
                tokens += chunk[0]
            self._prompt_tokens = tokens
        else:
            duration = costs.decode_line(n).ns(plan.decode_ctx, plan.decode_max) + warm - saved
            self._prompt_tokens = 0
        return self._fly(plan, now, host, launched, duration)

    def _transfer(self, transfers: Transfers, plan: StepPlan, host: int) -> int:
        """Submits a step's transfers, and notes what it will report. Returns when it may be launched."""
        begin = transfers.begin(plan, host, self._device_free)
        done = transfers.ended(begin)
        if done is not None:
            self._transfer_ends.append((plan.step, done))
        return begin

    def _fly(self, plan: StepPlan, now: int, host: int, launched: int, duration: int) -> int:
        if self.scrub_ns_per_block and (ledger := self._memory.ledger) is not None:
            duration += round(ledger.to_scrub() * self.scrub_ns_per_block)
        if plan.swaps:
            # The step waits for them: its blocks are those that are moved out.
            duration += round(sum([swap.tokens for swap in plan.swaps]) * self.swap_ns_per_token)
        begin = self._device_free
        if begin < host:
            begin = host
        end = begin + duration
        if end < launched:
            end = launched
        self._device_free = end
        self._pipeline.add(plan, (now, launched, end))
        return launched

    def _launch_drafts(self, speculation: Speculation, plan: StepPlan, now: int, host: int, more: int) -> int:
        """Times a step of requests that speculate. One without prompts is launched as a whole."""
        launched = host
        shape = shape_of(plan)
        duration = speculation.device_ns(shape, self._prompt_tokens)
        if shape.prompts:
            launched += self.costs.launch_ns(Batch(shape.rows, shape.context, shape.longest, shape.prompts))
            self._prompt_tokens = shape.rows + sum([chunk[0] for chunk in shape.prompts])
        else:
            duration += more
            self._prompt_tokens = 0
        return self._fly(plan, now, host, launched, duration)

    def _plan_stretch(self, stride: Stride, now: int, quiet: int) -> int:
        """Plans as many steps as begin before the next arrival, of `quiet` without decisions."""
        n = stride.count
        context = stride.context
        longest = stride.longest
        line, gap = self._pace(n)
        host = self._host_ns(n)
        due = self.arrivals.next_ns
        if self._expiry is not None:
            due = min(due, self._expiry.due_ns)
        self._prompt_tokens = 0
        launched = now + host
        transfers = self.transfers
        if transfers is not None:
            if transfers.unsubmitted:
                launched = transfers.begin(None, launched, self._device_free)
            self._submitting_ns = launched - now - host
        pipeline = self._pipeline
        if not pipeline.depth:
            self._base = base = launched - host
            plan = stride.plan(line.steps_begun(context, longest, due - base, quiet, gap))
        else:
            # Step i + 1 is planned when step i - 1 ends, if the device is the slower of the two.
            self._base = busy = self._device_free
            steps = 1
            if quiet > 1 and pipeline.flights and busy >= launched and busy < due:
                if line.ns(context, longest) + gap > host:
                    steps += line.steps_begun(context, longest, due - busy, quiet - 1, gap)
            elif busy < launched:
                self._base = launched
            plan = stride.plan(steps)
        if transfers is not None and transfers.under_way:
            times = (launched, self._base + host, gap)
            self._launches = StretchLaunches(plan.step, pipeline.depth, line, context, longest, times)
        pipeline.add(plan, self._times(plan, line, now, launched, gap))
        return launched

    def _times(
        self, plan: StepPlan, line: DecodeLine, start: int, launched: int, gap: int
    ) -> tuple[int, int, int]:
        """The flight of a stretch: its start, when the host may plan the next step, and its end.

        The first step begins at `_base`, and each takes `gap` more than its device time: the host's time
        (at depth 0), less what requests save one another by sharing blocks. At depth 1 the first step is
        planned before `_base`, and each other one when the step before its predecessor ends.
        """
        steps = plan.steps
        context = plan.decode_ctx
        longest = plan.decode_max
        base = self._base
        self._device_free = end = base + line.ns(context, longest, steps) + gap * steps
        free = launched
        if steps > 1 and self._pipeline.depth:
            free = base + line.ns(context, longest, steps - 1) + gap * (steps - 1)
        return start, free, end

    def _saved(self, requests: int) -> int:
        """Device time that decoding requests of a step save one another by sharing blocks.

        What they share changes only when one of them comes or goes.
        """
        shared = self._memory.shared_tokens()
        return self.costs.shared_ns(shared, requests) if shared else 0

    def _end_aborted(self, now: int) -> None:
        aborted = self.scheduler.aborted
        for request in aborted:
            self._ended(request, now)
        aborted.clear()

    def _ended(self, request: Request, now: int) -> None:
        if self.speculation is not None:
            self.speculation.ended(request)
        if request.state is not State.FINISHED:
            self.arrivals.failed(request)
        self.arrivals.ended(request.index, now)
        self.recorder.request(request)


def _offloading_host_ns(costs: StepCosts, step_ns: int, requests: int) -> int:
    """Host time of a step of so many requests, with what KV offloading takes."""
    return costs.host_ns(requests) + step_ns


def _disk_of(scheduler: Scheduler, links: HostLinks | None) -> DiskTransfers | None:
    """The transfers to and from the disk behind the host tier; None where there is no disk."""
    if not isinstance(scheduler.offloading, TieredOffloading):
        return None
    if links is None or links.disk is None:
        raise BadInput("a replica with a disk behind its host tier needs `links.disk`: how fast it is")
    return DiskTransfers(links.disk, scheduler.offloading.disk, links.seed)


def _checked(links: HostLinks | None) -> HostLinks:
    if links is None:
        raise BadInput("a replica with a host tier needs `links`: how fast its blocks are copied")
    return links
