"""Facts about GPUs: memory, bandwidth, arithmetic and links, each with its source.

`gpu("H100")` accepts the spellings people type. `hbm_bytes` is what the driver says is usable
(`cudaMemGetInfo`, torch's "total capacity"), not the number on the box: engines multiply their memory
fraction by it. It moves by 0.2% with the driver's version.

    >>> from pagecast.sim.machine.gpus import gpu
    >>> gpu("h100 pcie").name, gpu("h100 pcie").sms
    ('H100 PCIe', 114)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
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


# Maximum achievable matmul FLOP/s over peak, bf16, as measured in S. Bekman's "Machine Learning Engineering"
# (MAMF table); 0.80 where it has no figure.
_MATMUL_SHARE = {
    "A100 80GB": 0.869,
    "A100 40GB": 0.869,
    "A100 80GB PCIe": 0.822,
    "H100 SXM": 0.803,
    "H200": 0.803,
    "B200": 0.776,
    "GB200": 0.776,
    "MI300X": 0.601,
    "MI325X": 0.604,
    "MI350X": 0.601,  # the MI300X's, for want of a figure
    "MI355X": 0.601,
}


def _gpu(
    name: str,
    aliases: str,
    memory: tuple[float, float],
    tflops: tuple[float | None, float, float | None],
    sms: int,
    link: tuple[str, float],
    host_link: tuple[str, float],
    source: str,
) -> Gpu:
    rates = {
        dtype: value * 1e12
        for dtype, value in zip(("bf16", "fp16", "fp8"), tflops, strict=True)
        if value is not None
    }
    return Gpu(
        name=name,
        aliases=tuple(aliases.split(", ")) if aliases else (),
        hbm_bytes=round(memory[0] * GIB),
        hbm_bytes_per_s=memory[1] * 1e9,
        flops=MappingProxyType(rates),
        sms=sms,
        link=link[0],
        link_bytes_per_s=link[1] * 1e9,
        host_link_bytes_per_s=host_link[1] * 1e9,
        matmul_share=_MATMUL_SHARE.get(name, 0.80),
        source=source,
    )


_NV4 = ("NVLink", 450.0)
_NV5 = ("NVLink", 900.0)
_GEN3 = ("PCIe", 16.0)
_GEN4 = ("PCIe", 32.0)
_GEN5 = ("PCIe", 64.0)
_RESERVED = "less the 616 MiB that the driver keeps on an H200"
_OOM = "usable memory as torch's out-of-memory messages state it"
_UNSEEN = "its usable memory is reckoned, not seen"

# name, aliases, memory (usable GiB, GB/s), dense TFLOP/s (bf16, fp16, fp8), SMs, link to peers and link to
# the host (GB/s one way), source. GB200, GB300, GH200, GB10 and Rubin reach their host over NVLink-C2C, and
# B300 has PCIe 6: they count as PCIe 5 until copies there are measured.
GPUS: tuple[Gpu, ...] = (
    _gpu(
        "B200",
        "B200 SXM, B200 180GB, HGX B200",
        (178.35, 8000),
        (2250, 2250, 4500),
        148,
        _NV5,
        _GEN5,
        f"NVIDIA Blackwell architecture brief (HGX B200); {_OOM} (178.35 GiB)",
    ),
    _gpu(
        "GB200",
        "GB200 NVL72, GB200 186GB",
        (184.31, 8000),
        (2500, 2500, 5000),
        152,
        _NV5,
        _GEN5,
        f"NVIDIA GB200 NVL72 datasheet, a half of a superchip; {_OOM} (184.31 GiB)",
    ),
    _gpu(
        "B300",
        "B300 SXM, HGX B300",
        (267.99, 7750),
        (2250, 2250, 4500),
        148,
        _NV5,
        _GEN5,
        f"AIConfigurator's b300_sxm.yaml (275,040 MiB by nvidia-smi), {_RESERVED}",
    ),
    _gpu(
        "GB300",
        "GB300 NVL72",
        (276.94, 8000),
        (2500, 2500, 5000),
        152,
        _NV5,
        _GEN5,
        f"AIConfigurator's gb300.yaml (284,208 MiB by nvidia-smi), {_RESERVED}",
    ),
    _gpu(
        "Rubin",
        "VR200, R200, Vera Rubin, Vera Rubin NVL72, VR200 NVL72, Rubin 288GB",
        (267.99, 22_000),
        (4000, 4000, 17_500),
        224,
        ("NVLink", 1800.0),
        _GEN5,
        "NVIDIA's preliminary specifications of Vera Rubin NVL72 (288 GB of HBM4 at 22 TB/s, NVLink 6), a "
        f"72nd of the rack; {_UNSEEN}: the B300's, which has 288 GB too",
    ),
    _gpu(
        "GB10",
        "DGX Spark, NVIDIA GB10, GB10 Grace Blackwell, GB10 128GB",
        (121.69, 273),
        (125, 125, 250),
        48,
        _GEN5,
        _GEN5,
        "NVIDIA DGX Spark datasheet: 1 PFLOP/s of FP4 with sparsity, of which FP8 has a quarter and BF16 an "
        "eighth; memory shared with the CPU, 121.69 GiB as vLLM's messages state it",
    ),
    _gpu(
        "RTX PRO 6000",
        "RTX PRO 6000 Blackwell Server Edition, RTX PRO 6000 server, RTX PRO 6000 96GB",
        (94.99, 1792),
        (467.8, 467.8, 935.6),
        188,
        _GEN5,
        _GEN5,
        f"AIConfigurator's rtx_pro_6000_server.yaml (97,887 MiB by nvidia-smi), {_RESERVED}",
    ),
    _gpu(
        "RTX PRO 5000",
        "RTX PRO 5000 Blackwell, RTX PRO 5000 48GB",
        (47.19, 1344),
        (258, 258, 516),
        110,
        _GEN5,
        _GEN5,
        "NVIDIA RTX PRO 5000 Blackwell datasheet: 2,064 AI TOPS (FP4 with sparsity), of which BF16 has an "
        f"eighth and FP8 a quarter; {_UNSEEN}: half of what nvidia-smi says of an RTX PRO 6000, {_RESERVED}",
    ),
    _gpu(
        "H200 NVL",
        "H200 NVL 141GB",
        (139.80059, 4800),
        (835.5, 835.5, 1670.5),
        132,
        _NV4,
        _GEN5,
        "NVIDIA H200 datasheet (NVL, bridges of two or four), half of its rates with sparsity; "
        f"{_UNSEEN}: the H200's",
    ),
    _gpu(
        "H200",
        "H200 SXM, H200 141GB, H200 SXM5",
        (139.80059, 4800),
        (989.4, 989.4, 1978.9),
        132,
        _NV4,
        _GEN5,
        "NVIDIA H200 datasheet; usable memory measured: 150,109,880,320 bytes with driver 580 (nvidia-smi's "
        "143,771 MiB less the 616 MiB it calls reserved)",
    ),
    _gpu(
        "H100 SXM",
        "H100, H100 80GB, H100 SXM5, H100 80GB HBM3, H100 SXM 80GB",
        (79.18, 3352),
        (989.4, 989.4, 1978.9),
        132,
        _NV4,
        _GEN5,
        f"NVIDIA H100 datasheet; {_OOM} (79.10 to 79.22 GiB by driver)",
    ),
    _gpu(
        "H100 NVL",
        "H100 NVL 94GB, H100 94GB",
        (92.98, 3938),
        (835.5, 835.5, 1671),
        132,
        ("NVLink", 300.0),
        _GEN5,
        "NVIDIA H100 NVL product brief, half of its rates with sparsity; 95,830 MiB by nvidia-smi, "
        f"{_RESERVED}",
    ),
    _gpu(
        "H800",
        "H800 SXM, H800 80GB, H800 SXM5",
        (79.18, 3352),
        (989.4, 989.4, 1978.9),
        132,
        ("NVLink", 200.0),
        _GEN5,
        f"NVIDIA H800 datasheet: an H100 SXM with NVLink of 400 GB/s both ways; {_UNSEEN}: the H100's",
    ),
    _gpu(
        "GH200",
        "GH200 96GB, GH200 480GB, GH200 Grace Hopper, GH200 HBM3",
        (94.98, 4000),
        (989.4, 989.4, 1978.9),
        132,
        _NV4,
        _GEN5,
        f"NVIDIA GH200 datasheet (96 GB of HBM3); 97,871 MiB by nvidia-smi, {_RESERVED}",
    ),
    _gpu(
        "GH200 144GB",
        "GH200 HBM3e, GH200 144G HBM3e",
        (139.80, 4900),
        (989.4, 989.4, 1978.9),
        132,
        _NV4,
        _GEN5,
        f"NVIDIA GH200 datasheet (144 GB of HBM3e); {_UNSEEN}: the H200's, which has the same stacks",
    ),
    _gpu(
        "H100 PCIe",
        "H100 PCIe 80GB, H100 80GB PCIe",
        (79.18, 2039),
        (756, 756, 1513),
        114,
        _GEN5,
        _GEN5,
        f"NVIDIA H100 datasheet; {_OOM}",
    ),
    _gpu(
        "H20",
        "H20 96GB, H20 SXM",
        (95.22, 4000),
        (148, 148, 296),
        78,
        _NV4,
        _GEN5,
        f"NVIDIA H20 product brief; {_OOM} (95.00 to 95.22 GiB by driver)",
    ),
    _gpu(
        "A100 80GB",
        "A100 80GB SXM, A100-SXM4-80GB, A100 SXM 80GB, A100-80",
        (79.25, 2039),
        (312, 312, None),
        108,
        ("NVLink", 300.0),
        _GEN4,
        f"NVIDIA A100 datasheet (SXM4); {_OOM} (79.14 to 79.25 GiB by driver)",
    ),
    _gpu(
        "A100 80GB PCIe",
        "A100 PCIe 80GB, A100-PCIE-80GB",
        (79.25, 1935),
        (312, 312, None),
        108,
        _GEN4,
        _GEN4,
        f"NVIDIA A100 datasheet (PCIe); {_OOM}",
    ),
    _gpu(
        "A100 40GB",
        "A100 40GB SXM, A100-SXM4-40GB, A100 SXM 40GB, A100-40",
        (39.49, 1555),
        (312, 312, None),
        108,
        ("NVLink", 300.0),
        _GEN4,
        f"NVIDIA A100 datasheet (SXM4 40 GB); {_OOM} (39.38 to 39.56 GiB by driver)",
    ),
    _gpu(
        "L40S",
        "L40S 48GB",
        (44.39, 864),
        (362.05, 362.05, 733),
        142,
        _GEN4,
        _GEN4,
        f"NVIDIA L40S datasheet; {_OOM} (44.34 to 44.52 GiB by driver; ECC on)",
    ),
    _gpu(
        "L40",
        "L40 48GB",
        (44.39, 864),
        (181.05, 181.05, 362),
        142,
        _GEN4,
        _GEN4,
        f"NVIDIA L40 datasheet; {_UNSEEN}: the L40S's, which has the same memory (ECC on)",
    ),
    _gpu(
        "RTX 6000 Ada",
        "RTX 6000 Ada Generation, RTX 6000 Ada 48GB",
        (44.43, 960),
        (364.25, 364.25, 728.5),
        142,
        _GEN4,
        _GEN4,
        f"NVIDIA RTX 6000 Ada datasheet; {_OOM} (44.43 GiB; ECC on)",
    ),
    _gpu(
        "L4",
        "L4 24GB",
        (22.03, 300),
        (121, 121, 242.5),
        58,
        _GEN4,
        _GEN4,
        f"NVIDIA L4 datasheet, half of its rates with sparsity; {_OOM} (ECC on)",
    ),
    _gpu(
        "A10G",
        "A10G 24GB",
        (22.06, 600),
        (70, 70, None),
        80,
        _GEN4,
        _GEN4,
        f"AWS EC2 G5 specification; {_OOM} (ECC on)",
    ),
    _gpu(
        "A10",
        "A10 24GB",
        (22.05, 600),
        (125, 125, None),
        72,
        _GEN4,
        _GEN4,
        f"NVIDIA A10 datasheet; {_OOM} (ECC on)",
    ),
    _gpu(
        "RTX A6000",
        "A6000, RTX A6000 48GB",
        (47.53, 768),
        (154.8, 154.8, None),
        84,
        _GEN4,
        _GEN4,
        f"NVIDIA RTX A6000 datasheet; {_OOM}",
    ),
    _gpu(
        "RTX 5090",
        "5090, GeForce RTX 5090",
        (31.36, 1792),
        (209.5, 209.5, 419),
        170,
        _GEN5,
        _GEN5,
        f"NVIDIA RTX Blackwell architecture paper, FP32 accumulation; {_OOM}",
    ),
    _gpu(
        "RTX 4090",
        "4090, GeForce RTX 4090",
        (23.52, 1008),
        (165.2, 165.2, 330.3),
        128,
        _GEN4,
        _GEN4,
        f"NVIDIA Ada architecture paper, FP32 accumulation; {_OOM} (23.52 to 23.65 GiB by driver)",
    ),
    _gpu(
        "RTX 3090",
        "3090, GeForce RTX 3090",
        (23.56, 936),
        (71, 71, None),
        82,
        _GEN4,
        _GEN4,
        f"NVIDIA Ampere GA102 architecture paper, FP32 accumulation; {_OOM}",
    ),
    _gpu(
        "T4",
        "Tesla T4, T4 16GB",
        (14.56, 320),
        (None, 65, None),
        40,
        _GEN3,
        _GEN3,
        f"NVIDIA T4 datasheet; {_OOM} (14.56 to 14.75 GiB by driver; ECC on)",
    ),
    _gpu(
        "MI300X",
        "AMD MI300X, Instinct MI300X, MI300X 192GB",
        (191.69, 5300),
        (1307.4, 1307.4, 2614.9),
        304,
        ("Infinity Fabric", 448.0),
        _GEN5,
        f"AMD Instinct MI300X datasheet; {_OOM} (191.69 to 191.98 GiB by driver)",
    ),
    _gpu(
        "MI325X",
        "AMD MI325X, Instinct MI325X, MI325X 256GB",
        (255.69, 6000),
        (1307.4, 1307.4, 2614.9),
        304,
        ("Infinity Fabric", 448.0),
        _GEN5,
        "AMD Instinct MI325X datasheet; 256 GiB less the 0.31 GiB that the MI300X's driver keeps",
    ),
    _gpu(
        "MI350X",
        "AMD MI350X, Instinct MI350X, MI350X 288GB",
        (287.69, 8000),
        (2309.6, 2309.6, 4613.7),
        256,
        ("Infinity Fabric", 537.6),
        _GEN5,
        "AMD Instinct MI350X datasheet; 288 GiB less the 0.31 GiB that the MI300X's driver keeps",
    ),
    _gpu(
        "MI355X",
        "AMD MI355X, Instinct MI355X, MI355X 288GB",
        (287.69, 8000),
        (2516.6, 2516.6, 5033.2),
        256,
        ("Infinity Fabric", 537.6),
        _GEN5,
        "AMD Instinct MI355X datasheet; 288 GiB less the 0.31 GiB that the MI300X's driver keeps",
    ),
)


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
