"""Deployment: what an engine's own defaults depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MIB, GIB = 1 << 20, 1 << 30
_HOPPER = ("H100", "H200", "H20", "H800", "GH200")
_DATA_CENTRE_BLACKWELL = ("B200", "GB200", "B300", "GB300")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A model on GPUs, as an engine that is started there finds it.

    `gpu`, `memory_bytes`: the name and the usable memory of one GPU. `gpus`: how many a replica takes.
    `longest`: tokens of the longest sequence that the model is made for. `states`: some layers keep a state
    instead of tokens (Mamba). `latent`: multi-head latent attention. `weight_bytes`, `token_bytes`: weights,
    and the KV of a token, on one GPU. `chosen`: options that were given, by flat name.
    """

    gpu: str
    memory_bytes: int
    gpus: int
    longest: int
    states: bool = False
    latent: bool = False
    weight_bytes: int = 0
    token_bytes: float = 1.0
    chosen: Mapping[str, Any] = field(default_factory=dict)

    def given(self, name: str, default: int) -> int:
        """A whole number that was chosen, or the default."""
        value = self.chosen.get(name)
        return default if value is None else int(value)

    def kv_tokens(self, fraction: float) -> int:
        """Tokens of KV that fit beside the weights in a fraction of the memory."""
        return int((self.memory_bytes * fraction - self.weight_bytes) / self.token_bytes)

    @property
    def hopper(self) -> bool:
        """Whether the GPU has compute capability 9.0."""
        return self.gpu.split()[0] in _HOPPER

    @property
    def data_centre_blackwell(self) -> bool:
        """Whether the GPU has compute capability 10.x."""
        return self.gpu.split()[0] in _DATA_CENTRE_BLACKWELL

    @property
    def quantized_kv(self) -> bool:
        """Whether a KV cache of fewer than 16 bits was chosen."""
        return self.chosen.get("kv_cache_dtype", "auto") not in ("auto", "bfloat16", "float16")
