"""Compiles kernels for an H100 or H200 without a GPU; prints, as JSON, the instructions found in each.

Arguments are the names of those to be compiled; without any, all are.

A script of its own, because the tests' process interprets kernels instead of compiling them.
"""

import json
import sys
from functools import partial
from typing import Any

import torch
import triton
from pagecast.kernels import (
    grouped_gemm,
    linear_hopper,
    mixture,
    paged_decode,
    paged_prefill,
    prefill_hopper,
    routing,
)
from pagecast.kernels.decode_schedule import DecodeSchedule, DecodeShape
from pagecast.kernels.launch import Launch
from pagecast.kernels.linear_cuts import LinearCut
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

MARKS = (
    "wgmma.mma_async",
    "cp.async.bulk.tensor",
    "cp.async.cg",
    "mma.sync",
    "setmaxnreg",
    "atom.",
)
FP8_MARKS = ("ldmatrix", "cvt.rn.f16x2.e4m3x2", "ld.shared.b8")
HOPPER = GPUTarget("cuda", 90, 32)


def compiled(launch: Launch, types: dict[str, str], source: Any = ASTSource) -> dict[str, int]:
    """How often each mark stands in the PTX; `types` names the arguments that aren't constants or None."""
    names = launch.kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    constants = {
        (i,): launch.constants.get(name) for i, name in enumerate(names) if signature[name] == "constexpr"
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] == "*"}
    kernel = triton.compile(
        source(launch.kernel, signature, constants, aligned), target=HOPPER, options=launch.options
    )
    return {mark: kernel.asm["ptx"].count(mark) for mark in (*MARKS, *FP8_MARKS)}


def _gate_up(plan: mixture.Plan) -> Launch:
    return grouped_gemm.gate_up_launch((128, 1536, 2048), plan.tile_rows, plan.up, torch.device("cpu"))


def _down(plan: mixture.Plan) -> Launch:
    return grouped_gemm.down_launch((128, 2048, 768), plan.tile_rows, plan.down, torch.device("cpu"))


