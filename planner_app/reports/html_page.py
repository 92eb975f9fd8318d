"""The HTML page every report is: one file with its charts' library inside, which asks no network.

What users wrote (names of traces, models, files) is escaped here and nowhere else: builders give plain
text. The page forbids itself every connection by a content security policy, and reads without script too:
summary, tables and the captions of charts are plain HTML.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from pagecast.planner_app import console
from pagecast.sim.core.errors import CannotRunHere
from pagecast.traces.write import replacing

if TYPE_CHECKING:
    import plotly.graph_objects as go

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:"
)


@dataclass(frozen=True, slots=True)
class SummaryCard:
    """A figure of the summary: what it is, its value, and a word on it."""

    title: str
    value: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class HtmlTable:
    """Rows of text under a header; `marked` rows stand out. The first column is text, the rest numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    marked: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Section:
    """Charts or tables that belong together, under a heading."""

    title: str
    parts: Sequence[go.Figure | HtmlTable]


def ready(option: str, path: Path) -> None:
    """Before any work: Errors: BadInput where the report can't be written, CannotRunHere without plotly."""
    console.check_place(option, path, ".html", ".htm")
    try:
        import plotly  # noqa: F401
    except ImportError:
        raise CannotRunHere(f"{option} needs plotly; install it by pip install 'pagecast[app]'") from None


def page(
    title: str,
    lead: str,
    cards: Iterable[SummaryCard],
    sections: Iterable[Section],
    notes: Iterable[str] = (),
) -> str:
    """The whole page: title, one sentence that answers, the summary's figures, notes, then the sections."""
    figures: list[str] = []
    body = "".join(_section(section, figures) for section in sections)
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    card_html = "".join(
        f"<div class=card><div class=what>{escape(card.title)}</div><div class=value>{escape(card.value)}"
        f"</div><div class=hint>{escape(card.hint)}</div></div>"
        for card in cards
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{_text('css')}</style></head><body><main>"
        f"<h1>{escape(title)}</h1><p class=lead>{escape(lead)}</p><div class=cards>{card_html}</div>{body}"
        + (f"<section><h2>Notes on these figures</h2><ul>{items}</ul></section>" if items else "")
        + f"</main>{_scripts(figures)}</body></html>\n"
    )


def write(path: Path, text: str) -> None:
    """Writes the page, whole or not at all. Errors: BadInput where the file can't be written."""
    with replacing(path) as place:
        place.write_text(text, encoding="utf-8")


def _section(section: Section, figures: list[str]) -> str:
    parts = "".join(
        _table(part) if isinstance(part, HtmlTable) else _chart(part, figures) for part in section.parts
    )
    return f"<section><h2>{escape(section.title)}</h2><div class=parts>{parts}</div></section>"


def _table(table: HtmlTable) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in table.header)
    rows = "".join(
        f"<tr{' class=marked' if number in table.marked else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for number, row in enumerate(table.rows)
    )
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    caption = f"<p class=caption>{escape(table.caption)}</p>" if table.caption else ""
    return (
        f"<div class=table>{title}{caption}<div class=scroll><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div></div>"
    )


def _chart(figure: go.Figure, figures: list[str]) -> str:
    from pagecast.planner_app.reports.style import caption_of, title_of

    title, caption = title_of(figure), caption_of(figure)
    figures.append(str(figure.to_json()))
    return (
        f"<figure><h3>{escape(title)}</h3><p class=caption>{escape(caption)}</p>"
        f'<div class=chart id="chart{len(figures) - 1}" role="img" '
        f'aria-label="{escape(title)}. {escape(caption)}"></div></figure>'
    )


def _scripts(figures: list[str]) -> str:
    """The charts' data, and plotly.js once, packed: a page is 2 MB, not 5."""
    if not figures:
        return ""
    from plotly.offline import get_plotlyjs

    code = base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()
    data = ",".join(figures).replace("<", "\\u003c")  # no string may end the script it stands in
    return (
        f'<script type="application/json" id="figures">[{data}]</script>'
        "<!-- plotly.js, copyright Plotly, Inc., MIT licence: https colon //plotly.com/javascript -->"
        f'<script type="text/plain" id="plotly">{code}</script><script>{_text("js")}</script>'
    )


def _text(kind: str) -> str:
    """The style sheet or the script that a page carries inside."""
    return Path(__file__).with_name(f"report.{kind}").read_text(encoding="utf-8")


def plain_figures(text: str) -> list[dict[str, object]]:
    """The charts' data in a page, for those who want to read it again."""
    start = text.index('id="figures">') + len('id="figures">')
    figures: list[dict[str, object]] = json.loads(text[start : text.index("</script>", start)])
    return figures
