"""A scenario: the model, the GPU and the engine's options. One form for the command line, YAML and Python.

Options carry vLLM's names and defaults where vLLM has them. Reading a scenario loads neither the
scheduler nor a cost model: those are imported where they are used.

    >>> from pagecast.sim.scenario import Scenario
    >>> Scenario(gpu="L40S", block_size=32).blocks()
    5340
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cache
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin

from pagecast.sim.core.engines.trtllm.settings import CHUNKING, TrtllmSettings
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.group_spec import unit_tokens
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.eviction_orders import LeafOrderName, PoolOrderName
from pagecast.sim.core.tenants import Tenants
from pagecast.sim.core.tier_spec import HostTierSpec
from pagecast.sim.documents import field_problem
from pagecast.sim.machine.block_layout import BlockLayout, model_layout
from pagecast.sim.machine.gpus import GIB
from pagecast.sim.machine.gpus import gpu as find_gpu
from pagecast.sim.machine.host_link import DISK_LATENCY_MS, DISK_LOAD_GB_PER_S, DISK_STORE_GB_PER_S
from pagecast.sim.machine.models import model as find_model
from pagecast.sim.yaml_documents import read_mapping, yaml_text
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

if TYPE_CHECKING:
    from pagecast.sim.core.engines.profile import Profile
    from pagecast.sim.core.engines.sglang.settings import SglangSettings
    from pagecast.sim.costs.calibration.target import Target
    from pagecast.sim.costs.step_costs import StepCosts
    from pagecast.sim.machine.host_link import DiskLinks, HostLinks
    from pagecast.sim.machine.memory import HbmBudget
    from pagecast.sim.speculation.config import SpeculativeConfig

PAGE = 4096  # bytes: with a disk, offloaded blocks are whole pages of shared memory (as vLLM's)
CHECK = "check"  # the section of a scenario file that holds what `pagecast check` asks of it


def read_fields(path: str | Path) -> dict[str, Any]:
    """The fields of a YAML file, not yet checked. Errors: BadInput naming file and line."""
    return read_mapping(path, "give a YAML file of scenario fields")


SGLANG_FIELDS = (
    "max_prefill_tokens",
    "enable_mixed_chunk",
    "schedule_conservativeness",
    "radix_eviction_policy",
    "ignore_eos",
)


class Scenario(BaseModel):
    """Everything besides the trace that a replay depends on. Unknown fields are errors, not ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model: str = Field("Qwen/Qwen3-8B", description="a known model, or a folder with config.json")
    gpu: str = Field("H200", description="GPU type")
    profile: str = Field("vllm", description="engine whose rules are followed")
    costs: str = Field(
        "auto",
        description="step costs: measured, roofline, a shipped calibration's name, a file, or auto (best)",
    )
    engine: str | None = Field(
        None, description="engine whose calibration `costs: auto` takes: vllm, pagecast [the profile's]"
    )
    transfer_costs: bool = Field(False, description="allow a calibration of another model or GPU, scaled")
    block_size: int = Field(16, ge=1, description="tokens in a KV block (vLLM: 16)")
    gpu_memory_utilization: float | None = Field(
        None, gt=0, le=1, description="fraction of HBM the engine may use (vLLM: 0.9)"
    )
    free_gpu_memory_fraction: float | None = Field(
        None, gt=0, le=1, description="fraction of what is free after loading that KV may use (TensorRT-LLM)"
    )
    kv_tokens: int | None = Field(None, ge=1, description="most tokens of KV to hold")
    num_gpu_blocks: int | None = Field(None, ge=1, description="usable KV blocks; replaces the memory budget")
    max_num_seqs: int = Field(256, ge=1, description="most running requests (vLLM: 256)")
    max_num_batched_tokens: int = Field(8192, ge=1, description="most tokens in a step (vLLM: 8192)")
    max_model_len: int | None = Field(
        None, ge=2, description="longest prompt + output; longer requests are rejected (default: no limit)"
    )
    kv_cache_dtype: str = Field("auto", description="dtype of the KV cache (vLLM: auto, the model's)")
    disable_hybrid_kv_cache_manager: bool = Field(
        False, description="keep every token in every layer, windows or not (vLLM: off)"
    )
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs a replica is sharded over (vLLM: 1)")
    enable_expert_parallel: bool = Field(
        False, description="spread whole experts over a replica's GPUs, not slices of each (vLLM: off)"
    )
    moe_data_parallel_size: int = Field(
        1,
        ge=1,
        description="ranks that a mixture's experts are spread over, of which this replica is one; the "
        "others are taken to do the same at the same time (measured operations; vLLM: data_parallel_size, 1)",
    )
    gpu_link_gb_per_s: float | None = Field(
        None,
        gt=0,
        description="GB/s that a GPU sends to its peers, where that is less than usual, as over PCIe "
        "(measured operations and roofline; default: the GPU's link)",
    )
    host_time_factor: float | None = Field(
        None,
        gt=0,
        description="with measured operations, host time of synchronous steps as a multiple of the recorded "
        "host's (default: not known, counted as 1)",
    )
    scheduling_policy: Literal["fcfs", "priority", "lpm"] = Field(
        "fcfs", description="queue order (vLLM: fcfs)"
    )
    async_scheduling: bool | None = Field(
        None,
        description="plan a step while the last one runs (vLLM: on, off with n-gram and draft models; "
        "nano-vllm: off)",
    )
    enable_prefix_caching: bool = Field(True, description="reuse cached prefixes (vLLM: on)")
    eviction: PoolOrderName = Field(
        "lru",
        description="cached content evicted first: least recently used (lru, segmented: slru) or frequently "
        "used (lfu), oldest (fifo), of the lowest retention priority (priority), or cheapest to lose (cost: "
        "prefill time times probability of reuse)",
    )
    retention: str | None = Field(
        None,
        description="with priority, for requests whose trace says nothing: START-END:PRIORITY[:SECONDS] of "
        "prompt tokens and decode:PRIORITY[:SECONDS], with spaces between; priorities 0 to 100 (default: 35)",
    )
    eviction_protected: float = Field(
        0.8, gt=0, le=1, description="with slru, most of the blocks that reused content is protected in"
    )
    eviction_prefix_cap: float = Field(
        0.5, gt=0, le=1, description="with cost, most of the blocks that one prefix may own"
    )
    admission: Literal["prompt", "completion", "expected", "maximum"] = Field(
        "prompt",
        description="blocks that a request must find free to be admitted: of its prompt (vLLM), to its "
        "completion, for an expected output, or for the longest",
    )
    admission_quantile: float = Field(
        0.9,
        gt=0,
        le=1,
        description="with expected, the quantile of the trace's outputs to reserve for",
    )
    max_output_tokens: int | None = Field(
        None, ge=1, description="with maximum, the output to reserve for (default: the trace's longest)"
    )
    watermarks: str | None = Field(
        None, description="LOW:HIGH shares of blocks in use: admission stops above HIGH and goes on below LOW"
    )
    shed_ttft_s: float | None = Field(
        None, gt=0, description="reject requests on arrival whose predicted TTFT is above so many seconds"
    )
    preemption_victim: Literal["newest", "least-progress", "lowest-priority"] | None = Field(
        None, description="who is preempted when blocks run out (default: the profile's; vLLM: newest)"
    )
    preemption: Literal["recompute", "swap"] = Field(
        "recompute",
        description="what becomes of preempted KV: computed again, or swapped to host memory",
    )
    swap_space_gib: float = Field(4.0, gt=0, description="with swap, host memory per GPU in GiB")
    swap_gb_per_s: float = Field(25.0, gt=0, description="with swap, rate of each GPU's link in GB/s")
    partial_reuse: Literal["off", "copy", "take"] = Field(
        "off",
        description="cached blocks that match a prompt partly: not used (vLLM), copied or taken over where "
        "nobody uses them (copy; TensorRT-LLM), or only taken over (take)",
    )
    tenants: str | None = Field(
        None,
        description="shares of tenants, as NAME:weight=W,blocks=B with spaces between (*: all others): "
        "weights make queue and eviction fair, and a tenant's requests hold at most B blocks",
    )
    isolation: Literal["salt", "tenant"] = Field(
        "salt",
        description="who shares no prefixes: requests with different salts, or of different tenants as well",
    )
    public_namespaces: str | None = Field(
        None, description="namespaces whose tokens all tenants share, with spaces between (default: none)"
    )
    scrub_private_blocks: bool = Field(
        False, description="overwrite evicted blocks of tenants before others use them, at the rate of HBM"
    )
    rollout_at_s: float | None = Field(
        None, ge=0, description="when a new model revision replaces the old one, which no request hits then"
    )
    isolation_price: bool = Field(
        False, description="replay again without salts and tenants' isolation, and report the hits it costs"
    )
    max_loras: int | None = Field(
        None,
        ge=1,
        description="LoRA adapters that a step computes with at most (default: any number; vLLM: 1)",
    )
    speculative_config: str | None = Field(
        None, description="speculative decoding, as METHOD:DRAFTS:ACCEPTANCE or vLLM's JSON (default: none)"
    )
    enable_chunked_prefill: bool = Field(
        True, description="cut long prompts into chunks; sglang and trtllm can do without"
    )
    context_chunking_policy: Literal["first_come_first_served", "equal_progress"] = Field(
        "first_come_first_served", description="trtllm: how prompts share the tokens of a step"
    )
    max_prefill_tokens: int = Field(16384, ge=1, description="sglang: most prompt tokens in a batch")
    enable_mixed_chunk: bool = Field(False, description="sglang: decodes join a batch of prompts")
    schedule_conservativeness: float = Field(
        1.0, gt=0, description="sglang: scales the memory reserved for outputs"
    )
    radix_eviction_policy: LeafOrderName = Field(
        "lru", description="sglang: which cached prefix is evicted first"
    )
    ignore_eos: bool = Field(False, description="sglang: outputs end by length alone, and it knows")
    kv_offloading_size: float | None = Field(
        None, gt=0, description="GiB of host memory that KV is offloaded to (vLLM; default: none)"
    )
    kv_offloading_backend: Literal["native"] = Field(
        "native", description="who offloads: native, vLLM's OffloadingConnector"
    )
    kv_offloading_eviction_policy: Literal["lru", "arc"] = Field(
        "lru", description="order in which offloaded blocks give way (vLLM: lru)"
    )
    kv_offloading_block_size: int | None = Field(
        None, ge=1, description="tokens of an offloaded block, a multiple of block_size (vLLM: block_size)"
    )
    offload_prompt_only: bool = Field(True, description="offload prompts, not what is generated (vLLM: on)")
    kv_offloading_store_threshold: int = Field(
        0, ge=0, description="offload a block once it was looked up so often (vLLM: 0, at once)"
    )
    secondary_tiers: str | None = Field(
        None,
        description="what is behind the host tier: fs, or vLLM's JSON list with one tier of the type fs "
        "(vLLM: secondary_tiers; default: nothing)",
    )
    disk_load_gb_per_s: float = Field(
        DISK_LOAD_GB_PER_S, gt=0, description="GB/s that reading offloaded blocks from disk reaches"
    )
    disk_store_gb_per_s: float = Field(
        DISK_STORE_GB_PER_S, gt=0, description="GB/s that writing offloaded blocks to disk reaches"
    )
    disk_latency_ms: float = Field(
        DISK_LATENCY_MS, ge=0, description="milliseconds that each job of the disk takes beside"
    )
    host_load_gb_per_s: float | None = Field(
        None,
        gt=0,
        description="GB/s that loads from host memory reach (default: as calibrated, or by the GPU's PCIe "
        "generation)",
    )
    host_store_gb_per_s: float | None = Field(
        None,
        gt=0,
        description="GB/s that stores to host memory reach (default: as calibrated, or by the GPU's PCIe "
        "generation)",
    )
    host_latency_ms: float = Field(0.05, ge=0, description="milliseconds that each transfer takes beside")
    offloading_step_ms: float | None = Field(
        None,
        ge=0,
        description="milliseconds of host time that offloading adds to every step (default: as calibrated, "
        "or none)",
    )
    offloading_block_us: float | None = Field(
        None,
        ge=0,
        description="microseconds of host time to submit a block's transfer (default: as calibrated, or "
        "none)",
    )
    failing_transfers: float = Field(0.0, ge=0, le=1, description="share of transfers that fail")
    slow_transfers: float = Field(
        0.0, ge=0, le=1, description="share of transfers that take ten times as long"
    )
    link_faults: str | None = Field(
        None,
        description="failing and slow transfers link by link, as "
        "host-load:failing=0.1;disk-store:slow=0.2,factor=5 (default: as the two shares say)",
    )
    kv_load_failure_policy: Literal["fail", "recompute"] = Field(
        "fail", description="what becomes of a request whose load fails (vLLM: fail)"
    )
    seed: int = Field(0, description="seed of all random draws")

    @classmethod
    def load(cls, path: str | Path, **changes: Any) -> Scenario:
        """Reads a YAML file; `changes` replace its fields. Errors: BadInput naming file and field.

        A section `check` is left to `pagecast check`, so that one file serves both.
        """
        data = read_fields(path)
        data.pop(CHECK, None)
        return cls.make({**data, **changes}, str(path))

    @classmethod
    def make(cls, fields: dict[str, Any], where: str = "scenario") -> Scenario:
        """Checks fields from outside. Errors: BadInput naming the field and what it may be."""
        try:
            return cls(**fields)
        except ValidationError as error:
            raise BadInput(f"{where}: {field_problem(error, cls, document='a scenario')}") from None
        except BadInput as error:  # of a field that is checked where it is used
            raise BadInput(f"{where}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Writes every field, so that a run can be repeated from the file even where a default changes."""
        Path(path).write_text(yaml_text(self.model_dump()), encoding="utf-8")

    @field_validator("speculative_config", mode="before")
    @classmethod
    def _write_speculation(cls, value: Any) -> Any:
        """A mapping of a scenario file is kept as vLLM's JSON; whatever it is, it is checked."""
        if isinstance(value, dict):
            value = json.dumps(value)
        if isinstance(value, str):
            from pagecast.sim.speculation.config import SpeculativeConfig

            SpeculativeConfig.parse(value)
        return value

    @field_validator("secondary_tiers", mode="before")
    @classmethod
    def _check_secondary_tiers(cls, value: Any) -> Any:
        """A list of a scenario file is kept as vLLM's JSON; whatever it is, it is checked."""
        if isinstance(value, list):
            value = json.dumps(value)
        if isinstance(value, str):
            from pagecast.sim.machine.secondary_tiers import check_secondary_tiers

            check_secondary_tiers(value)
        return value

    @field_validator("link_faults")
    @classmethod
    def _check_link_faults(cls, value: str | None) -> str | None:
        if value is not None:
            from pagecast.sim.machine.link_faults import parse_link_faults

            parse_link_faults(value)
        return value

    @field_validator("retention")
    @classmethod
    def _check_retention(cls, value: str | None) -> str | None:
        if value is not None:
            from pagecast.sim.core.retention import Retention

            Retention.parse(value)
        return value

    @field_validator("watermarks")
    @classmethod
    def _check_watermarks(cls, value: str | None) -> str | None:
        if value is not None:
            watermarks_of(value)
        return value

    @field_validator("tenants")
    @classmethod
    def _check_tenants(cls, value: str | None) -> str | None:
        if value is not None:
            Tenants.parse(value)
        return value

    @field_validator("engine")
    @classmethod
    def _check_engine(cls, value: str | None) -> str | None:
        if value is not None and value not in (known := _engines()):
            raise BadInput(f"engine {value!r} is not known; choose one of {', '.join(known)}")
        return value

    @field_validator("seed")
    @classmethod
    def _check_seed(cls, value: int) -> int:
        from pagecast.traces.seeds import checked_seed

        return checked_seed(value)

    # ---- what follows from the fields

    def given(self, names: Iterable[str]) -> list[str]:
        """Those of the fields that are given: their values differ from the defaults."""
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]

    def without_effect(self, columns: Container[str]) -> list[tuple[list[str], str]]:
        """Fields that are given and change nothing, each list with what they need.

        `columns`: those of the trace.
        """
        idle = []
        for need in _NEEDS:
            given = self.given(need.fields)
            if given and not need.met(self, columns):
                idle.append((given, need.text))
        return idle

    def budget(self, **more: Any) -> HbmBudget | None:
        """The itemised HBM budget; None where `num_gpu_blocks` replaces it.

        `more`: options of `hbm_budget` that no field says.
        """
        if self.num_gpu_blocks is not None:
            return None
        from pagecast.sim.machine.memory import hbm_budget, options_of

        return hbm_budget(find_model(self.model), find_gpu(self.gpu), **options_of(self), **more)

    def limits(self, blocks_per_block: float = 1.0) -> Limits:
        """The replica's limits. Errors: BadInput where no KV block fits, or limits contradict each other.

        A profile that serves several KV groups has those of the model. For another one, a block stands for
        `blocks_per_block` of the engine's (`replay.windows`).
        """
        layout = self.layout()
        groups = layout.specs if self._serves_groups and not layout.plain else ()
        speculation = self.speculation
        if speculation is not None and self.async_scheduling and not speculation.may_plan_ahead:
            raise BadInput(
                f"speculation by {speculation.method} needs the tokens of a step before the next is planned; "
                "turn async_scheduling off, or take ngram_gpu"
            )
        limits = Limits(
            num_blocks=self.blocks() if groups else max(int(self.blocks() / blocks_per_block), 1),
            block_size=unit_tokens(groups) if groups else self.block_size,
            groups=groups,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            policy=self.scheduling_policy,
            pipeline_depth=int(self.pipelined),
            caching=self.enable_prefix_caching,
            max_loras=self.max_loras,
            tenants=None if self.tenants is None else Tenants.parse(self.tenants),
            engine=self._sglang() or self._trtllm(),
            host=self.host_tier(),
            swap_blocks=int(self.swap_space_gib * 2**30 / layout.block_bytes) if self.swaps else 0,
            partial_reuse="" if self.partial_reuse == "off" else self.partial_reuse,
        )
        limits.check()
        return limits

    def _trtllm(self) -> TrtllmSettings | None:
        """Settings of TensorRT-LLM's rules alone. Errors: BadInput where another profile is given it."""
        if self.profile.startswith("trtllm"):
            return TrtllmSettings(
                chunked_context=self.enable_chunked_prefill, chunking=self.context_chunking_policy
            )
        if self.context_chunking_policy != CHUNKING[0]:
            raise BadInput(
                "context_chunking_policy is for the profiles of TensorRT-LLM (trtllm-...); the profile is "
                f"{self.profile}"
            )
        return None

    def _sglang(self) -> SglangSettings | None:
        """Settings of SGLang's rules alone. Errors: BadInput where another profile is given it."""
        if self.profile == "sglang":
            from pagecast.sim.core.engines.sglang.settings import SglangSettings

            if self.eviction != "lru":
                raise BadInput("eviction is not for the profile sglang; give radix_eviction_policy")
            if self.enable_chunked_prefill and self.max_num_batched_tokens % self.block_size:
                raise BadInput(
                    f"max_num_batched_tokens {self.max_num_batched_tokens} is no multiple of block_size "
                    f"{self.block_size}, as SGLang asks of --chunked-prefill-size and --page-size"
                )
            return SglangSettings(
                max_prefill_tokens=self.max_prefill_tokens,
                chunked_prefill=self.enable_chunked_prefill,
                schedule_conservativeness=self.schedule_conservativeness,
                mixed_chunk=self.enable_mixed_chunk,
                ignore_eos=self.ignore_eos,
                eviction=self.radix_eviction_policy,
            )
        for name in SGLANG_FIELDS:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise BadInput(f"{name} is for the profile sglang; the profile is {self.profile}")
        if not self.enable_chunked_prefill and not self.profile.startswith("trtllm"):
            raise BadInput(f"the profile {self.profile} always cuts long prompts into chunks")
        return None

    def host_tier(self) -> HostTierSpec | None:
        """The host tier; None where KV is not offloaded. Errors: BadInput for a size that does not fit."""
        if self.kv_offloading_size is None:
            if self.secondary_tiers is not None:
                raise BadInput("secondary_tiers needs a host tier in front: give kv_offloading_size")
            return None
        wanted = self.kv_offloading_block_size or self.block_size
        if wanted % self.block_size:
            raise BadInput(
                f"kv_offloading_block_size {wanted} is no multiple of block_size {self.block_size}"
            )
        factor = wanted // self.block_size
        block_bytes = self.layout().block_bytes * self.tensor_parallel_size * factor
        if self.secondary_tiers is not None:
            block_bytes = -(-block_bytes // PAGE) * PAGE
        room = int(self.kv_offloading_size * GIB) // block_bytes
        if not room:
            raise BadInput(f"kv_offloading_size {self.kv_offloading_size} GiB has no room for a single block")
        return HostTierSpec(
            blocks=room,
            factor=factor,
            eviction_policy=self.kv_offloading_eviction_policy,
            prompt_only=self.offload_prompt_only,
            store_threshold=self.kv_offloading_store_threshold,
            disk=self.secondary_tiers is not None,
            kv_load_failure_policy=self.kv_load_failure_policy,
        )

    def host_links(self, costs: StepCosts | None = None) -> HostLinks | None:
        """How fast blocks move between a GPU and its host; None where KV is not offloaded.

        What the scenario leaves open is as `costs` were calibrated.
        """
        if self.kv_offloading_size is None:
            return None
        from pagecast.sim.costs.calibration.calibrated import option_costs
        from pagecast.sim.machine.host_link import HostLinks, LinkSpec, host_bytes_per_s
        from pagecast.sim.machine.link_faults import with_faults

        usual, calibrated = host_bytes_per_s(find_gpu(self.gpu)), option_costs(costs)

        def link(name: str, gb_per_s: float | None, known: float | None) -> LinkSpec:
            spec = LinkSpec(
                bytes_per_s=known or usual if gb_per_s is None else gb_per_s * 1e9,
                latency_ns=round(self.host_latency_ms * 1e6),
                failing=self.failing_transfers,
                slow=self.slow_transfers,
            )
            return with_faults(spec, name, self.link_faults)

        load = link("host-load", self.host_load_gb_per_s, calibrated.load_bytes_per_s)
        store = link("host-store", self.host_store_gb_per_s, calibrated.store_bytes_per_s)
        step_ns, block_ns = calibrated.offloading_step_ns or 0.0, calibrated.offloading_block_ns or 0.0
        if self.offloading_step_ms is not None:
            step_ns = self.offloading_step_ms * 1e6
        if self.offloading_block_us is not None:
            block_ns = self.offloading_block_us * 1e3
        return HostLinks(
            self.layout().block_bytes,
            load,
            store,
            self.seed,
            step_ns=round(step_ns),
            submit_ns=round(block_ns),
            disk=self._disk_links(),
        )

    def _disk_links(self) -> DiskLinks | None:
        """How fast blocks move between host memory and the disk; None where there is no disk."""
        if self.secondary_tiers is None:
            return None
        from pagecast.sim.machine.host_link import DiskLinks, LinkSpec
        from pagecast.sim.machine.link_faults import with_faults

        factor = (self.kv_offloading_block_size or self.block_size) // self.block_size
        speeds = {"disk-load": self.disk_load_gb_per_s, "disk-store": self.disk_store_gb_per_s}
        load, store = (
            with_faults(
                LinkSpec(
                    bytes_per_s=gb_per_s * 1e9,
                    latency_ns=round(self.disk_latency_ms * 1e6),
                    failing=self.failing_transfers,
                    slow=self.slow_transfers,
                ),
                name,
                self.link_faults,
            )
            for name, gb_per_s in speeds.items()
        )
        return DiskLinks(self.layout().block_bytes * self.tensor_parallel_size * factor, load, store)

    @property
    def swaps(self) -> bool:
        """Whether preempted requests go to host memory."""
        return self.preemption == "swap"

    def swap_ns_per_token(self) -> float:
        """The time that a token's KV takes from or to host memory, on all GPUs at once."""
        return self.layout().block_bytes / self.block_size / self.swap_gb_per_s

    def scrub_ns_per_block(self) -> float:
        """The time to overwrite a block, on all GPUs at once."""
        return self.layout().block_bytes / find_gpu(self.gpu).hbm_bytes_per_s * 1e9

    @property
    def _serves_groups(self) -> bool:
        """Whether the profile serves models whose layers keep different tokens. Errors: BadInput."""
        from pagecast.sim.core.engines.registry import profile

        return profile(self.profile).hybrid

    def rules(self, costs: StepCosts, outputs: Sequence[int] = ()) -> Profile:
        """The profile with the scenario's rules in place of its own. Errors: BadInput.

        `costs` tell the cost-aware eviction order what a block costs, and load shedding what a prompt does.
        `outputs` are the trace's output lengths, for admission that reserves.
        """
        from pagecast.sim.core.cache_policy import CachePolicy
        from pagecast.sim.core.engines.registry import profile as find_profile
        from pagecast.sim.costs.recompute import prefill_ns, recompute_ns

        policy = CachePolicy(
            eviction=self.eviction,
            protected_share=self.eviction_protected,
            prefix_cap=self.eviction_prefix_cap,
            recompute=recompute_ns(costs, self.block_size),
            admission=self.admission,
            expected_output=self._expected_output(outputs),
            most_output=self._most_output(outputs),
            watermarks=None if self.watermarks is None else watermarks_of(self.watermarks),
            shed_ns=None if self.shed_ttft_s is None else round(self.shed_ttft_s * 1e9),
            prefill_ns=prefill_ns(costs, self.max_num_batched_tokens),
            victim=self.preemption_victim,
        )
        return policy.applied(find_profile(self.profile))

    def _expected_output(self, outputs: Sequence[int]) -> int:
        """The quantile of output lengths that admission reserves for; the next length above it."""
        if self.admission != "expected":
            return 1
        ordered = sorted(outputs)
        if not ordered:
            raise _needs_outputs(self.admission)
        return ordered[min(int(self.admission_quantile * len(ordered)), len(ordered) - 1)]

    def _most_output(self, outputs: Sequence[int]) -> int:
        """The output that admission reserves for as the longest."""
        if self.admission != "maximum":
            return 1
        if self.max_output_tokens is not None:
            return self.max_output_tokens
        if not outputs:
            raise _needs_outputs(self.admission)
        return max(outputs)

    def layout(self) -> BlockLayout:
        """How the model's layers share KV blocks on one GPU."""
        return model_layout(
            find_model(self.model),
            self.block_size,
            tensor_parallel_size=self.tensor_parallel_size,
            kv_cache_dtype=self.kv_cache_dtype,
            disable_hybrid_kv_cache_manager=self.disable_hybrid_kv_cache_manager,
        )

    def blocks(self) -> int:
        """The engine's usable KV blocks, each of one group of layers."""
        if self.num_gpu_blocks is not None:
            return self.num_gpu_blocks
        budget = self.budget()
        assert budget is not None
        return budget.num_gpu_blocks

    @property
    def pipelined(self) -> bool:
        """Whether steps are planned ahead."""
        if self.async_scheduling is not None:
            return self.async_scheduling
        speculation = self.speculation
        if speculation is not None and not speculation.plans_ahead:
            return False
        from pagecast.sim.core.engines.registry import profile as find_profile

        return find_profile(self.profile).pipelined

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """How requests speculate; None where they do not."""
        if not self.speculative_config:
            return None
        from pagecast.sim.speculation.config import SpeculativeConfig

        return SpeculativeConfig.parse(self.speculative_config)

    def step_costs(self) -> StepCosts:
        """The cost model. Errors: BadInput for a name that is not known, or costs of something else."""
        from pagecast.sim.costs.calibration.choose import choose

        return choose(self.costs, self.target(), transfer=self.transfer_costs)

    @property
    def on_roofline(self) -> bool:
        """Whether its step costs are those of the roofline, chosen or for want of others."""
        from pagecast.sim.costs.calibration.choose import ROOFLINE

        return self.step_costs().name == ROOFLINE

    @property
    def has_peers(self) -> bool:
        """Whether its GPU sends anything to others: to those of its replica, or to other ranks."""
        return self.tensor_parallel_size > 1 or self.moe_data_parallel_size > 1

    def target(self) -> Target:
        """The target of step costs: `engine`, or the engine that a profile is named after."""
        from pagecast.sim.costs.calibration.target import Target

        model = find_model(self.model)
        if self.moe_data_parallel_size > 1 and model.moe is None:
            raise BadInput(
                "moe_data_parallel_size is for mixtures of experts, whose ranks share them; replicas of "
                f"{model.name} are independent: give one of them its share of the load, or a fleet"
            )
        return Target(
            model=model,
            gpu=find_gpu(self.gpu),
            tensor_parallel_size=self.tensor_parallel_size,
            kv_cache_dtype=self.kv_cache_dtype,
            pipeline_depth=int(self.pipelined),
            engine=self.engine or self.profile,
            max_num_seqs=self.max_num_seqs,
            expert_parallel=self.enable_expert_parallel,
            moe_data_parallel_size=self.moe_data_parallel_size,
            gpu_link_gb_per_s=self.gpu_link_gb_per_s,
            host_time_factor=self.host_time_factor,
        )


class _Need(NamedTuple):
    """What some fields have no effect without.

    `met`: whether it is there, from the scenario and the columns of the trace.
    """

    fields: tuple[str, ...]
    text: str
    met: Callable[[Scenario, Container[str]], bool]


_NEEDS = (
    _Need(("retention",), "eviction priority", lambda own, _: own.eviction == "priority"),
    _Need(("eviction_protected",), "eviction slru", lambda own, _: own.eviction == "slru"),
    _Need(("eviction_prefix_cap",), "eviction cost", lambda own, _: own.eviction == "cost"),
    _Need(("admission_quantile",), "admission expected", lambda own, _: own.admission == "expected"),
    _Need(("max_output_tokens",), "admission maximum", lambda own, _: own.admission == "maximum"),
    _Need(("swap_space_gib", "swap_gb_per_s"), "preemption swap", lambda own, _: own.swaps),
    _Need(
        (
            "kv_offloading_eviction_policy",
            "kv_offloading_block_size",
            "offload_prompt_only",
            "kv_offloading_store_threshold",
            "host_load_gb_per_s",
            "host_store_gb_per_s",
            "host_latency_ms",
            "offloading_step_ms",
            "offloading_block_us",
            "failing_transfers",
            "slow_transfers",
            "link_faults",
            "kv_load_failure_policy",
        ),
        "kv_offloading_size",
        lambda own, _: own.kv_offloading_size is not None,
    ),
    _Need(
        ("disk_load_gb_per_s", "disk_store_gb_per_s", "disk_latency_ms"),
        "secondary_tiers",
        lambda own, _: own.secondary_tiers is not None,
    ),
    _Need(
        ("isolation", "scrub_private_blocks"),
        "tenants in the trace",
        lambda _, columns: "tenant" in columns,
    ),
    _Need(
        ("public_namespaces",),
        "namespaces and public_tokens in the trace",
        lambda _, columns: "namespace" in columns and "public_tokens" in columns,
    ),
    _Need(
        ("enable_expert_parallel",),
        "a mixture of experts",
        lambda own, _: find_model(own.model).moe is not None,
    ),
    _Need(
        ("enable_expert_parallel",),
        "several GPUs and measured operations",
        lambda own, _: find_model(own.model).moe is None or (own.has_peers and not own.on_roofline),
    ),
    _Need(("host_time_factor",), "measured operations", lambda own, _: not own.on_roofline),
    _Need(("gpu_link_gb_per_s",), "several GPUs", lambda own, _: own.has_peers),
)


@cache
def _engines() -> tuple[str, ...]:
    """Engines that step costs are known of: by a shipped calibration, or by measured operations.

    Profiles stand for the engine that they are named after.
    """
    from pagecast.sim.core.engines.registry import PROFILES
    from pagecast.sim.costs.calibration.file import all_shipped
    from pagecast.sim.costs.measured.compose import LANES

    calibrated = (str(calibration.made_for.get("engine")) for calibration in all_shipped())
    return tuple(dict.fromkeys((*LANES, *calibrated, *PROFILES)))


def _needs_outputs(admission: str) -> BadInput:
    return BadInput(f"admission {admission} needs the output lengths of a trace; choose another here")


def watermarks_of(text: str) -> tuple[float, float]:
    """Reads `LOW:HIGH`. Errors: BadInput."""
    low, colon, high = text.partition(":")
    try:
        marks = float(low), float(high)
    except ValueError:
        marks = (1.0, 0.0)
    if not colon or not 0 < marks[0] <= marks[1] <= 1:
        raise BadInput(f"watermarks {text!r}: write LOW:HIGH, shares of the blocks with 0 < LOW <= HIGH <= 1")
    return marks


def value_type(field: FieldInfo) -> type:
    """The type of a field's values: `str` for a choice of texts, `int` for an optional number."""
    annotation: Any = field.annotation
    if get_origin(annotation) is Literal:
        return type(get_args(annotation)[0])
    types = [kind for kind in get_args(annotation) if kind is not NoneType]
    kind: type = types[0] if types else annotation
    return kind
