"""Options of `vllm serve` for a scenario, with vLLM 0.24's names; those at vLLM's defaults are left out.

Source: vllm/engine/arg_utils.py, config/kv_transfer.py and v1/kv_offload (0.24).
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from pagecast.sim.core.engines.vllm.settings import VllmSettings
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.tier_spec import OffloadingPolicy
from pagecast.sim.scenario import HostTier, Scenario

PORT = 8000
ROOT_DIR = "/var/cache/vllm-kv"  # of the disk tier, where the scenario names none
_ONLY_SIMULATED = (
    "kv_tokens",
    "free_gpu_memory_fraction",
    "eviction",
    "retention",
    "admission",
    "watermarks",
    "shed_ttft_s",
    "preemption",
    "partial_reuse",
    "tenants",
    "isolation",
    "public_namespaces",
    "scrub_private_blocks",
    "rollout_at_s",
)
_SPECULATION = (
    "method",
    "model",
    "num_speculative_tokens",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "num_speculative_tokens_per_batch_size",
    "parallel_drafting",
)


def serve_arguments(scenario: Scenario, port: int = PORT, *, hands_over: bool = False) -> list[str]:
    """The arguments of `vllm serve` for one replica.

    `hands_over`: it hands KV to another replica, or takes it. Errors: BadInput for what vLLM has no option
    for.
    """
    _check(scenario)
    arguments = [scenario.model, "--port", str(port)]
    options = {
        "--tensor-parallel-size": (scenario.tensor_parallel_size, 1),
        "--block-size": (scenario.block_size, 16),
        "--gpu-memory-utilization": (scenario.gpu_memory_utilization, None),
        # vLLM counts its null block too.
        "--num-gpu-blocks-override": (scenario.num_gpu_blocks and scenario.num_gpu_blocks + 1, None),
        "--max-num-seqs": (scenario.max_num_seqs, None),
        "--max-num-batched-tokens": (scenario.max_num_batched_tokens, None),
        "--max-model-len": (scenario.max_model_len, None),
        "--kv-cache-dtype": (scenario.kv_cache_dtype, "auto"),
        "--scheduling-policy": (scenario.scheduling_policy, "fcfs"),
        "--speculative-config": (_speculation(scenario), None),
        "--kv-offloading-size": (scenario.host and scenario.host.size_gib, None),
        "--kv-transfer-config": (_connector(scenario, hands_over=hands_over), None),
    }
    for option, (value, default) in options.items():
        if value not in (None, default):
            arguments += [option, str(value)]
    if scenario.max_loras is not None:
        arguments += ["--enable-lora", "--max-loras", str(scenario.max_loras)]
    switches = {
        "--enable-expert-parallel": scenario.enable_expert_parallel,
        "--disable-hybrid-kv-cache-manager": scenario.disable_hybrid_kv_cache_manager,
        "--no-enable-prefix-caching": not scenario.enable_prefix_caching,
        "--no-async-scheduling": not scenario.pipelined,
    }
    arguments += _settings(scenario.vllm or VllmSettings())
    return arguments + [switch for switch, on in switches.items() if on]


def _settings(settings: VllmSettings) -> list[str]:
    """The scheduler's settings that are not vLLM's defaults."""
    arguments = []
    for one in fields(settings):
        if one.name == "encoder_tokens":
            continue  # vLLM takes the model's longest image
        value = getattr(settings, one.name)
        name = (one.metadata["declared"].flat or one.name).replace("_", "-")
        if isinstance(value, bool) and value != one.default:
            arguments.append(f"--{name}" if value else f"--no-{name}")
        elif value != one.default:
            arguments += [f"--{name}", str(value)]
    return arguments


def _check(scenario: Scenario) -> None:
    """Errors: BadInput where vLLM does not do what is simulated."""
    if scenario.profile.name != "vllm":
        raise BadInput(f"--emit: {scenario.profile.label} is not vLLM; use --engine vllm")
    only = [name for name in _ONLY_SIMULATED if name in scenario.given]
    if scenario.cache.victim not in (None, "newest"):
        only.append("preemption_victim")
    if only:
        raise BadInput(f"--emit: vLLM has no option for {', '.join(only)}; plan without, or without --emit")
    ranks = scenario.moe_data_parallel_size
    if ranks > 1:
        raise BadInput(
            f"--emit: moe_data_parallel_size: vLLM starts {ranks} ranks that share experts as one server "
            f"(--data-parallel-size {ranks}), and replicas are written one by one; plan without, or without "
            "--emit"
        )


def _speculation(scenario: Scenario) -> str | None:
    """The value of `--speculative-config`: without acceptance, which vLLM's drafter decides."""
    config = scenario.speculation
    if config is None:
        return None
    if config.model is None and config.method in ("draft_model", "eagle", "eagle3"):
        raise BadInput(
            f"--emit: vLLM needs the draft model of {config.method}; write speculative_config as JSON with it"
        )
    fields = config.model_dump(mode="json", exclude_defaults=True)
    return json.dumps({name: fields[name] for name in _SPECULATION if name in fields})


def _connector(scenario: Scenario, *, hands_over: bool) -> str | None:
    """The value of `--kv-transfer-config`: for handing over, or where offloading is not as by default."""
    if hands_over and scenario.host is not None:
        raise BadInput(
            "--emit: offloading and handing over need two connectors; leave kv_offloading_size out"
        )
    if hands_over:
        return json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
    return None if scenario.host is None else _offloading(scenario.host)


def _offloading(host: HostTier) -> str | None:
    usual = OffloadingPolicy()
    defaults = usual.of_connector()
    extra = {name: value for name, value in host.policy.of_connector().items() if value != defaults[name]}
    if host.block_size is not None:
        extra["block_size"] = host.block_size
    if host.disk is not None:
        extra["spec_name"] = "TieringOffloadingSpec"
        extra["secondary_tiers"] = [{"root_dir": ROOT_DIR, **tier} for tier in host.disk.tiers]
    config: dict[str, Any] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    if host.policy.kv_load_failure_policy != usual.kv_load_failure_policy:
        config["kv_load_failure_policy"] = host.policy.kv_load_failure_policy
    if extra:
        config["kv_connector_extra_config"] = extra
    return json.dumps(config) if len(config) > 2 else None
