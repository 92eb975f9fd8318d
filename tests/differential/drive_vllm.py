"""A driver of vLLM's own scheduler in virtual time, without a GPU: prints what it decided, a line per seed.

    python drive_vllm.py FIRST LAST [FEATURE...]
    python drive_vllm.py FIRST LAST --families plain,keys --limit-s 40

runs with the interpreter that has vLLM (see README.md). The scheduler and KV cache manager are vLLM's; this
script takes the engine's part: it hands requests in, pretends to compute steps for as long as the
specification's cost says, and answers with a token for each request whose known tokens are all computed.

The clock counts microseconds. Requests are handed in before a plan, at the time that stands in
`submitted_us`; the plan is made one microsecond later, so the order of events can be told from their times.
With asynchronous scheduling one plan is made while another is being computed.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import os
import signal
import sys
import tempfile
import traceback
from collections import deque
from dataclasses import fields
from math import lcm
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_DO_NOT_TRACK", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch
import virtual_disk
from contents import Contents
from decisions import BlockTrail, Decisions, Delivered, EventDigests, Served, Step, disk_job, to_line
from families import EVENTS, FAMILIES, scenario
from host_tier import TransferDigests
from hybrid_specifications import HYBRID
from specifications import Spec, checksum
from speculation import DraftCounts
from virtual_disk import Disk
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading_scheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, maybe_convert_block_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

logging.disable()  # vLLM warns in nearly every step
Row = dict[str, Any]

BLOCK_BYTES = 4096  # any multiple of a page will do


class Deadlock(Exception):
    """vLLM plans nothing any more although requests wait: as a loaded request behind the first holds the
    blocks that this one needs, or as the pool is too small by its rules."""


MOST_IDLE_PLANS = 2_000  # plans of transfers alone: with more of them somebody is promoted for ever
LIMITS_OF_QUEUE = {"max_num_queued_reqs", "max_num_queued_tokens"}
PLACEHOLDER = 1 << 44  # the token that stands for a part of any image
STOP = 0  # the token that ends an output early
PRIVATE_PROMPT = 1_000_000  # content ids of what a specification gives no name
PRIVATE_OUTPUT = 2_000_000
TOKENS_PER_CONTENT = 1 << 20
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 64,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}


class Computing(NamedTuple):
    """A plan in flight: when it will be computed, the requests that it yields tokens for, and what the worker
    reports of transfers."""

    output: SchedulerOutput
    end_us: int
    sampling: frozenset[str]
    transfers: KVConnectorOutput | None = None


class OrderedSet(dict[Any, None]):
    """A set in the order of insertion. vLLM keeps the blocks of a job in a set, whose order differs from run
    to run and decides which of them are evicted first."""

    def __init__(self, values: Any = ()) -> None:
        super().__init__(dict.fromkeys(values))

    def add(self, value: Any) -> None:
        self[value] = None

    def remove(self, value: Any) -> None:
        del self[value]

    def discard(self, value: Any) -> None:
        dict.pop(self, value, None)

    def update(self, values: Any) -> None:
        super().update(dict.fromkeys(values))

    def pop(self, *chosen: Any) -> Any:
        return super().pop(*chosen) if chosen else self.popitem()[0]

    def difference_update(self, values: Any) -> None:
        for value in values:
            self.pop(value, None)


def _set_ended(scheduler: Any, ids: Any) -> None:
    scheduler.__dict__["ended"] = OrderedSet(ids)


offloading_scheduler.set = OrderedSet  # type: ignore[attr-defined]
# Since 0.26 the connector stores what requests that have ended left, in the order of this set.
Scheduler.finished_req_ids = property(lambda scheduler: scheduler.__dict__["ended"], _set_ended)


def ends_of(job: Any) -> Any:
    """(source, destination) of a job: before 0.26 one pair."""
    return job.transfer_spec if hasattr(job, "transfer_spec") else (job.src_spec, job.dst_spec)


def waiting_of(scheduler: Any) -> int:
    """Requests in both of its queues: since 0.31 the second has those that hold blocks."""
    second = "skipped_waiting" if hasattr(scheduler, "skipped_waiting") else "kv_holding_waiting"
    return len(scheduler.waiting) + len(getattr(scheduler, second))


class Worker:
    """The worker's side of the offloading connector: it copies blocks, in virtual time.

    A step's loads are submitted with the step, its stores with the next one. Each direction takes one job
    after another. Stores wait for what the device computes.
    """

    def __init__(self, links: Row) -> None:
        self._links = links
        self.lost: list[int] = []  # the loads that failed so far
        self.failed: list[str | None] = []  # whose they were, of those not taken note of
        self._loads: dict[int, set[int]] = {}  # the device blocks of those under way
        self._stores: dict[int, Any] = {}  # not submitted yet
        self._free_us = {"load": 0, "store": 0}
        self.ends: dict[int, tuple[int, str | None]] = {}  # by job: when it is done; who waits for it

    def run(self, metadata: Any, now_us: int, device_free_us: int) -> int:
        """Submits what a step brings. Returns when the step may begin."""
        for number, job in self._stores.items():
            self._submit("store", number, job, max(now_us, device_free_us), None)
        for number, job in metadata.load_jobs.items():
            self._submit("load", number, job, now_us, job.req_id)
            self._loads[number] = {int(block) for block in ends_of(job)[1].block_ids}
        self._stores = dict(metadata.store_jobs)
        waited = [self.ends[number][0] for number in metadata.jobs_to_flush or () if number in self.ends]
        return max([now_us, *waited])

    def _submit(self, way: str, number: int, job: Any, now_us: int, waiting: str | None) -> None:
        device = ends_of(job)[way == "load"]
        begin = max(now_us, self._free_us[way])
        end = begin + self._links["latency_us"] + self._links[f"{way}_us"] * len(device.block_ids)
        self._free_us[way] = end
        self.ends[number] = end, waiting

    def finished(self, now_us: int) -> KVConnectorOutput:
        """What is done by now and was not reported before."""
        done = sorted((end, number) for number, (end, _) in self.ends.items() if end <= now_us)
        metadata = OffloadingWorkerMetadata()
        received = OrderedSet()
        invalid: set[int] = set()
        failing = self._links.get("failing_loads", 0)
        for _, number in done:
            blocks = self._loads.pop(number, None)
            if blocks is not None and failing and number % failing == 0:
                self.lost.append(number)
                self.failed.append(self.ends[number][1])
                invalid |= blocks
            waiting = self.ends.pop(number)[1]
            metadata.mark_completed(number)
            if waiting is not None:
                received.add(waiting)
        return KVConnectorOutput(
            finished_recving=received, kv_connector_worker_meta=metadata, invalid_block_ids=invalid
        )

    @property
    def next_us(self) -> int | None:
        """When the next transfer ends; None where none is under way."""
        return min((end for end, _ in self.ends.values()), default=None)


class Story:
    """What happened to one request so far."""

    def __init__(self, submitted_us: int) -> None:
        self.submitted_us = submitted_us
        self.first_token_us = -1
        self.finish_us = -1
        self.cancelled_us = -1
        self.cached_tokens = -1
        self.tokens_out = 0
        self.local_tokens = -1  # the prefix hit before its latest load
        self.external_tokens = 0


def token(content: int, offset: int) -> int:
    """The token at a place of a text: no two places have the same."""
    return 1 + content * TOKENS_PER_CONTENT + offset


def prompt(number: int, row: Row) -> list[int]:
    """The token ids of a request's prompt."""
    spans = row.get("spans") or [[PRIVATE_PROMPT + number, 0, row["input_tokens"]]]
    ids = [token(content, offset + i) for content, offset, length in spans for i in range(length)]
    for _, offset, length in row.get("items", ()):
        ids[offset : offset + length] = [PLACEHOLDER] * length
    return ids


