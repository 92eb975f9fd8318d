"""Tenants: ceilings, weighted fairness, accounts, isolation and public namespaces."""

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagecast.sim.core.cache_policy import EVICTIONS, CachePolicy
from pagecast.sim.core.cache_rules import CacheRules
from pagecast.sim.core.check import check
from pagecast.sim.core.engines.registry import PROFILES
from pagecast.sim.core.engines.sglang.settings import SglangSettings
from pagecast.sim.core.engines.trtllm.settings import TrtllmSettings
from pagecast.sim.core.engines.vllm.profile import VLLM
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.group_spec import GroupSpec, KvKind
from pagecast.sim.core.identity.keys import BlockKeys, Public
from pagecast.sim.core.identity.scope import Scope
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.plan import Outcome
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.scheduler import Scheduler
from pagecast.sim.core.tenants import Tenants, TenantShare
from pagecast.sim.core.tier_spec import HostTierSpec, OffloadingPolicy
from pagecast.sim.core.tiers.tiered_offloading import TieredOffloading
from pagecast.sim.scenario import Scenario

sys.path.insert(0, str(Path(__file__).parent))

from disk_worker import DiskWorker
from driver import Life, endless

SIZE = 4
RECOMPUTED = OffloadingPolicy(kv_load_failure_policy="recompute")
ARC = replace(RECOMPUTED, eviction_policy="arc")


def scheduler(blocks: int, tenants: str, *, seqs: int = 8, eviction: str = "lru") -> Scheduler:
    limits = Limits(blocks, SIZE, seqs, 4096, tenants=Tenants.parse(tenants))
    return Scheduler(limits, CacheRules(CachePolicy(EVICTIONS[eviction]())).applied(VLLM), log=True)


def request(
    id: str, tenant: str, text: int, prompt: int, output: int = 1, scope: Scope | None = None
) -> Request:
    keys = BlockKeys.of_spans(SIZE, [(text, 0, prompt)], (10_000 + hash(id) % 1000, 0), scope or Scope())
    made = Request(id, keys, prompt, output)
    made.tenant = tenant
    return made


def run(s: Scheduler, *requests: Request) -> list[str]:
    """Serves requests to the end. Returns the order in which they were admitted."""
    for each in requests:
        assert s.submit(each), each.reason
    while s.requests:
        plan = s.plan(0)
        assert plan is not None
        s.commit(plan)
        check(s)
    return [each.id for each in sorted(requests, key=lambda each: each.order)]


def test_shares_are_read_and_others_have_the_stars() -> None:
    tenants = Tenants.parse("a:weight=2,blocks=40 org:team:blocks=3 *:weight=0.5")
    assert tenants.share("a") == TenantShare(2.0, 40)
    assert tenants.share("org:team") == TenantShare(1.0, 3)
    assert tenants.share("x") == TenantShare(0.5)
    assert tenants.fair and tenants.limited


@pytest.mark.parametrize(
    "text", ["a", "a:weight=0", "a:blocks=0", "a:wait=3", "a:weight=x", "a:blocks=1 a:blocks=2"]
)
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="tenant"):
        Tenants.parse(text)


@pytest.mark.parametrize("field", ["blocks", "weight"])
def test_a_field_given_twice_is_refused_by_its_name(field: str) -> None:
    with pytest.raises(BadInput, match=f"tenant 'x:{field}=4,{field}=9': field '{field}' is given twice"):
        Tenants.parse(f"a:blocks=1 x:{field}=4,{field}=9")


def test_a_tenant_at_its_ceiling_waits_and_others_pass_it() -> None:
    s = scheduler(40, "a:blocks=6")
    order = [request("a0", "a", 1, 12, 9), request("a1", "a", 2, 12, 9), request("b0", "b", 3, 12, 9)]
    for each in order:
        s.submit(each)
    s.commit(s.plan(0))
    assert [each.state for each in order] == [State.DECODE, State.WAITING, State.DECODE]
    late = request("b1", "b", 4, 8)
    s.submit(late)
    s.commit(s.plan(0))
    assert late.state is not State.WAITING
    while s.requests:
        s.commit(s.plan(0))
        held = sum(len(s.memory.blocks(each)) for each in order[:2] if s.memory.holds(each))
        assert held <= 6
        check(s)
    assert order[1].state is State.FINISHED


