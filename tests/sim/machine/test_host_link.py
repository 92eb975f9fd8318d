"""Links to the host: what each GPU's copies reach."""

import pytest
from pagecast.sim.machine.gpus import GPUS, gpu
from pagecast.sim.machine.host_link import host_bytes_per_s
from pagecast.sim.scenario import Scenario

GB_PER_S = {
    12.5: ("T4",),
    25: ("A100 80GB", "A100 40GB", "A100 80GB PCIe", "A10", "A10G", "L4", "L40S", "RTX A6000", "RTX 4090"),
    55: ("H100", "H100 PCIe", "H200", "H20", "B200", "GB200", "RTX 5090", "RTX PRO 6000", "MI300X"),
}


@pytest.mark.parametrize(
    ("name", "gb_per_s"), [(name, rate) for rate, names in GB_PER_S.items() for name in names]
)
def test_copies_reach_what_the_gpus_pcie_generation_allows(name: str, gb_per_s: float) -> None:
    links = Scenario(gpu=name, model="Qwen/Qwen3-0.6B", kv_offloading_size=1.0).host_links()
    assert links is not None
    assert links.load.bytes_per_s == links.store.bytes_per_s == gb_per_s * 1e9


@pytest.mark.parametrize(
    "facts", [each for each in GPUS if each.link == "PCIe"], ids=lambda facts: facts.name
)
def test_peers_over_pcie_are_reached_by_the_link_to_the_host(facts) -> None:
    assert facts.host_link_bytes_per_s == facts.link_bytes_per_s


def test_no_copy_is_faster_than_its_link() -> None:
    for facts in GPUS:
        assert host_bytes_per_s(facts) < facts.host_link_bytes_per_s
    assert host_bytes_per_s(gpu("H200")) == 55e9
