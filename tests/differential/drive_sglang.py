"""A driver of SGLang's own scheduler in virtual time, without a GPU: prints what it decided, a line per seed.

    python drive_sglang.py FIRST LAST [pressure]

runs with the interpreter that has SGLang (see README.md). Scheduler turn, prefill admission, batches,
retraction, radix tree, allocator and result processing are SGLang's. This script takes the part of the event
loop and of the model: it hands requests in, pretends to compute batches for as long as the specification's
cost says, and answers with a token for every request of a batch.

The clock counts microseconds. Requests are handed in before a turn; the turn is one microsecond later, so
the order of events can be told from their times.
"""

from __future__ import annotations

import sys
import types
from array import array
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import sglang_stubs
import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import PrefillAdder, SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from sglang.srt.managers.scheduler_components.recv_skipper import SchedulerRecvSkipper
from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_decisions import Decisions, Served, Turn, to_line
from sglang_specifications import Spec, checksum, specification

Row = dict[str, Any]

assert sglang_stubs.STUBBED

PRIVATE_PROMPT = 1_000_000  # content ids of what a specification gives no name
PRIVATE_OUTPUT = 2_000_000
TOKENS_PER_CONTENT = 1 << 20


def token(content: int, offset: int) -> int:
    """The token at a place of a text: no two places have the same."""
    return 10 + content * TOKENS_PER_CONTENT + offset


def prompt(number: int, row: Row) -> list[int]:
    """The token ids of a request's prompt."""
    spans = row.get("spans") or [[PRIVATE_PROMPT + number, 0, row["input_tokens"]]]
    return [token(content, offset + i) for content, offset, length in spans for i in range(length)]


class Sampling:
    """SGLang's sampling state of a batch, of which nothing is needed."""

    def __init__(self) -> None:
        self.penalizer_orchestrator = types.SimpleNamespace(is_required=False)

    def filter_batch(self, *args: Any) -> None:
        pass

    def merge_batch(self, other: Sampling) -> None:
        pass


def publish(config: Row) -> Any:
    """Publishes the configuration to SGLang's modules; to be restored by whoever calls."""
    override = get_context().override_server_args(
        device="cpu",
        page_size=config["page_size"],
        pp_max_micro_batch_size=config["max_running_requests"],
        schedule_policy=config["schedule_policy"],
        schedule_conservativeness=config["schedule_conservativeness"],
        chunked_prefill_size=config["chunked_prefill_size"] or -1,
        max_prefill_tokens=config["max_prefill_tokens"],
        enable_mixed_chunk=config["enable_mixed_chunk"],
        disable_radix_cache=not config["enable_prefix_caching"],
        radix_eviction_policy=config["radix_eviction_policy"],
        scheduler_recv_interval=config.get("scheduler_recv_interval", 1),
    )
    override.install()
    return override


def write_indices(
    out: Any, _pool: Any, pools: Any, _pre: Any, prefixes: Any, _seq: Any, ends: Any, *rest: Any
) -> None:
    """What SGLang's kernel does: a request's prefix and new tokens are written to its row."""
    prefix_tensors, req_to_token = rest[-2], rest[-1].req_to_token
    at = 0
    for row, prefix, end, there in zip(
        pools.tolist(), prefixes.tolist(), ends.tolist(), prefix_tensors, strict=True
    ):
        req_to_token[row, :prefix] = there.to(torch.int32)
        req_to_token[row, prefix:end] = out[at : at + end - prefix].to(torch.int32)
        at += end - prefix


allocation.write_cache_indices = write_indices


class Nobody:
    """Takes any call and does nothing: SGLang's metrics and clocks."""

    enable_metrics = False
    num_generated_tokens = forward_ct_decode = num_retracted_reqs = 0

    def __getattr__(self, name: str) -> Any:
        return _nothing

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass

    def record(self, *args: Any) -> Nobody:
        return self


def _nothing(*args: Any, **more: Any) -> None:
    pass


class Pool:
    """Stands for the KV cache itself, which is not looked at."""

    device = "cpu"


