"""Decisions of a recorded run, replayed on its own clock and compared with the engine's.

The start and end of each step are those that were recorded. The scheduler and the allocator decide the rest:
which requests are in each step, their tokens and context, how many wait, how many blocks are used, and how
much of each prompt is found in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from pagecast.sim.core import handoff
from pagecast.sim.core.engines.profile import Profile
from pagecast.sim.core.engines.vllm.profile import VLLM
from pagecast.sim.core.engines.vllm.settings import VllmSettings
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.group_spec import unit_tokens
from pagecast.sim.core.kv_events import KvEventStream
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.pipeline import Pipeline
from pagecast.sim.core.plan import Outcome, StepPlan
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.tiers.tiered_offloading import TieredOffloading
from pagecast.sim.replay.feed import Feed
from pagecast.sim.replica.scheduler_spec import SchedulerSpec, speculation_of
from pagecast.sim.runs.external_events import Endings, ExternalEventKind, Outside, outside
from pagecast.sim.runs.host_tier import host_tier_of
from pagecast.sim.runs.kv_groups import drafter_groups, recorded_groups
from pagecast.sim.runs.recorded import RecordedRun, Steps
from pagecast.sim.runs.transfers import DISK, RecordedTransfer
from pagecast.sim.speculation.config import SpeculativeConfig
from pagecast.sim.speculation.recorded import RecordedDrafts
from pagecast.traces.schema import Trace

USAGE_TOLERANCE = 1e-6
# `cached_tokens` in meta.json: hits are those of the latest admission before the first token.
LATEST = "latest"
_FOREVER = 1 << 62
Accepted = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class DecisionReport:
    """How many decisions of a recorded run the core made in the same way."""

    run: str
    steps_recorded: int
    steps_matched: int
    first_mismatch: str | None
    requests: int
    cached_tokens_matched: int

    @property
    def ok(self) -> bool:
        """Whether every step and every request's prefix hit is the same."""
        return self.steps_matched == self.steps_recorded and self.cached_tokens_matched == self.requests


def limits_of(run: RecordedRun) -> Limits:
    """The replica a run was recorded on, from its `meta.json`. Errors: BadInput naming a missing field."""
    config = run.meta.get("config", {})
    blocks = run.meta.get("usable_blocks")
    if not isinstance(blocks, int) or blocks < 1:
        raise BadInput(f"{run.folder}/meta.json: 'usable_blocks' is {blocks!r}, must be at least 1")

    def whole(name: str) -> int:
        value = config.get(name)
        if type(value) is not int or value < 1:
            wrong = f"{name!r} is {value!r}, must be a whole number of at least 1"
            raise BadInput(f"{run.folder}/meta.json: config: {wrong}")
        return value

    block_size = whole("block_size")
    groups = recorded_groups(run)
    return Limits(
        num_blocks=blocks,
        block_size=unit_tokens(groups) if groups else block_size,
        max_num_seqs=whole("max_num_seqs"),
        max_num_batched_tokens=whole("max_num_batched_tokens"),
        max_model_len=whole("max_model_len") if config.get("max_model_len") else None,
        policy=str(config.get("scheduling_policy", "fcfs")),
        pipeline_depth=run.pipeline_depth,
        caching=bool(config.get("enable_prefix_caching", True)),
        groups=groups,
        max_loras=whole("max_loras") if config.get("max_loras") else None,
        host=host_tier_of(run),
        engine=_settings_of(config),
        drafter_groups=drafter_groups(run) if groups else (),
    )


def _settings_of(config: dict[str, Any]) -> VllmSettings | None:
    """vLLM's settings beside limits; None where a run has none."""
    known = {field.name: field.metadata["declared"].flat or field.name for field in fields(VllmSettings)}
    given = {name: config[flat] for name, flat in known.items() if config.get(flat) is not None}
    return VllmSettings(**given) if given else None


def spec_of(run: RecordedRun, trace: Trace, profile: Profile) -> SchedulerSpec:
    """A recorded run's scheduler, with the draft tokens that its trace has recorded. Errors: BadInput."""
    fields = run.meta.get("config", {}).get("speculative_config")
    where = f"{run.folder}/meta.json: config: speculative_config"
    return SchedulerSpec(
        limits=limits_of(run),
        rules=profile,
        speculation=SpeculativeConfig.make(fields, where) if fields else None,
        drafts=RecordedDrafts.of(trace),
    )


