"""Options of `trtllm-serve` and of its YAML file that become fields of a scenario other than one by one.

Source: tensorrt_llm/commands/serve.py, llmapi/llm_args.py.
"""

from __future__ import annotations

from pagecast.planner_app.launch.reading import Reading

_CAPACITY = {
    "GUARANTEED_NO_EVICT": "trtllm-guaranteed-no-evict",
    "MAX_UTILIZATION": "trtllm-max-utilization",
    "STATIC_BATCH": "trtllm-static",
}


def read(reading: Reading) -> None:
    """Adds the fields; options of the YAML file go by their names there. Errors: BadInput."""
    fields = reading.fields
    policy = str(reading.value("scheduler_config.capacity_scheduler_policy") or "GUARANTEED_NO_EVICT")
    if policy not in _CAPACITY:
        reading.caution(
            f"capacity_scheduler_policy {policy} is not modelled; policies are {', '.join(_CAPACITY)}"
        )
    fields["engine"] = _CAPACITY.get(policy, "trtllm-guaranteed-no-evict")
    if reading.given.positional and "model" not in fields:
        fields["model"] = reading.given.positional[0]
    sizes = {name: _size(reading, name) for name in ("tensor", "pipeline", "context")}
    reading.gpus = sizes["tensor"] * sizes["pipeline"] * sizes["context"]
    chunking = reading.value("scheduler_config.context_chunking_policy")
    if chunking is not None:
        fields["context_chunking_policy"] = str(chunking).lower()
    if max(reading.count("moe-expert-parallel-size"), reading.count("moe_expert_parallel_size")) > 1:
        fields["enable_expert_parallel"] = True
    if reading.value("disable_overlap_scheduler") is True:
        fields["async_scheduling"] = False
    partial = reading.value("kv_cache_config.enable_partial_reuse")
    copied = reading.value("kv_cache_config.copy_on_partial_reuse")
    if partial is not None or copied is not None:
        fields["partial_reuse"] = "off" if partial is False else "take" if copied is False else "copy"
    if reading.value("kv_cache_config.max_gpu_total_bytes"):
        reading.caution("not modelled: max_gpu_total_bytes of kv_cache_config; give --kv-tokens")


def _size(reading: Reading, kind: str) -> int:
    """Of a kind of parallelism; the file's wins, as in the engine."""
    in_file = reading.value(f"{kind}_parallel_size")
    return reading.count(f"{kind}_parallel_size" if in_file is not None else f"{kind}-parallel-size")
