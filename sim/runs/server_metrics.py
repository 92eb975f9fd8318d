"""Figures of a running server from its Prometheus metrics: load, hit rate, KV use and latencies.

Read are dumps of `/metrics`, one or two, or the JSON of a range query, of vLLM (0.9 to 0.33), SGLang (0.5,
--enable-metrics) and TensorRT-LLM (1.1 and later, return_perf_metrics). Counters and histograms count between
the first and the last of the times, or from the server's start where there is one; gauges are means over the
times. Several engines of one server are counted as one of them: sums are divided by their number.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from pagecast.sim.core.errors import BadInput, CannotRunHere
from pagecast.sim.documents import read_text
from pagecast.traces.arrays import Floats, Ints

Labels = frozenset[tuple[str, str]]
Values = dict[tuple[str, Labels], float]

_MOST_BYTES = 1 << 28
_REMEDY = "give what a server answers at /metrics, or the JSON of a range query to Prometheus"
_QUERY = 'query the metrics themselves, as {__name__=~"(vllm:|sglang:|trtllm_).+"}'
_ENGINE_LABELS = ("engine", "dp_rank", "instance", "pod")
_RANKS = ("tp_rank", "pp_rank", "moe_ep_rank")  # of one engine, which all tell the same
PREFIXES = {"vllm": "vllm:", "sglang": "sglang:", "trtllm": "trtllm_"}
# What each figure is called, without the engine's prefix; the first that is there counts.
NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm": {
        "running": ("num_requests_running",),
        "waiting": ("num_requests_waiting",),
        "kv": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
        "hits": ("prefix_cache_hits_total", "gpu_prefix_cache_hits_total"),
        "queries": ("prefix_cache_queries_total", "gpu_prefix_cache_queries_total"),
        "prompt": ("prompt_tokens_total",),
        "output": ("generation_tokens_total",),
        "done": ("request_success_total",),
        "preemptions": ("num_preemptions_total",),
        "ttft": ("time_to_first_token_seconds",),
        "tpot": ("request_time_per_output_token_seconds",),
        "itl": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
        "e2e": ("e2e_request_latency_seconds",),
        "queue": ("request_queue_time_seconds",),
        "inputs": ("request_prompt_tokens",),
        "outputs": ("request_generation_tokens",),
    },
    "sglang": {
        "running": ("num_running_reqs",),
        "waiting": ("num_queue_reqs",),
        "kv": ("token_usage",),
        "hit_rate": ("cache_hit_rate",),
        "hits": ("cached_tokens_total",),
        "queries": ("prompt_tokens_total",),
        "prompt": ("prompt_tokens_total",),
        "output": ("generation_tokens_total",),
        "done": ("num_requests_total",),
        "preemptions": ("num_retractions_total",),
        "ttft": ("time_to_first_token_seconds",),
        "itl": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
        "e2e": ("e2e_request_latency_seconds",),
        "queue": ("queue_time_seconds",),
        "inputs": ("prompt_tokens_histogram",),
        "outputs": ("generation_tokens_histogram",),
    },
    "trtllm": {
        "running": ("num_requests_running", "num_active_requests"),
        "waiting": ("num_requests_waiting", "server_queue_length"),
        "kv": ("kv_cache_utilization",),
        "hit_rate": ("kv_cache_hit_rate",),
        "hits": ("prompt_cached_tokens_total",),
        "queries": ("prompt_tokens_total",),
        "prompt": ("prompt_tokens_total",),
        "output": ("generation_tokens_total",),
        "done": ("request_success_total",),
        "ttft": ("time_to_first_token_seconds",),
        "tpot": ("time_per_output_token_seconds",),
        "e2e": ("e2e_request_latency_seconds",),
        "queue": ("request_queue_time_seconds",),
    },
}


@dataclass(frozen=True)
class Scrape:
    """All series at one time, by name and labels. `time_s`: since 1970; None where a dump does not say."""

    values: Values
    time_s: float | None = None

    def of_first_ranks(self) -> Scrape:
        """Without what other ranks of an engine tell again (SGLang, --enable-metrics-for-all-schedulers)."""
        kept: Values = {}
        told: set[tuple[str, Labels]] = set()
        for (name, labels), value in sorted(self.values.items(), key=lambda one: _rank(one[0][1])):
            of_engine = name, frozenset(label for label in labels if label[0] not in _RANKS)
            if of_engine not in told:
                told.add(of_engine)
                kept[name, labels] = value
        return replace(self, values=kept)

    def total(self, name: str) -> float | None:
        """The sum over a name's series; None where it has none."""
        found = [value for (each, _), value in self.values.items() if each == name]
        return math.fsum(found) if found else None

    def mean(self, name: str) -> float | None:
        """The mean over a name's series."""
        found = [value for (each, _), value in self.values.items() if each == name]
        return math.fsum(found) / len(found) if found else None

    def buckets(self, name: str) -> dict[float, float]:
        """The counts of a histogram up to each bound."""
        counts: dict[float, float] = {}
        for (each, labels), value in self.values.items():
            bound = dict(labels).get("le")
            if each == f"{name}_bucket" and bound is not None:
                counts[float(bound)] = counts.get(float(bound), 0.0) + value
        return dict(sorted(counts.items()))


