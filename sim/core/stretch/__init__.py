"""Stretches: many decode steps planned as one, while nothing has to be decided.

Start at `stride.py`, which has the interface: `quiet` says for how many steps nothing has to be decided,
`plan` plans them as one, `cut` shortens the plan to the steps that have begun, `settle` applies it. Models
whose layers keep different tokens have `hybrid.py`, with `turns.py` for requests that act one after another
and `common_turns.py` for all together. SGLang's variant is in its folder (`engines/sglang/stride.py`). What
a stretch reads is kept by `running.py` and `decoders.py` of the core, which single steps use too.

Words:

    tick       a step in which requests may decode; `Running.tick` counts them. Under nano-vLLM it stands
               still in steps of prompts; elsewhere every step is a tick
    lag        at tick t a decoding request computes position t - lag. Both numbers that describe it, its lag
               and its last tick, stay as they are while it decodes in every tick
    crossing   a request begins a new block: its lag is congruent to the tick, modulo the block size
    turn       what a request does with its blocks in a step: give back, take, publish
    due        a request that has something to do in its turn
    joining    the plan being made computes the last token of the prompt; it decodes from the next step on
    parked     generating, but the batch is full (nano-vLLM alone: `max_num_seqs` bounds a step there)
    draining   the last token is planned and not committed yet
    open       a stretch that is planned and not settled: its blocks are not taken yet
"""
