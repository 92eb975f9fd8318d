"""A scenario: the model, the GPU and the engine's options. One form for the command line, YAML and Python.

Options carry vLLM's names where vLLM has them, and have one level of names for users
(`Scenario.flat_fields`). An open one that is not given is as the engine decides: its attribute has the
engine's value for this GPU and model (`Scenario.defaults`). In code, options that belong together are a
section: the settings that the core and other parts take as they are. Reading a scenario loads neither the
machine, the scheduler nor a cost model: those are imported where they are used.

    >>> from pagecast.sim.scenario import Scenario
    >>> Scenario(gpu="L40S", block_size=32).blocks()
    5645
    >>> Scenario(kv_offloading_size=8.0).host.size_gib
    8.0
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pagecast.sim.core.cache_policy import CachePolicy, Lru
from pagecast.sim.core.engines import DEFAULT_ENGINE
from pagecast.sim.core.engines.sglang.settings import SglangSettings
from pagecast.sim.core.engines.trtllm.settings import TrtllmSettings
from pagecast.sim.core.engines.version_order import since
from pagecast.sim.core.engines.vllm.settings import VllmSettings
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.option import choice, option, section
from pagecast.sim.core.preemption import PREEMPTIONS, Preemption, Swap
from pagecast.sim.core.tenants import Tenancy
from pagecast.sim.core.tier_spec import HostTierSpec
from pagecast.sim.documents import field_problem
from pagecast.sim.scenario.flat import (
    Value,
    branches,
    checked,
    engine_options,
    flat_defaults,
    flat_model,
    of_trace,
    open_options,
    settings,
    spread,
    texts,
)
from pagecast.sim.scenario.host import HostTier
from pagecast.sim.yaml_documents import read_mapping, yaml_text
from pydantic import ValidationError
from pydantic.fields import FieldInfo

if TYPE_CHECKING:
    from pagecast.sim.core.engines.profile import Profile
    from pagecast.sim.core.limits import Limits
    from pagecast.sim.costs.calibration.target import Target
    from pagecast.sim.costs.step_costs import StepCosts
    from pagecast.sim.machine.block_layout import BlockLayout
    from pagecast.sim.machine.gpus import Gpu
    from pagecast.sim.machine.host_link import HostLinks
    from pagecast.sim.machine.memory import BudgetOptions, HbmBudget
    from pagecast.sim.machine.model_facts import ModelFacts
    from pagecast.sim.speculation.config import SpeculativeConfig

MEMORY_LIMITS = ("gpu_memory_utilization", "free_gpu_memory_fraction", "kv_tokens")
"""Options that limit the KV cache; an engine's own limit is for where none of them is given."""
CHECK = "check"  # the section of a scenario file that holds what `pagecast check` asks of it


def read_fields(path: str | Path) -> dict[str, Any]:
    """The fields of a YAML file, not yet checked. Errors: BadInput naming file and line."""
    return read_mapping(path, "give a YAML file of scenario fields")


def _engine_text(text: str) -> str:
    """The engine with its version."""
    from pagecast.sim.core.engines.registry import profile

    return profile(text).text


def _checked_seed(seed: int) -> int:
    from pagecast.traces.seeds import checked_seed

    return checked_seed(seed)


def _known_model(name: str) -> ModelFacts | None:
    from pagecast.sim.machine.models import model

    try:
        return model(name)
    except BadInput:
        return None


def _read_speculation(text: str) -> SpeculativeConfig | None:
    from pagecast.sim.speculation.config import SpeculativeConfig

    return SpeculativeConfig.parse(text)


