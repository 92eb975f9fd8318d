"""Places and names of the bundled samples; `samples.py` makes them."""

from __future__ import annotations

from pathlib import Path

from pagecast.sim.core.errors import BadInput

FOLDER = Path(__file__).parent / "samples"
PREFIX = "sample:"
_ENDING = ".jsonl.gz"


def sample_names() -> list[str]:
    """The samples' names, sorted."""
    return sorted(path.name.removesuffix(_ENDING) for path in FOLDER.glob(f"*{_ENDING}"))


def resolve(path: str | Path) -> Path:
    """The file meant by a path, or by a sample's name: `chat` (where no file is called so) or `sample:chat`.

    Raises BadInput for `sample:` with a name that no sample has.
    """
    text = str(path)
    name = text.removeprefix(PREFIX)
    if name in sample_names() and (name != text or not Path(text).exists()):
        return FOLDER / f"{name}{_ENDING}"
    if name != text:
        raise BadInput(f"{text}: no such sample; there are {', '.join(sample_names())}")
    return Path(path)
