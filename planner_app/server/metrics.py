"""Prometheus metrics with vLLM's names, labels and buckets, so that its dashboards and routers read them.

Counts are kept here as plain numbers and rendered when somebody scrapes. A step has as many gaps between
tokens as it has requests, but few different ones; these are counted together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from pagecast.planner_app.server.backend import GenerationBackend
from pagecast.planner_app.server.generation import NEVER, Generation
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

_NS = 1e-9
FINISH_REASONS = ("stop", "length", "abort", "error")
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_TRANSFER_BYTES = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)
_CHOICES = (1, 2, 5, 10, 20)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_LATE_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


def lengths(most: int) -> tuple[int, ...]:
    """Buckets of counts of tokens: 1, 2, 5, 10, 20, ... up to `most`."""
    buckets: list[int] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > most:
                return tuple(buckets)
            buckets.append(digit * power)
        power *= 10


class Histogram:
    """Counts of values by bucket; each bucket takes values up to its bound."""

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.about = about
        self._bounds = tuple(float(bound) for bound in bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, labels: dict[str, str]) -> Metric:
        """The histogram as Prometheus has it."""
        family = HistogramMetricFamily(self.name, self.about, labels=list(labels))
        total = 0
        buckets = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


class ServerMetrics(Collector):
    """Metrics of one replica: implements `Observer`, and is a collector for a Prometheus registry.

    Times are seconds of the backend's clock: simulated ones where the server simulates. `host_alone`: no tier
    lies behind host memory.
    """

    def __init__(
        self,
        backend: GenerationBackend,
        model_name: str,
        *,
        engine: str = "0",
        cache_config: dict[str, str] | None = None,
        max_loras: int | None = None,
        time_scale: float | None = None,
        host_alone: bool = True,
    ) -> None:
        self._backend = backend
        self._labels = {"model_name": model_name, "engine": engine}
        self._cache_config = {**(cache_config or {}), "engine": engine}
        self._max_loras = max_loras
        self._time_scale = time_scale
        self._host_alone = host_alone
        most = lengths(backend.max_model_len)
        self._histograms: list[Histogram] = []
        make = self._histogram
        self.first_token = make(
            "time_to_first_token_seconds", "Time to first token in seconds.", _FIRST_TOKEN_S
        )
        self.gap = make("inter_token_latency_seconds", "Inter-token latency in seconds.", _TOKEN_S)
        self.tpot = make(
            "request_time_per_output_token_seconds", "Mean time per output token of a request.", _TOKEN_S
        )
        self.e2e = make("e2e_request_latency_seconds", "End to end request latency in seconds.", _REQUEST_S)
        self.queue = make("request_queue_time_seconds", "Time spent in WAITING phase.", _REQUEST_S)
        self.inference = make("request_inference_time_seconds", "Time spent in RUNNING phase.", _REQUEST_S)
        self.prefill = make("request_prefill_time_seconds", "Time spent in PREFILL phase.", _REQUEST_S)
        self.decode = make("request_decode_time_seconds", "Time spent in DECODE phase.", _REQUEST_S)
        self.computed = make(
            "request_prefill_kv_computed_tokens", "New KV tokens computed during prefill.", most
        )
        self.prompt_length = make("request_prompt_tokens", "Prompt tokens of a request.", most)
        self.output_length = make("request_generation_tokens", "Generated tokens of a request.", most)
        self.step_tokens = make("iteration_tokens_total", "Tokens per engine step.", _STEP_TOKENS)
        self.longest = make(
            "request_max_num_generation_tokens", "Most tokens generated for one of a request's choices.", most
        )
        self.preempted = make("request_num_preemptions", "Preemptions of a finished request.", _PREEMPTIONS)
        self.choices = make("request_params_n", "The n request parameter.", _CHOICES)
        self.max_tokens = make("request_params_max_tokens", "The max_tokens request parameter.", most)
        self.late = Histogram(
            "pagecast:step_lateness_seconds", "How much later than it ended a step was handed out.", _LATE_S
        )
        self._histograms.append(self.late)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.external_tokens = 0
        self.external_queried_tokens = 0
        self.output_tokens = 0
        self.steps = 0
        self.ended_for = dict.fromkeys(FINISH_REASONS, 0)
        self.rejected: dict[int, int] = {}
        self.queue_full = 0

    def _histogram(self, name: str, about: str, bounds: Sequence[float]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", about, bounds)
        self._histograms.append(histogram)
        return histogram

    # ---- what happens

    def step(
        self, tokens: int, generated: int, gaps_ns: dict[int, int], first: list[Generation], late_ns: int
    ) -> None:
        self.steps += 1
        self.step_tokens.observe(tokens)
        self.late.observe(max(late_ns, 0) * _NS)
        self.output_tokens += generated
        for gap, times in gaps_ns.items():
            self.gap.observe(gap * _NS, times)
        for generation in first:
            self.first_token.observe((generation.first_ns - generation.arrival_ns) * _NS)
            prompt = len(generation.prompt)
            cached = max(generation.cached_tokens, 0)
            self.prompt_tokens += prompt
            self.cached_tokens += cached
            self.queried_tokens += prompt
            external = generation.external_tokens
            self.hit_tokens += cached - external
            self.external_tokens += external
            self.external_queried_tokens += prompt - (cached - external)

    def ended(self, generation: Generation) -> None:
        self.ended_for[generation.finish_reason] += 1
        if generation.finish_reason not in ("stop", "length") or generation.first_ns == NEVER:
            return
        admitted, first, last = generation.admitted_ns, generation.first_ns, generation.last_ns
        count = generation.count
        self.e2e.observe((generation.finished_ns - generation.arrival_ns) * _NS)
        self.queue.observe((admitted - generation.arrival_ns) * _NS)
        self.prefill.observe((first - admitted) * _NS)
        self.inference.observe((last - admitted) * _NS)
        self.decode.observe((last - first) * _NS)
        self.computed.observe(len(generation.prompt) - max(generation.cached_tokens, 0))
        self.prompt_length.observe(len(generation.prompt))
        self.output_length.observe(count)
        self.preempted.observe(generation.preemptions)
        self.tpot.observe((last - first) * _NS / (count - 1) if count > 1 else 0.0)
        if generation.max_tokens:
            self.max_tokens.observe(generation.max_tokens)

    def answered(self, generations: list[Generation]) -> None:
        """A request has been answered, with all its choices."""
        self.choices.observe(generations[0].choices)
        self.longest.observe(max(generation.count for generation in generations))

    def refused(self, status: int) -> None:
        """A request was answered with an error."""
        self.rejected[status] = self.rejected.get(status, 0) + 1

    def queue_was_full(self) -> None:
        """A request was refused, for as many wait as may."""
        self.queue_full += 1

    # ---- when somebody scrapes

    def collect(self) -> Iterable[Metric]:
        """Every metric as it is now."""
        load = self._backend.load()
        used = load.used_blocks / load.num_blocks if load.num_blocks else 0.0
        yield self._gauge(
            "num_requests_running", "Number of requests in model execution batches.", load.running
        )
        yield self._gauge("num_requests_waiting", "Number of requests waiting to be processed.", load.waiting)
        about = "Number of waiting requests by reason."
        by_reason = {"capacity": load.waiting, "deferred": 0}
        yield self._labelled(GaugeMetricFamily, "num_requests_waiting_by_reason", about, "reason", by_reason)
        yield self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", used)
        sleep = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        yield self._labelled(
            GaugeMetricFamily, "engine_sleep_state", "Engine sleep state.", "sleep_state", sleep
        )
        yield from self._counters()
        yield from self._offloading()
        yield from self._speculation()
        for histogram in self._histograms:
            yield histogram.family(self._labels)
        yield self._info(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", self._cache_config
        )
        if self._max_loras is not None:
            running, waiting = self._backend.adapters()
            adapters = {
                "max_lora": str(self._max_loras),
                "running_lora_adapters": ",".join(running),
                "waiting_lora_adapters": ",".join(waiting),
            }
            yield self._info("vllm:lora_requests_info", "Running stats on lora requests.", adapters)
        name, about = "pagecast:recording_failed", "1 where a recording that was asked for has ended."
        family = GaugeMetricFamily(name, about, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), bool(self._backend.unrecorded))
        yield family
        if self._time_scale is not None:
            name, about = "pagecast:time_scale", "Simulated seconds in a second."
            family = GaugeMetricFamily(name, about, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), self._time_scale)
            yield family

    def _counters(self) -> Iterable[Metric]:
        counters = {
            "prefix_cache_queries": ("Prefix cache queries, in tokens.", self.queried_tokens),
            "prefix_cache_hits": ("Prefix cache hits, in tokens.", self.hit_tokens),
            "external_prefix_cache_queries": (
                "External prefix cache queries, in tokens.",
                self.external_queried_tokens,
            ),
            "external_prefix_cache_hits": ("External prefix cache hits, in tokens.", self.external_tokens),
            "mm_cache_queries": ("Multi-modal cache queries.", 0),
            "mm_cache_hits": ("Multi-modal cache hits.", 0),
            "num_preemptions": ("Cumulative number of preemptions.", self._backend.preemptions()),
            "prompt_tokens": ("Number of prefill tokens processed.", self.prompt_tokens),
            "prompt_tokens_cached": ("Number of cached prompt tokens.", self.cached_tokens),
            "generation_tokens": ("Number of generation tokens processed.", self.output_tokens),
        }
        for name, (about, value) in counters.items():
            yield self._counter(name, about, value)
        sources = {
            "local_compute": self.prompt_tokens - self.cached_tokens,
            "local_cache_hit": self.cached_tokens - self.external_tokens,
            "external_kv_transfer": self.external_tokens,
        }
        about = "Number of prompt tokens by source."
        yield self._labelled(CounterMetricFamily, "prompt_tokens_by_source", about, "source", sources)
        # Blocks on disk are loaded by way of host memory: which of the two held them first is not told.
        sources = dict.fromkeys(("device", "host", "p2p", "disk", "external_unspecified"), 0)
        outside = "host" if self._host_alone else "external_unspecified"
        sources |= {"device": self.cached_tokens - self.external_tokens, outside: self.external_tokens}
        about = "Number of cached prompt tokens by the tier that held them."
        yield self._labelled(CounterMetricFamily, "prompt_tokens_cached_by_source", about, "source", sources)
        about = "Requests refused at admission, by reason."
        reasons = {"max_num_queued_reqs": self.queue_full}
        yield self._labelled(CounterMetricFamily, "admission_rejections", about, "reason", reasons)
        about = "Count of successfully processed requests."
        yield self._labelled(CounterMetricFamily, "request_success", about, "finished_reason", self.ended_for)
        if self.rejected:
            name, about = "pagecast:requests_refused", "Requests answered with an error, by status."
            family = CounterMetricFamily(name, about, labels=[*self._labels, "status"])
            for status, number in sorted(self.rejected.items()):
                family.add_metric([*self._labels.values(), str(status)], number)
            yield family

    def _offloading(self) -> Iterable[Metric]:
        """Transfers to and from host memory, where there is a host tier."""
        tier = self._backend.host_tier()
        if tier is None:
            return
        counters = {
            "kv_offload_load_bytes": ("Bytes loaded from offload storage.", tier.load_bytes),
            "kv_offload_load_time": ("Load time from offload storage, in seconds.", tier.load_s),
            "kv_offload_store_bytes": ("Bytes stored to offload storage.", tier.store_bytes),
            "kv_offload_store_time": ("Store time to offload storage, in seconds.", tier.store_s),
            "kv_offload_stores_skipped": ("Stores skipped for want of room.", tier.skipped_stores),
            "kv_offload_allocation_failure": ("Stores that found no room.", tier.skipped_stores),
        }
        for name, (about, value) in counters.items():
            yield self._counter(name, about, value)
        for direction, sizes in (("load", tier.load_sizes), ("store", tier.store_sizes)):
            about = f"Size of a KV offload {direction} operation, in bytes."
            histogram = Histogram(f"vllm:kv_offload_{direction}_size", about, _TRANSFER_BYTES)
            for size, times in sizes.items():
                histogram.observe(size, times)
            yield histogram.family(self._labels)
        yield self._gauge("kv_offload_cpu_cache_usage_perc", "Usage of the host tier, 0 to 1.", tier.usage)

    def _speculation(self) -> Iterable[Metric]:
        """Draft tokens and how many were accepted, where requests speculate."""
        use = self._backend.speculation()
        if use is None:
            return
        counters = {
            "spec_decode_num_drafts": ("Number of spec decoding drafts.", use.drafts),
            "spec_decode_num_draft_tokens": ("Number of draft tokens.", use.draft_tokens),
            "spec_decode_num_accepted_tokens": ("Number of accepted tokens.", use.accepted_tokens),
        }
        for name, (about, value) in counters.items():
            yield self._counter(name, about, value)
        name, about = "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens per draft position."
        accepted = {str(place): count for place, count in enumerate(use.accepted_per_position)}
        yield self._labelled(CounterMetricFamily, name, about, "position", accepted)

    def _counter(self, name: str, about: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", about, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", about, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _labelled(
        self,
        kind: Callable[..., GaugeMetricFamily | CounterMetricFamily],
        name: str,
        about: str,
        label: str,
        values: dict[str, int],
    ) -> Metric:
        family = kind(f"vllm:{name}", about, labels=[*self._labels, label])
        for value, number in values.items():
            family.add_metric([*self._labels.values(), value], number)
        return family

    def _info(self, name: str, about: str, labels: dict[str, str]) -> Metric:
        family = GaugeMetricFamily(name, about, labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        return family