def make_scheduler(config: Row) -> Scheduler:
    """SGLang's scheduler for a configuration, with the attributes that its turns read."""
    s = object.__new__(Scheduler)
    page, tokens = config["page_size"], config["usable_pages"] * config["page_size"]
    slots = ReqToTokenPool(config["max_running_requests"], config["longest"] + page + 8, "cpu", False)
    if page == 1:
        allocator: Any = TokenToKVPoolAllocator(tokens, torch.float16, "cpu", Pool(), False)
    else:
        allocator = PagedTokenToKVPoolAllocator(tokens, page, torch.float16, "cpu", Pool(), False)
    allocator.use_triton_kernels = False
    tree = UnifiedRadixCache(
        CacheInitParams(
            disable=not config["enable_prefix_caching"],
            req_to_token_pool=slots,
            token_to_kv_pool_allocator=allocator,
            page_size=page,
            eviction_policy=config["radix_eviction_policy"],
            tree_components=(ComponentType.FULL,),
        )
    )
    s.model_config = types.SimpleNamespace(is_encoder_decoder=False, vocab_size=1 << 62)
    s.spec_algorithm = SpeculativeAlgorithm.NONE
    s.device = "cpu"
    s.page_size = page
    s.tree_cache, s.token_to_kv_pool_allocator, s.req_to_token_pool = tree, allocator, slots
    s.enable_overlap = s.enable_skip_finishing_decode = config["overlap"]
    s.is_mixed_chunk = config["enable_mixed_chunk"]
    s.chunked_prefill_size = config["chunked_prefill_size"]
    s.max_prefill_tokens = config["max_prefill_tokens"]
    s.max_running_requests = config["max_running_requests"]
    s.policy = SchedulePolicy(config["schedule_policy"], tree, False, False, False)
    s.new_token_ratio_tracker = NewTokenRatioTracker.from_config()
    s.waiting_queue = []
    s.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
    s.last_batch = s.chunked_req = None
    s.result_queue = deque()
    s.disaggregation_mode = DisaggregationMode.NULL
    for name in (
        "dllm_config",
        "prefill_delayer",
        "min_free_slots_delayer",
        "dynamic_chunk_sizer",
        "truncation_align_size",
        "hisparse_coordinator",
        "decode_offload_manager",
        "lora_drainer",
        "scripted_scheduler_hook",
        "max_queued_requests",
    ):
        setattr(s, name, None)
    for name in (
        "enable_hisparse",
        "enable_priority_preemption",
        "enable_priority_scheduling",
        "is_hybrid_swa",
        "enable_lora",
        "enable_hicache_storage",
        "enable_lmcache",
        "enable_hierarchical_cache",
        "enable_unified_cache_external_linker",
        "require_mlp_sync",
        "enable_fpm",
        "_engine_paused",
    ):
        setattr(s, name, False)
    s.max_prefill_bs = s.priority_scheduling_preemption_threshold = s.processed_tokens_counter = (
        s.forward_ct
    ) = 0
    s.grammar_manager = types.SimpleNamespace(has_waiting_grammars=lambda: False)
    s.tp_worker = types.SimpleNamespace(
        model_runner=types.SimpleNamespace(attn_backend=object(), prefill_aware_swa=False)
    )
    s.load_inquirer = types.SimpleNamespace(_get_num_pending_tokens=lambda **_: 0)
    s.beam_coordinator = Nobody()
    s.beam_coordinator.pending_member_rows = lambda batch: 0
    s.beam_coordinator.commit_decode = lambda batch: set()
    s.dp_attn_adapter = types.SimpleNamespace(
        maybe_prepare_mlp_sync_batch=lambda batch, **_: batch,
        maybe_convert_decode_to_extend=lambda batch: batch,
    )
    s.ngram_embedding_manager = types.SimpleNamespace(prepare_for_forward=lambda batch, **_: batch)
    s.metrics_reporter = Nobody()
    s.scheduler_stage_metrics = Nobody()
    s.process_pending_chunked_abort = lambda: None
    s._should_defer_prefill = lambda batch: False
    s._arm_prefill_decode_interval = lambda batch: None
    s._prefetch_kvcache = lambda req: None
    s._set_or_validate_priority = lambda req: True
    s._abort_on_queued_limit = lambda req: False
    s.get_prefill_adder_class = lambda: PrefillAdder
    s.batch_result_processor = SchedulerBatchResultProcessor(
        is_generation=True,
        disaggregation_mode=DisaggregationMode.NULL,
        enable_overlap=s.enable_overlap,
        enable_overlap_mlx=False,
        model_config=s.model_config,
        token_to_kv_pool_allocator=allocator,
        tree_cache=tree,
        hisparse_coordinator=None,
        req_to_token_pool=slots,
        decode_offload_manager=None,
        metrics_collector=Nobody(),
        metrics_reporter=s.metrics_reporter,
        draft_worker=None,
        model_worker=None,
        logprob_result_processor=Nobody(),
        output_streamer=Nobody(),
        beam_coordinator=s.beam_coordinator,
        abort_request=lambda *_: None,
    )
    return s


