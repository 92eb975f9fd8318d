"""Gain of host memory for KV offloading by its size, on a chat trace and on a coding agent's.

    python examples/offloading.py [TRACE ...] [--gpu H200] [--requests 1000] [--sizes 16,64,256]
        [--load GB/S] [--disk] [--disk-load GB/S]

prints, for each trace and each size of the host tier, TTFT, E2E, output tokens per second, and the share of
prompt tokens found on the GPU, in host memory, and on disk. With `--disk` each size is replayed with a disk
behind the host as well. Without TRACE it takes the bundled samples.
"""

from __future__ import annotations

import argparse

from pagecast.sim.replay import Kept, replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read


def main() -> None:
    """Prints a table per trace."""
    options = argparse.ArgumentParser(description="Gain of host memory for KV offloading by its size.")
    options.add_argument("traces", nargs="*", default=["chat", "code", "rag"])
    options.add_argument("--gpu", default="H200")
    options.add_argument("--model", default="Qwen/Qwen3-8B")
    options.add_argument("--requests", type=int, default=1000)
    options.add_argument("--speed", type=float, default=1.0, help="speed up arrivals")
    options.add_argument("--blocks", type=int, help="KV blocks on the GPU (default: what fits)")
    options.add_argument("--sizes", default="16,64,256,1024", help="GiB of host memory")
    options.add_argument("--load", type=float, help="GB/s from host to GPU (default: by the GPU)")
    options.add_argument("--disk", action="store_true", help="with a disk behind the host too")
    options.add_argument("--disk-load", type=float, default=6.0, help="GB/s from disk to host")
    given = options.parse_args()
    for name in given.traces:
        trace = read(name, limit=given.requests)
        if given.speed != 1.0:
            trace.requests["arrival_s"] /= given.speed
        print(f"\n{trace.name}: {len(trace):,} requests on {given.model}, {given.gpu}")
        print(
            "host GiB  disk   mean TTFT    p99 TTFT    mean E2E   tokens/s   GPU hits  host hits  disk hits"
            "  load busy"
        )
        sizes = [float(text) for text in given.sizes.split(",")]
        tiers = [(size, disk) for size in sizes for disk in ((None, "fs") if given.disk else (None,))]
        for size, disk in [(None, None), *tiers]:
            scenario = Scenario(
                model=given.model,
                gpu=given.gpu,
                num_gpu_blocks=given.blocks,
                kv_offloading_size=size,
                host_load_gb_per_s=given.load,
                secondary_tiers=disk,
                disk_load_gb_per_s=given.disk_load,
            )
            print(_row(size, disk, replay(trace, scenario, kept=Kept(steps=False)).summary), flush=True)


def _row(size: float | None, disk: str | None, s: dict) -> str:  # type: ignore[type-arg]
    tiers = s.get("offloading", {})
    on_disk = tiers.get("disk_hit_rate", 0.0)
    device = tiers.get("device_hit_rate", s["reused_prefix_tokens"] / s["input_tokens"])
    return (
        f"{'none' if size is None else f'{size:g}':>8}{disk or '-':>6}"
        f"{s['ttft_s']['mean']:>10.3f} s{s['ttft_s']['p99']:>10.3f} s{s['e2e_s']['mean']:>10.3f} s"
        f"{s['output_tokens_per_s']:>11,.0f}{device:>11.1%}{tiers.get('host_hit_rate', 0.0) - on_disk:>11.1%}"
        f"{on_disk:>11.1%}"
        f"{tiers.get('load_busy', 0.0):>11.1%}"
    )


if __name__ == "__main__":
    main()
