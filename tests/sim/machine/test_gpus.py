"""GPU facts: the spellings people type, and figures that agree with one another."""

import pytest
from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.gpus import GIB, GPUS, gpu


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("H200", "H200"),
        ("nvidia-h200", "H200"),
        ("h100", "H100 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("H100-PCIe", "H100 PCIe"),
        ("a100-80gb", "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("l40s", "L40S"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("mi300x", "MI300X"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Tesla T4", "T4"),
        ("NVIDIA GB10", "GB10"),
        ("h100-nvl", "H100 NVL"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("AMD Instinct MI355X", "MI355X"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 5000 Blackwell", "RTX PRO 5000"),
        ("vera rubin", "Rubin"),
    ],
)
def test_common_spellings_are_understood(typed: str, name: str) -> None:
    assert gpu(typed).name == name


def test_an_unknown_gpu_is_answered_with_the_nearest_names() -> None:
    with pytest.raises(BadInput, match=r"unknown GPU 'H300'; nearest: .*H200"):
        gpu("H300")


def test_a_name_two_gpus_share_is_not_guessed() -> None:
    with pytest.raises(BadInput, match="A100 80GB' or 'A100 40GB"):
        gpu("A100")


@pytest.mark.parametrize("facts", GPUS, ids=lambda facts: facts.name)
def test_every_figure_is_plausible_and_has_its_source(facts) -> None:
    assert 14 * GIB < facts.hbm_bytes < 300 * GIB
    assert 200e9 < facts.hbm_bytes_per_s < (10e12 if facts.name != "Rubin" else 25e12)
    assert facts.peak_flops("bf16") >= 60e12
    # fp8 units do twice the 16-bit rate wherever they exist; without them the 16-bit rate counts.
    # Rubin's do more: its 16-bit units did not grow with them.
    ratio = facts.peak_flops("fp8") / facts.peak_flops("fp16")
    assert ratio == pytest.approx(
        4.375 if facts.name == "Rubin" else 2 if "fp8" in facts.flops else 1, rel=0.02
    )
    assert facts.source and facts.link_bytes_per_s > 0 and facts.sms > 0


def test_usable_memory_is_less_than_the_number_on_the_box() -> None:
    boxes = {"H200": 141e9, "H100 SXM": 80 * GIB, "A100 40GB": 40 * GIB, "L4": 24 * GIB, "B200": 192e9}
    for name, advertised in boxes.items():
        assert 0.9 * advertised < gpu(name).hbm_bytes < 1.07 * advertised
    assert gpu("H200").hbm_bytes < 143_771 * (1 << 20)  # nvidia-smi's figure holds the driver's share
