"""Plans for fleets: the fewest replicas, and what others would start."""

import json
import re
import shlex

import pytest
import yaml
from pagecast.planner_app.cli import run
from pagecast.planner_app.planner.fleet.emit import emit
from pagecast.planner_app.planner.fleet.sizing import fewest, sized
from pagecast.planner_app.planner.fleet.vllm_options import serve_arguments
from pagecast.planner_app.planner.slo import Slo
from pagecast.sim.core.errors import BadInput
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.fleet.simulation import replay_fleet
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read


def fleet_of(policy="least-loaded", **fields):
    return FleetSettings.make({"router": {"policy": policy}, **fields})


def test_one_replica_less_does_not_keep_the_level():
    trace = read("chat", limit=400)
    scenario = Scenario(gpu="L4", costs="roofline", max_model_len=16_384, max_num_batched_tokens=8192)
    slo = Slo.parse("ttft_p90<2s,tpot_p90<120ms")
    answer = fewest(trace, scenario, fleet_of(), slo, most=32)
    assert answer.replicas is not None and answer.replicas > 1
    assert answer.verdict.holds
    less = replay_fleet(trace, scenario, sized(fleet_of(), answer.replicas - 1))
    assert not slo.verdict(less).holds
    none = fewest(trace, scenario, fleet_of(), Slo.parse("tpot_p90<1ms"), most=2)
    assert none.replicas is None and not none.verdict.holds


def test_a_price_is_that_of_the_fleets_gpus(capsys):
    options = [
        "--gpu",
        "L4",
        "--max-model-len",
        "16384",
        "--costs",
        "roofline",
        "--limit",
        "50",
        "--slo",
        "ttft_p90<60s",
    ]
    assert run(["plan", "chat", *options, "--router", "cost", "--price", "L4=0.5", "--json"]) == 0
    (size,) = json.loads(capsys.readouterr().out)["routers"]
    assert size["cost"] == pytest.approx(0.5 * size["gpu_hours"])


