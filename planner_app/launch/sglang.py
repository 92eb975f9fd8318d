"""Options of SGLang that become fields of a scenario other than one by one. Source: server_args.py."""

from __future__ import annotations

from pagecast.planner_app.launch.reading import Reading

_DEFAULT_LORAS = 8
_POLICIES = ("fcfs", "lpm")


def read(reading: Reading) -> None:
    """Adds the fields. Errors: BadInput naming the option."""
    fields = reading.fields
    fields["engine"] = "sglang"
    if reading.given.positional and "model" not in fields:
        fields["model"] = reading.given.positional[0]
    ranks = reading.count("dp-size")
    attention = reading.value("enable-dp-attention") is True  # the ranks then share the replica's GPUs
    reading.gpus = reading.count("tp-size") * reading.count("pp-size") * (1 if attention else ranks)
    for option, value in reading.given.values.items():
        if option.names[0] == "chunked-prefill-size":
            tokens = reading.whole(option, value)
            fields |= {"max_num_batched_tokens": tokens} if tokens > 0 else {"enable_chunked_prefill": False}
    policy = reading.value("schedule-policy")
    if policy in _POLICIES:
        fields["scheduling_policy"] = policy
    elif policy is not None:
        reading.caution(f"--schedule-policy {policy} is not modelled; policies are {', '.join(_POLICIES)}")
    if reading.value("disable-radix-cache") is True:
        fields["enable_prefix_caching"] = False
    if reading.value("disable-overlap-schedule") is True:
        fields["async_scheduling"] = False
    if reading.count("ep-size") > 1:
        fields["enable_expert_parallel"] = True
    if reading.value("enable-lora") is True or reading.value("lora-paths"):
        given = reading.value("max-loras-per-batch")
        fields["max_loras"] = reading.count("max-loras-per-batch") if given else _DEFAULT_LORAS
    if ranks > 1:
        reading.caution(
            f"{ranks} data-parallel ranks: one is forecast, so give it a share of the load, or replay a fleet"
        )