def group_spec(group: Row, config: Row) -> KVCacheSpec:
    """vLLM's specification of one KV group."""
    if group.get("state"):
        return state_spec(group, config)
    sizes = {
        "block_size": group["block_size"] // ranks_of(config),
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.float32,
    }
    if "window" in group:
        return SlidingWindowSpec(sliding_window=group["window"], **sizes)
    if "chunk" in group:
        return ChunkedLocalAttentionSpec(attention_chunk_size=group["chunk"], **sizes)
    return MLAAttentionSpec(**sizes) if group.get("latent") else FullAttentionSpec(**sizes)


def state_spec(group: Row, config: Row) -> MambaSpec:
    """vLLM's specification of recurrent states: with prefix caching those at the ends of blocks."""
    more: Row = {}
    if "block_size" in group and config["enable_prefix_caching"]:
        more = {"mamba_cache_mode": "align", "num_speculative_blocks": drafts_of(config)}
        if "exported" in group and "prefill_checkpoint_alignment" in MambaSpec.__dataclass_fields__:
            more["num_prefill_checkpoint_blocks"] = 1
            more["prefill_checkpoint_alignment"] = group["exported"]
    size = group["block_size"] if more else config["max_model_len"]
    return MambaSpec(block_size=size, shapes=((1,),), dtypes=(torch.float32,), **more)