def test_a_request_above_its_tenants_ceiling_is_rejected_with_the_reason() -> None:
    s = scheduler(40, "a:blocks=2")
    assert not s.submit(big := request("a0", "a", 1, 12))
    assert big.reason == "needs 3 blocks of 4 tokens; its tenant may hold 2"
    assert s.submit(request("b0", "b", 1, 12))


def test_tenants_take_turns_by_weight_and_a_flood_does_not_starve_others() -> None:
    flood = [request(f"a{i}", "a", i, 8) for i in range(8)]
    few = [request(f"b{i}", "b", 20 + i, 8) for i in range(4)]
    assert run(scheduler(40, "*:weight=1", seqs=1), *flood, *few)[:6] == ["a0", "b0", "a1", "b1", "a2", "b2"]
    flood = [request(f"a{i}", "a", i, 8) for i in range(8)]
    few = [request(f"b{i}", "b", 20 + i, 8) for i in range(4)]
    assert run(scheduler(40, "a:weight=3", seqs=1), *flood, *few)[:6] == ["a0", "b0", "a1", "a2", "a3", "b1"]


def test_a_tenant_that_waits_for_a_load_keeps_its_turn() -> None:
    limits = Limits(60, SIZE, 1, 64, tenants=Tenants.parse("a:weight=1 b:weight=1"), host=HOST)
    s = Scheduler(limits, VLLM)

    def step() -> None:
        plan = s.plan(0)
        assert plan is not None
        jobs = tuple(transfer.job for transfer in (*plan.loads, *plan.stores))
        if plan.computes:
            s.commit(plan, Outcome(transferred=jobs))
        else:
            s.transferred(jobs)

    s.submit(request("b0", "b", 1, 17))
    while s.requests:
        step()
    s.evict(60)
    for number in range(6):
        s.submit(request(f"a{number}", "a", 10 + number, 40, 4))
    while len(s.requests) > 5:
        step()
    # b's prompt is in host memory. While it is loaded one more of a is admitted; then b goes first.
    s.submit(again := request("b1", "b", 1, 17, 4))
    while s.requests:
        step()
    assert again.external_tokens == 16
    assert again.order == 5


def test_a_cancelled_request_is_not_charged() -> None:
    s = scheduler(40, "*:weight=1", seqs=1)
    for each in [request("a0", "a", 1, 80), request("b0", "b", 2, 8), request("a1", "a", 3, 8)]:
        s.submit(each)
    s.cancel("a0", 0)
    first = s.plan(0)
    s.commit(first)
    assert [chunk.request.id for plan in (first, s.plan(0)) for chunk in plan.chunks] == ["a1", "b0"]


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_tenant_that_floods_the_cache_loses_its_own_content(eviction: str) -> None:
    s = scheduler(24, "*:weight=1", eviction=eviction)
    run(s, request("b0", "b", 1, 17))
    for i in range(20):
        run(s, request(f"a{i}", "a", 100 + i, 17))
    again = request("b1", "b", 1, 17)
    run(s, again)
    assert again.cached_tokens == 16
    ledger = s.memory.ledger
    assert ledger.evicted["b"] == 0 < ledger.evicted["a"] == ledger.evicted_for["a", "a"]
    assert any(event.detail.endswith("tenant=a") for event in s.events or ())


def test_accounts_without_weights_follow_the_plain_order() -> None:
    s = scheduler(24, "a:blocks=1000")
    run(s, request("b0", "b", 1, 17))
    for i in range(20):
        run(s, request(f"a{i}", "a", 100 + i, 17))
    assert s.memory.ledger.evicted_for["a", "b"] == 4
    assert sum(s.memory.ledger.evicted.values()) == s.memory.evicted_blocks


def test_the_ledger_counts_what_is_cached() -> None:
    s = scheduler(24, "*:weight=1")
    for i in range(7):
        run(s, request(f"{'ab'[i % 2]}{i}", "ab"[i % 2], i, 17))
        cached = {}
        for extent in s.memory.eviction:
            if extent.key is not None:
                cached[extent.tenant] = cached.get(extent.tenant, 0) + extent.rows
        assert cached == {tenant: blocks for tenant, blocks in s.memory.ledger.cached.items() if blocks}


# ---- isolation