def _rank(labels: Labels) -> tuple[str, ...]:
    said = dict(labels)
    return tuple(said.get(name, "") for name in _RANKS)


@dataclass(frozen=True)
class Lengths:
    """Lengths as a histogram has them: `bounds` (the last infinite), how many in each, and their mean."""

    bounds: Floats
    counts: Floats
    mean: float

    def drawn(self, count: int, random: np.random.Generator) -> Ints:
        """`count` lengths of this distribution, as evenly as may be, in random order, with its mean."""
        share = np.cumsum(self.counts) / self.counts.sum()
        points = (np.arange(count) + 0.5) / count
        bucket = np.minimum(np.searchsorted(share, points), len(share) - 1)
        below = np.concatenate([[0.0], share[:-1]])[bucket]
        within = np.clip((points - below) / np.maximum(share[bucket] - below, 1e-12), 0, 1)
        low = np.concatenate([[0.0], self.bounds[:-1]])[bucket]
        high = np.where(np.isinf(self.bounds[bucket]), 4 * np.maximum(low, 1), self.bounds[bucket])
        longest = bucket == bucket.max()

        def lengths(power: float, reach: float) -> Floats:
            ends = np.where(longest, low + reach * (high - low), high)
            return np.asarray(np.maximum(low + (ends - low) * within**power, 1.0), np.float64)

        # So that the mean is right: how far the last bucket is filled is unknown, and if that is not enough
        # where in their buckets lengths lie.
        reach = _solved(lambda reach: lengths(1.0, reach).mean() - self.mean, 0.0, 1.0)
        power = _solved(lambda power: self.mean - lengths(math.exp(power), reach).mean(), -5.0, 5.0)
        drawn = np.floor(lengths(math.exp(power), reach) + random.random(count)).astype(np.int64)
        return random.permutation(np.maximum(drawn, 1))