def ranks_of(config: Row) -> int:
    """The GPUs that share a sequence's tokens: each has its part of a block."""
    return int(config.get("decode_context_parallel_size", 1))


def drafts_of(config: Row) -> int:
    """Draft tokens of a step at most."""
    return int(config.get("speculative_config", {}).get("num_speculative_tokens", 0))


def caches_states(config: Row) -> bool:
    """Whether recurrent states can be found again."""
    groups = config.get("kv_groups", ())
    return config["enable_prefix_caching"] and any(group.get("state") for group in groups)


def aligned_tokens(config: Row) -> int:
    """The tokens of which vLLM's hits are multiples: the least common multiple of all block sizes."""
    groups = [group_spec(group, config) for group in config.get("kv_groups", [config])]
    return lcm(*(group.block_size for group in groups)) * ranks_of(config)


# Since 0.33 a block's hash may cover the tokens that a drafter reads ahead.
LOOKAHEAD = "num_hash_lookahead_tokens" in inspect.signature(get_request_block_hasher).parameters


def retention(cache: CacheConfig) -> Row:
    """How sparsely windows and states are kept findable: since 0.30 an option, by default at most."""
    if "prefix_cache_retention_interval" not in inspect.signature(KVCacheConfig).parameters:
        return {}
    return {"prefix_cache_retention_interval": cache.prefix_cache_retention_interval}


def tensor(blocks: int) -> KVCacheTensor:
    """The memory of all blocks, as this vLLM describes it."""
    if "shared_by" in inspect.signature(KVCacheTensor).parameters:
        return KVCacheTensor(size=blocks * BLOCK_BYTES, shared_by=["layer 0"])
    return KVCacheTensor(
        size=blocks * BLOCK_BYTES,
        layers=["layer 0"],
        layer_stride=blocks * BLOCK_BYTES,
        block_stride=BLOCK_BYTES,
    )


# Options that the scheduler's configuration has beside those above; absent ones are at vLLM's defaults.
SETTINGS = (
    "enable_chunked_prefill",
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "max_num_scheduled_tokens",
    "watermark",
    "scheduler_reserve_full_isl",
    "prefill_schedule_interval",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
)


def make_scheduler(config: Row, folder: Path) -> Scheduler:
    """vLLM's scheduler for a specification's configuration."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    model = ModelConfig(
        model=str(folder),
        dtype="float16",
        skip_tokenizer_init=True,
        max_model_len=config["max_model_len"],
        enforce_eager=True,
    )
    known = {field.name for field in fields(SchedulerConfig)}
    scheduling = SchedulerConfig(
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        max_model_len=config["max_model_len"],
        is_encoder_decoder=False,
        async_scheduling=config["async_scheduling"],
        policy=config["scheduling_policy"],
        **{name: config[name] for name in SETTINGS if name in config and name in known},
    )
    cache = CacheConfig(
        block_size=config["block_size"] // ranks_of(config),
        gpu_memory_utilization=0.9,
        cache_dtype="auto",
        enable_prefix_caching=config["enable_prefix_caching"],
    )
    whole = VllmConfig(
        scheduler_config=scheduling,
        model_config=model,
        cache_config=cache,
        device_config=DeviceConfig(device="cpu"),
    )
    whole.parallel_config.decode_context_parallel_size = ranks_of(config)
    if "max_loras" in config:
        whole.lora_config = object.__new__(LoRAConfig)
        whole.lora_config.max_loras = config["max_loras"]
    if "speculative_config" in config:
        whole.speculative_config = speculative_config(config["speculative_config"])
        whole._set_max_num_scheduled_tokens()
    if "kv_offloading" in config:
        whole.kv_transfer_config = transfer_config(config)
    groups = [group_spec(group, config) for group in config.get("kv_groups", [config])]
    drafting = {n for n, group in enumerate(config.get("kv_groups", ())) if group.get("drafts")}
    blocks = config["usable_blocks"] + 1  # vLLM keeps one for itself
    cache.num_gpu_blocks = blocks
    if caches_states(config):
        cache.mamba_cache_mode = "align"
    kind = AsyncScheduler if config["async_scheduling"] else Scheduler
    return kind(
        vllm_config=whole,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[tensor(blocks)],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer {n}"], group, is_eagle_group=n in drafting)
                for n, group in enumerate(groups)
            ],
            **retention(cache),
        ),
        structured_output_manager=StructuredOutputManager(whole),
        block_size=aligned_tokens(config),
        hash_block_size=config["block_size"] if config["enable_prefix_caching"] else None,
        log_stats=False,
    )


def transfer_config(config: Row) -> KVTransferConfig:
    """vLLM's configuration of the offloading connector, as `--kv-offloading-size` makes it."""
    options = dict(config["kv_offloading"])
    factor = options.pop("block_size_factor")
    options["cpu_bytes_to_use"] = options.pop("cpu_blocks") * factor * BLOCK_BYTES
    tiers = options.get("secondary_tiers")
    if tiers:
        options["spec_name"] = "TieringOffloadingSpec"
        options["secondary_tiers"] = [{**tier, "root_dir": tempfile.gettempdir()} for tier in tiers]
    if factor > 1:
        sizes = [group["block_size"] for group in config.get("kv_groups", [config])]
        options["block_size"] = sizes[0] * factor
    return KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config=options,
        kv_load_failure_policy=config.get("kv_load_failure_policy", "fail"),
    )