def public_request(
    id: str, tenant: str, spans: list[tuple[int, int, int]], public: int, ids: bool = False
) -> Request:
    tokens = sum(length for _, _, length in spans)
    scope = Scope(salt=f"tenant/{tenant}/")
    shared = Public(public, Scope(salt="public/docs"))
    if ids:
        numbers = [content * 1000 + offset + i for content, offset, n in spans for i in range(n)]
        keys = BlockKeys.of_ids(SIZE, [*numbers, -1], scope, public=shared)
    else:
        keys = BlockKeys.of_spans(SIZE, spans, (10_000 + hash(id) % 1000, 0), scope, public=shared)
    made = Request(id, keys, tokens, 1)
    made.tenant = tenant
    return made


@pytest.mark.parametrize("ids", [False, True])
def test_a_public_namespace_is_shared_and_what_follows_it_is_not(ids: bool) -> None:
    s = scheduler(40, "*:weight=1")
    spans = [(1, 0, 16), (2, 0, 16)]
    run(s, public_request("a0", "a", spans, 16, ids))
    for id, tenant, cached in (("b0", "b", 16), ("a1", "a", 28)):
        each = public_request(id, tenant, spans, 16, ids)
        run(s, each)
        assert each.cached_tokens == cached
    assert s.memory.ledger.cached[""] == 4


def test_public_tokens_that_end_within_a_block_do_not_share_that_block() -> None:
    s = scheduler(40, "*:weight=1")
    spans = [(1, 0, 18), (2, 0, 15)]
    run(s, public_request("a0", "a", spans, 18))
    each = public_request("b0", "b", spans, 18)
    run(s, each)
    assert each.cached_tokens == 16
    again = public_request("a1", "a", [(1, 0, 18), (2, 0, 7), (3, 0, 8)], 18)
    run(s, again)
    assert again.cached_tokens == 24


def test_public_prompts_of_different_cuts_are_told_apart() -> None:
    """Spans of equal names and other lengths within the last public block are other tokens."""
    keys = []
    for first in (3, 5):
        spans = [(1, 0, 16), (2, 0, first), (3, 0, 8 - first), (4, 0, 8)]
        keys.append(public_request(f"a{first}", "a", spans, 24).keys)
    assert keys[0].block_key(5) != keys[1].block_key(5)
    assert keys[0].block_key(6) != keys[1].block_key(6)


class Counted(dict):
    """A dictionary that counts how often it is asked, and how often there is an answer."""

    asked = answered = 0

    def get(self, key, default=None):
        value = super().get(key, default)
        self.asked += 1
        self.answered += value is not None
        return value

    def __contains__(self, key):
        there = super().__contains__(key)
        self.asked += 1
        self.answered += there
        return there

    def __getitem__(self, key):
        self.asked += 1
        self.answered += super().__contains__(key)
        return super().__getitem__(key)


class CountedSet(set):
    """A set that counts how often it is asked, and how often there is an answer."""

    asked = answered = 0

    def __contains__(self, key):
        there = super().__contains__(key)
        self.asked += 1
        self.answered += there
        return there


def work_of_lookup(s: Scheduler, probe: Request) -> tuple[int, ...]:
    """How often a lookup asks the device's index, the host's slots and the disk's files, and is answered."""
    extents, index = s.memory.pool, s.memory.pool.index
    extents.index = on_device = Counted(index)
    hit = s.memory.find(probe)
    extents.index = index
    assert hit.tokens == 0
    if s.offloading is None:
        return on_device.asked, on_device.answered
    host = s.offloading.host
    host.slots = in_host = Counted(host.slots)
    if isinstance(s.offloading, TieredOffloading):
        on_disk = work_of_asking_the_disk(s.offloading, probe)
    else:
        on_disk = ()
        assert s.offloading.ask(probe, 0) == 0
    host.slots = dict(in_host)  # a look may take note of reads that have failed
    s.offloading.ended(probe)
    return on_device.asked, on_device.answered, in_host.asked, in_host.answered, *on_disk


def work_of_asking_the_disk(offloading: TieredOffloading, probe: Request) -> tuple[int, int]:
    """How often a request's question asks for files, and is answered. Others' questions stay open."""
    lookups = offloading.disk.lookups
    others, lookups.open = lookups.open, []
    tokens = offloading.ask(probe, 0)
    files = CountedSet(offloading.disk.stored)
    if lookups.answer(files):
        assert tokens is None
        tokens = offloading.ask(probe, 0)
    assert tokens == 0
    lookups.open = others
    return files.asked, files.answered


LOOKED_UP = [
    None,
    HostTierSpec(400, policy=RECOMPUTED),
    HostTierSpec(400, policy=ARC),
    HostTierSpec(400, disk=True),
]


