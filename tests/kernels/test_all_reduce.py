"""Sums over memory that several processes share are right, in any order of sizes, kinds and dtypes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pagecast.kernels import all_reduce as kernels
from pagecast.sim.core.errors import BadInput

SCRIPT = Path(__file__).with_name("all_reduce_ranks.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs have a test of their own")
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_rank_gets_the_same_sums(ranks: int) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(ranks)], timeout=240, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_what_does_not_fit_is_refused() -> None:
    own = torch.zeros(kernels.mailbox_bytes(2, 4096), dtype=torch.uint8)
    boxes = kernels.Mailboxes(own, [0, 0], 0, 4096)
    with pytest.raises(BadInput, match="at most 4096 bytes, not 8192"):
        kernels.all_reduce(torch.zeros(2048), boxes)
    with pytest.raises(BadInput, match="dense floats"):
        kernels.all_reduce(torch.zeros(4, dtype=torch.int32), boxes)
    with pytest.raises(BadInput, match="a mailbox of"):
        kernels.Mailboxes(own[:16], [0, 0], 0, 4096)