def speculative_config(fields: Row) -> SpeculativeConfig:
    """vLLM's configuration of speculation, without the draft model that it would look up."""
    made = object.__new__(SpeculativeConfig)
    made.num_speculative_tokens_per_batch_size = None
    made.parallel_drafting = False
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def watch_blocks(pool: Any) -> BlockTrail:
    """Takes note of every block that becomes findable, and of every one whose content is given up."""
    trail = BlockTrail()
    insert, remove = pool._insert_block_hash, pool._remove_cached_block_hashes

    def stored(key: bytes, block: Any, num_tokens: int | None) -> None:
        # The last four bytes of a key are the group's number; vLLM's block 0 is the null block.
        if block.block_hash != key and not pool.cached_block_hash_to_block.contain(key, block.block_id):
            trail.stored(int.from_bytes(key[-4:], "big"), block.block_id - 1)
        insert(key, block, num_tokens)

    def removed(block: Any) -> Any:
        keys = remove(block)
        if keys:
            trail.removed(block.block_id - 1)
        return keys

    pool._insert_block_hash, pool._remove_cached_block_hashes = stored, removed
    return trail


def adapter_request(name: str) -> LoRARequest:
    """What vLLM is told of a request's LoRA adapter."""
    return LoRARequest(lora_name=name, lora_int_id=1 + int(name.split()[-1]), lora_path="none")


def image(name: str, offset: int, length: int) -> MultiModalFeatureSpec:
    """What vLLM is told of an image in a prompt."""
    place = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=place)


def see(scheduler: Scheduler, tokens: int | None) -> None:
    """Gives a scheduler room for images of so many tokens; None: for every image.

    The specifications let images of one name differ in length; since 0.31 such requests are ended.
    """
    if tokens is not None:
        scheduler.max_num_encoder_input_tokens = tokens
        scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=tokens)
        return
    scheduler.max_num_encoder_input_tokens = 1 << 40
    scheduler._reject_on_encoder_cache_embed_mismatch = lambda *args: False
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1 << 40)