@pytest.mark.parametrize("host", LOOKED_UP, ids=["device", "host", "arc", "disk"])
def test_a_lookup_does_not_depend_on_what_others_cached(host: HostTierSpec | None) -> None:
    """The same prompt, a salt of its own: as many questions whatever others have cached and offloaded."""
    asked = set()
    for others in (0, 1, 30):
        s = Scheduler(Limits(400, SIZE, 8, 4096, host=host))
        for i in range(others):
            one = request(f"x{i}", f"t{i}", 1, 24, scope=Scope(salt=f"t{i}"))
            s.submit(one)
            plan = s.plan(0) or s.plan(0)  # a disk answers with the next step
            s.commit(plan, Outcome(transferred=tuple(transfer.job for transfer in plan.stores)))
        if host is not None:
            assert s.offloading.host.used == 6 * others
        if host is not None and host.disk:
            for job in s.offloading.disk.take_submitted():
                s.offloading.disk.end(job.number)
            assert len(s.offloading.disk.stored) == 6 * others
        asked.add(work_of_lookup(s, request("me", "me", 1, 24, scope=Scope(salt="me"))))
    assert len(asked) == 1
    # The disk is asked for every block at once, for its answers come later, and the host again then.
    assert asked.pop() in [(1, 0), (1, 0, 1, 0), (1, 0, 6 + 1, 0, 6, 0)]


