"""Facts about GPUs: memory, bandwidth, arithmetic and links, each with its source.

`gpu("H100")` accepts the spellings people type. `hbm_bytes` is what the driver says is usable
(`cudaMemGetInfo`, torch's "total capacity"), not the number on the box: engines multiply their memory
fraction by it. It moves by 0.2% with the driver's version.

    >>> from pagecast.sim.machine.gpus import gpu
    >>> gpu("h100 pcie").name, gpu("h100 pcie").sms
    ('H100 PCIe', 114)
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType

from pagecast.sim.core.errors import BadInput

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU model. Dense rates, without sparsity, as its maker publishes them.

    `flops` has floating point operations per second by dtype (`bf16`, `fp16`, `fp8`), only those that its
    matrix units know. `link_bytes_per_s` is what one GPU can send to its peers, one way, over `link`
    (`NVLink`, `PCIe` or `Infinity Fabric`). `host_link_bytes_per_s` is the rate of its PCIe link to the host,
    one way. `matmul_share` is the part of the bf16 rate that the best large matrix product reaches within the
    power limit.
    """

    name: str
    aliases: tuple[str, ...]
    hbm_bytes: int
    hbm_bytes_per_s: float
    flops: MappingProxyType[str, float]
    sms: int
    link: str
    link_bytes_per_s: float
    host_link_bytes_per_s: float
    matmul_share: float
    source: str

    def peak_flops(self, dtype: str) -> float:
        """FLOP/s of a matrix product in `dtype`; a dtype that the GPU lacks runs at its 16-bit rate."""
        rates = self.flops
        return rates.get(dtype) or rates.get("bf16") or rates["fp16"]

    @property
    def hopper(self) -> bool:
        """Whether it is of NVIDIA's Hopper generation."""
        return self.name.startswith(("H100", "H200", "H20", "H800", "GH200"))

    @property
    def data_center_blackwell(self) -> bool:
        """Whether it is a Blackwell of compute capability 10."""
        return self.name in ("B200", "GB200", "B300", "GB300")

    @property
    def desktop_blackwell(self) -> bool:
        """Whether it is a Blackwell of compute capability 12."""
        return self.name in ("RTX 5090", "RTX PRO 5000", "RTX PRO 6000", "GB10")

    @property
    def blackwell(self) -> bool:
        """Whether it is of NVIDIA's Blackwell generation."""
        return self.data_center_blackwell or self.desktop_blackwell

    def matmul_flops(self, dtype: str) -> float:
        """FLOP/s that the best large matrix product reaches in `dtype`."""
        return self.peak_flops(dtype) * self.matmul_share


# `gpus.csv` has usable memory in GiB, its GB/s, dense TFLOP/s, SMs, and links to peers and to the host (PCIe)
# in GB/s, one way. GB200, GB300, GH200, GB10 and Rubin reach their host over NVLink-C2C, and B300 has PCIe 6:
# they count as PCIe 5 until copies there are measured. `matmul_share`: maximum achievable matmul FLOP/s over
# peak, bf16, as measured in S. Bekman's "Machine Learning Engineering" (MAMF table); MI350X and MI355X have
# the MI300X's. Where there is no figure it is this.
_MATMUL_SHARE = 0.80


def _gpu(row: dict[str, str]) -> Gpu:
    return Gpu(
        name=row["name"],
        aliases=tuple(row["aliases"].split(", ")),
        hbm_bytes=round(float(row["usable_gib"]) * GIB),
        hbm_bytes_per_s=float(row["gb_per_s"]) * 1e9,
        flops=MappingProxyType({t: float(row[t]) * 1e12 for t in ("bf16", "fp16", "fp8") if row[t]}),
        sms=int(row["sms"]),
        link=row["link"],
        link_bytes_per_s=float(row["link_gb_per_s"]) * 1e9,
        host_link_bytes_per_s=float(row["host_link_gb_per_s"]) * 1e9,
        matmul_share=float(row["matmul_share"] or _MATMUL_SHARE),
        source=row["source"],
    )


def _gpus() -> tuple[Gpu, ...]:
    text = Path(__file__).with_name("gpus.csv").read_text(encoding="utf-8")
    return tuple(map(_gpu, csv.DictReader(text.splitlines())))


GPUS = _gpus()


def _key(name: str) -> str:
    plain = re.sub(r"[^a-z0-9]+", "", name.lower())
    for prefix in ("nvidia", "amd", "tesla", "instinct", "geforce"):
        plain = plain.removeprefix(prefix)
    return plain.replace("gib", "gb")


_BY_KEY: dict[str, Gpu] = {_key(spelling): g for g in GPUS for spelling in (g.name, *g.aliases)}


def gpu(name: str) -> Gpu:
    """The GPU called `name`, in any common spelling (`H100`, `h100-sxm`, `NVIDIA A100-SXM4-80GB`).

    Errors: `BadInput` for a name that is unknown, or that two GPUs share, with the nearest names.
    """
    match = _BY_KEY.get(_key(name))
    if match is not None:
        return match
    if _key(name) in ("a100", "a100sxm", "a100sxm4", "a100pcie"):
        raise BadInput(f"GPU {name!r} comes in two sizes: say 'A100 80GB' or 'A100 40GB'")
    keys = get_close_matches(_key(name), _BY_KEY, n=6, cutoff=0.5)
    near = list(dict.fromkeys(_BY_KEY[key].name for key in keys))[:3]
    hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(g.name for g in GPUS)}"
    raise BadInput(f"unknown GPU {name!r}; {hint}")
