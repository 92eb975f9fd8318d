"""Options of vLLM that become fields of a scenario other than one by one.

Source: vllm/engine/arg_utils.py, config/vllm.py, config/kv_transfer.py, config/speculative.py.
"""

from __future__ import annotations

import json
from typing import Any, get_args

from pagecast.planner_app.launch.reading import Reading
from pagecast.planner_app.planner.fleet.vllm_options import ROOT_DIR
from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.gpus import GIB
from pagecast.sim.machine.models import model as find_model
from pagecast.sim.machine.secondary_tiers import FILE_SYSTEM
from pagecast.sim.scenario import Scenario
from pagecast.sim.speculation.config import Method, SpeculativeConfig

_DEFAULT_LORAS = 1
_MTP = "mtp"
_PLAIN = ("bf16", "fp16", "fp32")  # weights that are not quantized
_OFFLOADING = {
    "eviction_policy": "kv_offloading_eviction_policy",
    "block_size": "kv_offloading_block_size",
    "offload_prompt_only": "offload_prompt_only",
    "store_threshold": "kv_offloading_store_threshold",
}


def read(reading: Reading) -> None:
    """Adds the fields. Errors: BadInput naming the option."""
    fields = reading.fields
    fields["engine"] = "vllm"
    if reading.given.positional and "model" not in fields:
        fields["model"] = reading.given.positional[0]
    reading.gpus = (
        reading.count("tensor-parallel-size")
        * reading.count("pipeline-parallel-size")
        * reading.count("prefill-context-parallel-size")
        * reading.count("data-parallel-size")
    )
    _length(reading)
    if reading.value("enable-lora") is True:
        fields["max_loras"] = reading.count("max-loras") if reading.value("max-loras") else _DEFAULT_LORAS
    _speculation(reading)
    _connector(reading)
    _weights(reading)
    _ranks(reading, reading.count("data-parallel-size"))
    _blocks(reading)


def _length(reading: Reading) -> None:
    for option, value in reading.given.values.items():
        if option.names[0] != "max-model-len":
            continue
        if str(value) in ("auto", "-1"):
            reading.caution(
                "--max-model-len auto is not modelled: give --max-model-len the length of the log"
            )
        else:
            reading.fields["max_model_len"] = reading.whole(option, value)


def _blocks(reading: Reading) -> None:
    """vLLM counts its null block too."""
    override, memory = reading.value("num-gpu-blocks-override"), reading.value("kv-cache-memory-bytes")
    if override is not None:
        reading.fields["num_gpu_blocks"] = reading.count("num-gpu-blocks-override") - 1
    elif memory is not None:
        try:
            block_bytes = Scenario.make(reading.fields, reading.where).layout().block_bytes
        except BadInput:
            reading.caution("--kv-cache-memory-bytes is not modelled for a model that is not known")
            return
        reading.fields["num_gpu_blocks"] = reading.count("kv-cache-memory-bytes") // block_bytes - 1


def _weights(reading: Reading) -> None:
    """FP8 made at loading is the model with FP8 weights; other formats are the checkpoint's own."""
    quantization = reading.value("quantization")
    if quantization is None:
        return
    try:
        facts = find_model(reading.fields.get("model", ""))
    except BadInput:
        return
    if facts.weight_dtype not in _PLAIN:
        return
    if quantization == "fp8":
        reading.fields["model"] += "-FP8"
    else:
        reading.caution(f"not modelled, though a forecast depends on it: --quantization {quantization}")


def _ranks(reading: Reading, ranks: int) -> None:
    """Data-parallel ranks share the experts of a mixture, and are replicas of another model."""
    if ranks == 1:
        return
    try:
        mixture = find_model(reading.fields.get("model", "")).moe is not None
    except BadInput:
        mixture = False
    if mixture:
        reading.fields["moe_data_parallel_size"] = ranks
    reading.caution(
        f"{ranks} data-parallel ranks: one is forecast, so give it a share of the load, or replay a fleet"
    )


def _speculation(reading: Reading) -> None:
    config = dict(reading.document("speculative-config") or {})
    for name, theirs in (
        ("spec-method", "method"),
        ("spec-model", "model"),
        ("spec-tokens", "num_speculative_tokens"),
    ):
        value = reading.value(name)
        if value is not None:
            config[theirs] = int(value) if name == "spec-tokens" else value
    if not config:
        return
    method = config.get("method") or ("draft_model" if config.get("model") else "")
    config["method"] = _MTP if str(method).endswith(_MTP) else method
    known = SpeculativeConfig.model_fields
    left_out = [name for name in config if name not in known]
    if config["method"] not in get_args(Method) or "num_speculative_tokens" not in config:
        reading.caution(
            f"speculation by {method or 'an unnamed method'} is not modelled; methods are "
            f"{', '.join(get_args(Method))}, with num_speculative_tokens"
        )
        return
    if left_out:
        reading.caution(f"not modelled: {', '.join(left_out)} of --speculative-config")
    kept = {name: value for name, value in config.items() if name in known}
    reading.fields["speculative_config"] = json.dumps(kept)
    if not {"acceptance", "synthetic_acceptance_rates", "synthetic_acceptance_length"} & set(kept):
        reading.caution(
            "no start script says how many drafts are accepted, and none are here; give --speculative-config "
            f"{kept['method']}:{kept['num_speculative_tokens']}:ACCEPTANCE"
        )


def _connector(reading: Reading) -> None:
    """`--kv-transfer-config`: vLLM's own offloading is followed, with its extra fields."""
    config = reading.document("kv-transfer-config")
    if config is None:
        return
    name, extra = config.get("kv_connector"), dict(config.get("kv_connector_extra_config") or {})
    if name != "OffloadingConnector":
        reading.caution(f"not modelled, though a forecast may depend on it: KV transfer by {name}")
        return
    fields = reading.fields
    host_bytes = extra.pop("cpu_bytes_to_use", None)
    if host_bytes is not None:
        fields["kv_offloading_size"] = int(host_bytes) / GIB
    for theirs, ours in _OFFLOADING.items():
        if theirs in extra:
            fields[ours] = extra.pop(theirs)
    if config.get("kv_load_failure_policy") is not None:
        fields["kv_load_failure_policy"] = config["kv_load_failure_policy"]
    tiers = extra.pop("secondary_tiers", None)
    if tiers is not None:
        fields["secondary_tiers"] = _tiers(tiers)
    extra.pop("spec_name", None)
    if extra:
        reading.caution(f"not modelled: {', '.join(extra)} of --kv-transfer-config")


def _tiers(tiers: list[dict[str, Any]]) -> str:
    """The tiers as a scenario has them, without the folder that `--emit` puts in."""
    own = [{name: value for name, value in tier.items() if value != ROOT_DIR} for tier in tiers]
    return FILE_SYSTEM if own == [{"type": FILE_SYSTEM}] else json.dumps(own)