class TwoTenants(Life):
    """Random lives of two tenants with equal texts; no block may ever be held, found or loaded by both.

    With a host tier transfers take some steps, and one of twenty fails; so do those between host and disk.
    """

    patience = 40  # steps in which nothing but the disk moves, before a client leaves

    def __init__(self, draw: Iterator[int], **how: object) -> None:
        super().__init__(draw, **how)
        self.jobs: list[int] = []
        self.steps = 0
        self.owner: dict[int, str] = {}  # of what is stored in each place of the host
        self.files: dict[int, str] = {}  # whose content each file has
        self.loads = self.failed = self.lookups = self.disk_tokens = self.idle_steps = 0
        self.disk = DiskWorker.of(self.s, lambda: next(self.draw) % 3, lambda: 0 < next(self.draw) < 14)

    def submit(self, id: str) -> None:
        if id in self.s.requests:
            return
        made, _ = self.make(id)
        self.s.submit(self.salted(made, "ab"[next(self.draw) % 2]))

    def salted(self, made: Request, tenant: str) -> Request:
        spans = [(text % 2, 0, length) for text, _, length in self.spans]
        output = (50 + next(self.draw) % 2, 0)
        made.keys = BlockKeys.of_spans(self.limits.block_size, spans, output, Scope(salt=tenant))
        made.tenant = tenant
        return made

    def step(self) -> None:
        self.settle()
        if self.disk is not None:
            self.steps += 1
            self.disk.advance(self.steps)
        plan = self.s.plan(self.operations)
        self.run_disk()
        if plan is None:
            self.idle_steps += 1
            if self.plans:
                self.commit()
            elif self.jobs:
                self.s.transferred(*self.take_ended())
                self.run_disk()
            elif self.disk is not None and self.disk.disk.busy and self.idle_steps < self.patience:
                pass
            elif self.s.offloading is not None and (self.disk is not None or self.s.offloading.holders):
                # Who has loaded may hold what the first needs, and the disk be asked for what it can't read:
                # a client's patience ends it.
                self.cancel()
            return
        self.idle_steps = 0
        if plan.flushed:
            self.s.transferred(*self.take_ended(plan.flushed))
            self.run_disk()
        for transfer in plan.loads:
            self.loads += 1
            self.disk_tokens += transfer.request.last_disk
            for place in transfer.places:
                assert self.owner[place] == transfer.request.tenant, "foreign content is loaded"
        for transfer in plan.stores:
            self.owner.update(dict.fromkeys(transfer.places, transfer.request.tenant))
        self.jobs += [transfer.job for transfer in (*plan.loads, *plan.stores)]
        if plan.computes:
            self.plans.append(plan)

    def run_disk(self) -> None:
        """Begins the disk's jobs; whose a block's content is goes with it."""
        if self.disk is None:
            return
        factor = self.limits.host.factor
        for job in self.disk.take(self.steps):
            for name, slot in zip(job.names, job.slots, strict=True):
                places = range(slot * factor, (slot + 1) * factor)
                if job.is_promotion:
                    assert self.files[name] == job.request.tenant, "a foreign file is read"
                    self.owner.update(dict.fromkeys(places, self.files[name]))
                else:
                    owners = {self.owner[place] for place in places}
                    assert owners == {job.request.tenant}, "foreign content is written"
                    assert self.files.setdefault(name, job.request.tenant) == job.request.tenant

    def take_ended(self, at_once: tuple[int, ...] = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Transfers that have ended, and those of them that failed."""
        done = tuple(job for job in self.jobs if job in at_once or next(self.draw) % 3 == 0)
        self.jobs = [job for job in self.jobs if job not in done]
        lost = tuple(job for job in done if 0 < next(self.draw) < 14)
        self.failed += len(lost)
        return done, lost

    def commit(self) -> None:
        done, lost = self.take_ended() if self.jobs else ((), ())
        outcome = Outcome(transferred=done, lost=lost)
        for request in self.s.commit(self.plans.pop(0), outcome, now=self.operations):
            self.ended.append(request.id)
        self.run_disk()

    def operate(self) -> None:
        super().operate()
        holders: dict[int, str] = {}
        for each in self.s.requests.values():
            for block in self.s.memory.blocks(each):
                assert holders.setdefault(block, each.tenant) == each.tenant, "a block is held by both"
        if self.limits.caching:
            for each in self.s.requests.values():
                for hit in self.s.memory.find(each).tables:
                    for extent, _, _ in hit.parts:
                        assert extent.tenant == each.tenant, "a foreign block was found"
            if self.operations % 20 == 0:
                self.look_up_a_foreign_prompt()

    def look_up_a_foreign_prompt(self) -> None:
        """Asks for a prompt that both tenants have, under a salt that neither has."""
        size = self.limits.block_size
        keys = BlockKeys.of_spans(size, [(0, 0, 9)], (50, 0), Scope(salt="c"))
        probe = Request("probe", keys, 9, 1)
        blocks = 8 // size
        expected = (1, 0) if blocks else (0, 0)
        if self.s.offloading is not None:
            # Without a full block there is nothing to ask the host for.
            factor = self.s.offloading.spec.factor
            full = 9 // size // factor
            if self.disk is None:
                expected += (1 if full else 0, 0)
            else:
                expected += (full + 1 if full else 0, 0, full, 0)
        assert work_of_lookup(self.s, probe) == expected
        self.lookups += 1


TIERS: dict[str, dict[str, object]] = {
    "device": {},
    "host": {"host": HostTierSpec(24, policy=RECOMPUTED)},
    "arc": {"host": HostTierSpec(12, 2, ARC)},
    "disk": {"host": HostTierSpec(24, policy=RECOMPUTED, disk=True)},
    "disk, arc": {"host": HostTierSpec(12, 2, ARC, disk=True)},
}


def two_tenants(data: bytes, eviction: str, *, fair: bool, tier: str = "device") -> TwoTenants:
    shares = "*:weight=2" if fair else "a:blocks=1000000"
    return TwoTenants(
        endless(data), policy=CachePolicy(EVICTIONS[eviction]()), tenants=shares, more=TIERS[tier]
    )


@settings(max_examples=30, deadline=None)
@given(
    data=st.binary(min_size=300, max_size=900),
    eviction=st.sampled_from(list(EVICTIONS)),
    fair=st.booleans(),
    tier=st.sampled_from(tuple(TIERS)),
)
def test_tenants_with_equal_prompts_never_share(data: bytes, eviction: str, fair: bool, tier: str) -> None:
    life = two_tenants(data, eviction, fair=fair, tier=tier)
    while life.operations < len(data) // 4:
        life.operate()
    life.drain()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_tenants_never_share_in_a_million_operations(eviction: str, tier: str) -> None:
    """1,000,000 operations for each tier over all orders, with cancellations, preemptions and evictions."""
    left = -(-1_000_000 // len(EVICTIONS))
    seed = operations = lookups = loads = failed = disk_tokens = lost_stores = lost_reads = 0
    while left > 0:
        seed += 1
        life = two_tenants(random.Random(seed).randbytes(40_000), eviction, fair=bool(seed % 2), tier=tier)
        for _ in range(min(left, 5_000)):
            life.operate()
        left -= life.operations
        operations += life.operations
        lookups += life.lookups
        loads += life.loads
        failed += life.failed
        disk_tokens += life.disk_tokens
        lost_stores += life.disk.failed_stores if life.disk is not None else 0
        lost_reads += life.disk.failed_reads if life.disk is not None else 0
        check(life.s)
        life.drain(10**6)
    print(
        f"\n{eviction}, {tier}: {operations} operations, {lookups} foreign lookups, {loads} loads, "
        f"{failed} transfers failed, {disk_tokens} tokens came from the disk, "
        f"{lost_stores} of its stores and {lost_reads} of its reads failed"
    )
    assert lookups > 1000
    assert tier == "device" or (loads > 100 and failed > 100)
    assert "disk" not in tier or (disk_tokens > 100 and lost_stores > 100 and lost_reads > 100)


# ---- ceilings under every rule that admits

HOST = HostTierSpec(64, policy=RECOMPUTED)
CEILINGS = {
    "host tier": (VLLM, {"host": HOST}),
    "nano-vllm": (PROFILES["nano-vllm"], {}),
    "no evict": (PROFILES["trtllm-guaranteed-no-evict"], {"engine": TrtllmSettings(chunked_context=True)}),
    "max utilization": (PROFILES["trtllm-max-utilization"], {"engine": TrtllmSettings(chunked_context=True)}),
    "sglang": (PROFILES["sglang"], {"engine": SglangSettings()}),
    "sglang, lpm": (PROFILES["sglang"], {"engine": SglangSettings(), "policy": "lpm", "pipeline_depth": 1}),
    "windows": (VLLM, {"groups": (GroupSpec(KvKind.FULL, SIZE), GroupSpec(KvKind.WINDOW, SIZE, 8))}),
}


@pytest.mark.parametrize("name", CEILINGS)
def test_ceilings_hold_under_the_rules_of_every_engine_that_has_them(name: str) -> None:
    profile, more = CEILINGS[name]
    most = 12 if name == "windows" else 6
    limits = Limits(60, SIZE, 8, 64, tenants=Tenants.parse(f"a:blocks={most}"), **more)
    s = Scheduler(limits, profile)
    made = [request(f"{'ab'[i % 2]}{i}", "ab"[i % 2], 7 * i, 8 + i % 5, 9) for i in range(12)]
    for each in made:
        assert s.submit(each), each.reason
    together = most_of_a = 0
    for _ in range(400):
        plan = s.plan(0)
        if plan is None or not s.requests:
            break
        running = list(s.running.requests)
        counted = sum(limits.blocks_at_end(each.total_tokens) for each in running if each.tenant == "a")
        most_of_a = max(most_of_a, counted)
        together = max(together, len({each.tenant for each in running}))
        jobs = tuple(transfer.job for transfer in (*plan.loads, *plan.stores))
        if plan.computes:
            s.commit(plan, Outcome(transferred=jobs))
        elif jobs:
            s.transferred(jobs)
        check(s)
    assert not s.requests
    assert together == 2, "others pass a tenant at its ceiling"
    assert 0 < most_of_a <= most
    assert all(each.state is State.FINISHED for each in made)


def test_what_a_load_brings_counts_below_the_ceiling() -> None:
    limits = Limits(60, SIZE, 8, 64, tenants=Tenants.parse("a:blocks=6"), host=HOST)
    s = Scheduler(limits)

    def serve(one: Request) -> None:
        s.submit(one)
        while s.requests:
            plan = s.plan(0)
            s.commit(plan, Outcome(transferred=tuple(transfer.job for transfer in plan.stores)))

    serve(request("a0", "a", 1, 17))
    s.evict(60)
    first, second = request("a1", "a", 1, 17), request("a2", "a", 2, 9)
    s.submit(first)
    s.submit(second)
    plan = s.plan(0)
    assert len(plan.loads) == 1
    assert first.state is State.LOADING
    assert second.state is State.WAITING, "the load holds 5 of 6 blocks"
    s.transferred([plan.loads[0].job])
    plan = s.plan(0)
    assert first.state is not State.LOADING
    assert first.external_tokens == 16
    s.commit(plan, Outcome(transferred=tuple(transfer.job for transfer in plan.stores)))
    while s.requests:
        plan = s.plan(0)
        s.commit(plan, Outcome(transferred=tuple(transfer.job for transfer in plan.stores)))
    assert second.state is State.FINISHED


def test_rules_that_know_no_weights_of_tenants_say_so() -> None:
    scenario = Scenario(tenants="a:weight=2", num_gpu_blocks=100, costs="roofline", engine="sglang")
    with pytest.raises(BadInput, match=r"tenants may have ceilings \(blocks\) there, but no weights"):
        Scheduler(scenario.limits(), scenario.rules(scenario.step_costs()))
