"""Options that have no effect beside others are refused: nobody takes an answer for one that follows them."""

from __future__ import annotations

from collections.abc import Mapping

from pagecast.sim.core.errors import BadInput

WITHOUT_DRAWS = "is for the draws behind intervals: give --replicates N as well"


def refuse_options(values: Mapping[str, object], reason: str) -> None:
    """Refuses the first option that is given.

    `values`: what the options have by their names without dashes, None where one is not given. `reason`: why
    it has no effect, and what to do. Errors: BadInput, `--NAME REASON`.
    """
    for name, value in values.items():
        if value is not None:
            raise BadInput(f"--{name} {reason}")
