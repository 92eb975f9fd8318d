"""Every decoder of transformers at its default configuration, read by pagecast, beside its parameters.

    python tests/benchmarks/default_models.py

What pagecast accepts should have the parameters that transformers makes on its meta device, or a note on
what is not counted. Run it where transformers 5.24 can be imported.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.models import model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_NEAR = 1e-3


def main() -> int:
    """Prints each model type that is accepted and off, and how many are which."""
    counted = {"refused": 0, "not built": 0, "equal": 0, "off": 0}
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        counted[_compared(kind)] += 1
    sys.stdout.write(f"{counted}\n")
    return 0


def _compared(kind: str) -> str:
    try:
        config = AutoConfig.for_model(kind)
        said = config.to_json_string(use_diff=False)
    except Exception:  # types that exist only as parts of others
        return "not built"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(json.loads(said)))
        try:
            facts = model(folder)
        except BadInput:
            return "refused"
    try:
        with torch.device("meta"):
            made = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    except Exception:  # defaults that are no model
        return "not built"
    text = facts.params - facts.tower_params  # transformers leaves the towers of some out
    error = min(abs(each / made - 1) for each in (facts.params, text))
    if error < _NEAR:
        return "equal"
    sys.stdout.write(f"{kind}: {made:,} parameters, {100 * (facts.params / made - 1):+.2f}%; {facts.notes}\n")
    return "off"


if __name__ == "__main__":
    raise SystemExit(main())
