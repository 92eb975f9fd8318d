"""Every decision of vLLM 0.24 to 0.33, as recorded, and of the core with the rules of that version."""

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from decisions import Decisions
from drift import RECORDED, difference_of, kept
from families import FAMILIES
from pagecast.sim.core.engines.vllm.profile import VLLM, vllm
from pagecast.sim.core.engines.vllm.versions import VERSIONS
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.scheduler import Scheduler

FEW = {"0.33.0": 2}  # seeds of a family and version in `make test`; of the other versions one


def families() -> list[tuple[str, str]]:
    """Versions and families with recorded runs of the version."""
    paths = sorted(RECORDED.glob("*/*.jsonl.xz"))
    return [(path.parent.name, path.name.removesuffix(".jsonl.xz")) for path in paths]


def recorded(version: str, name: str, *, few: bool) -> Iterator[Decisions]:
    """Recorded runs of a family: the first, or the others. Only these are unpacked.

    Scenarios that once differed stand first: 139 of `mixed-disk` (a load leaves room for drafts of prompts
    that its step completes) and 311 (one group of layers, whose hits leave out their last block), 22 of
    `disk-events` (promotions taken note of at the end of a step) and 113 of `encoder` (the commit of a chunk
    before the last yields no token); of 0.31 161 of `hybrid-disk` and 164 of `disk-events` (a plan in between
    computes nothing, and its commit stores), 83 of `hybrid-drafter` (the drafter's layers keep as many blocks
    as others, but one place further) and 41059 of `offloading-events` (a plan with nothing in flight fills
    blocks in the order of its turns).
    """
    first = FEW.get(version, 1)
    runs = kept(version, name)
    yield from islice(runs, first) if few else islice(runs, first, None)


@pytest.mark.parametrize(("version", "name"), families())
def test_every_decision_is_that_of_the_version(version: str, name: str) -> None:
    for run in recorded(version, name, few=True):
        assert difference_of(run, FAMILIES[name], version) is None, run.seed


@pytest.mark.slow
@pytest.mark.parametrize(("version", "name"), families())
def test_every_further_decision_is_that_of_the_version(version: str, name: str) -> None:
    found = {
        run.seed: difference_of(run, FAMILIES[name], version) for run in recorded(version, name, few=False)
    }
    assert {seed: difference for seed, difference in found.items() if difference} == {}


def test_the_oldest_version_has_the_rules_of_the_default_profile() -> None:
    assert vllm(VERSIONS[0]) == VLLM


def test_a_version_that_is_not_known_is_an_error_that_names_those_that_are() -> None:
    with pytest.raises(BadInput, match=r"vLLM 0\.1 is not known; known are 0\.24, "):
        vllm("0.1")


def test_a_profile_says_which_version_it_follows() -> None:
    for version in VERSIONS:
        assert vllm(version).version == version
        assert Scheduler(Limits(num_blocks=4), vllm(version)).profile.version == version
