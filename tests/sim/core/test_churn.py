"""Churn: requests that are cancelled at every instant, retried and forked, and transfers that fail."""

import gc
import os
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from pagecast.sim.core.cache_policy import EVICTIONS, CachePolicy
from pagecast.sim.core.cache_rules import CacheRules
from pagecast.sim.core.check import Checker, check
from pagecast.sim.core.engines.vllm.profile import VLLM
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.identity.scope import Scope
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.plan import Outcome, StepPlan
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.retention import Retention
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.core.tenants import Tenants
from pagecast.sim.core.tier_spec import HostTierSpec, OffloadingPolicy

sys.path.insert(0, str(Path(__file__).parent))

from disk_worker import DiskWorker

SIZE = 16
CANCELLED, RETRIED, FAILING = 0.3, 0.1, 0.05
FORKED = 0.1
CEILING = 100  # blocks of tenant a
SWAP_BLOCKS = 60
PATIENCE = 50  # steps
INSTANTS = ("waiting", "loading", "loaded", "chunk", "decoding", "draining", "swapped", "held back", "fork")
OF_HOST = {"loading", "loaded"}
OF_DISK = {"asking", "promoting", "cascading"}  # its blocks come from the disk, or go there

RETENTIONS = (None, Retention.parse("0-64:80 decode:10"), Retention.parse("0-32:90:0.0000002 32-:20"))

# With a host tier KV is loaded and stored by transfers; without one partly matching blocks are reused.
RECOMPUTED = OffloadingPolicy(kv_load_failure_policy="recompute")
RECOMPUTED_ARC = replace(RECOMPUTED, eviction_policy="arc")
HOST = {"host": HostTierSpec(200, policy=RECOMPUTED)}
ARC = {"host": HostTierSpec(60, 2, RECOMPUTED_ARC)}
PARTIAL = {"partial_reuse": "copy"}
DISK = {"host": HostTierSpec(150, policy=RECOMPUTED, disk=True)}
DISK_ARC = {"host": HostTierSpec(100, 2, RECOMPUTED_ARC, disk=True)}


def instants_of(more: dict[str, object]) -> set[str]:
    """The instants at which requests of a configuration are cancelled."""
    host = more.get("host")
    if not isinstance(host, HostTierSpec):
        return set(INSTANTS) - OF_HOST
    return set(INSTANTS) | (OF_DISK if host.disk else set())