class Engine:
    """One specification being served."""

    def __init__(self, seed: int, spec: Spec, folder: Path, features: list[str]) -> None:
        self.seed = seed
        self.spec = spec
        self.rows: list[Row] = self.spec["requests"]
        self.depth = int(self.spec["config"]["async_scheduling"])
        self.disk = Disk(self.spec["links"]) if "disk_load_us" in self.spec.get("links", ()) else None
        if self.disk is not None:
            self.disk.use()
        self.scheduler = make_scheduler(self.spec["config"], folder)
        self.trail = watch_blocks(self.scheduler.kv_cache_manager.block_pool) if HYBRID in features else None
        see(self.scheduler, spec["config"].get("encoder_tokens"))
        hasher = get_request_block_hasher(
            self.spec["config"]["block_size"],
            sha256,
            *([self.scheduler.num_hash_lookahead_tokens] if LOOKAHEAD else []),
        )
        self.requests = [self._request(number, row, hasher) for number, row in enumerate(self.rows)]
        self.drafts = DraftCounts(self.rows)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.pool.enable_kv_cache_events = EVENTS in features or (bool(features) and HYBRID not in features)
        self.kv_events = EventDigests() if EVENTS in features else None
        self.scheduler.kv_cache_manager.take_events = list  # the scheduler would publish them
        self.contents = Contents(self.rows, self.spec["config"]["block_size"])
        self.places: dict[Any, tuple[int, int]] = {}  # a request that has a content, and the block's number
        self.hashed = [0] * len(self.rows)
        self.digests: list[int] = []
        self.stories: dict[str, Story] = {}
        self.steps: list[Step] = []
        self.in_flight_tokens: deque[Computing] = deque()
        self.now_us = 0
        self.device_free_us = 0
        self.worker = Worker(self.spec["links"]) if "links" in self.spec else None
        self.delivered: list[Delivered] = []
        self.idle_plans = 0
        self.transfers: list[int] = []
        self.transfer_digests = TransferDigests()
        self.host_events: list[Any] = []
        if self.worker is not None:
            self._watch_host()

    def _watch_host(self) -> None:
        """Lets the host tier tell of its blocks, and the connector of each load."""
        connector = self.scheduler.connector.connector_scheduler
        host = connector.manager if self.disk is None else connector.manager.primary_tier
        host.events = self.host_events = []
        self.scheduler.connector.take_events = lambda: ()
        load = connector.update_state_after_alloc

        def watched(request: Request, blocks: Any, tokens: int) -> None:
            load(request, blocks, tokens)
            if tokens:
                status = connector._req_status[request.request_id]
                self.stories[request.request_id].local_tokens = status.num_locally_computed_tokens

        connector.update_state_after_alloc = watched

    def _request(self, number: int, row: Row, hasher: Any) -> Request:
        sampling = SamplingParams(
            max_tokens=row["output_tokens"],
            temperature=0.0,
            ignore_eos=True,
            stop_token_ids=[STOP],
        )
        return Request(
            request_id=str(number),
            prompt_token_ids=prompt(number, row),
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=row["arrival_us"] / 1e6,
            priority=row.get("priority", 0),
            cache_salt=row.get("salt"),
            lora_request=adapter_request(row["adapter"]) if "adapter" in row else None,
            mm_features=[image(*item) for item in row.get("items", ())],
            block_hasher=hasher,
        )

    def run(self) -> Decisions:
        """Serves every request to its end."""
        while (
            len(self.stories) < len(self.rows)
            or self.scheduler.has_unfinished_requests()
            or self.in_flight_tokens
        ):
            self._take_in()
            self._give_up()
            if self._has_work():
                self._plan()
            elif self.in_flight_tokens:
                self._commit()
            elif len(self.stories) < len(self.rows):
                self.now_us = self.rows[len(self.stories)]["arrival_us"]
        served = [self._served(number) for number in range(len(self.rows))]
        return Decisions(
            self.seed,
            checksum(self.spec),
            self.steps,
            served,
            tuple(self.digests),
            tuple(self.transfers),
            tuple(self.delivered),
            self._lost(),
        )

    def _lost(self) -> tuple[int, ...]:
        """The transfers that failed, of the host and of the disk."""
        lost = [] if self.worker is None else list(self.worker.lost)
        if self.disk is not None:
            lost += [disk_job(number) for number in self.disk.lost]
        return tuple(lost)

    def _has_work(self) -> bool:
        if self.scheduler.has_unfinished_requests():
            return True
        if self.worker is None or not self.scheduler.connector.has_pending_push_work():
            return False
        # Transfers go on while nobody is served; but nothing asks for them once all have ended.
        return len(self.stories) < len(self.rows)

    def _take_in(self) -> None:
        """Hands the scheduler what has arrived by now."""
        for number in range(len(self.stories), len(self.rows)):
            if self.rows[number]["arrival_us"] > self.now_us:
                return
            accepted = self._is_accepted()
            self.stories[str(number)] = Story(self.now_us)
            if accepted:
                self.scheduler.add_request(self.requests[number])

    def _is_accepted(self) -> bool:
        """Whether vLLM's server accepts a request now: the check is its own, the counts are made here."""
        if not LIMITS_OF_QUEUE & self.spec["config"].keys():
            return True
        live = self.scheduler.requests
        waiting = [int(id) for id in live if self.stories[id].first_token_us < 0]
        server = SimpleNamespace(
            scheduler_config=self.scheduler.scheduler_config,
            admission_stats=None,
            logger_manager=None,
            get_num_unfinished_requests=lambda: len(live),
            get_num_queued_tokens=lambda: sum(self.rows[number]["input_tokens"] for number in waiting),
            _record_admission_rejection=lambda reason: None,
        )
        try:
            AsyncLLM.check_admission(server)
        except Exception:  # one of two kinds, by the limit
            return False
        return True

    def _give_up(self) -> None:
        """Takes back the requests whose clients have gone, and those that wait for longer than theirs do."""
        for id, story in self.stories.items():
            row = self.rows[int(id)]
            after_us = row.get("cancel_after_us", row.get("patience_us"))
            request = self.scheduler.requests.get(id)
            if after_us is None or request is None or story.cancelled_us >= 0:
                continue
            if self.now_us < story.submitted_us + after_us:
                continue
            if "cancel_after_us" not in row:
                waits = request.status == RequestStatus.WAITING and not request.num_output_placeholders
                if story.first_token_us >= 0 or not waits:
                    continue
            self.now_us += 1
            story.cancelled_us = self.now_us
            self.idle_plans = 0
            self.scheduler.finish_requests([id], RequestStatus.FINISHED_ABORTED)

    def _plan(self) -> None:
        """Lets the scheduler decide, and computes the oldest plan where no further one may be in flight."""
        self.now_us += 1
        if self.disk is not None:
            self._look_at_disk(self.disk)
        output = self.scheduler.schedule()
        _check_padding(output)
        self._look_at_contents(output)
        transfers = self._transfer(output)
        if transfers is not None and not output.total_num_scheduled_tokens:
            self._compute_nothing(output)
            return
        if not output.total_num_scheduled_tokens:
            if output.preempted_req_ids:
                self.steps.append(self._step([], self.now_us))
            elif not self.in_flight_tokens:
                raise Deadlock
            if self.in_flight_tokens:
                self._commit()
            return
        chunks = self._chunks(output)
        planned_us = self.now_us
        if self.worker is not None:
            meta = output.kv_connector_metadata
            self.now_us = self.worker.run(meta, self.now_us, self.device_free_us)
            transfers = self.worker.finished(self.now_us)
        end_us = max(self.now_us, self.device_free_us) + self._cost_us(chunks)
        self.device_free_us = end_us
        self.steps.append(self._step(chunks, end_us, planned_us))
        ids = output.num_scheduled_tokens
        sampling = frozenset(id for id in ids if not self.scheduler.requests[id].is_prefill_chunk)
        self.in_flight_tokens.append(Computing(output, end_us, sampling, transfers))
        if len(self.in_flight_tokens) > self.depth:
            self._commit()

    def _transfer(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        """Takes note of the transfers of a plan; None where there is no host tier."""
        if self.worker is None:
            return None
        digests = self.transfer_digests
        meta = output.kv_connector_metadata
        digests.flushed(list(meta.jobs_to_flush or ()))
        for number, job in meta.load_jobs.items():
            host, device = ends_of(job)
            self._digest_job("load", number, job, device, host)
        for number, job in meta.store_jobs.items():
            device, host = ends_of(job)
            self._digest_job("store", number, job, device, host)
        for event in self.host_events:
            if getattr(event, "metadata_only", False):
                continue  # since 0.33: a write that failed; what was never there is not told to have left
            for key in event.keys:
                digests.host(key, not event.removed)
        self.host_events.clear()
        if self.disk is not None:
            for job in self.disk.submitted:
                digests.disk(*job)
            self.disk.submitted.clear()
        self.transfers.append(digests.digest())
        return KVConnectorOutput()

    def _look_at_disk(self, disk: Disk) -> None:
        """Lets the disk's transfers end that are done by now."""
        disk.looked_up = False
        disk.advance(self.now_us)
        self.delivered += [Delivered(end, disk_job(number)) for end, number in disk.ended]
        disk.ended.clear()

    def _digest_job(self, kind: str, number: int, job: Any, device: Any, host: Any) -> None:
        blocks = [int(block) - 1 for block in device.block_ids]
        slots = [int(slot) for slot in host.block_ids]
        self.transfer_digests.job(kind, number, int(job.req_id), blocks, slots)

    def _compute_nothing(self, output: SchedulerOutput) -> None:
        """Carries out a plan of transfers alone, or of nothing; it is answered after those before it."""
        assert self.worker is not None
        self.steps.append(self._step([], self.now_us, self.now_us))
        self.now_us = self.worker.run(output.kv_connector_metadata, self.now_us, self.device_free_us)
        if not self.in_flight_tokens:
            # The engine asks again and again until something happens.
            coming = [self.worker.next_us]
            if self.disk is not None:
                coming += [self.disk.next_us, self.now_us if self.disk.looked_up else None]
            self._check_progress()
            if len(self.stories) < len(self.rows):
                coming.append(self.rows[len(self.stories)]["arrival_us"])
            soonest = min((time for time in coming if time is not None), default=None)
            if soonest is None and not output.preempted_req_ids and not self.worker._stores:
                raise Deadlock
            # What comes at the time of a plan would seem to have come before it.
            # Scenarios recorded without that have no such arrivals.
            later = self.disk is not None or "failing_loads" in self.spec["links"]
            self.now_us = max(self.now_us + later, soonest or 0)
        transfers = self.worker.finished(self.now_us)
        self.in_flight_tokens.append(Computing(output, self.now_us, frozenset(), transfers))
        self._commit()
        if self.in_flight_tokens and not self.in_flight_tokens[0].output.total_num_scheduled_tokens:
            self._commit()

    def _check_progress(self) -> None:
        """A request whose blocks do not fit in the host together is promoted for ever."""
        self.idle_plans += 1
        if self.idle_plans > MOST_IDLE_PLANS:
            raise Deadlock

    def _look_at_contents(self, output: SchedulerOutput) -> None:
        """Takes note of the blocks stored and removed since the last step."""
        if not self.pool.enable_kv_cache_events:
            return
        for event in self.pool.take_events():
            if self.kv_events is not None:
                self._look_at_event(event)
                continue
            note = self.contents.stored if isinstance(event, BlockStored) else self.contents.removed
            for content in event.block_hashes:
                note(*self._place(content))
        if self.kv_events is not None and self.worker is not None:
            for event in self.scheduler.connector.connector_scheduler.take_events():
                self._look_at_event(event)
        if output.total_num_scheduled_tokens:
            self.digests.append((self.kv_events or self.contents).digest())

    def _look_at_event(self, event: Any) -> None:
        assert self.kv_events is not None
        if self.worker is not None:
            self.kv_events.medium(event.medium)
        if isinstance(event, BlockStored):
            tokens = len(event.token_ids)
            parent = event.parent_block_hash
            self.kv_events.stored_event(event.block_hashes, parent, tokens, event.block_size, event.group_idx)
        else:
            self.kv_events.removed_event(event.block_hashes, event.group_idx)

    def _place(self, content: Any) -> tuple[int, int]:
        """A request that has a content, by its hash, and the block's number there."""
        if content not in self.places:
            for row, request in enumerate(self.requests):
                for block in range(self.hashed[row], len(request.block_hashes)):
                    self.places.setdefault(
                        maybe_convert_block_hash(request.block_hashes[block]), (row, block)
                    )
                self.hashed[row] = len(request.block_hashes)
        return self.places[content]

    def _chunks(self, output: SchedulerOutput) -> list[tuple[int, int]]:
        """(tokens, tokens already there) of each request in a plan; takes note of prefix hits."""
        chunks = []
        for new in output.scheduled_new_reqs:
            chunks.append((output.num_scheduled_tokens[new.req_id], new.num_computed_tokens))
            story = self.stories[new.req_id]
            if story.cached_tokens < 0:
                story.cached_tokens = new.num_computed_tokens
                if story.local_tokens >= 0 and new.num_computed_tokens > story.local_tokens:
                    story.external_tokens = new.num_computed_tokens - story.local_tokens
        cached = output.scheduled_cached_reqs
        for id, there in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            chunks.append((output.num_scheduled_tokens[id], there))
        return chunks

    def _cost_us(self, chunks: list[tuple[int, int]]) -> int:
        cost = self.spec["cost"]
        tokens = sum(tokens for tokens, _ in chunks)
        context = sum(tokens + there for tokens, there in chunks)
        return int(cost["step_us"] + cost["token_us"] * tokens + cost["context_ns"] * context // 1000)

    def _step(self, chunks: list[tuple[int, int]], end_us: int, start_us: int = -1) -> Step:
        decodes = [there for tokens, there in chunks if tokens == 1]
        scheduler = self.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        return Step(
            start_us=self.now_us if start_us < 0 else start_us,
            end_us=end_us,
            decode_n=len(decodes),
            decode_ctx=sum(decodes),
            decode_max=max(decodes, default=0),
            prefill=tuple(sorted(chunk for chunk in chunks if chunk[0] > 1)),
            running=len(scheduler.running),
            waiting=waiting_of(scheduler),
            used_blocks=self.spec["config"]["usable_blocks"] - pool.get_num_free_blocks(),
            trail=self.trail.cut() if self.trail is not None else None,
        )

    def _commit(self) -> None:
        """Tells the scheduler what the oldest plan in flight has yielded."""
        output, end_us, sampling, transfers = self.in_flight_tokens.popleft()
        self.now_us = max(self.now_us, end_us)
        if self.disk is not None:
            self.disk.now_us = self.now_us
        while self.worker is not None and self.worker.failed:
            self.stories[str(self.worker.failed.pop())].local_tokens = -1
        if transfers is not None and transfers.kv_connector_worker_meta is not None:
            for number in transfers.kv_connector_worker_meta.completed_jobs:
                self.delivered.append(Delivered(self.now_us, number))
        ids = list(output.num_scheduled_tokens)
        answer = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={id: index for index, id in enumerate(ids)},
            sampled_token_ids=[self._sampled(id, output) if id in sampling else [] for id in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=transfers,
        )
        for result in self.scheduler.update_from_output(output, answer).values():
            for one in result.outputs:
                story = self.stories[one.request_id]
                if one.new_token_ids and not story.tokens_out:
                    story.first_token_us = end_us
                story.tokens_out += len(one.new_token_ids)
                if one.finished and one.finish_reason is not FinishReason.ERROR:
                    story.finish_us = end_us
        if "speculative_config" in self.spec["config"] and not self.depth:
            self._draft(output)

    def _sampled(self, id: str, output: SchedulerOutput) -> list[int]:
        """The next token, and one for each draft token that is right."""
        number = int(id)
        row = self.rows[number]
        done = self.stories[id].tokens_out
        count = 1
        drafts = output.scheduled_spec_decode_tokens.get(id)
        # Since 0.26 a request that joins with one token is padded with drafts that are never right.
        joins = any(new.req_id == id for new in output.scheduled_new_reqs)
        joins = joins or id in output.scheduled_cached_reqs.resumed_req_ids
        if drafts and id in self.scheduler.requests and not joins:
            count += min(self.drafts.next("accepted_drafts", number), len(drafts))
        content = row.get("output_content", PRIVATE_OUTPUT + number)
        stop_after = row.get("stop_after")
        return [STOP if at + 1 == stop_after else token(content, at) for at in range(done, done + count)]

    def _draft(self, output: SchedulerOutput) -> None:
        """Hands the scheduler the draft tokens that follow a step's tokens."""
        drafts = {}
        for id in output.num_scheduled_tokens:
            request = self.scheduler.requests.get(id)
            if request is not None and not request.is_prefill_chunk:
                most = output.num_spec_tokens_to_schedule
                drafts[id] = [0] * min(self.drafts.next("drafts", int(id)), most)
        self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))

    def _served(self, number: int) -> Served:
        story = self.stories[str(number)]
        return Served(
            submitted_us=story.submitted_us,
            first_token_us=story.first_token_us,
            finish_us=story.finish_us,
            cached_tokens=story.cached_tokens,
            tokens_out=story.tokens_out,
            preemptions=self.requests[number].num_preemptions,
            external_tokens=story.external_tokens,
            cancelled_us=story.cancelled_us,
        )


