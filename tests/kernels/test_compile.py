"""The kernels compile for Hopper with the Triton installed here, to the instructions they are built on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_for_hopper.py")


def instructions_of(folder: Path, *names: str) -> dict[str, dict[str, int]]:
    """How often each instruction stands in these kernels, or in all."""
    if sys.platform != "linux":
        pytest.skip("Triton compiles on Linux")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    run = subprocess.run(
        [sys.executable, SCRIPT, *names], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    instructions: dict[str, dict[str, int]] = json.loads(run.stdout.splitlines()[-1])
    return instructions


def test_attention_compiles_to_the_instructions_it_relies_on(tmp_path: Path) -> None:
    instructions = instructions_of(tmp_path, "decode", "prefill")
    assert instructions["decode"]["cp.async.cg"] > 0  # tiles arrive while others are computed
    assert instructions["decode"]["mma.sync"] > 0
    assert instructions["decode"]["atom."] == 1  # the last program of a head merges
    assert instructions["prefill"]["wgmma.mma_async"] > 0


@pytest.mark.slow
def test_every_kernel_compiles_to_the_instructions_it_relies_on(tmp_path: Path) -> None:
    instructions = instructions_of(tmp_path)
    assert instructions["decode fp8"]["mma.sync"] > 0
    assert instructions["decode fp8"]["cvt.rn.f16x2.e4m3x2"] > 0
    assert instructions["decode fp8"]["ldmatrix"] > 0
    assert instructions["decode fp8"]["ld.shared.b8"] == 0  # no fp8 number is read alone
    assert instructions["decode with sinks"]["mma.sync"] > 0
    assert instructions["prefill with sinks"]["wgmma.mma_async"] > 0
    assert instructions["hopper"]["wgmma.mma_async"] > 0
    assert instructions["hopper"]["cp.async.bulk.tensor"] == 32  # 8 boxes of 16 tokens, 2 halves, K and V
    assert instructions["hopper"]["setmaxnreg"] > 0
    # A third warpgroup that multiplies, and products with 64 and with 32 columns.
    assert (
        instructions["hopper of small heads"]["wgmma.mma_async"] > instructions["hopper"]["wgmma.mma_async"]
    )
    assert instructions["hopper of small heads"]["setmaxnreg"] > instructions["hopper"]["setmaxnreg"]
    assert instructions["hopper in halves"]["wgmma.mma_async"] > 0
    assert instructions["hopper in halves"]["setmaxnreg"] > instructions["hopper"]["setmaxnreg"]
    assert instructions["hopper in halves"]["cp.async.bulk.tensor"] == 32
    assert instructions["choose"]["atom."] == 1  # a token's place among those of its expert
    assert instructions["sort"]["atom."] == 0
    assert instructions["linear"]["wgmma.mma_async"] == 2 * 4  # of 64 tokens, and of the rest
    assert instructions["linear"]["cp.async.bulk.tensor"] == 3 * (10 + 1)  # before the loop, and in it
    assert instructions["gated linear"]["wgmma.mma_async"] == 4
    for name, product in (("up of few", "mma.sync"), ("up of many", "wgmma.mma_async")):
        assert instructions[name][product] > 0
        assert instructions[name]["cp.async.bulk.tensor"] > 0  # the experts' matrices
        assert instructions[name]["cp.async.cg"] > 0  # the gathered tokens
    assert instructions["up of few in fp8"]["wgmma.mma_async"] > 0  # in fp8, however few the tokens
    assert instructions["down of many"]["wgmma.mma_async"] > 0
