"""The bundled samples, and the script that makes them: `python -m pagecast.traces.samples`.

They are generated, not recorded: their shapes follow what public traces report (see each one below),
so that a newcomer can replay something real-looking at once. The seed is fixed; the script reproduces
the files in `samples/`.
"""

from __future__ import annotations

from collections.abc import Callable

from pagecast.traces.arrivals import ArrivalProcess
from pagecast.traces.bundled import FOLDER
from pagecast.traces.generate import Conversations, Retrieval, conversations, retrieval
from pagecast.traces.lengths import LogNormal, Uniform
from pagecast.traces.schema import Trace
from pagecast.traces.write import write_jsonl

_SEED = 20_250_101


def chat() -> Trace:
    """2,000 turns of chat over five system prompts in two minutes, some 16 requests per second.

    Output lengths follow Azure's conversations of 2023 (p50 129, mean 211).
    """
    shape = Conversations(
        starts=ArrivalProcess("gamma", rate=5.0, cv=1.4),
        turns=LogNormal(p50=3.2, sigma=0.7, least=1, most=10),
        message=LogNormal(p50=60, sigma=1.0, least=4, most=2000),
        opening=LogNormal(p50=220, sigma=1.3, least=4, most=8000),
        output=LogNormal(p50=150, sigma=0.8, least=4, most=1500),
        think_s=LogNormal(p50=5.0, sigma=0.5, most=20),
        system_prompts=(900, 1600, 400, 2400, 700),
        most_tokens=16_000,
    )
    return conversations(shape, duration_s=120, count=2000, seed=_SEED, name="chat")


def code() -> Trace:
    """600 turns of coding agents: long prompts that grow turn by turn, short answers, short pauses.

    As agent sessions publish them: tools and instructions of some 15,000 tokens, a hundred thousand
    tokens late in a session, p50 of the output 217.
    """
    shape = Conversations(
        starts=ArrivalProcess("poisson", rate=0.05),
        turns=LogNormal(p50=22, sigma=0.7, least=2, most=120),
        message=LogNormal(p50=450, sigma=1.3, least=20, most=20_000),
        opening=LogNormal(p50=9_000, sigma=0.9, least=300, most=60_000),
        output=LogNormal(p50=217, sigma=0.9, least=10, most=4000),
        think_s=LogNormal(p50=5.0, sigma=1.2, most=300),
        system_prompts=(15_300, 14_100),
        most_tokens=130_000,
    )
    return conversations(shape, sessions=40, count=600, seed=_SEED + 1, name="code")


def rag() -> Trace:
    """1,000 questions over 400 documents: passages first, so that popular documents share their prefix."""
    shape = Retrieval(
        arrivals=ArrivalProcess("poisson", rate=6.0),
        documents=400,
        document=LogNormal(p50=700, sigma=0.5, least=80, most=3000),
        passages=Uniform(2, 6),
        question=LogNormal(p50=30, sigma=0.6, least=5, most=300),
        output=LogNormal(p50=180, sigma=0.7, least=10, most=1000),
        system_tokens=350,
    )
    return retrieval(shape, count=1000, seed=_SEED + 2, name="rag")


MAKERS: dict[str, Callable[[], Trace]] = {"chat": chat, "code": code, "rag": rag}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for sample, make in MAKERS.items():
        write_jsonl(make(), FOLDER / f"{sample}.jsonl.gz")