class CutPadding(Exception):
    """A row of drafts that fills up a joining request has fewer tokens than the request is said to compute.

    From 0.30 on vLLM asserts that none is cut. Before, `long_prefill_token_threshold` cuts them, and the
    count of computed tokens becomes negative.
    """


def _check_padding(output: SchedulerOutput) -> None:
    joining = [new.req_id for new in output.scheduled_new_reqs]
    for id in [*joining, *output.scheduled_cached_reqs.resumed_req_ids]:
        drafts = output.scheduled_spec_decode_tokens.get(id, ())
        if drafts and output.num_scheduled_tokens[id] <= len(drafts):
            raise CutPadding


class Hang(Exception):
    """A scenario takes more real time than it may."""


def _hang(*_: object) -> None:
    raise Hang


def attempt(seed: int, features: tuple[str, ...], folder: Path, limit_s: int) -> Decisions | str:
    """What vLLM decides in a scenario, or why it is left out: vLLM does not get on, or fails.

    `limit_s`: real time, in whole seconds; 0: no limit, and errors of this script itself are raised.
    """
    signal.signal(signal.SIGALRM, _hang)
    signal.alarm(limit_s)
    try:
        return Engine(seed, scenario(seed, features), folder, list(features)).run()
    except Deadlock:
        return "deadlock"
    except Hang:
        return "hang"
    except CutPadding:
        return "padding cut short"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        if where.filename == __file__ and not limit_s:
            raise
        file = Path(where.filename)
        return f"{type(error).__name__} in {file.parent.name}/{file.name}, line {where.lineno}"
    finally:
        signal.alarm(0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints what vLLM's scheduler decides, a line per seed.")
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("features", nargs="*", help="features of the scenarios")
    parser.add_argument("--families", help="families to drive, with commas; lines begin with their names")
    parser.add_argument("--limit-s", type=int, default=0, help="real time per scenario; default: no limit")
    options = parser.parse_args()
    families = options.families.split(",") if options.families else [""]
    init_none_hash(sha256)
    virtual_disk.install()
    with tempfile.TemporaryDirectory() as folder:
        make_scheduler(scenario(options.first, ())["config"], Path(folder))  # vLLM's first takes long
        for name in families:
            features = FAMILIES[name] if name else tuple(options.features)
            for seed in range(options.first, options.last + 1):
                run = attempt(seed, features, Path(folder), options.limit_s)
                if isinstance(run, Decisions):
                    print(f"{name} {to_line(run)}" if name else to_line(run), flush=True)
                elif name:
                    print(f"{name} {json.dumps([seed, run])}", flush=True)
                else:
                    print(f"seed {seed}: {run}; left out", file=sys.stderr)


if __name__ == "__main__":
    main()