class DecisionReplay:
    """A scheduler fed with a recorded run's requests and times, one step at a time.

    External events (submissions, cancellations) and the ends of steps are applied in the order of their
    times. `requests` is by row. `idle_differences` lists, with their times, differences in plans that
    computed nothing, if the run has recorded such plans.
    """

    def __init__(
        self,
        run: RecordedRun,
        profile: Profile = VLLM,
        *,
        log: bool = False,
        kv_events: KvEventStream | None = None,
    ) -> None:
        if not len(run.requests):
            raise BadInput(f"{run.folder}: has no requests.csv.gz: a run of steady shapes can't be replayed")
        self.run = run
        trace = run.trace("submitted")
        spec = spec_of(run, trace, profile)
        self.scheduler = spec.scheduler(log=log, kv_events=kv_events)
        self._speculation = speculation_of(self.scheduler)
        feed = Feed(
            trace,
            self.scheduler.limits.block_size,
            lookahead=spec.key_lookahead,
        )
        self.requests: list[Request] = [
            feed.request(row, arrival_ns) for row, arrival_ns in enumerate(run.arrival_ns.tolist())
        ]
        self._endings = Endings.of(run)
        self._gives = "given_back_s" in run.requests  # it computed prompts for another engine
        self._holders: dict[int, Request] = {}  # stand-ins of prompts that are handed over, by row
        self._outside = sorted(outside(run), reverse=True)  # the next stands last
        self._pipeline: Pipeline[int] = Pipeline(self.scheduler)  # with the end of each step
        self.idle_differences: list[tuple[int, str]] = []
        self.transfer_plans: list[StepPlan] = []  # plans of transfers alone

    def step(self, number: int) -> StepPlan | None:
        """Plans the step that was recorded as `number`, after all that happened before it."""
        steps, s = self.run.steps, self.scheduler
        start = int(steps.start_ns[number])
        self._advance(start)
        plan = s.plan(start, once=self.run.idle is not None)
        if plan is not None and not plan.computes:
            self.transfer_plans.append(plan)
            return None
        if plan is not None:
            self._pipeline.add(plan, int(steps.end_ns[number]))
        return plan

    def finish(self) -> None:
        """Takes in what happened after the last step was planned."""
        self._advance(_FOREVER)

    def _advance(self, start: int) -> None:
        """Does everything that happened before `start`."""
        coming = self._outside
        pipeline = self._pipeline
        while True:
            due = coming[-1].time_ns if coming else _FOREVER
            end = pipeline.oldest[1] if len(pipeline) else _FOREVER
            if len(pipeline) and end <= due and (end <= start or pipeline.is_full):
                self._commit()
            elif due < start:
                self._happen(coming.pop())
            elif pipeline.is_full:
                self._commit()
            else:
                return

    def _commit(self) -> None:
        plan, end = self._pipeline.oldest
        outcome = self._endings.at(end)
        if self._speculation is not None:
            accepted = self._speculation.outcome(plan).accepted
            outcome = outcome._replace(accepted=accepted, ended_after=self._until_stop(accepted, outcome))
        ended = self._pipeline.commit(outcome, end)
        if self._gives:
            self._hold(ended)

    def _hold(self, ended: list[Request]) -> None:
        """Holds the prompts that ended for another engine to read."""
        for request in ended:
            if request.state is State.FINISHED:
                holder = self._holders[request.index] = handoff.stand_in(request)
                handoff.hold(self.scheduler, holder)

    def _until_stop(self, accepted: Accepted, outcome: Outcome) -> Accepted:
        """Of requests that stopped: how many tokens of the step are theirs."""
        if not outcome.stopped:
            return ()
        tokens_out = self.run.requests["tokens_out"]
        counts = []
        for id, right in accepted:
            if id in outcome.stopped:
                request = self.scheduler.requests[id]
                remaining = int(tokens_out[request.index]) - (request.known_tokens - request.prompt_tokens)
                counts.append((id, min(right + 1, remaining)))
        return tuple(counts)

    def _happen(self, what: Outside) -> None:
        s = self.scheduler
        if what.kind is ExternalEventKind.SUBMITTED:
            s.submit(self.requests[what.row])
        elif what.kind is ExternalEventKind.CANCELLED:
            request = self.requests[what.row]
            request.reason = self._endings.reasons.get(what.row, "")
            s.cancel(request.id, what.time_ns)
        elif what.kind is ExternalEventKind.TRANSFERRED:
            transfer = self.run.transfers[what.row]
            if transfer.kind == DISK:
                self._end_on_disk(transfer)
                return
            s.transferred((transfer.job,), (transfer.job,) if transfer.lost else (), what.time_ns)
        elif what.kind is ExternalEventKind.RESERVED:
            holder = self._holders[what.row] = handoff.stand_in(self.requests[what.row])
            handoff.reserve(s, holder)
        elif what.kind is ExternalEventKind.LANDED:
            handoff.land(s, self._holders.pop(what.row))
        elif what.kind is ExternalEventKind.GIVEN_BACK:
            handoff.give_back(s, self._holders.pop(what.row))
        elif what.row < 0:
            s.plan(what.time_ns)
        else:
            self._plan_nothing(what)

    def _end_on_disk(self, transfer: RecordedTransfer) -> None:
        offloading = self.scheduler.offloading
        if not isinstance(offloading, TieredOffloading):
            raise BadInput(f"{self.run.folder}: has transfers of a disk, but no disk in meta.json")
        if transfer.job not in offloading.disk.jobs:
            raise BadInput(f"{self.run.folder}: disk job {transfer.job} ended, which was never begun")
        offloading.disk.end(transfer.job, lost=transfer.lost)

    def _plan_nothing(self, what: Outside) -> None:
        """Plans what computed nothing in the recorded run. A plan that computes is not taken back: all that
        follows will differ."""
        s, idle = self.scheduler, self.run.idle
        assert idle is not None
        plan = s.plan(what.time_ns, once=True)
        if plan is not None and not plan.computes:
            self.transfer_plans.append(plan)
            plan = None
        if plan is not None:
            self._pipeline.add(plan, what.time_ns)
            wrong = [f"the engine computed nothing, the core {plan.decode_n} decodes and {plan.prefill}"]
        else:
            state = (len(s.running.requests), s.queue.size, s.memory.used_blocks)
            wrong = _left_otherwise(idle, what.row, state, s.limits.num_blocks)
        if wrong:
            self.idle_differences.append((what.time_ns, "; ".join(wrong)))


