"""Options that an engine is started with."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pagecast.engine.ngram import engine_speculation
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.option import option
from pagecast.sim.core.tier_spec import EvictionPolicy, HostTierSpec, OffloadingPolicy
from pagecast.sim.speculation.config import SpeculativeConfig

DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_DTYPES = ("auto", "fp8", "fp8_e4m3")
POLICIES = ("fcfs", "priority")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the engine, in vLLM's names where it has them. Those of the scheduler are its limits.

    `option` declares those that a scenario lacks, or that the engine answers otherwise; `flat` is their name
    on the command line. The others are described as a scenario's fields. `kv_cache_dtype` auto: that of the
    computation; fp8: e4m3 with a scale of 1. With `tensor_parallel_size`, each GPU holds a share of the
    model; with `enable_expert_parallel`, some of a mixture's experts, whole. `pipeline_depth` 1 plans a step
    while its predecessor runs. `seed` is for requests that have none, and for random weights.
    """

    random_weights: bool = option("random weights, for timing without a download", False)
    device: str = option("auto (a CUDA GPU), cuda or cpu", "auto")
    dtype: str = option("auto (the checkpoint's; float32 on the CPU), bfloat16, float16, float32", "auto")
    attention: str = option("auto (triton on a GPU, torch elsewhere), triton, flash-attn, torch", "auto")
    enforce_eager: bool = option("no CUDA graphs", False)
    block_size: int = 16
    num_blocks: int | None = option(
        "usable KV blocks [what fits; 1024 on the CPU]", None, flat="num_gpu_blocks"
    )
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = option("longest prompt + output [the model's]", None)
    kv_cache_dtype: str = "auto"
    pipeline_depth: int | None = option(
        "plan a step while the last one runs [on; off with speculation]", None, flat="async_scheduling"
    )
    scheduling_policy: str = option(f"queue order: {' or '.join(POLICIES)}", "fcfs")
    enable_prefix_caching: bool = True
    speculative_config: str | None = option("speculation by n-grams, as ngram:3 or vLLM's JSON [none]", None)
    kv_offloading_size: float | None = None
    kv_offloading_eviction_policy: EvictionPolicy = "lru"
    kv_offloading_block_size: int | None = None
    offload_prompt_only: bool = True
    kv_offloading_store_threshold: int = 0
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    seed: int = 0

    def check(self) -> None:
        """Errors: BadInput naming the first option that can't work."""
        if self.dtype not in DTYPES:
            raise BadInput(f"dtype {self.dtype!r} is not known; choose one of {', '.join(DTYPES)}")
        if self.kv_cache_dtype not in KV_DTYPES:
            known = ", ".join(KV_DTYPES)
            raise BadInput(f"the engine's kv_cache_dtype is one of {known}, not {self.kv_cache_dtype!r}")
        if self.fp8_kv and self.attention == "flash-attn":
            raise BadInput("attention backend flash-attn has no fp8 KV here; choose triton")
        if self.device not in ("auto", "cuda", "cpu"):
            raise BadInput(f"device {self.device!r} is not known; choose auto, cuda or cpu")
        if not 0 < self.gpu_memory_utilization <= 1:
            value = self.gpu_memory_utilization
            raise BadInput(f"gpu_memory_utilization is {value}; it must lie above 0 and at most 1")
        if self.kv_offloading_size is not None and not 0 < self.kv_offloading_size < float("inf"):
            raise BadInput(f"kv_offloading_size is {self.kv_offloading_size}; it must be above 0")
        self._check_host_tier()
        if self.speculation is not None and self.pipeline_depth:
            raise BadInput(
                "n-grams need the tokens of a step before the next is planned: give --no-async-scheduling "
                "(pipeline_depth 0), or leave out the speculative config"
            )
        if self.tensor_parallel_size < 1:
            raise BadInput(f"tensor_parallel_size is {self.tensor_parallel_size}; it must be at least 1")
        self.limits(1 if self.num_blocks is None else self.num_blocks, self.max_model_len).check()

    def _check_host_tier(self) -> None:
        if self.kv_offloading_size is not None:
            self._host_tier(self.kv_offloading_block_size or self.block_size).check()
            return
        for field in fields(self):
            of_host_tier = field.name.startswith("kv_offloading_") or field.name == "offload_prompt_only"
            if of_host_tier and getattr(self, field.name) != field.default:
                raise BadInput(f"{field.name} is for a host tier; give kv_offloading_size, or leave it out")

    @property
    def fp8_kv(self) -> bool:
        """True where the KV cache holds fp8."""
        return self.kv_cache_dtype != "auto"

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """How requests speculate; None where they do not. Errors: BadInput."""
        return engine_speculation(self.speculative_config)

    @property
    def most_drafts(self) -> int:
        """Draft tokens that a request verifies in a step, at most."""
        config = self.speculation
        return 0 if config is None else config.num_speculative_tokens

    def limits(self, num_blocks: int, max_model_len: int | None, host_places: int = 0) -> Limits:
        """The scheduler's limits once the number of blocks and the length are known.

        `host_places`: blocks that the host tier has room for; 0: there is none.
        """
        return Limits(
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=max_model_len,
            policy=self.scheduling_policy,
            pipeline_depth=int(self.speculation is None)
            if self.pipeline_depth is None
            else self.pipeline_depth,
            caching=self.enable_prefix_caching,
            host=self._host_tier(host_places) if host_places else None,
        )

    def _host_tier(self, places: int) -> HostTierSpec:
        """A host tier with room for so many KV blocks. Errors: BadInput."""
        size = self.kv_offloading_block_size or self.block_size
        if size % self.block_size:
            raise BadInput(f"kv_offloading_block_size {size} is no multiple of block_size {self.block_size}")
        factor = size // self.block_size
        if places < factor:
            raise BadInput(
                f"kv_offloading_size {self.kv_offloading_size:g} GiB has no room for a block of {size} tokens"
            )
        return HostTierSpec(
            blocks=places // factor,
            factor=factor,
            policy=OffloadingPolicy(
                self.kv_offloading_eviction_policy,
                self.offload_prompt_only,
                self.kv_offloading_store_threshold,
            ),
        )
