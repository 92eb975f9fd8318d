"""Pages that quote code quote what is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
SEAMS = (ROOT / "tests" / "sim" / "core" / "test_seams.py").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_quotes_every_seam():
    assert len(BLOCKS) >= 8
    assert PAGE.count("```") == 2 * len(BLOCKS)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("\n", 1)[0].strip())
def test_each_block_is_an_excerpt_of_the_tests(block):
    """Its lines stand there in this order, with nothing between them."""
    assert f"\n{block}" in SEAMS


def test_each_test_and_file_that_the_page_names_exists():
    for name in re.findall(r"\btest_\w+\b(?!\.py)", PAGE):
        assert f"def {name}(" in SEAMS
    for path in re.findall(r"`((?:sim|tests)/[\w/]+(?:\.py)?)`", PAGE):
        assert (ROOT / path).exists()
