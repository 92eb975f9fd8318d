"""Sizes of model, GPU and engine that cost terms use: heads, SMs and CUDA graph sizes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pagecast.sim.core.errors import BadInput


@dataclass(frozen=True, slots=True)
class TileShape:
    """The sizes of one engine, model and GPU.

    `family` names the kernels (see `registry.py`); `kv_heads` and `group` (query heads to one KV head) are of
    one GPU; `sms` its multiprocessors. `graph_sizes` are the token counts that decode steps are padded to,
    those of CUDA graphs (empty: none), `prompt_sizes` those of steps with prompts; larger steps run without.
    """

    family: str
    kv_heads: int
    group: int
    sms: int
    graph_sizes: tuple[int, ...]
    prompt_sizes: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON."""
        sizes = {"graph_sizes": list(self.graph_sizes), "prompt_sizes": list(self.prompt_sizes)}
        return {**asdict(self), **sizes}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> TileShape:
        """The opposite of `as_dict`."""
        sizes = {name: tuple(fields.get(name, ())) for name in ("graph_sizes", "prompt_sizes")}
        return cls(**{**fields, **sizes})

    @property
    def largest_graph(self) -> int:
        """Tokens of the largest CUDA graph for steps with prompts; 0: none."""
        return self.prompt_sizes[-1] if self.prompt_sizes else 0

    def check(self, where: str) -> None:
        """Errors: BadInput naming a field that can't be."""
        sizes = {"kv_heads": self.kv_heads, "group": self.group, "sms": self.sms}
        for name in ("graph_sizes", "prompt_sizes"):
            sizes |= {f"{name} {number}": size for number, size in enumerate(getattr(self, name))}
        for name, value in sizes.items():
            if type(value) is not int or value < 1:
                raise BadInput(f"{where}: {name} is {value!r}, must be a whole number of at least 1")
