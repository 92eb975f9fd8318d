"""The kernels compile for Hopper with the Triton installed here, to the instructions they are built on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_for_hopper.py")


def test_kernels_compile_to_the_instructions_they_rely_on(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("Triton compiles on Linux")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run(
        [sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    instructions = json.loads(run.stdout.splitlines()[-1])
    assert instructions["decode"]["cp.async.cg"] > 0  # tiles arrive while others are computed
    assert instructions["decode"]["mma.sync"] > 0
    assert instructions["decode"]["atom."] == 1  # the last program of a head merges
    assert instructions["prefill"]["wgmma.mma_async"] > 0
    assert instructions["decode fp8"]["mma.sync"] > 0
    assert instructions["decode fp8"]["cvt.rn.f16x2.e4m3x2"] > 0
    assert instructions["decode fp8"]["ldmatrix"] > 0
    assert instructions["decode fp8"]["ld.shared.b8"] == 0  # no fp8 number is read alone
    assert instructions["decode with sinks"]["mma.sync"] > 0
    assert instructions["prefill with sinks"]["wgmma.mma_async"] > 0
    assert instructions["hopper"]["wgmma.mma_async"] > 0
    assert instructions["hopper"]["cp.async.bulk.tensor"] == 32  # 8 boxes of 16 tokens, 2 halves, K and V
    assert instructions["hopper"]["setmaxnreg"] > 0
    assert instructions["decode on hopper"]["wgmma.mma_async"] > 0
    assert instructions["decode on hopper"]["cp.async.bulk.tensor"] == 16  # 4 boxes of 16 tokens, 2 halves
    assert instructions["decode on hopper"]["setmaxnreg"] > 0
    assert instructions["decode on hopper"]["atom."] == 1
    # A third warpgroup that multiplies, and products with 64 and with 32 columns.
    assert (
        instructions["hopper of small heads"]["wgmma.mma_async"] > instructions["hopper"]["wgmma.mma_async"]
    )
    assert instructions["hopper of small heads"]["setmaxnreg"] > instructions["hopper"]["setmaxnreg"]
    assert instructions["choose"]["atom."] == 1  # a token's place among those of its expert
    assert instructions["sort"]["atom."] == 0
    for name, product in (("up of few", "mma.sync"), ("up of many", "wgmma.mma_async")):
        assert instructions[name][product] > 0
        assert instructions[name]["cp.async.bulk.tensor"] > 0  # the experts' matrices
        assert instructions[name]["cp.async.cg"] > 0  # the gathered tokens
    assert instructions["up of few in fp8"]["wgmma.mma_async"] > 0  # in fp8, however few the tokens
    assert instructions["down of many"]["wgmma.mma_async"] > 0