def test_a_plan_says_what_it_is_for_how_far_to_trust_it_and_what_was_not_served(capsys, tmp_path):
    """As that of one replica does: model, GPUs, where the costs are from, and their expected error."""
    file = tmp_path / "fleet.yaml"
    file.write_text("groups:\n- scenario: {gpu: L40S, max_model_len: 4000}\n")
    options = [
        "--gpu",
        "L4",
        "--max-model-len",
        "16384",
        "--costs",
        "roofline",
        "--limit",
        "60",
        "--slo",
        "ttft_p90<60s",
    ]
    command = ["plan", "chat", *options, "--fleet", str(file), "--router", "cost", "--against", "session"]
    assert run([*command, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["model"], answer["gpu"], answer["costs"]) == ("Qwen/Qwen3-8B", "L40S", "roofline")
    assert any("were not checked: allow 25%" in note for note in answer["notes"])
    assert len(answer["notes"]) == len(set(answer["notes"]))
    counts = [row["counts"] for row in answer["routers"]]
    assert [(each["completed"], each["rejected"]) for each in counts] == [(58, 2)] * 2
    assert run([*command, "--explain"]) == 0
    printed = capsys.readouterr().out
    first = "chat: 60 requests on Qwen/Qwen3-8B, replicas of 1 x L40S, vLLM 0.33, costs roofline"
    assert printed.splitlines()[0] == first
    assert "cost: of 60 requests 58 completed, 2 rejected" in printed
    assert "session: of 60 requests 58 completed, 2 rejected" in printed
    assert [f"note: {note}" for note in answer["notes"]] == [
        line for line in printed.splitlines() if line.startswith("note: ")
    ]
    assert "planned in" in printed.splitlines()[-1]


def test_a_plan_at_a_rate_repeats_a_trace_whose_sessions_pause(capsys):
    """Scaled alone, 60 requests of sessions that go on for minutes never come at that rate."""
    options = [
        "--gpu",
        "L4",
        "--max-model-len",
        "16384",
        "--costs",
        "roofline",
        "--limit",
        "60",
        "--slo",
        "ttft_p90<2s",
    ]
    answers = []
    for rate in ([], ["--rate", "8"]):
        assert run(["plan", "chat", *options, *rate, "--router", "session"]) == 0
        answers.append(capsys.readouterr().out)
    own, scaled = (int(text.split(" requests")[0].split()[-1].replace(",", "")) for text in answers)
    assert own == 60 and scaled > 300
    assert "is not reached" not in answers[1]


def test_plan_compares_routers_and_writes_the_smallest_fleet(capsys, tmp_path):
    out = tmp_path / "run.sh"
    options = [
        "--gpu",
        "L4",
        "--max-model-len",
        "16384",
        "--costs",
        "roofline",
        "--limit",
        "300",
        "--slo",
        "ttft_p90<2s",
        "--out",
        str(out),
    ]
    command = ["plan", "chat", "--router", "least-loaded", "--against", "round-robin", *options]
    assert run([*command, "--emit", "vllm", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["router"] for row in answer["routers"]] == ["least-loaded", "round-robin"]
    fewest_of = min(row["replicas"] for row in answer["routers"])
    assert out.read_text() == answer["emitted"]
    assert answer["emitted"].count("vllm serve Qwen/Qwen3-8B") == fewest_of
    assert run(["plan", "chat", *options[:-2], "--router", "random", "--emit", "helm"]) == 2
    assert "forms are vllm" in capsys.readouterr().err
    assert (
        run(["plan", "chat", *options[:-2], "--router", "random", "--emit", "llm-d", "--workers", "1"]) == 2
    )
    assert "use --router llm-d" in capsys.readouterr().err


def test_vllm_gets_the_options_simulated():
    scenario = Scenario(
        tensor_parallel_size=2, num_gpu_blocks=999, block_size=32, async_scheduling=False, max_model_len=4096
    )
    words = shlex.join(serve_arguments(scenario))
    assert "--tensor-parallel-size 2 --block-size 32 --num-gpu-blocks-override 1000" in words
    assert words.endswith("--max-model-len 4096 --no-async-scheduling")
    with pytest.raises(BadInput, match="nano-vLLM bb823b3 is not vLLM"):
        serve_arguments(Scenario(engine="nano-vllm"))


@pytest.mark.parametrize("form", ["vllm", "k8s", "dynamo"])
def test_ranks_that_share_experts_are_not_written_as_replicas_that_do_not(form):
    fields = {"model": "Qwen/Qwen3-30B-A3B", "costs": "measured"}
    fleet = fleet_of("dynamo" if form == "dynamo" else "round-robin")
    assert "Qwen3-30B-A3B" in emit(form, Scenario(**fields), fleet)
    with pytest.raises(
        BadInput, match="moe_data_parallel_size: vLLM starts 4 ranks that share experts as one"
    ):
        emit(form, Scenario(**fields, moe_data_parallel_size=4), fleet)


def option(arguments, name):
    return json.loads(arguments[arguments.index(name) + 1])


def test_vllm_gets_tiers_drafts_and_switches():
    scenario = Scenario(
        speculative_config="ngram:3:0.5",
        kv_offloading_size=64,
        kv_offloading_eviction_policy="arc",
        secondary_tiers="fs",
        kv_load_failure_policy="recompute",
        enable_expert_parallel=True,
        max_loras=2,
    )
    arguments = serve_arguments(scenario)
    assert option(arguments, "--speculative-config") == {"method": "ngram", "num_speculative_tokens": 3}
    assert option(arguments, "--kv-offloading-size") == 64
    connector = option(arguments, "--kv-transfer-config")
    assert connector["kv_connector"] == "OffloadingConnector"
    assert connector["kv_load_failure_policy"] == "recompute"
    extra = connector["kv_connector_extra_config"]
    assert extra["eviction_policy"] == "arc"
    assert extra["spec_name"] == "TieringOffloadingSpec"
    assert [tier["type"] for tier in extra["secondary_tiers"]] == ["fs"]
    assert {"--enable-lora", "--max-loras", "--enable-expert-parallel"} <= set(arguments)
    assert "--kv-transfer-config" not in serve_arguments(Scenario(kv_offloading_size=64))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"eviction": "lfu", "watermarks": "0.8:0.9"}, "eviction, watermarks"),
        ({"preemption_victim": "lowest-priority"}, "preemption_victim"),
        ({"speculative_config": "eagle:3:0.7"}, "draft model of eagle"),
    ],
)
def test_rules_that_vllm_does_not_have_are_named_before_the_search(fields, named):
    with pytest.raises(BadInput, match=named):
        serve_arguments(Scenario(**fields))