def _speculation_text(config: SpeculativeConfig) -> str:
    return json.dumps(config.model_dump(mode="json", exclude_defaults=True))


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Scenario:
    """Everything besides the trace that a replay depends on. Unknown fields are errors, not ignored.

    `given`: options whose values differ from the defaults, by flat name, as they were written. That includes
    those of sections that nothing chose, which have no effect.
    """

    given: Mapping[str, Value] = field(default_factory=dict)
    model: str = option("a known model, or a folder with config.json", "Qwen/Qwen3-8B")
    assume_dense: bool = option(
        "leave out the fields of the model's config.json that pagecast does not know", False
    )
    gpu: str = option("GPU type", "H200")
    engine: str = option(
        "engine whose rules, defaults and step costs are taken, as NAME or NAME@VERSION",
        DEFAULT_ENGINE,
        check=_engine_text,
    )
    costs: str = option(
        "step costs: measured, roofline, a shipped calibration's name, a file, or auto (best)", "auto"
    )
    block_size: int = option("tokens in a KV block (default: the engine's)", open=True, ge=1, le=1 << 20)
    gpu_memory_utilization: float | None = option(
        "fraction of HBM the engine may use (default: the engine's)", open=True, gt=0, le=1
    )
    free_gpu_memory_fraction: float | None = option(
        "fraction of what is free after loading that KV may use (TensorRT-LLM; default: the engine's)",
        open=True,
        gt=0,
        le=1,
    )
    kv_tokens: int | None = option("most tokens of KV to hold", None, ge=1)
    num_gpu_blocks: int | None = option("usable KV blocks; replaces the memory budget", None, ge=1)
    max_num_seqs: int = option("most running requests (default: the engine's)", open=True, ge=1)
    max_num_batched_tokens: int = option("most tokens in a step (default: the engine's)", open=True, ge=1)
    max_model_len: int = option(
        "longest prompt + output; longer requests are rejected (default: the model's longest)",
        open=True,
        ge=2,
    )
    kv_cache_dtype: str = option("dtype of the KV cache (vLLM: auto, the model's)", "auto")
    disable_hybrid_kv_cache_manager: bool = option(
        "keep every token in every layer, windows or not (vLLM: off)", False
    )
    tensor_parallel_size: int = option("GPUs a replica is sharded over (vLLM: 1)", 1, ge=1)
    enable_expert_parallel: bool = option(
        "spread whole experts over a replica's GPUs, not slices of each (vLLM: off)", False
    )
    moe_data_parallel_size: int = option(
        "ranks that a mixture's experts are spread over, of which this replica is one; the others"
        " are taken to do the same at the same time (measured operations; vLLM: "
        "data_parallel_size, 1)",
        1,
        ge=1,
    )
    gpu_link_gb_per_s: float | None = option(
        "GB/s that a GPU sends to its peers, where that is less than usual, as over PCIe "
        "(measured operations and roofline; default: the GPU's link)",
        None,
        gt=0,
    )
    host_time_factor: float | None = option(
        "with measured operations, host time of synchronous steps as a multiple of the recorded "
        "host's (default: not known, counted as 1)",
        None,
        gt=0,
    )
    scheduling_policy: Literal["fcfs", "priority", "lpm"] = option("queue order (vLLM: fcfs)", "fcfs")
    async_scheduling: bool | None = option(
        "plan a step while the last one runs (vLLM: on, off with n-gram and draft models; nano-vllm: off)",
        None,
    )
    enable_prefix_caching: bool = option("reuse cached prefixes (default: the engine's)", open=True)
    cache: CachePolicy = section(CachePolicy)
    preemption: Preemption = choice(
        "what becomes of preempted KV: computed again, or swapped to host memory", PREEMPTIONS
    )
    partial_reuse: Literal["off", "copy", "take"] = option(
        "cached blocks that match a prompt partly: not used (off; vLLM), copied or taken over where "
        "nobody uses them (copy; TensorRT-LLM), or only taken over (take)",
        open=True,
    )
    tenancy: Tenancy = section(Tenancy)
    rollout_at_s: float | None = option(
        "when a new model revision replaces the old one, which no request hits then", None, ge=0
    )
    isolation_price: bool = option(
        "replay again without salts and tenants' isolation, and report the hits it costs", False
    )
    max_loras: int | None = option(
        "LoRA adapters that a step computes with at most (default: any number; vLLM: 1)", None, ge=1
    )
    speculation: SpeculativeConfig | None = option(
        "speculative decoding, as METHOD:DRAFTS:ACCEPTANCE or vLLM's JSON (default: none)",
        None,
        flat="speculative_config",
        read=_read_speculation,
        write=_speculation_text,
        form=dict,
    )
    trtllm: TrtllmSettings | None = section(TrtllmSettings, "trtllm", "TensorRT-LLM")
    sglang: SglangSettings | None = section(SglangSettings, "sglang", "SGLang")
    vllm: VllmSettings | None = section(VllmSettings, "vllm", "vLLM")
    host: HostTier | None = section(HostTier)
    seed: int = option("seed of all random draws", 0, check=_checked_seed)

    def __init__(self, **options: Any) -> None:
        """Options by flat name, or sections by theirs. Errors: pydantic's ValidationError, and BadInput."""
        kind = type(self)
        values = checked(kind, spread(kind, options))
        defaults = flat_defaults(kind)
        given = {name: text for name, text in texts(values).items() if text != defaults[name]}
        self.__dict__.update(settings(kind, values), given=given)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.given == other.given

    def __hash__(self) -> int:
        return hash(tuple(self.given.items()))

    def __repr__(self) -> str:
        return f"Scenario({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"

    # ---- flat names

    @classmethod
    def flat_fields(cls) -> dict[str, FieldInfo]:
        """Every option by flat name: type, default, description and bounds."""
        return flat_model(cls).model_fields

    def flat(self) -> dict[str, Value]:
        """Every option by flat name, as a file has it: open ones are None where they are not given."""
        return {**flat_defaults(type(self)), **self.given}

    def resolved(self) -> dict[str, Value]:
        """Every option by flat name, with the engine's own values of those that are not given."""
        return {**self.flat(), **self.defaults}

    @property
    def profile(self) -> Profile:
        """The engine's rules and defaults."""
        from pagecast.sim.core.engines.registry import profile

        return profile(self.engine)

    @property
    def defaults(self) -> dict[str, Value]:
        """The engine's own values of open options that are not given, by flat name. Errors: BadInput."""
        owners = [owner for owner in (self, self.trtllm, self.sglang, self.vllm) if owner is not None]
        left = {
            name: getattr(owner, field)
            for owner in owners
            for name, field in open_options(type(owner)).items()
            if name not in self.given
        }
        return {name: value for name, value in left.items() if value is not None}

    if not TYPE_CHECKING:  # else every misspelt attribute would be one

        def __getattr__(self, name: str) -> Any:
            if name not in open_options(type(self)):
                raise AttributeError(f"a scenario has no {name}")
            self.__dict__.update(self._of_engine())
            return self.__dict__[name]

    def _of_engine(self) -> dict[str, Any]:
        """Open options that are not given, as the engine has them; None for limits that others replace."""
        from pagecast.sim.core.engines.deployment import Deployment

        facts, card = self.facts(), self.card()
        deployment = Deployment(
            gpu=card.name,
            memory_bytes=card.hbm_bytes,
            gpus=self.tensor_parallel_size,
            longest=facts.max_position,
            states=facts.recurrent is not None,
            latent=facts.attention.mla is not None,
            weight_bytes=facts.weight_bytes(self.tensor_parallel_size),
            token_bytes=facts.kv_bytes_of_sequence(
                facts.max_position, self.kv_cache_dtype, self.tensor_parallel_size
            )
            / facts.max_position,
            chosen=self.flat(),
        )
        own = {"enable_prefix_caching": True, "partial_reuse": "off", **self.profile.defaults(deployment)}
        if any(name in self.given for name in (*MEMORY_LIMITS, "num_gpu_blocks")):
            own |= dict.fromkeys(MEMORY_LIMITS)
        return {name: own.get(name) for name in open_options(type(self)) if name not in self.given}

    def changed(self, **options: Any) -> Scenario:
        """The scenario with some options or sections replaced. Errors: BadInput naming the field."""
        return self.make({**self.given, **spread(type(self), options)})

    @classmethod
    def load(cls, path: str | Path, **changes: Any) -> Scenario:
        """Reads a YAML file; `changes` replace its fields. Errors: BadInput naming file and field.

        A section `check` is left to `pagecast check`, so that one file serves both.
        """
        data = read_fields(path)
        data.pop(CHECK, None)
        return cls.make({**data, **changes}, str(path))

    @classmethod
    def make(cls, fields: Mapping[str, Any], where: str = "scenario") -> Scenario:
        """Checks fields from outside. Errors: BadInput naming the field and what it may be."""
        try:
            return cls(**fields)
        except ValidationError as error:
            problem = field_problem(error, flat_model(cls), document="a scenario")
            raise BadInput(f"{where}: {problem}") from None
        except BadInput as error:  # of a field that is checked where it is used
            raise BadInput(f"{where}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Writes every field, so that a run can be repeated from the file even where a default changes."""
        Path(path).write_text(yaml_text(self.flat()), encoding="utf-8")

    def without_effect(self, columns: Container[str]) -> list[tuple[list[str], str]]:
        """Options that are given and change nothing, each list with what they need.

        `columns`: those of the trace.
        """
        values = self.flat()
        idle: dict[str, list[str]] = {}
        for branch in branches(type(self)):
            if not branch.chosen(values):
                idle[branch.need] = [name for name in branch.options if name in self.given]
        for name, (text, needed) in of_trace(type(self)).items():
            if name in self.given and not all(column in columns for column in needed):
                idle.setdefault(text, []).append(name)
        for need in _NEEDS:
            if need.field in self.given and not need.met(self):
                idle.setdefault(need.text, []).append(need.field)
        return [(names, text) for text, names in idle.items() if names]

    # ---- what follows from the options

    def budget(self, **more: Any) -> HbmBudget | None:
        """The itemised HBM budget; None where `num_gpu_blocks` replaces it.

        `more`: those of `BudgetOptions` that no field says. Errors: BadInput where nothing fits, or the
        engine does not start.
        """
        if self.num_gpu_blocks is not None:
            return None
        from pagecast.sim.machine.memory import hbm_budget

        profile, options = self.profile, self.budget_options(**more)
        budget = hbm_budget(self.loaded(), self.card(), options)
        if options.kv_cache_dtype != self.kv_cache_dtype:
            note = f"{profile.title} packs latents by itself on this GPU: kv_cache_dtype {self.kv_dtype}"
            budget = replace(budget, notes=(*budget.notes, note))
        if profile.holds_longest and self.kv_tokens is None:
            shortage = budget.shortage(self.max_model_len, options.held_tokens)
            if shortage:
                raise BadInput(f"{profile.label} does not start: {shortage}")
        return budget

    def budget_options(self, **more: Any) -> BudgetOptions:
        """The options of the budget beside model and GPU; `more` as for `budget`."""
        from pagecast.sim.machine.memory import BudgetOptions

        return BudgetOptions.of(
            self,
            static_fraction=self.profile.static_fraction,
            held_batches=self.profile.held_batches(int(self.pipelined)),
            kv_cache_dtype=self.kv_dtype,
            **more,
        )

    def limits(self, blocks_per_block: float = 1.0) -> Limits:
        """The replica's limits. Errors: BadInput where no KV block fits, or limits contradict each other.

        A profile that serves several KV groups has those of the model. For another one, a block stands for
        `blocks_per_block` of the engine's (`replay.windows`).
        """
        from pagecast.sim.core.group_spec import unit_tokens
        from pagecast.sim.core.limits import Limits

        layout = self.layout()
        groups = layout.specs if self._serves_groups and not layout.plain else ()
        speculation = self.speculation
        if speculation is not None and self.async_scheduling and not speculation.may_plan_ahead:
            raise BadInput(
                f"speculation by {speculation.method} needs the tokens of a step before the next is planned; "
                "turn async_scheduling off, or take ngram_gpu"
            )
        num_blocks = self.blocks() if groups else max(int(self.blocks() / blocks_per_block), 1)
        self._check_engine()
        limits = Limits(
            num_blocks=num_blocks,
            block_size=unit_tokens(groups) if groups else self.block_tokens,
            groups=groups,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            policy=self.scheduling_policy,
            pipeline_depth=int(self.pipelined),
            caching=self.enable_prefix_caching,
            max_loras=self.max_loras,
            tenants=self.tenancy.shares,
            engine=self.sglang or self.trtllm or self.vllm,
            host=self.host_tier(),
            swap_blocks=self.preemption.swap_blocks(layout.block_bytes),
            partial_reuse="" if self.partial_reuse == "off" else self.partial_reuse,
        )
        limits.check()
        return limits

    def _check_engine(self) -> None:
        """Errors: BadInput for options of other engines, and for what SGLang does not take."""
        known, foreign = engine_options(type(self), self.profile.name)
        for name, problem in foreign.items():
            if name in self.given and name not in known:
                raise BadInput(problem)
        if self.sglang is None:
            return
        if not isinstance(self.cache.eviction, Lru):
            raise BadInput("eviction is not for SGLang; give radix_eviction_policy")
        if self.sglang.chunked_prefill and self.max_num_batched_tokens % self.block_size:
            raise BadInput(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is no multiple of block_size "
                f"{self.block_size}, as SGLang asks of --chunked-prefill-size and --page-size"
            )

    def host_tier(self) -> HostTierSpec | None:
        """The host tier; None where KV is not offloaded. Errors: BadInput for a size that does not fit."""
        if self.host is not None:
            if self.context_ranks > 1:
                raise BadInput("a host tier with decode context parallelism is not simulated")
            return self.host.spec(self.block_size, self.layout().block_bytes * self.tensor_parallel_size)
        if "secondary_tiers" in self.given:
            raise BadInput("secondary_tiers needs a host tier in front: give kv_offloading_size")
        return None

    def host_links(self, costs: StepCosts | None = None) -> HostLinks | None:
        """How fast blocks move between a GPU and its host; None where KV is not offloaded.

        What the scenario leaves open is as `costs` were calibrated.
        """
        if self.host is None:
            return None
        from pagecast.sim.costs.calibration.calibrated import option_costs

        block_bytes = self.layout().block_bytes
        return self.host.links(
            self.card(),
            option_costs(costs),
            block_bytes=block_bytes,
            offloaded_bytes=block_bytes * self.tensor_parallel_size * self.host.factor(self.block_size),
            seed=self.seed,
        )

    @property
    def swaps(self) -> bool:
        """Whether preempted requests go to host memory."""
        return isinstance(self.preemption, Swap)

    def swap_ns_per_token(self) -> float:
        """The time that a token's KV takes from or to host memory, on all GPUs; 0 without swapping."""
        if not isinstance(self.preemption, Swap):
            return 0.0
        return self.layout().block_bytes / self.block_tokens / self.preemption.gb_per_s

    def scrub_ns_per_block(self) -> float:
        """The time to overwrite a block, on all GPUs at once; 0 where none is overwritten."""
        if not self.tenancy.scrub_private_blocks:
            return 0.0
        return self.layout().block_bytes / self.card().hbm_bytes_per_s * 1e9

    def facts(self) -> ModelFacts:
        """The model's facts. Errors: BadInput for one that is not known."""
        from pagecast.sim.machine.models import model

        return model(self.model, assume_dense=self.assume_dense)

    def loaded(self) -> ModelFacts:
        """The model as the engine holds it: with what drafts, and room for states that it keeps beside."""
        facts, speculation = self.facts(), self.speculation
        if speculation is None and facts.recurrent is None:
            return facts
        from pagecast.sim.machine.drafting import holding_states, with_draft_layers, with_draft_model

        states = facts.recurrent
        if speculation is not None and speculation.method == "mtp":
            facts = with_draft_layers(facts)
        elif speculation is not None and speculation.model is not None:
            facts = with_draft_model(facts, speculation.model, _known_model(speculation.model))
        drafts = 0 if speculation is None else speculation.num_speculative_tokens
        if states is None or not self.enable_prefix_caching:
            return holding_states(facts, drafts, 0)
        exported = states.exported_on(self.card())
        cached, tokens = self.profile.cached_states(exported=exported, whole=states.form == "mamba")
        return holding_states(facts, drafts, cached, tokens, found=self.profile.finds_states)

    @property
    def kv_dtype(self) -> str:
        """The dtype of the KV cache as the engine has it, which may pack latents by itself."""
        if not self.profile.packs_latents:
            return self.kv_cache_dtype
        from pagecast.sim.machine.packed_latents import packed_dtype

        return packed_dtype(self.facts(), self.card(), self.kv_cache_dtype)

    def card(self) -> Gpu:
        """The GPU's facts. Errors: BadInput for one that is not known."""
        from pagecast.sim.machine.gpus import gpu

        return gpu(self.gpu)

    @property
    def _serves_groups(self) -> bool:
        """Whether the profile serves models whose layers keep different tokens. Errors: BadInput."""
        return self.profile.hybrid

    def rules(self, costs: StepCosts, outputs: Sequence[int] = ()) -> Profile:
        """The profile with the scenario's rules in place of its own. Errors: BadInput.

        `costs` tell the cost-aware eviction order what a block costs, and load shedding what a prompt does.
        `outputs` are the trace's output lengths, for admission that reserves.
        """
        from pagecast.sim.core.cache_rules import CacheRules
        from pagecast.sim.costs.recompute import prefill_ns, recompute_ns

        rules = CacheRules(
            self.cache,
            recompute=recompute_ns(costs, self.block_tokens),
            prefill_ns=prefill_ns(costs, self.max_num_batched_tokens),
            outputs=outputs,
        )
        return rules.applied(self.profile)

    def layout(self) -> BlockLayout:
        """How the model's layers share KV blocks on one GPU."""
        from pagecast.sim.machine.block_layout import model_layout

        return model_layout(
            self.loaded(),
            self.block_size,
            tensor_parallel_size=self.tensor_parallel_size,
            kv_cache_dtype=self.kv_dtype,
            disable_hybrid_kv_cache_manager=self.disable_hybrid_kv_cache_manager,
            context_ranks=self.context_ranks,
        )

    @property
    def context_ranks(self) -> int:
        """The GPUs that share a sequence's tokens (vLLM's decode context parallelism)."""
        return 1 if self.vllm is None else self.vllm.decode_context_parallel_size

    @property
    def block_tokens(self) -> int:
        """Tokens of a block as the scheduler counts them, on all GPUs that share a sequence."""
        return self.block_size * self.context_ranks

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
        return self.profile.pipelined

    def step_costs(self) -> StepCosts:
        """The cost model. Errors: BadInput for a name that is not known, or costs of something else."""
        from pagecast.sim.costs.calibration.choose import choose

        return choose(self.costs, self.target())

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
        """The target of step costs."""
        from pagecast.sim.costs.calibration.target import Target

        model = self.facts()
        if self.moe_data_parallel_size > 1 and model.moe is None:
            raise BadInput(
                "moe_data_parallel_size is for mixtures of experts, whose ranks share them; replicas of "
                f"{model.name} are independent: give one of them its share of the load, or a fleet"
            )
        return Target(
            model=model,
            gpu=self.card(),
            tensor_parallel_size=self.tensor_parallel_size,
            kv_cache_dtype=self.kv_dtype,
            pipeline_depth=int(self.pipelined),
            engine=self.profile.priced_as or self.profile.name,
            max_num_seqs=self.max_num_seqs,
            expert_parallel=self.enable_expert_parallel,
            moe_data_parallel_size=self.moe_data_parallel_size,
            gpu_link_gb_per_s=self.gpu_link_gb_per_s,
            host_time_factor=self.host_time_factor,
        )


class _Need(NamedTuple):
    """An option that has no effect without something of the model, the GPUs or the step costs."""

    field: str
    text: str
    met: Callable[[Scenario], bool]


_NEEDS = (
    _Need("enable_expert_parallel", "a mixture of experts", lambda own: own.facts().moe is not None),
    _Need(
        "enable_expert_parallel",
        "several GPUs and measured operations",
        lambda own: own.facts().moe is None or (own.has_peers and not own.on_roofline),
    ),
    _Need(
        "prefill_schedule_interval",
        "vllm@0.33 or later, without data parallelism",
        lambda own: since(own.profile.version, "0.33"),
    ),
    _Need("host_time_factor", "measured operations", lambda own: not own.on_roofline),
    _Need("gpu_link_gb_per_s", "several GPUs", lambda own: own.has_peers),
)
