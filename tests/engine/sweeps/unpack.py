"""Sweeps of our engine that its shipped calibrations are fitted to, unpacked into folders of recorded runs.

    python tests/engine/sweeps/unpack.py FOLDER
    pagecast calibrate --from-run FOLDER/h200n-qwen3-8b --from-run FOLDER/h200o-qwen3-8b --out fit.json

N and O are two H200s of one host. To H and I, two others with earlier kernels, `h200hi-qwen3-8b.json` is
fitted, with costs for the recorded runs of such kernels. T and U are two H100s. The files inside the
archives are not compressed by themselves: that takes half the room.
"""

from __future__ import annotations

import gzip
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).parent
ARCHIVES = {path.name.removesuffix(".tar.xz"): path for path in sorted(HERE.glob("*.tar.xz"))}


def unpack(name: str, folder: Path) -> Path:
    """Unpacks one sweep below `folder`; returns its own folder, with a recorded run per segment."""
    with tarfile.open(ARCHIVES[name]) as archive:
        for member in archive.getmembers():
            content = archive.extractfile(member)
            if content is None:
                continue
            path = folder / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".json":
                path.write_bytes(content.read())
            else:
                path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(content.read(), 6, mtime=0))
    return folder / name


if __name__ == "__main__":
    for sweep in ARCHIVES:
        sys.stdout.write(f"{unpack(sweep, Path(sys.argv[1]))}\n")
