"""The families of kernels, by name and by the engine that recorded a run."""

from __future__ import annotations

from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.families.fa3 import FLASH_ATTENTION_3
from pagecast.sim.costs.families.paged_triton import PAGED_TRITON
from pagecast.sim.costs.families.plain import PLAIN
from pagecast.sim.costs.families.term import KernelFamily

FAMILIES = {family.name: family for family in (FLASH_ATTENTION_3, PAGED_TRITON, PLAIN)}


def family(name: str) -> KernelFamily:
    """The family of that name. Errors: BadInput naming those there are."""
    if name not in FAMILIES:
        raise BadInput(f"no kernel family {name!r}: this pagecast knows {', '.join(FAMILIES)}")
    return FAMILIES[name]


def family_of(engine: str, attention: str) -> KernelFamily:
    """The family of an engine's recording, by the attention that it names."""
    if engine == "pagecast":
        return PAGED_TRITON
    return FLASH_ATTENTION_3 if attention.startswith("FlashAttention 3") else PLAIN