def _solved(over: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function is 0, or the end that is closest."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if over(middle) > 0 else (middle, high)
    return low


@dataclass(frozen=True)
class ServerFigures:
    """What a server's metrics tell of a span of time; None where they do not.

    `seconds`: the span; None for a single dump, which counts from the server's start. `counts`: requests that
    began between times (`times_s`, from the first). Latencies in seconds are means; `tpot_s` of requests, or
    of tokens where an engine has no other (`tpot_of_tokens`). `kv_usage`, `hit_rate`: 0 to 1.
    """

    engine: str
    engines: int
    seconds: float | None
    requests: float
    figures: dict[str, float] = field(default_factory=dict)
    inputs: Lengths | None = None
    outputs: Lengths | None = None
    times_s: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()
    num_blocks: int | None = None
    block_size: int | None = None
    tpot_of_tokens: bool = False
    notes: tuple[str, ...] = ()

    @property
    def requests_per_s(self) -> float | None:
        """Requests per second; None where the span is unknown."""
        return None if not self.seconds else self.requests / self.seconds


def read_metrics(*paths: str | Path, seconds: float | None = None) -> ServerFigures:
    """Reads a dump, dumps in order of time, or a range query. Errors: BadInput.

    `seconds`: from the first dump to the last, which they do not tell.
    """
    scrapes: list[Scrape] = []
    for path in paths:
        text = read_text(Path(path), _MOST_BYTES, _REMEDY)
        scrapes += _scrapes(str(path), text)
    if seconds is not None and len(scrapes) > 1 and all(each.time_s is None for each in scrapes):
        step = seconds / (len(scrapes) - 1)
        scrapes = [replace(each, time_s=step * number) for number, each in enumerate(scrapes)]
    return figures_of_scrapes(scrapes, " and ".join(map(str, paths)))


def _scrapes(where: str, text: str) -> list[Scrape]:
    if text.lstrip().startswith("{"):
        return _of_query(where, text)
    scrape = parse_metrics(text, where)
    if not scrape.values:
        raise BadInput(f"{where}: holds no metrics; {_REMEDY}")
    return [scrape]


def parse_metrics(text: str, where: str = "metrics", time_s: float | None = None) -> Scrape:
    """One dump of `/metrics`. Errors: BadInput; CannotRunHere without prometheus_client."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise CannotRunHere(
            "metrics need prometheus_client; install it: pip install 'pagecast[serve]'"
        ) from None
    values: Values = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name, frozenset(sample.labels.items())] = sample.value
    except (ValueError, IndexError, KeyError) as error:
        raise BadInput(f"{where}: no metrics ({str(error)[:100]}); {_REMEDY}") from None
    return Scrape(values, time_s)


def _of_query(where: str, text: str) -> list[Scrape]:
    try:
        document = json.loads(text)
        if "error" in document:
            raise BadInput(f"{where}: Prometheus answered with an error: {document['error']}; {_QUERY}")
        if "result" not in document.get("data", ()):
            raise BadInput(f"{where}: no answer of Prometheus, which has data and its result; {_REMEDY}")
        result = document["data"]["result"]
        by_time: dict[float, Values] = {}
        for series in result:
            labels = dict(series["metric"])
            name = labels.pop("__name__", None)
            if name is None:
                raise BadInput(f"{where}: its series have no names, as those of rate(...); {_QUERY}")
            key = name, frozenset(labels.items())
            for time_s, value in series.get("values") or [series["value"]]:
                by_time.setdefault(float(time_s), {})[key] = float(value)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise BadInput(f"{where}: no answer of Prometheus ({error!r}); {_REMEDY}") from None
    if not by_time:
        raise BadInput(f"{where}: the query found nothing; {_QUERY}")
    return [Scrape(values, time_s) for time_s, values in sorted(by_time.items())]


def figures_of_scrapes(scrapes: Sequence[Scrape], where: str) -> ServerFigures:
    """The figures between the first and the last of the scrapes. Errors: BadInput."""
    scrapes = [scrape.of_first_ranks() for scrape in scrapes]
    last = scrapes[-1]
    engine = next(
        (
            name
            for name, prefix in PREFIXES.items()
            if any(each.startswith(prefix) for each, _ in last.values)
        ),
        None,
    )
    if engine is None:
        raise BadInput(
            f"{where}: no metrics of vLLM, SGLang or TensorRT-LLM among {len(last.values):,} series"
        )
    reading = _Reading(engine, scrapes, where)
    times = [scrape.time_s for scrape in scrapes]
    seconds = None
    if len(scrapes) > 1 and times[0] is not None and times[-1] is not None:
        seconds = times[-1] - times[0]
    requests = reading.count("ttft") or reading.grown("done") or reading.count("e2e") or 0.0
    per_s: dict[str, float | None] = {}
    if seconds:
        per_s["requests_per_s"] = requests / seconds
        for name, source in (("prompt_tokens_per_s", "prompt"), ("output_tokens_per_s", "output")):
            grown = reading.grown(source)
            per_s[name] = None if grown is None else grown / seconds
    hits, queries = reading.grown("hits"), reading.grown("queries")
    hit_rate = hits / queries if hits is not None and queries else reading.gauge("hit_rate", mean=True)
    tpot = reading.average("tpot")
    figures = {
        **per_s,
        "running": reading.gauge("running"),
        "waiting": reading.gauge("waiting"),
        "kv_usage": reading.gauge("kv", mean=True),
        "hit_rate": hit_rate,
        "preemptions": reading.grown("preemptions"),
        "ttft_s": reading.average("ttft"),
        "tpot_s": reading.average("itl") if tpot is None else tpot,
        "e2e_s": reading.average("e2e"),
        "queue_s": reading.average("queue"),
    }
    counts = [reading.between(a, b) for a, b in itertools.pairwise(scrapes)]
    begun = [time_s - times[0] for time_s in times if time_s is not None and times[0] is not None]
    blocks, size = reading.cache()
    return ServerFigures(
        engine,
        reading.engines,
        seconds,
        requests,
        {name: value for name, value in figures.items() if value is not None and math.isfinite(value)},
        reading.lengths("inputs", "prompt", requests),
        reading.lengths("outputs", "output", requests),
        tuple(begun),
        tuple(counts),
        blocks,
        size,
        tpot is None,
        tuple(reading.notes),
    )


class _Reading:
    """Scrapes of one engine's names; sums are those of one of its engines."""

    def __init__(self, engine: str, scrapes: Sequence[Scrape], where: str) -> None:
        self._names, self._prefix = NAMES[engine], PREFIXES[engine]
        self._scrapes, self._where = scrapes, where
        self.notes: list[str] = []
        last = scrapes[-1]
        running = [dict(labels) for (name, labels) in last.values if name in self._called("running")]
        self.engines = max(len({tuple(one.get(key) for key in _ENGINE_LABELS) for one in running}), 1)
        models = {one.get("model_name") for one in running}
        if len(models) > 1:
            raise BadInput(f"{where}: metrics of {len(models)} models; give those of one")
        if self.engines > 1:
            self.notes.append(
                f"{self.engines} engines: figures are those of one, at an equal share of the load"
            )
        if len(scrapes) == 1:
            self.notes.append(
                "one dump counts from the server's start, whose time it does not tell: the load per second "
                "is unknown; give two, a time apart, with --seconds between them, or a range query"
            )

    def _called(self, figure: str) -> list[str]:
        return [self._prefix + name for name in self._names.get(figure, ())]

    def _name(self, figure: str, suffix: str = "") -> str | None:
        last = self._scrapes[-1]
        return next((name for name in self._called(figure) if last.total(name + suffix) is not None), None)

    def _grown(self, name: str, a: Scrape | None, b: Scrape) -> float:
        """How much a counter has grown; from 0 where the server was started again."""
        after, before = b.total(name) or 0.0, (a.total(name) or 0.0) if a is not None else 0.0
        if after < before:
            note = "a counter went back: the server was started again in between, and is counted from there"
            if note not in self.notes:
                self.notes.append(note)
            return after
        return after - before

    def _span(self, name: str) -> float:
        pairs: Iterable[tuple[Scrape | None, Scrape]] = zip(self._scrapes, self._scrapes[1:], strict=False)
        if len(self._scrapes) == 1:
            pairs = [(None, self._scrapes[0])]
        return math.fsum(self._grown(name, a, b) for a, b in pairs)

    def grown(self, figure: str) -> float | None:
        """The growth of a counter over the span."""
        name = self._name(figure)
        return None if name is None else self._span(name) / self.engines

    def count(self, figure: str) -> float | None:
        """How many values a histogram has counted."""
        name = self._name(figure, "_count")
        return None if name is None else self._span(f"{name}_count") / self.engines

    def between(self, a: Scrape, b: Scrape) -> float:
        """Requests that began between two scrapes."""
        for figure, suffix in (("ttft", "_count"), ("done", ""), ("e2e", "_count")):
            name = self._name(figure, suffix)
            if name is not None:
                return self._grown(name + suffix, a, b) / self.engines
        return 0.0

    def average(self, figure: str) -> float | None:
        """The mean of what a histogram has counted."""
        name = self._name(figure, "_count")
        count = None if name is None else self._span(f"{name}_count")
        return self._span(f"{name}_sum") / count if count else None

    def gauge(self, figure: str, mean: bool = False) -> float | None:
        """The mean of a gauge over the scrapes: of one engine, which for shares is their mean."""
        name = self._name(figure)
        if name is None:
            return None
        found = [scrape.mean(name) if mean else scrape.total(name) for scrape in self._scrapes]
        known = [value for value in found if value is not None]
        return math.fsum(known) / len(known) / (1 if mean else self.engines) if known else None

    def lengths(self, figure: str, total: str, requests: float) -> Lengths | None:
        """Lengths by a histogram; by their mean alone where there is none."""
        average = self.average(figure)
        if average is None:
            grown = self.grown(total)
            if not grown or not requests:
                return None
            return Lengths(np.array([grown / requests]), np.array([1.0]), grown / requests)
        name = self._name(figure, "_count")
        assert name is not None
        bounds = list(self._scrapes[-1].buckets(name))
        begin = self._scrapes[0].buckets(name) if len(self._scrapes) > 1 else {}
        end = self._scrapes[-1].buckets(name)
        upto = np.array([max(end[bound] - begin.get(bound, 0.0), 0.0) for bound in bounds])
        if not len(upto) or upto[-1] <= 0:
            upto = np.array([end[bound] for bound in bounds])  # started again in between
        counts = np.diff(np.concatenate([[0.0], np.maximum.accumulate(upto)]))
        return Lengths(np.array(bounds), counts, average) if counts.sum() > 0 else None

    def cache(self) -> tuple[int | None, int | None]:
        """KV blocks and their tokens, of vLLM's `cache_config_info`; its null block is not counted."""
        for name, labels in self._scrapes[-1].values:
            if name == "vllm:cache_config_info":
                said = dict(labels)
                blocks, size = said.get("num_gpu_blocks", ""), said.get("block_size", "")
                return (
                    int(blocks) - 1 if blocks.isdecimal() else None,
                    int(size) if size.isdecimal() else None,
                )
        return None, None
