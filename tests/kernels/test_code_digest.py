"""Digest of the kernels' code: the same for the same code, however it is commented."""

from pathlib import Path

from pagecast.kernels.code_digest import code_digest


def digest_of(folder: Path, text: str) -> str:
    folder.mkdir()
    (folder / "kernel.py").write_text(text)
    (folder / "reference.py").write_text(f"NEVER_LAUNCHED = {folder.name!r}")
    return code_digest(folder)


def test_comments_and_docstrings_do_not_count_and_code_does(tmp_path: Path) -> None:
    plain = digest_of(tmp_path / "a", "def add(x, warps=4):\n    return x + 1\n")
    commented = '"""Sums."""\ndef add(x, warps=4):\n    """Adds."""\n    return (x + 1)  # one more\n'
    assert digest_of(tmp_path / "b", commented) == plain
    changes = ("warps=8", "x + 1"), ("warps=4", "x + 2"), ("warps=4", "x - 1")
    digests = {
        digest_of(tmp_path / f"c{at}", f"def add(x, {warps}):\n    return {value}\n")
        for at, (warps, value) in enumerate(changes)
    }
    assert len({plain, *digests}) == 4


def test_the_kernels_have_one() -> None:
    assert len(code_digest()) == 8 and int(code_digest(), 16) >= 0