class Churn:
    """A replica under churn, with swapping, forks and three tenants, one of them below a ceiling."""

    def __init__(self, seed: int, eviction: str, more: dict[str, object]) -> None:
        self.random = random.Random(seed)
        limits = Limits(
            160,
            SIZE,
            24,
            256,
            pipeline_depth=1,
            swap_blocks=SWAP_BLOCKS,
            tenants=Tenants.parse(f"a:weight=2,blocks={CEILING} *:weight=1"),
            **more,
        )
        self.s = Scheduler(limits, CacheRules(CachePolicy(EVICTIONS[eviction]())).applied(VLLM))
        self.checker = Checker(self.s, every=500)
        self.count = self.cancelled = self.retried = self.ended = self.forks = 0
        self.transfers = self.failed = self.unreadable = self.idle_steps = 0
        self.instants: Counter[str] = Counter()
        self.plans: list[StepPlan] = []
        self.instants_wanted = sorted(instants_of(more))
        self.disk = DiskWorker.of(
            self.s, lambda: self.random.randrange(1, 6), lambda: self.random.random() < FAILING
        )
        self.jobs: list[tuple[int, int]] = []  # transfers under way: the step in which each ends, its number
        self.step = 0

    # ---- requests come

    def submit(self) -> None:
        r = self.random
        text = r.randrange(60)
        tenant = "abc"[text % 3]
        parent = None
        if r.random() < FORKED and self.s.requests:
            parent = r.choice(list(self.s.requests.values()))
            if parent.parent is not None or parent.preemptions:
                parent = None
        if parent is not None:
            self.forks += 1
            self.add(parent.keys.spans, parent.tenant, parent)
        else:
            self.add([(1, 0, 64), (10 + text, 0, r.randrange(1, 200))], tenant)

    def add(self, spans: list[tuple[int, int, int]], tenant: str, parent: Request | None = None) -> None:
        keys = BlockKeys.of_spans(SIZE, spans, (1000 + self.count, 0), Scope(salt=tenant))
        tokens = sum(length for _, _, length in spans)
        made = Request(str(self.count), keys, tokens, self.random.randrange(1, 100), parent=parent)
        made.tenant = tenant
        made.retention = self.random.choice(RETENTIONS)
        self.count += 1
        assert self.s.submit(made), made.reason

    # ---- and go

    def instant(self, request: Request) -> str:
        """What a request is doing."""
        if request.swapped_tokens:
            return "swapped"
        if request.state is State.LOADING:
            return "loading" if request in self.s.offloading.loading else "loaded"
        if self.disk is not None and (moving := self.instant_of_disk(self.disk, request)):
            return moving
        if request.parent is not None:
            held = request.state is State.WAITING and request not in self.s.queue
            return "held back" if held else "fork"
        for plan in self.plans:
            if any(chunk.request is request for chunk in plan.chunks):
                return "chunk"
        names = {State.WAITING: "waiting", State.DECODE: "decoding", State.DRAINING: "draining"}
        return names.get(request.state, "chunk")

    def instant_of_disk(self, disk: DiskWorker, request: Request) -> str:
        """What the disk does for a request; empty: nothing."""
        for job in disk.disk.jobs.values():
            if job.request is request:
                return "promoting" if job.is_promotion else "cascading"
        waits = request.state is State.WAITING and not request.preemptions
        return "asking" if waits and request in disk.disk.lookups.askers() else ""

    def cancel(self, most: int) -> None:
        """Cancels somebody, at an instant drawn first, where there is anybody in it."""
        r = self.random
        live = list(self.s.requests.values())
        wanted = r.choice(self.instants_wanted)
        r.shuffle(live)
        one = next((each for each in live if self.instant(each) == wanted), live[0])
        self.instants[self.instant(one)] += 1
        assert self.s.cancel(one.id, self.step)
        assert not self.s.cancel(one.id, self.step)
        self.cancelled += 1
        self.ended += 1
        if self.count < most and self.retried < RETRIED * self.count:
            self.retried += 1
            self.add(one.keys.spans, one.tenant)

    # ---- steps

    def run(self, most: int) -> None:
        """Until so many have come and all have ended."""
        s, r = self.s, self.random
        while self.count < most or s.requests:
            self.step += 1
            while self.count < most and len(s.requests) < 40:
                self.submit()
            if self.disk is not None:
                self.disk.advance(self.step)
            plan = s.plan(self.step)
            self.run_disk()
            if plan is not None:
                self.carry_out(plan)
            while s.requests and self.cancelled < CANCELLED * self.count and r.random() < 0.7:
                self.cancel(most)
            while self.plans and (plan is None or len(self.plans) > 1):
                done, lost = self.take_transferred()
                outcome = Outcome(transferred=done, lost=lost)
                self.ended += len(s.commit(self.plans.pop(0), outcome, now=self.step))
                self.run_disk()
            if plan is None and not self.plans:
                self.tell()
                self.give_up()
            self.checker.after_step()
            if self.step % 100 == 0:
                self.check_ceiling()
        while self.plans:
            self.ended += len(s.commit(self.plans.pop(0), now=self.step))
        while self.jobs or (self.disk is not None and self.disk.disk.busy):
            self.step += 1
            self.tell()
            if self.disk is not None:
                self.disk.advance(self.step)
                s.plan(self.step)

    def run_disk(self) -> None:
        """Begins the jobs that the core has made for the disk."""
        if self.disk is not None:
            self.disk.take(self.step)

    def give_up(self) -> None:
        """Ends, after a while, who asks for ever for what the disk can't read, as a replica does."""
        self.idle_steps += 1
        if self.disk is None or self.idle_steps < PATIENCE:
            return
        for request in sorted(self.disk.disk.lookups.askers(), key=lambda one: int(one.id)):
            if request.alive and request.state is State.WAITING:
                assert self.s.cancel(request.id, self.step)
                self.unreadable += 1
                self.ended += 1

    def carry_out(self, plan: StepPlan) -> None:
        """Begins a plan's transfers; those that the step waits for are done before it."""
        self.idle_steps = 0
        if plan.flushed:
            self.tell(plan.flushed)
        for transfer in (*plan.loads, *plan.stores):
            self.jobs.append((self.step + self.random.randrange(1, 6), transfer.job))
        if plan.computes:
            self.plans.append(plan)

    def take_transferred(self, at_once: tuple[int, ...] = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Transfers that have ended by now, and those of them that failed."""
        done = tuple(job for at, job in self.jobs if at <= self.step or job in at_once)
        self.jobs = [(at, job) for at, job in self.jobs if job not in done]
        lost = tuple(job for job in done if self.random.random() < FAILING)
        self.transfers += len(done)
        self.failed += len(lost)
        return done, lost

    def tell(self, at_once: tuple[int, ...] = ()) -> None:
        done, lost = self.take_transferred(at_once)
        if done:
            self.s.transferred(done, lost)
            self.run_disk()

    def disk_figures(self) -> str:
        """How much moved between host and disk; empty without a disk."""
        if (disk := self.disk) is None:
            return ""
        return (
            f" {disk.failed_reads} of {disk.promotions} reads of the disk failed, {disk.failed_stores} of"
            f" {disk.cascades} stores, {self.unreadable} requests waited for what can't be read;"
        )

    def check_ceiling(self) -> None:
        held = [len(self.s.memory.blocks(one)) for one in self.s.requests.values() if one.tenant == "a"]
        assert sum(held) <= CEILING

    def proof(self) -> None:
        """Nothing is lost, and every block is home."""
        s = self.s
        check(s)
        assert s.memory.used_blocks == 0
        assert s.lifecycle.swap.free_blocks == SWAP_BLOCKS
        assert not s.requests
        assert self.ended == self.count
        if s.offloading is not None:
            assert not s.offloading.jobs
            assert not s.offloading.host.pins, "no host block is read or written any more"
            assert not s.offloading.loading
            assert not s.offloading.holders
        if self.disk is not None:
            assert not self.disk.disk.jobs
            assert not self.disk.disk.lookups.askers(), "the answers to requests that have gone are forgotten"


CONFIGURATIONS = {"host": HOST, "arc": ARC, "partial": PARTIAL, "disk": DISK, "disk, arc": DISK_ARC}


@pytest.mark.parametrize("more", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
@pytest.mark.parametrize("eviction", ["lru", "cost"])
def test_churn_brings_every_block_home(eviction: str, more: dict[str, object]) -> None:
    churn = Churn(6, eviction, more)
    for most in range(100, 601, 100):
        churn.run(most)
        churn.proof()
    assert churn.cancelled >= 0.29 * churn.count
    assert churn.retried >= 0.09 * churn.count
    if "host" in more:
        assert 0.03 < churn.failed / churn.transfers < 0.08
    assert set(churn.instants) == instants_of(more)
    if churn.disk is not None:
        assert churn.disk.promotions > 50
        assert 0.03 < churn.disk.failed_reads / churn.disk.promotions < 0.07
        assert 0.02 < churn.disk.failed_stores / churn.disk.cascades < 0.09
        assert churn.unreadable


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("more", "requests"),
    [(HOST, 1_000_000), (ARC, 200_000), (PARTIAL, 200_000), (DISK, 1_000_000), (DISK_ARC, 200_000)],
    ids=CONFIGURATIONS,
)
def test_long_churn_loses_nothing_in_flat_memory(more: dict[str, object], requests: int) -> None:
    churn = Churn(2, "priority", more)
    part = requests // 20
    objects: list[int] = []
    resident: list[int] = []
    for most in range(part, requests + 1, part):
        churn.run(most)
        churn.proof()
        gc.collect()
        objects.append(len(gc.get_objects()))
        resident.append(resident_bytes())
    print(
        f"\n{churn.count} requests in {churn.step} steps, {churn.cancelled} cancelled,"
        f" {churn.retried} retried, {churn.forks} forks, {churn.s.preemptions} preemptions,"
        f" {churn.failed} of {churn.transfers} transfers failed, {churn.checker.checks} full checks;"
        f"{churn.disk_figures()} cancelled at {dict(churn.instants)};"
        f" {min(objects)} to {max(objects)} objects,"
        f" {resident[1] / 1e6:.1f} MB after a tenth, {resident[-1] / 1e6:.1f} MB at the end"
    )
    assert churn.count == requests
    assert churn.cancelled >= 0.299 * requests
    assert churn.retried >= 0.099 * requests
    cascading = churn.instants.pop("cascading", 1)  # what has a file is not written again, so they are few
    assert cascading > 0
    assert min(churn.instants.values()) > requests // 1000
    assert max(objects[10:]) < 1.02 * max(objects[:10])
    assert resident[-1] < resident[1] + 8e6
    if "host" in more:
        assert 0.045 < churn.failed / churn.transfers < 0.055