def test_manifests_have_the_replicas_and_gpus_simulated():
    groups = [{"name": "a", "replicas": 3}, {"name": "b", "scenario": {"tensor_parallel_size": 2}}]
    fleet = fleet_of("llm-d", groups=groups, router={"policy": "llm-d", "options": {"prefix": 5.0}})
    documents = list(yaml.safe_load_all(emit("llm-d", Scenario(), fleet)))
    kinds = [document["kind"] for document in documents]
    assert kinds == ["Deployment", "Deployment", "Service", "InferencePool", "EndpointPickerConfig"]
    assert [each["spec"]["replicas"] for each in documents[:2]] == [3, 1]
    limits = documents[1]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": "2"}
    weights = [one.get("weight") for one in documents[4]["schedulingProfiles"][0]["plugins"]]
    assert weights == [2.0, 2.0, 5.0, None]
    graph = yaml.safe_load(emit("dynamo", Scenario(), fleet_of("dynamo", groups=groups)))
    assert graph["kind"] == "DynamoGraphDeployment"
    assert graph["spec"]["services"]["Worker0"]["replicas"] == 3
    with pytest.raises(BadInput, match="use --router llm-d"):
        emit("llm-d", Scenario(), fleet_of("random"))


# Fields of three schemas. Those with "!" are required, and there are no others.
LABELS = {str: str}
# gateway-api-inference-extension at 84436a9, config/crd/bases/inference.networking.k8s.io_inferencepools.yaml
INFERENCE_POOL = {
    "apiVersion!": ("inference.networking.k8s.io/v1",),
    "kind!": ("InferencePool",),
    "metadata!": {"name!": str, "namespace": str, "labels": LABELS, "annotations": LABELS},
    "spec!": {
        "selector!": {"matchLabels!": LABELS},
        "targetPorts!": [{"number!": range(1, 65536)}],
        "appProtocol": ("http", "kubernetes.io/h2c"),
        "endpointPickerRef!": {
            "group": str,
            "kind": str,
            "name!": str,
            "port!": {"number!": range(1, 65536)},  # required where the kind is Service, as it is by default
            "failureMode": ("FailOpen", "FailClose"),
        },
    },
}
# llm-d-router at ebab687 (0.9), apix/config/v1alpha1/endpointpickerconfig_types.go
PICKER_CONFIG = {
    "apiVersion!": ("llm-d.ai/v1alpha1",),
    "kind!": ("EndpointPickerConfig",),
    "featureGates": [str],
    "plugins!": [{"name": str, "type!": str, "parameters": dict}],
    "schedulingProfiles!": [{"name!": str, "plugins!": [{"pluginRef!": str, "weight": float}]}],
    "dataLayer": dict,
    "flowControl": dict,
    "requestHandler": dict,
    "saturationDetector": dict,
    "parser": dict,
}
# dynamo, deploy/operator/api/v1alpha1: dynamographdeployment_types.go at 0fddc01,
# dynamocomponentdeployment_types.go at 00686d6, common.go at 015d780
ENVS = [{"name!": str, "value": str, "valueFrom": dict}]
AMOUNTS = {"cpu": str, "memory": str, "gpu": str, "gpuType": str, "custom": LABELS}
CONTAINER = {"name": str, "image": str, "command": [str], "args": [str], "workingDir": str, "env": ENVS}
SERVICE = {
    "annotations": LABELS,
    "labels": LABELS,
    "serviceName": str,
    "componentType": str,
    "subComponentType": str,
    "globalDynamoNamespace": bool,
    "resources": {"requests": AMOUNTS, "limits": AMOUNTS, "claims": list},
    "envs": ENVS,
    "envFromSecret": str,
    "extraPodMetadata": dict,
    "extraPodSpec": {"mainContainer": CONTAINER},  # and all of a PodSpec
    "replicas": range(1 << 31),
    "multinode": {"nodeCount!": range(2, 1 << 31)},
}
GRAPH = {
    "apiVersion!": ("nvidia.com/v1alpha1",),
    "kind!": ("DynamoGraphDeployment",),
    "metadata!": {"name!": str, "namespace": str, "labels": LABELS, "annotations": LABELS},
    "spec!": {
        "annotations": LABELS,
        "labels": LABELS,
        "pvcs": list,
        "services": {str: SERVICE},
        "envs": ENVS,
        "backendFramework": ("sglang", "vllm", "trtllm"),
    },
}