class Engine:
    """One specification being served."""

    def __init__(self, seed: int, spec: Spec) -> None:
        self.seed = seed
        self.spec = spec
        self.config: Row = spec["config"]
        self.rows: list[Row] = spec["requests"]
        self.scheduler = make_scheduler(self.config)
        self.skipper = SchedulerRecvSkipper.maybe_create()
        self.requests = [self._request(number, row) for number, row in enumerate(self.rows)]
        self.submitted_us: list[int] = []
        self.handed = 0  # so many of them to the scheduler
        self.first_us = [-1] * len(self.rows)
        self.finish_us = [-1] * len(self.rows)
        self.cached = [-1] * len(self.rows)
        self.turns: list[Turn] = []
        self.ends: dict[int, int] = {}
        self.now_us = self.device_free_us = 0
        self.evicted = 0
        tree = self.scheduler.tree_cache
        evict = tree._evict

        def counted(*args: Any, **more: Any) -> Any:
            result = evict(*args, **more)
            self.evicted += result.num_tokens_evicted
            return result

        tree._evict = counted

    def _request(self, number: int, row: Row) -> Req:
        sampling = SamplingParams(
            max_new_tokens=row["output_tokens"],
            temperature=0.0,
            ignore_eos=self.config["ignore_eos"],
            stop_token_ids=[self._token(number, row["stop_after"] - 1)] if "stop_after" in row else None,
        )
        sampling.stop_strs = []
        sampling.stop_regex_strs = []
        sampling.stop_str_max_len = 0
        req = Req(
            str(number),
            "",
            array("q", prompt(number, row)),
            sampling,
            extra_key=row.get("salt"),
            eos_token_ids=set(),
            vocab_size=1 << 62,
        )
        req.time_stats = Nobody()
        return req

    def run(self) -> Decisions:
        """Serves every request to its end."""
        scheduler = self.scheduler
        overlap = self.config["overlap"]
        while min(self.finish_us) < 0:
            self._take_in()
            last = scheduler.last_batch
            batch = self._turn()
            if batch is not None:
                end = max(self.now_us, self.device_free_us) + self._cost_us(batch)
                self.device_free_us = end
                self._note(batch, end)
                scheduler.result_queue.append((batch.copy(), end))
                if not overlap:
                    self._process()
            if overlap and last is not None:
                self._process()
            scheduler.last_batch = batch
            if batch is None and (last is None or not overlap):
                self._idle()
        served = [self._served(number) for number in range(len(self.rows))]
        return Decisions(self.seed, checksum(self.spec), self.turns, served)

    def _take_in(self) -> None:
        """Hands over the requests that have come, where SGLang looks for them; idle turns take no time."""
        scheduler = self.scheduler
        coming = range(len(self.submitted_us), len(self.rows))
        self.submitted_us += [
            self.now_us for number in coming if self.rows[number]["arrival_us"] <= self.now_us
        ]
        idle = scheduler.last_batch is None and scheduler.running_batch.is_empty()
        idle = idle and not scheduler.result_queue and scheduler.chunked_req is None
        idle = idle and not scheduler.waiting_queue
        while self.skipper is not None and not self.skipper.handle(scheduler.last_batch):
            if not idle:
                return
        for number in range(self.handed, len(self.submitted_us)):
            scheduler._add_request_to_queue(self.requests[number])
        self.handed = len(self.submitted_us)

    def _idle(self) -> None:
        scheduler = self.scheduler
        if (
            not scheduler.waiting_queue
            and scheduler.running_batch.is_empty()
            and scheduler.chunked_req is None
        ):
            scheduler.new_token_ratio_tracker.reset()
        if self.handed < len(self.submitted_us):
            self.now_us -= 1  # idle turns take no time
        elif min(self.finish_us) < 0:
            if len(self.submitted_us) == len(self.rows):
                raise RuntimeError(f"seed {self.seed}: nothing can be scheduled")
            self.now_us = max(self.now_us, self.rows[len(self.submitted_us)]["arrival_us"])

    def _turn(self) -> ScheduleBatch | None:
        scheduler = self.scheduler
        self.now_us += 1
        before = [req.retraction_count for req in self.requests]
        plan = scheduler.get_next_batch_to_run(scheduler.running_batch, scheduler.last_batch)
        scheduler.running_batch = plan.running_batch
        self.retracted = [
            number for number, req in enumerate(self.requests) if req.retraction_count > before[number]
        ]
        return plan.batch_to_run

    def _work(self, batch: ScheduleBatch) -> tuple[list[tuple[int, int, int]], list[int]]:
        """The chunks of a batch (request, tokens already there, tokens), and the requests that decode."""
        mixed = len(batch.decoding_reqs or ()) if not batch.forward_mode.is_decode() else 0
        if batch.forward_mode.is_decode():
            return [], [int(req.rid) for req in batch.reqs]
        chunks = len(batch.reqs) - mixed
        prefill = [
            (int(req.rid), there, tokens)
            for req, there, tokens in zip(
                batch.reqs[:chunks], batch.prefix_lens[:chunks], batch.extend_lens[:chunks], strict=True
            )
        ]
        return prefill, [int(req.rid) for req in batch.reqs[chunks:]]

    def _contexts(self, batch: ScheduleBatch, decodes: list[int]) -> list[int]:
        return [int(length) - 1 for length in batch.seq_lens_cpu.tolist()[len(batch.reqs) - len(decodes) :]]

    def _cost_us(self, batch: ScheduleBatch) -> int:
        cost = self.spec["cost"]
        prefill, decodes = self._work(batch)
        tokens = len(decodes) + sum(tokens for _, _, tokens in prefill)
        context = sum(self._contexts(batch, decodes)) + len(decodes)
        context += sum(there + tokens for _, there, tokens in prefill)
        return int(cost["step_us"] + cost["token_us"] * tokens + cost["context_ns"] * context // 1000)

    def _note(self, batch: ScheduleBatch, end: int) -> None:
        scheduler = self.scheduler
        prefill, decodes = self._work(batch)
        for number, there, _ in prefill:
            if self.cached[number] < 0:
                self.cached[number] = there
        page = self.config["page_size"]
        self.turns.append(
            Turn(
                start_us=self.now_us,
                end_us=end,
                prefill=tuple(prefill),
                decodes=tuple(decodes),
                context=sum(self._contexts(batch, decodes)),
                retracted=tuple(self.retracted),
                waiting=tuple(int(req.rid) for req in scheduler.waiting_queue),
                free_pages=scheduler.token_to_kv_pool_allocator.available_size() // page,
                evictable_pages=scheduler.tree_cache.evictable_size() // page,
                evicted_tokens=self.evicted,
                ratio=scheduler.new_token_ratio_tracker.current,
            )
        )

    def _process(self) -> None:
        """Waits for the oldest batch and hands its tokens back."""
        scheduler = self.scheduler
        batch, end = scheduler.result_queue.popleft()
        self.now_us = max(self.now_us, end)
        tokens = [self._token(int(req.rid), len(req.output_ids)) for req in batch.reqs]
        result = types.SimpleNamespace(
            copy_done=None,
            routed_experts_output=None,
            indexer_topk_output=None,
            auxiliary_host_output=None,
            logits_output=None,
            extend_input_len_per_req=None,
            extend_logprob_start_len_per_req=None,
            can_run_cuda_graph=False,
            next_token_ids=torch.tensor(tokens),
            get_num_generated_tokens=lambda batch_size: batch_size,
        )
        processor = scheduler.batch_result_processor
        if batch.forward_mode.is_decode():
            processor.process_batch_result_decode(batch, result)
        else:
            processor.process_batch_result_prefill(batch, result)
        for req in batch.reqs:
            number = int(req.rid)
            if len(req.output_ids) and self.first_us[number] < 0:
                self.first_us[number] = self.now_us
            if req.finished() and self.finish_us[number] < 0:
                self.finish_us[number] = self.now_us

    def _token(self, number: int, place: int) -> int:
        """The token that a request generates at a place of its output."""
        return token(self.rows[number].get("output_content", PRIVATE_OUTPUT + number), place)

    def _served(self, number: int) -> Served:
        req = self.requests[number]
        return Served(
            self.submitted_us[number],
            self.first_us[number],
            self.finish_us[number],
            self.cached[number],
            len(req.output_ids),
            req.retraction_count,
        )


def no_sampling(cls: Any, batch: Any, vocab_size: int) -> Sampling:
    return Sampling()


def main() -> None:
    """Prints a line per seed, from the first to the last, both included."""
    from sglang.srt.managers import schedule_batch

    schedule_batch.SamplingBatchInfo.from_schedule_batch = classmethod(no_sampling)
    for module in ("sglang.srt.managers.scheduler", "sglang.srt.managers.schedule_batch"):
        for name in ("set_time_batch", "set_schedule_time_batch"):
            if hasattr(sys.modules[module], name):
                setattr(sys.modules[module], name, lambda *args, **more: None)
    for name in (
        "_maybe_update_reasoning_tokens",
        "_maybe_collect_routed_experts",
        "_maybe_collect_indexer_topk",
        "_maybe_collect_customized_info",
        "_mamba_prefix_cache_update",
        "materialize_sampling_mask_output",
        "move_logprobs_to_cpu",
        "_validate_pp_skip_output_comm",
        "snapshot_auxiliary_output_starts",
    ):
        setattr(SchedulerBatchResultProcessor, name, lambda self, *args, **more: None)
    SchedulerBatchResultProcessor._mamba_can_cache_finished_req = lambda self, *args: True
    torch.set_num_threads(1)
    first, last = int(sys.argv[1]), int(sys.argv[2])
    for seed in range(first, last + 1):
        spec = specification(seed, *sys.argv[3:])
        override = publish(spec["config"])
        try:
            print(to_line(Engine(seed, spec).run()), flush=True)
        except RuntimeError as error:
            print(f"seed {seed}: {error}", file=sys.stderr)
        finally:
            override.restore()


if __name__ == "__main__":
    main()
