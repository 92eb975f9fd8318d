"""Decisions of one replica: requests, blocks, prefix reuse, eviction, admission, scheduling.

Start at `reference.py`: what is decided, block by block, in one slow and obvious file. `scheduler.py` is the
facade of the fast form. Simulator, engine and validation all run one loop around it, and `pipeline.py` keeps
the plans of that loop that are in flight:

    plan = scheduler.plan(now); outcome = backend.execute(plan); scheduler.commit(plan, outcome, now)

    request.py, limits.py, plan.py    what goes in (a request, a replica's limits), what comes out (a plan)
    engines/       a folder per engine; `profile.py` puts a scheduler together, `vllm/mix.py` is one step
    rules/         rules that several engines use; `rules.py` has their protocols
    option.py      how classes of settings declare the options that users give
    cache_policy.py, cache_rules.py    settings of rules that replace an engine's, and the parts made of them
    step.py        one step in the making: what rules may call, and `seal`, which makes the plan
    lifecycle.py   the states of a request, and all that changes from one to the next
    queue.py, forks.py, running.py, decoders.py    the requests that wait; those that run, by what they do
    stretch/       many decode steps planned as one while nothing has to be decided, and the words for it
    parts.py, group_spec.py    what a profile makes; what the layers of a model keep
    intake.py, retention.py, tenants.py    who is rejected on arrival, how long blocks are kept, who shares
    tiers/, tier_spec.py    host memory and a disk below the device
    preemption.py, swap_space.py    what becomes of the KV of a preempted request
    handoff.py     prompts computed on one replica and decoded on another
    drafter.py     speculation: how many draft tokens a request verifies beside its next one
    memory/        KV blocks behind the protocol `Memory` of `memory.py`: `kv_memory.py`, whose groups
                   keep what `group_spec.py` says; SGLang has a radix tree of its own (engines/sglang)
    identity/      which tokens are equal: content spans, block keys, sharing scopes
    events.py, kv_events.py    the event logs
    check.py, check_tiers.py, invariant.py, errors.py    the invariants, and errors a user can act on

The core imports the standard library, numpy and xxhash. It has no clock, randomness or I/O: `now` is
always passed in, in integer nanoseconds. `docs/extending.md` shows how to add to it.
"""
