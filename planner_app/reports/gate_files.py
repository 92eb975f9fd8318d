"""Findings of the gate as files that CI systems show: JUnit XML and Markdown."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path

from pagecast.planner_app.planner.gate.judge import ONE, Finding, verdict
from pagecast.traces.write import replacing


def write_junit(
    path: Path, name: str, findings: Sequence[Finding], seconds: float, facts: Mapping[str, object]
) -> None:
    """A test suite with a case a finding; `facts` (model, GPU, costs) become its properties.

    Errors: BadInput where the file can't be written.
    """
    failures = sum(not finding.holds for finding in findings)
    counts = {"tests": str(len(findings)), "failures": str(failures), "errors": "0", "skipped": "0"}
    time = f"{seconds:.3f}"
    suites = ET.Element("testsuites", {**counts, "time": time})
    attributes = {"name": _xml(f"pagecast check {name}"), **counts, "time": time}
    suite = ET.SubElement(suites, "testsuite", attributes)
    properties = ET.SubElement(suite, "properties")
    for key, fact in facts.items():
        ET.SubElement(properties, "property", {"name": _xml(key), "value": _xml(str(fact))})
    for finding in findings:
        whose = "" if finding.of == ONE else f" (mean of {finding.of})"
        title = f"{finding.name}{whose} {finding.asked}"
        place = {"classname": f"pagecast.{finding.kind}", "name": _xml(title)}
        case = ET.SubElement(suite, "testcase", {**place, "time": "0"})
        why = f": {finding.why}" if finding.why else ""
        text = _xml(f"{finding.value}{whose}, asked {finding.asked}{why}")
        if not finding.holds:
            ET.SubElement(case, "failure", {"message": text, "type": finding.kind}).text = text
        else:
            ET.SubElement(case, "system-out").text = text
    with replacing(path) as place_:
        ET.ElementTree(suites).write(place_, encoding="utf-8", xml_declaration=True)


def write_markdown(
    path: Path, name: str, findings: Sequence[Finding], notes: Sequence[str], uncompared: int = 0
) -> None:
    """A heading, the table, and notes. `uncompared` as in `verdict`. Errors: BadInput where the file can't be
    written."""
    with replacing(path) as place:
        place.write_text(markdown(name, findings, notes, uncompared), encoding="utf-8")


def markdown(name: str, findings: Sequence[Finding], notes: Sequence[str], uncompared: int = 0) -> str:
    """The same as text; what broke stands first."""
    lines = [
        f"### pagecast check {_md(name)}: {verdict(findings, uncompared)}",
        "",
        "| | check | figure | mean of | value | asked | |",
    ]
    lines.append("|---|---|---|---|--:|--:|---|")
    for finding in sorted(findings, key=lambda finding: finding.holds):
        mark = "ok" if finding.holds else "**failed**"
        cells = (finding.kind, finding.name, finding.of, finding.value, finding.asked, finding.why)
        lines.append(f"| {mark} | " + " | ".join(map(_md, cells)) + " |")
    lines += ["", *(f"- {_md(note)}" for note in notes)]
    return "\n".join(lines).rstrip() + "\n"


def _md(text: str) -> str:
    """Plain text in a table's cell: no line ends, no markup, no HTML."""
    for char in "\\`*_|[]":
        text = text.replace(char, f"\\{char}")
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").split())


def _xml(text: str) -> str:
    """Without the characters that XML can't hold."""
    return "".join(char if char.isprintable() else " " for char in text)