def check(value, schema, place=""):
    """Fails where a document does not keep a schema of the kind above."""
    if isinstance(schema, tuple | range):
        assert value in schema and not isinstance(value, bool), place
    elif isinstance(schema, list):
        assert isinstance(value, list) and value, place
        for position, each in enumerate(value):
            check(each, schema[0], f"{place}[{position}]")
    elif isinstance(schema, dict) and str in schema:
        for name, each in value.items():
            check(each, schema[str], f"{place}.{name}")
    elif isinstance(schema, dict):
        fields = {name.rstrip("!"): kind for name, kind in schema.items()}
        assert not set(value) - set(fields), (place, set(value) - set(fields))
        missing = {name[:-1] for name in schema if name.endswith("!")} - set(value)
        assert not missing, (place, missing)
        for name, each in value.items():
            check(each, fields[name], f"{place}.{name}")
    else:
        assert isinstance(value, schema), place


@pytest.mark.parametrize("parallel", [1, 4])
def test_manifests_of_llm_d_and_dynamo_keep_the_projects_schemas(parallel):
    scenario = Scenario(tensor_parallel_size=parallel, num_gpu_blocks=5000, max_model_len=8192)
    groups = [{"name": "a", "replicas": 3}, {"name": "b", "scenario": {"block_size": 32}}]
    router = {"policy": "llm-d", "options": {"prefix": 5.0}}
    *_, pool, picker = yaml.safe_load_all(emit("llm-d", scenario, fleet_of(groups=groups, router=router)))
    check(pool, INFERENCE_POOL)
    check(picker, PICKER_CONFIG)
    plugins = {plugin.get("name", plugin["type"]) for plugin in picker["plugins"]}
    (profile,) = picker["schedulingProfiles"]
    assert {plugin["pluginRef"] for plugin in profile["plugins"]} <= plugins
    router = {"policy": "dynamo", "options": {"temperature": 0.5}}
    graph = yaml.safe_load(emit("dynamo", scenario, fleet_of(groups=groups, router=router)))
    check(graph, GRAPH)
    services = graph["spec"]["services"]
    envs = {env["name"]: env["value"] for env in services["Frontend"]["envs"]}
    assert envs == {"DYN_ROUTER_MODE": "kv", "DYN_ROUTER_TEMPERATURE": "0.5"}
    arguments = services["Worker0"]["extraPodSpec"]["mainContainer"]["args"]
    assert json.loads(arguments[arguments.index("--kv-events-config") + 1])["enable_kv_cache_events"]


def apart(policy, **disaggregation):
    groups = [
        {"name": "p", "role": "prefill", "replicas": 2},
        {"name": "d", "role": "decode", "scenario": {"tensor_parallel_size": 2}},
    ]
    return fleet_of(policy, groups=groups, disaggregation=disaggregation)


def test_vllm_hands_kv_over_between_replicas_with_roles():
    text = emit("vllm", Scenario(), apart("round-robin"))
    commands = [line for line in text.splitlines() if "vllm serve" in line]
    assert len(commands) == 3
    assert all('"kv_connector": "NixlConnector"' in command for command in commands)
    ports = [re.search(r"SIDE_CHANNEL_PORT=(\d+)", command)[1] for command in commands]
    assert ports == ["5600", "5601", "5602"]
    with pytest.raises(BadInput, match="two connectors"):
        emit("vllm", Scenario(kv_offloading_size=8), apart("round-robin"))


def test_dynamo_has_workers_for_prefill_and_for_decode():
    graph = yaml.safe_load(emit("dynamo", Scenario(), apart("dynamo")))
    check(graph, GRAPH)
    workers = [graph["spec"]["services"][f"Worker{number}"] for number in (0, 1)]
    assert [worker["subComponentType"] for worker in workers] == ["prefill", "decode"]
    assert [worker["replicas"] for worker in workers] == [2, 1]
    arguments = [worker["extraPodSpec"]["mainContainer"]["args"] for worker in workers]
    modes = [each[each.index("--disaggregation-mode") + 1] for each in arguments]
    assert modes == ["prefill", "decode"]


