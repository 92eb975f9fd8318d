"""The sweep that a calibration is fitted from: traces that lead the engine through its batch shapes.

Every step of it is one that the scheduler planned for requests it was given. Contexts are made once and met
again by prefix hits; requests that decode together share them in one part alone, for shared KV is read from
the GPU's L2 cache in part, faster than any other. Shapes are dense where cost bends (CUDA graph sizes, small
batches, small chunks) and sparse where it is linear.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log

import numpy as np
from pagecast.engine.sweep_script import Document, PromptSpans, Script
from pagecast.sim.core.limits import Limits
from pagecast.traces.schema import Trace

VERSION = 3  # of the sweep's shapes: segments of another one are not mixed with these

_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144)
_LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_BACKGROUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 248)
_IDLE_S = 0.03  # before an isolated prompt
_REST_S = 0.2  # before decode steps whose contexts are all that is to tell: a GPU gets its clocks back


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """Room of an engine.

    `seqs` requests at once, `step_tokens` in a step, `cache_tokens` in the KV cache, `max_len` in a request;
    `graphs` are the batch sizes of its CUDA graphs, `prompt_graphs` the token counts of those for steps with
    prompts. `depth` is the pipeline's, `block` the tokens of a KV block.
    """

    seqs: int
    step_tokens: int
    cache_tokens: int
    max_len: int
    graphs: tuple[int, ...]
    prompt_graphs: tuple[int, ...]
    depth: int
    block: int

    @classmethod
    def of(cls, limits: Limits, graphs: list[int], prompt_graphs: list[int]) -> EngineCapacity:
        """The space that a scheduler's limits leave."""
        cache = limits.num_blocks * limits.block_size
        longest = min(limits.max_model_len or cache, cache)
        return cls(
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            cache,
            longest,
            tuple(graphs),
            tuple(prompt_graphs),
            limits.pipeline_depth,
            limits.block_size,
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of the sweep, recorded in one go with an empty cache at its start."""

    name: str
    depth: int
    trace: Trace


def segments(limits: Limits, graphs: list[int], prompt_graphs: list[int]) -> list[Segment]:
    """The sweep for an engine of these limits, at both pipeline depths; equal limits give equal traces."""
    made = []
    for depth, word in ((0, "sync"), (1, "async")):
        space = replace(EngineCapacity.of(limits, graphs, prompt_graphs), depth=depth)
        for name, write in _PARTS.items():
            script = Script(f"{name}-{word}", space.max_len)
            write(script, space)
            if len(script):
                made.append(Segment(script.name, depth, script.trace()))
    return made


def rehearsal(limits: Limits) -> Trace:
    """Steps of all kinds, to be served before anything is recorded: whatever is compiled or loaded at its
    first use is then there."""
    space = EngineCapacity.of(limits, [], [])
    script = Script("rehearsal", space.max_len)
    for size in (*(n + odd for n in _SIZES for odd in (0, 1)), space.step_tokens):
        if size <= min(space.step_tokens, space.max_len // 2):
            script.follow(script.fresh(size, 2))
    documents = [script.document(min(n, space.max_len // 2, space.cache_tokens // 8)) for n in (500, 9000)]
    for n in (1, 7, 40, 200):
        texts = [script.document(20 + i).cut(20 + i) for i in range(min(n, max(1, space.seqs // 2)))]
        decoding = [script.add(prompt, 60) for prompt in texts]
        script.follow(script.fresh(16, 2))
        for _ in range(12):
            script.group(_burst(script, space, documents, space.step_tokens // 4, on_context=0.5), output=1)
        script.follow(decoding[0])
    return script.trace()


# ---- decode


def _decode(script: Script, space: EngineCapacity) -> None:
    """Batches of every size at several contexts: requests that begin together and end one after another."""
    most = 768 if space.depth else 2048
    tokens = int(max(8, min(most, 0.6 * space.cache_tokens / space.seqs, space.max_len / 2)))
    documents = [script.document(tokens) for _ in range(space.seqs)]
    script.group([document.cut(tokens) for document in documents], output=48)
    even = (1.0, 0.25) if space.depth else (1.0, 0.5, 0.25, 0.1)
    draws = [tokens * share - script.random.uniform(0, 16, space.seqs) for share in even]
    draws.append(script.random.uniform(1, tokens, space.seqs))
    if not space.depth:
        draws.append(np.minimum(tokens * script.random.lognormal(-2.0, 1.0, space.seqs), tokens))
    for cuts in draws:
        prompts = [document.cut(int(cut)) for document, cut in zip(documents, cuts, strict=True)]
        _stairs(script, space, prompts)


def _stairs(script: Script, space: EngineCapacity, prompts: list[PromptSpans]) -> None:
    """Decode steps of falling batch size: on each size of a CUDA graph, and just above the next smaller."""
    sizes = _batch_sizes(space)
    steps = np.zeros(space.seqs, np.int64)
    for size in sizes:
        steps[:size] += 8 if size <= 8 else 4
    rows = [script.add(prompt, int(count) + 1) for prompt, count in zip(prompts, steps, strict=True)]
    script.follow(rows[0])


def _batch_sizes(space: EngineCapacity) -> list[int]:
    ladder = [size for size in (space.graphs or _LADDER) if size <= space.seqs]
    sizes = {*ladder, *(size + 1 for size in ladder if size < space.seqs), space.seqs}
    ladder = sorted(sizes)
    return [size for i, size in enumerate(ladder) if not space.depth or size <= 8 or i % 3 == 0]


# ---- shared contexts


def _shared(script: Script, space: EngineCapacity) -> None:
    """Requests that decode together behind one prefix, as those of one system prompt do.

    Their contexts are there before, and a prompt's only new token is its last: what they spare one another
    is little beside what a GPU loses that has just computed prompts.
    """
    own = int(max(0, min(256, 0.2 * space.cache_tokens / space.seqs))) // space.block * space.block + 1
    for prefix in (512, 2048, 8192):
        if prefix > min(space.max_len / 2, space.cache_tokens / 4):
            break
        text = script.document(prefix).cut(prefix)
        script.follow(script.add(text, 1))
        prompts = [(*text, *script.document(own).cut(own)) for _ in range(min(64, space.seqs))]
        script.group(prompts, output=1)
        for n in (size for size in (3, 8, 16, 32, 64) if size <= len(prompts)):
            script.group(prompts[:n], output=10, gap_s=_REST_S)


# ---- long contexts


def _long(script: Script, space: EngineCapacity) -> None:
    """Prompts up to the longest, in chunks; few requests that decode far in; prompts on cached contexts."""
    share, most = (0.3, 4) if space.depth else (0.6, 8)
    top = 24_576 if space.depth else space.max_len
    length = int(max(16, min(top, 0.97 * space.max_len, share * space.cache_tokens / 2)))
    count = max(1, min(most, int(share * space.cache_tokens / length), space.seqs))
    documents = [script.document(length) for _ in range(count)]
    script.group([document.cut(length) for document in documents], output=24)
    few = min(64, max(1, space.seqs // 2))
    short = [script.document(min(4096, max(8, 0.3 * space.cache_tokens / few))) for _ in range(few)]
    script.group([document.cut(document.tokens) for document in short], output=24)
    _even(script, documents, (0.98, 0.25) if space.depth else (0.98, 0.5, 0.25, 0.12, 0.06), (1, 2, 4, 6, 8))
    _even(script, short, (1.0, 0.4), (12, 24, 40, 64))
    _ragged(script, documents, short)
    _on_contexts(script, space, documents)


def _even(
    script: Script, texts: list[Document], fractions: tuple[float, ...], sizes: tuple[int, ...]
) -> None:
    """Contexts of one length that decode together, at each of these fractions of their texts."""
    for fraction in fractions:
        for n in (size for size in sizes if size <= len(texts)):
            cuts = fraction * texts[0].tokens - script.random.integers(0, 16, n)
            prompts = [text.cut(int(cut)) for text, cut in zip(texts, cuts, strict=False)]
            script.group(prompts, output=8, gap_s=_REST_S)


def _ragged(script: Script, documents: list[Document], short: list[Document]) -> None:
    """A few long contexts among many short ones."""
    for n in (size for size in (3, 12, 40, 64) if size <= len(short)):
        for far in (1, len(documents)):
            cuts = script.random.uniform(0.05, 1.0, n + far)
            texts = [*short[:n], *documents[:far]]
            prompts = [text.cut(int(cut * text.tokens)) for text, cut in zip(texts, cuts, strict=True)]
            script.group(prompts, output=8, gap_s=_REST_S)


def _on_contexts(script: Script, space: EngineCapacity, documents: list[Document]) -> None:
    """New tokens of many numbers on cached contexts of many lengths, one prompt at a time and several."""
    sizes = [size for size in (16, 64, 200, 512, 1024, 2048, 4096, 8192) if size <= space.step_tokens]
    for fraction in (0.05, 0.5) if space.depth else (0.03, 0.1, 0.25, 0.5, 0.9):
        for i, size in enumerate(sizes):
            text = documents[i % len(documents)]
            fresh = script.document(size).cut(size)
            script.follow(script.add((*text.cut(int(fraction * text.tokens)), *fresh), 3))
    for _ in range(6 if space.depth else 16):
        prompts = _burst(script, space, documents, space.step_tokens, on_context=1.0)
        script.group(prompts, output=3)


# ---- prompts by themselves


def _prompts(script: Script, space: EngineCapacity) -> None:
    """Prompts of every size, isolated and back to back, and many small ones in a step."""
    longest = min(2 * space.step_tokens, space.max_len // 2)
    sizes = sorted(size for size in {*_SIZES, *space.prompt_graphs} if size < longest)
    sizes += [space.step_tokens, longest]
    for gap_s in (_IDLE_S, 0.0) if space.depth else (_IDLE_S, 0.0, 0.0):
        for size in script.random.permutation(sizes).tolist():
            jitter = int(script.random.integers(0, 1 + size // 8))
            script.follow(script.fresh(max(2, size - jitter), 3, gap_s=gap_s))
    for total in (64, 256, 1024, 4096, 8192):
        for count in (2, 4, 8, 16, 32, 64):
            if total <= space.step_tokens and 2 * count <= total and count <= space.seqs:
                script.group(_split(script, total, count), output=3)


def _split(script: Script, total: int, count: int) -> list[PromptSpans]:
    """New prompts of uneven sizes that have `total` tokens together, each of two or more."""
    shares = script.random.dirichlet(np.full(count, 2.0))
    sizes = np.maximum(2, (shares * total).astype(np.int64)).tolist()
    return [script.document(size).cut(size) for size in sizes]


# ---- prompts beside decodes


def _mixed(script: Script, space: EngineCapacity) -> None:
    """Bursts of prompts beside decoding requests, few and many; most bursts are small."""
    few = min(128, max(1, space.seqs // 2))
    short = [script.document(min(512, max(8, 0.2 * space.cache_tokens / few))) for _ in range(few)]
    length = min(16_384, space.max_len // 2, 0.06 * space.cache_tokens)
    far = [script.document(max(8, length)) for _ in range(3)]
    last = script.group([text.cut(text.tokens) for text in (*far, *short)], output=4)
    bursts = 16 if space.depth else 24
    for n in sorted({min(n, max(1, space.seqs - 8)) for n in _BACKGROUNDS}):
        script.follow(last)
        small = min(512, space.step_tokens)
        tokens = [space.step_tokens] * bursts + [small] * (bursts if n <= 64 else bursts // 2)
        last = _beside(script, space, n, (short, far), tokens)


def _beside(
    script: Script,
    space: EngineCapacity,
    n: int,
    documents: tuple[list[Document], list[Document]],
    most: list[int],
) -> int:
    """`n` decoding requests, and beside them a burst for each of `most` tokens.

    Returns the first of the `n`, all of which outlast the bursts.
    """
    short, far = documents
    bursts = [_burst(script, space, [*short, *far], tokens, on_context=0.5) for tokens in most]
    outputs = script.random.integers(1, 5, len(bursts)).tolist()
    steps = sum(
        ceil(sum(span[2] for prompt in burst for span in prompt) / space.step_tokens) + output
        for burst, output in zip(bursts, outputs, strict=True)
    )
    texts = [
        short[i].cut(int(script.random.integers(1, short[i].tokens + 1)))
        if i < len(short)
        else script.document(64).cut(int(script.random.integers(16, 65)))
        for i in range(n)
    ]
    decoding = [script.add(prompt, steps + 6) for prompt in texts]
    script.follow(script.fresh(16, 3))  # once this one has ended, the others decode
    for burst, output in zip(bursts, outputs, strict=True):
        script.group(burst, output)
    return decoding[0]


def _burst(
    script: Script, space: EngineCapacity, documents: list[Document], most: int, *, on_context: float
) -> list[PromptSpans]:
    """One to eight prompts of up to `most` new tokens together, small ones as likely as large.

    Each has a cached context with probability `on_context`.
    """
    random = script.random
    count = int(min(random.choice([1, 1, 1, 1, 2, 3, 5, 8]), space.seqs))
    total = max(2 * count, int(np.exp(random.uniform(log(4), log(max(most, 8))))))
    prompts = _split(script, total, count)
    for i in range(count):
        if random.random() < on_context:
            text = documents[int(random.integers(len(documents)))]
            before = text.cut(int(np.exp(random.uniform(log(4), log(max(text.tokens, 8))))))
            prompts[i] = (*before, *prompts[i])
    return prompts


# ---- conversations


def _load(script: Script, space: EngineCapacity) -> None:
    """Users who wait for an answer, think, and ask on, in a few and in many conversations at once."""
    last = -1
    most = max(8, min(4096, space.cache_tokens // 8, space.max_len // 2))
    for share, turns, think_s in ((0.025, 6, 0.2), (0.1, 4, 0.3), (0.4, 3, 0.5)):
        ends = []
        for _ in range(max(1, round(share * space.seqs))):
            script.follow(last)
            text = script.document(most)
            asked = 0
            for _ in range(turns):
                asked += int(script.random.lognormal(5.5, 1.0)) + 2
                think = float(script.random.exponential(think_s))
                answer = int(script.random.geometric(1 / 50))
                script.follow(script.add(text.cut(asked), min(answer, 200), gap_s=think))
            ends.append(len(script) - 1)
        last = ends[-1]


_PARTS = {
    "decode": _decode,
    "shared": _shared,
    "long": _long,
    "prompts": _prompts,
    "mixed": _mixed,
    "load": _load,
}
