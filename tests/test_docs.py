"""The documentation shows the output of real commands, and quotes code that exists."""

import doctest
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path

import pagecast
import pytest
from pagecast.planner_app.cli import run
from pagecast.planner_app.commands.registry import load
from pagecast.traces.schema import COLUMNS

from .documented import PAGES, ROOT, Command, commands, difference

EXTENDING = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
SEAMS = (ROOT / "tests" / "sim" / "core" / "test_seams.py").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", EXTENDING, re.DOTALL)
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def pages(slow: bool) -> list[Path]:
    """Pages with commands to run: those that hold none but slow ones are slow."""
    return [
        page for page in PAGES if any(each.runs and (each.mark == "slow") == slow for each in commands(page))
    ]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder to run in, where the project's folders are and files may be written."""
    for folder in ("examples", "tests", "traces"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)


def printed(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that a command prints: one of pagecast, or an example."""
    if words[0] == "python":
        done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, check=True)
        return (done.stdout + done.stderr).splitlines()
    code = run(list(words[1:]))
    output = capsys.readouterr()
    assert code in (0, 1), f"{words}: exit code {code}: {output.err}"
    return (output.out + output.err).splitlines()


def obey(page: Path, capsys: pytest.CaptureFixture[str], *, slow: bool) -> None:
    """Runs a page's commands in order and compares what they print."""
    for each in commands(page):
        if not each.runs or (each.mark == "slow" and not slow):
            continue
        example = each.words[0] == "python" and each.words[1].startswith("examples/")
        if not example and not each.words[0].endswith("pagecast"):
            continue
        problem = difference(each.output, printed(each.words, capsys))
        assert not problem, f"{name(page)}: {' '.join(each.words)}\n{problem}"


@pytest.mark.parametrize("page", pages(slow=False), ids=name)
def test_each_page_shows_what_its_commands_print(page, desk, capsys):
    obey(page, capsys, slow=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", pages(slow=True), ids=name)
def test_each_page_with_long_commands_shows_what_they_print(page, desk, capsys):
    obey(page, capsys, slow=True)


def test_the_table_of_gpus_shows_what_replays_print(desk, capsys):
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    table = page.partition("| GPU |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) == 6
    for line in table:
        gpu, *shown = (cell.strip() for cell in line.strip("|").split("|"))
        words = (
            "pagecast",
            "replay",
            "--explain",
            "traces/samples/chat.jsonl.gz",
            "--model",
            "Qwen/Qwen3-8B",
            "--gpu",
            gpu,
            "--max-model-len",
            "16384",
        )
        lines = printed(words, capsys)
        rows = [re.split(r" {2,}", line.strip()) for line in lines]
        cells = {row[0]: row for row in rows}
        usage = cells["KV cache"][1].split(", ")[1].split("%")[0]
        assert shown == [
            cells["TTFT"][5],
            cells["TPOT"][5],
            cells["output"][1].split()[0],
            f"{float(usage):.0f}%",
            cells["pressure"][1].split()[0],
            lines[0].split(", costs ")[1],
        ], gpu


@pytest.mark.slow
def test_a_failing_check_is_shown_as_it_is_printed(desk, capsys):
    page = ROOT / "docs" / "how-to" / "gate-ci.md"
    shown = re.search(r"```text\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    scenario = (ROOT / "examples" / "check.yaml").read_text(encoding="utf-8")
    Path("worse.yaml").write_text(scenario.replace("max_num_seqs: 128", "max_num_seqs: 8"), encoding="utf-8")
    printed(("pagecast", "check", "--scenario", "examples/check.yaml", "--write-baseline", "base"), capsys)
    lines = printed(("pagecast", "check", "--scenario", "worse.yaml", "--baseline", "base"), capsys)
    problem = difference(("...", *shown[1].splitlines(), "..."), lines)
    assert not problem, problem


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_each_command_exists_with_its_options(page):
    for each in commands(page):
        check(each)


def check(documented: Command) -> None:
    """A command that is not run must exist all the same: options, target of make, extra, file."""
    program, *words = documented.words
    program = program.removeprefix(".venv/bin/")
    if program == "pagecast":
        command, words = load(words[0]), words[1:]
        while words and (inner := getattr(command, "commands", {}).get(words[0])):
            command, words = inner, words[1:]
        known = {"--help"}.union(*((*each.opts, *each.secondary_opts) for each in command.params))
        unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in known]
        assert not unknown, f"{documented.words}: {unknown}"
    elif program == "make":
        assert all(f"\n{target}:" in MAKEFILE for target in words if "=" not in target)
    elif program == "pip":
        for extra in re.findall(r"\[([\w,]+)\]", " ".join(words)):
            assert all(re.search(rf"^{part} = \[", PYPROJECT, re.MULTILINE) for part in extra.split(","))
    elif program == "python":
        assert (ROOT / words[0]).exists() or words[0] == "-m"
    else:
        others = {"cat", "cp", "curl", "dask", "hf", "source", "tail"}
        assert program in others, f"{program}: how is this checked?"


def test_every_block_of_commands_is_marked_as_one():
    """Commands stand in `console` blocks only, where they are tested."""
    for page in PAGES:
        for language, body in re.findall(r"```(\w*)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            if language != "console":
                assert not re.search(r"^(\$ )?(pagecast|make|pip) ", body, re.MULTILINE), name(page)


@pytest.mark.parametrize(
    "page", [ROOT / file for file in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")], ids=name
)
def test_pages_beside_the_site_have_no_dead_links(page):
    """The build of the site checks its own pages: see `make lint`."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize(
    ("shown", "same"),
    [
        (("a", "b", "c"), True),
        (("a", "..."), True),
        (("...", "b", "..."), True),
        (("a", "b"), False),
        (("b", "..."), False),
        (("...", "c", "b", "..."), False),
        ((), True),
    ],
)
def test_outputs_are_compared_line_by_line(shown, same):
    assert (difference(shown, ["a", "b", "c"]) == "") == same


SESSIONS = {
    page: re.findall(r"```pycon\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL) for page in PAGES
}


@pytest.mark.parametrize("page", [page for page, blocks in SESSIONS.items() if blocks], ids=name)
def test_python_sessions_of_a_page_print_what_it_shows(page):
    session = doctest.DocTestParser().get_doctest("\n".join(SESSIONS[page]), {}, name(page), str(page), 0)
    assert doctest.DocTestRunner().run(session).failed == 0


def test_the_api_page_has_every_public_name_with_its_parameters():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for public in pagecast.__all__:
        target = getattr(pagecast, public)
        assert f"`{public}" in page or f"pagecast.{public}`" in page
        if inspect.isfunction(target):
            shown = re.search(rf"^`{public}\((.*?)\)(?: ->|`)", page, re.MULTILINE | re.DOTALL)
            assert shown is not None, public
            names = [part.split("=")[0].strip() for part in shown[1].split(",")]
            assert sorted(each for each in names if each != "*") == sorted(parameters(target))


def parameters(function) -> list[str]:
    """The names of a function's parameters, and those of a typed `**options`."""
    names = list(inspect.signature(function).parameters)
    options = typing.get_type_hints(function).get("options")
    if options is None:
        return names
    return [each for each in names if each != "options"] + list(typing.get_args(options)[0].__annotations__)


def test_the_page_quotes_every_seam():
    assert len(BLOCKS) >= 8
    assert EXTENDING.count("```") == 2 * len(BLOCKS)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("\n", 1)[0].strip())
def test_each_block_is_an_excerpt_of_the_tests(block):
    """Its lines stand there in this order, with nothing between them."""
    assert f"\n{block}" in SEAMS


def test_each_test_and_file_that_the_page_names_exists():
    for test in re.findall(r"\btest_\w+\b(?!\.py)", EXTENDING):
        assert f"def {test}(" in SEAMS
    for path in re.findall(r"`((?:sim|tests)/[\w/]+(?:\.py)?)`", EXTENDING):
        assert (ROOT / path).exists()


def test_the_trace_format_describes_every_column():
    page = (ROOT / "docs" / "how-to" / "trace-format.md").read_text(encoding="utf-8")
    for column, meaning in COLUMNS.items():
        text, _, kind = meaning.removesuffix(")").rpartition(" (")
        row = f"| `{column}` | {text} | {kind.partition(', ')[0]} | {kind.partition(', ')[2] or 'required'} |"
        assert row in page, column