@pytest.mark.parametrize(
    ("tokens", "decider"), [(0, "always-disagg-pd-decider"), (512, "prefix-based-pd-decider")]
)
def test_llm_d_picks_a_replica_of_each_role(tokens, decider):
    fleet = apart("llm-d", remote_tokens=tokens)
    prefill, decode, _, pool, picker = yaml.safe_load_all(emit("llm-d", Scenario(), fleet))
    check(pool, INFERENCE_POOL)
    check(picker, PICKER_CONFIG)
    pods = [each["spec"]["template"] for each in (prefill, decode)]
    assert [pod["metadata"]["labels"]["llm-d.ai/role"] for pod in pods] == ["prefill", "decode"]
    assert "initContainers" not in pods[0]["spec"]
    sidecar = pods[1]["spec"]["initContainers"][0]
    served = pods[1]["spec"]["containers"][0]["ports"][0]["containerPort"]
    assert f"--port={pool['spec']['targetPorts'][0]['number']}" in sidecar["args"]
    assert served != pool["spec"]["targetPorts"][0]["number"]
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in picker["plugins"]}
    assert plugins["disagg-profile-handler"]["deciders"]["prefill"] == decider
    assert plugins[decider] == ({"nonCachedTokens": 512} if tokens else {})
    names = [profile["name"] for profile in picker["schedulingProfiles"]]
    assert names == ["prefill", "decode"]
    for profile in picker["schedulingProfiles"]:
        assert {plugin["pluginRef"] for plugin in profile["plugins"]} <= set(plugins)
    with pytest.raises(BadInput, match="use --emit llm-d"):
        emit("k8s", Scenario(), fleet)


def test_a_sweep_writes_its_cheapest_fleet(capsys, tmp_path):
    out = tmp_path / "graph.yaml"
    space = ["--set", "replicas=2,3", "--set", "prefill_replicas=1", "--router", "dynamo"]
    command = ["sweep", "chat", *space, "--limit", "40", "--costs", "roofline", "--workers", "1", "--json"]
    assert run([*command, "--emit", "dynamo", "--emit-to", str(out)]) == 0
    answer = json.loads(capsys.readouterr().out)
    graph = yaml.safe_load(out.read_text())
    assert out.read_text() == answer["emitted"]
    workers = [graph["spec"]["services"][f"Worker{number}"]["replicas"] for number in (0, 1)]
    assert sum(workers) == answer["cheapest"]["replicas"] == 2


def test_groups_may_have_any_name_and_kubernetes_names_are_its_own():
    fleet = fleet_of("llm-d", groups=({"name": "Big_One"}, {"name": "___"}))
    documents = list(yaml.safe_load_all(emit("k8s", Scenario(), fleet)))
    assert [document["metadata"]["name"] for document in documents] == [
        "pagecast-fleet-big-one",
        "pagecast-fleet-group",
        "pagecast-fleet",
    ]


@pytest.mark.parametrize("names", [("a.b", "a-b"), (40 * "x" + "-one", 40 * "x" + "-two")])
def test_groups_whose_names_are_the_same_in_kubernetes_are_refused(names):
    fleet = fleet_of("llm-d", groups=[{"name": name} for name in names])
    for form in ("k8s", "llm-d"):
        with pytest.raises(BadInput, match=f"groups {names[0]} and {names[1]} would both be .* rename one"):
            emit(form, Scenario(), fleet)
    assert emit("vllm", Scenario(), fleet).count("vllm serve") == 2


def test_deployments_and_services_keep_kubernetes_own_schemas():
    kubernetes = pytest.importorskip("kubernetes_validate", reason="its schemas come with that package")
    fleet = fleet_of(
        "llm-d", groups=({"replicas": 3}, {"name": "b", "scenario": {"tensor_parallel_size": 2}})
    )
    for form, settings in (("k8s", fleet), ("llm-d", fleet), ("llm-d", apart("llm-d"))):
        documents = list(yaml.safe_load_all(emit(form, Scenario(), settings)))
        core = [document for document in documents if document["apiVersion"] in ("v1", "apps/v1")]
        assert len(core) == 3
        for document in core:
            kubernetes.validate(document, "1.36", strict=True)