def compare_decisions(run: RecordedRun, profile: Profile = VLLM) -> DecisionReport:
    """Replays a recorded run and counts the steps and prefix hits that are the same."""
    replay = DecisionReplay(run, profile)
    matched = 0
    first: str | None = None
    first_ns = _FOREVER
    for number in range(len(run.steps)):
        plan = replay.step(number)
        difference = _difference(run, number, plan, replay.scheduler.limits.num_blocks)
        if difference is None:
            matched += 1
        elif first is None:
            first_ns = int(run.steps.start_ns[number])
            first = f"step {number} (start_s {first_ns / 1e9:.6f}): {difference}"
    replay.finish()
    idle = 0 if run.idle is None else len(run.idle)
    matched += idle - len(replay.idle_differences)
    if replay.idle_differences and replay.idle_differences[0][0] < first_ns:
        time_ns, difference = replay.idle_differences[0]
        first = f"plan at start_s {time_ns / 1e9:.6f}, which computed nothing: {difference}"
    cached = run.requests["cached_tokens"].to_numpy().tolist()
    latest = run.meta.get("cached_tokens") == LATEST
    equal = 0
    for row, request in enumerate(replay.requests):
        ours = request.hit_tokens if latest else max(request.cached_tokens, 0)
        if ours == cached[row]:
            equal += 1
        elif first is None:
            first = f"request {row}: cached_tokens is {ours}, the engine's {cached[row]}"
    return DecisionReport(run.name, len(run.steps) + idle, matched, first, len(cached), equal)


def _difference(run: RecordedRun, number: int, plan: StepPlan | None, num_blocks: int) -> str | None:
    steps = run.steps
    if plan is None:
        return "the engine computed a step, the core found nothing to compute"
    pairs = (
        ("decode_n", plan.decode_n, int(steps.decode_n[number])),
        ("decode_ctx", plan.decode_ctx, int(steps.decode_ctx[number])),
        ("decode_max", plan.decode_max, int(steps.decode_max[number])),
        ("prefill", sorted(plan.prefill), sorted(steps.prefill(number))),
    )
    wrong = [f"{name} is {ours}, the engine's {theirs}" for name, ours, theirs in pairs if ours != theirs]
    state = (plan.running, plan.waiting, plan.used_blocks)
    return "; ".join(wrong + _left_otherwise(steps, number, state, num_blocks)) or None


def _left_otherwise(steps: Steps, number: int, state: tuple[int, int, int], num_blocks: int) -> list[str]:
    """Differences in running requests, waiting requests and used blocks after a recorded plan."""
    running, waiting, used = state
    pairs = (
        ("running", running, int(steps.running[number])),
        ("waiting", waiting, int(steps.waiting[number])),
    )
    wrong = [f"{name} is {ours}, the engine's {theirs}" for name, ours, theirs in pairs if ours != theirs]
    if abs(used / num_blocks - float(steps.kv_usage[number])) > USAGE_TOLERANCE:
        theirs = round(float(steps.kv_usage[number]) * num_blocks)
        wrong.append(f"used blocks are {used}, the engine's {theirs}")
    return wrong
