"""Plans for fleets: the fewest replicas, and what others would start."""

import json
import shlex

import pytest
import yaml
from pagecast.planner_app.cli import run
from pagecast.planner_app.planner.fleet.emit import emit, serve_arguments
from pagecast.planner_app.planner.fleet.sizing import fewest, sized
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
    scenario = Scenario(gpu="L4", costs="roofline")
    slo = Slo.parse("ttft_p90<2s,tpot_p90<120ms")
    answer = fewest(trace, scenario, fleet_of(), slo, most=32)
    assert answer.replicas is not None and answer.replicas > 1
    assert answer.verdict.holds
    less = replay_fleet(trace, scenario, sized(fleet_of(), answer.replicas - 1))
    assert not slo.verdict(less).holds
    none = fewest(trace, scenario, fleet_of(), Slo.parse("tpot_p90<1ms"), most=2)
    assert none.replicas is None and not none.verdict.holds


def test_plan_compares_routers_and_writes_the_smallest_fleet(capsys, tmp_path):
    out = tmp_path / "run.sh"
    options = [
        "--gpu",
        "L4",
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


def test_vllm_gets_the_options_simulated():
    scenario = Scenario(
        tensor_parallel_size=2, num_gpu_blocks=999, block_size=32, async_scheduling=False, max_model_len=4096
    )
    words = shlex.join(serve_arguments(scenario))
    assert "--tensor-parallel-size 2 --block-size 32 --num-gpu-blocks-override 1000" in words
    assert words.endswith("--max-model-len 4096 --no-async-scheduling")
    with pytest.raises(BadInput, match="not vLLM's"):
        serve_arguments(Scenario(profile="nano-vllm"))


def test_manifests_have_the_replicas_and_gpus_simulated():
    groups = [{"name": "a", "replicas": 3}, {"name": "b", "scenario": {"tensor_parallel_size": 2}}]
    fleet = fleet_of("llm-d", groups=groups, router={"policy": "llm-d", "options": {"prefix": 5.0}})
    documents = list(yaml.safe_load_all(emit("llm-d", Scenario(), fleet)))
    kinds = [document["kind"] for document in documents]
    assert kinds == ["Deployment", "Deployment", "Service", "EndpointPickerConfig"]
    assert [each["spec"]["replicas"] for each in documents[:2]] == [3, 1]
    limits = documents[1]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": "2"}
    weights = [one.get("weight") for one in documents[3]["schedulingProfiles"][0]["plugins"]]
    assert weights == [2.0, 2.0, 5.0, None]
    graph = yaml.safe_load(emit("dynamo", Scenario(), fleet_of("dynamo", groups=groups)))
    assert graph["kind"] == "DynamoGraphDeployment"
    assert graph["spec"]["services"]["Worker0"]["replicas"] == 3
    with pytest.raises(BadInput, match="use --router llm-d"):
        emit("llm-d", Scenario(), fleet_of("random"))


def test_groups_may_have_any_name_and_kubernetes_names_are_its_own():
    fleet = fleet_of("llm-d", groups=({"name": "Big_One"}, {"name": "___"}))
    documents = list(yaml.safe_load_all(emit("k8s", Scenario(), fleet)))
    assert [document["metadata"]["name"] for document in documents] == [
        "pagecast-fleet-big-one",
        "pagecast-fleet-group",
        "pagecast-fleet",
    ]


def test_deployments_and_services_keep_kubernetes_own_schemas():
    kubernetes = pytest.importorskip("kubernetes_validate", reason="its schemas come with that package")
    fleet = fleet_of(
        "llm-d", groups=({"replicas": 3}, {"name": "b", "scenario": {"tensor_parallel_size": 2}})
    )
    for form in ("k8s", "llm-d"):
        documents = list(yaml.safe_load_all(emit(form, Scenario(), fleet)))
        core = [document for document in documents if document["apiVersion"] in ("v1", "apps/v1")]
        assert len(core) == 3
        for document in core:
            kubernetes.validate(document, "1.36", strict=True)