def _linear(cut: LinearCut, *, gated: bool = False) -> dict[str, int]:
    """Compiles a product of Qwen3-0.6B: gate and up with the activation, or down."""
    launch = linear_hopper.linear_launch(
        (6144, 1024) if gated else (1024, 3072), cut, gated, torch.device("cpu")
    )
    layout = linear_hopper.gl.NVMMASharedLayout(128, 16, 2)
    rows = {"x": cut.tokens, "weight": cut.outputs // 2 if gated else cut.outputs}
    rows |= {"x_rest": cut.rest} if cut.rest else {}
    types = {name: f"tensordesc<bf16[{n}, {cut.depth}],{layout!r}>" for name, n in rows.items()}
    types |= {"out": "*fp32" if cut.splits > 1 else "*bf16", "tokens": "i32"}
    return compiled(launch, types, GluonASTSource)


def _matrix(blocking: grouped_gemm.Blocking) -> dict[str, str]:
    return {"weights": f"tensordesc<bf16[{blocking.columns}, {blocking.depth}]>"}


def main() -> None:
    """Compiles with the shapes of a Qwen3-8B layer, pages of 16 tokens, and of a Qwen3-30B-A3B mixture."""
    q, kv = torch.empty(64, 32, 128).bfloat16(), torch.empty(8, 2, 16, 8, 128).bfloat16()
    k, v = kv.unbind(1)
    schedule = DecodeSchedule(DecodeShape(32, 8, 128, torch.bfloat16), 64, "cpu")
    pools = dict.fromkeys(("q", "k_cache", "v_cache", "out"), "*bf16")
    decode = dict.fromkeys(("table", "seq_lens", "ends", "first_row", "arrivals"), "*i32")
    decode |= {"sums": "*fp32", "outputs": "*fp32", "table_stride": "i32", "batch": "i32", "scale": "fp32"}
    prefill = {"table": "*i32", "tiles": "*i32", "table_stride": "i32", "scale": "fp32"}
    prefill |= {"parts": "*fp32", "sums": "*fp32"}
    layout = prefill_hopper.gl.NVMMASharedLayout(128, 16, 2)
    maps = dict.fromkeys(("k_cache", "v_cache"), f"tensordesc<bf16[16, 128],{layout!r}>")
    hopper = Launch(
        prefill_hopper._prefill_hopper, prefill_hopper.constants_of(q, k, v, q, None), num_warps=4
    )
    halved = Launch(
        prefill_hopper._prefill_hopper,
        prefill_hopper.constants_of(q, k, v, q, None, rows=prefill_hopper.wide_rows_of(128)),
        num_warps=4,
    )
    small_q, small_kv = torch.empty(64, 32, 96).bfloat16(), torch.empty(8, 2, 16, 8, 96).bfloat16()
    small = Launch(
        prefill_hopper._prefill_hopper,
        prefill_hopper.constants_of(
            small_q, *small_kv.unbind(1), small_q, None, rows=prefill_hopper.rows_of(96)
        ),
        num_warps=4,
    )
    fp8 = paged_decode._configure(
        q,
        k.to(torch.float8_e4m3fn),
        v.to(torch.float8_e4m3fn),
        q,
        None,
        DecodeSchedule(DecodeShape(32, 8, 128, torch.float8_e4m3fn), 64, "cpu"),
        False,
    )
    fp8.constants["ON_GPU"] = True
    few, many = (mixture.plan_of(tokens, 8, 128, torch.bfloat16) for tokens in (1, 8192))
    routes = dict.fromkeys(("row_tokens", "tiles", "counts", "ids", "ranks", "rows", "slots"), "*i32")
    routes |= dict.fromkeys(("x", "out", "logits"), "*bf16") | {"weights": "*fp32"}
    routes |= dict.fromkeys(("tokens", "entries", "most"), "i32")
    few8 = mixture.plan_of(64, 8, 128, torch.float8_e4m3fn)
    routes8 = {**routes, "x": "*fp8e4nv"} | dict.fromkeys(("x_scales", "scales"), "*fp32")
    kernels = {
        "choose": partial(compiled, routing._choice(torch.empty(4, 128).bfloat16(), 8, 0, 128, True), routes),
        "sort": partial(compiled, routing._sorting(q.device, 8, 128, 16), routes),
        "up of few": partial(compiled, _gate_up(few), routes | _matrix(few.up)),
        "up of many": partial(compiled, _gate_up(many), routes | _matrix(many.up)),
        "up of few in fp8": partial(
            compiled,
            grouped_gemm.gate_up_launch((128, 1536, 2048), few8.tile_rows, few8.up, torch.device("cpu"), 128),
            routes8 | {"weights": f"tensordesc<fp8e4nv[{few8.up.columns}, 128]>"},
        ),
        "down of many": partial(compiled, _down(many), routes | _matrix(many.down)),
        "decode": partial(
            compiled, paged_decode._configure(q, k, v, q, None, schedule, False), pools | decode
        ),
        "prefill": partial(compiled, paged_prefill._plain(q, k, v, q, None, None), pools | prefill),
        "decode fp8": partial(
            compiled, fp8, {**pools, **decode, "k_cache": "*fp8e4nv", "v_cache": "*fp8e4nv"}
        ),
        "decode with sinks": partial(
            compiled,
            paged_decode._configure(q, k, v, q, None, schedule, False),
            pools | decode | {"sinks": "*fp32"},
        ),
        "prefill with sinks": partial(
            compiled, paged_prefill._plain(q, k, v, q, None, None), pools | prefill | {"sinks": "*fp32"}
        ),
        "hopper": partial(compiled, hopper, pools | prefill | maps, GluonASTSource),
        "hopper in halves": partial(compiled, halved, pools | prefill | maps, GluonASTSource),
        "hopper of small heads": partial(compiled, small, pools | prefill | maps, GluonASTSource),
        "linear": partial(_linear, LinearCut(64, 64, 16, 4, 10)),
        "gated linear": partial(_linear, LinearCut(64, 128, 0, 1, 8), gated=True),
    }
    names = sys.argv[1:] or list(kernels)
    print(json.dumps({name: kernels[name]() for name in names}))


if __name__ == "__main__":
    main()
