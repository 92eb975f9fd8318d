"""Segments of a sweep that show what n-grams and a host tier take beyond plain steps.

Both are recorded with synchronous scheduling, whose steps show the host's time.

- "ngram": batches of every size decode texts of chance, in which nothing is found; then texts that quote
  their own prompts, so that all draft tokens are accepted and every step verifies as many as there may be.
- "host": documents that take more room than the KV cache has. Asked for again, they come back from host
  memory, few and many blocks at a time. From a host tier that is smaller than the cache nothing comes back:
  what is seen then is stores.
"""

from __future__ import annotations

from pagecast.engine.sweep_script import Document, Script
from pagecast.engine.sweep_traces import EngineCapacity, Segment
from pagecast.sim.core.limits import Limits

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_MOST_LONG = 64  # requests that have long contexts: their prompts would take most of the time
_MISSED_STEPS, _FOUND_STEPS = 24, 12
_LEAST_MATCH = 8  # tokens of an output before it is sure to be found in the prompt
_LENGTHS = (0.02, 0.05, 0.1, 0.2)  # of documents, as shares of the cache
_LONGEST = 0.2  # of a document, as a share of the room for all
_TURNS = 3


def option_segments(limits: Limits, drafts: int) -> list[Segment]:
    """The segments for an engine of these limits that drafts so many tokens per request, 0 for none.

    That of the host tier comes first.
    """
    space = EngineCapacity.of(limits, [], [])
    made = []
    if limits.host is not None:
        script = Script("host-sync", space.max_len)
        _documents(script, space, limits.host.blocks * limits.host.factor * limits.block_size)
        made.append(Segment(script.name, 0, script.trace()))
    if drafts:
        script = Script("ngram-sync", space.max_len)
        _ngrams(script, space, drafts)
        made.append(Segment(script.name, 0, script.trace()))
    return made


def _ngrams(script: Script, space: EngineCapacity, drafts: int) -> None:
    """Batches that find nothing, and batches whose draft tokens are all accepted."""
    right = _LEAST_MATCH + _FOUND_STEPS * (drafts + 1)
    longest = min(1024, space.max_len // 2, int(0.6 * space.cache_tokens / space.seqs))
    sizes = [n for n in _SIZES if n <= space.seqs]
    for n in sizes:
        lengths = {max(2, longest // 4), max(2, longest if n <= _MOST_LONG else longest // 4)}
        for length in sorted(lengths):
            _batch(script, n, length, _MISSED_STEPS, quoting=False)
            _batch(script, n, max(length, right), right, quoting=True)


def _batch(script: Script, n: int, length: int, output: int, *, quoting: bool) -> None:
    """Requests that begin together, with outputs that quote their prompts, or of texts never seen."""
    documents = [script.document(length) for _ in range(n)]
    answers = documents if quoting else [script.document(output) for _ in range(n)]
    rows = [
        script.add(document.cut(length), output, quote=(answer.content, 0))
        for document, answer in zip(documents, answers, strict=True)
    ]
    script.follow(rows[-1])


def _documents(script: Script, space: EngineCapacity, host_tokens: int) -> None:
    """Documents that overflow the cache and fit the host, asked for in turn, alone and several at once."""
    room = min(0.9 * host_tokens, 1.5 * space.cache_tokens)
    longest = min(space.max_len - 32, int(_LONGEST * room))
    lengths = [min(max(2 * space.block, int(share * space.cache_tokens)), longest) for share in _LENGTHS]
    documents = list[Document]()
    while sum(document.tokens for document in documents) + lengths[len(documents) % 4] < room:
        documents.append(script.document(lengths[len(documents) % 4]))
    together = 1
    for _ in range(1 + _TURNS):
        for first in range(0, len(documents), together):
            some = documents[first : first + together]
            script.group([(*text.cut(text.tokens), *script.document(8).cut(8)) for text in some], output=6)
        together = min(2 * together, space.seqs)
