"""The files for containers fit the server: metrics, ports, options and packages."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"


def test_every_metric_of_the_dashboard_is_one_of_the_server(server: Any) -> None:
    dashboard = json.loads((DEPLOY / "grafana/dashboards/serving.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    with server.client() as http:
        families = text_string_to_metric_families(http.get("/metrics").text)
        known = {sample.name for family in families for sample in family.samples}
    named = {name for query in queries for name in re.findall(r"(?:vllm|pagecast):\w+", query)}
    assert len(named) > 20
    assert named <= known


def test_prometheus_scrapes_the_port_that_the_container_serves() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"]
    assert scraped == [{"targets": ["pagecast:8000"]}]
    assert compose["services"]["pagecast"]["ports"] == ["127.0.0.1:8000:8000"]
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            assert (DEPLOY / volume.split(":")[0]).exists()


def test_the_image_has_every_folder_of_the_package() -> None:
    copied = re.findall(r"^COPY (\w+) \./\1$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert {"sim", "traces", "engine", "kernels", "planner_app"} <= set(copied)
