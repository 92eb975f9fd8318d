"""`pagecast watch`: a running server beside its forecast, in a table that refreshes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.field_options import with_options
from pagecast.planner_app.commands.output import Output
from pagecast.planner_app.commands.scenario_options import ScenarioOnly, started
from pagecast.planner_app.options import Options
from pagecast.planner_app.wording.server_figures import figure, percent, title
from pagecast.sim.core.errors import BadInput
from pagecast.sim.runs.server_forecast import forecast_of_metrics
from pagecast.sim.runs.server_metrics import Scrape, ServerFigures, figures_of_scrapes, parse_metrics
from pagecast.sim.scenario import Scenario
from pydantic import Field
from rich.live import Live
from rich.table import Table

_TIMEOUT_S = 5.0
_MOST_BYTES = 64 << 20
_REQUESTS = 2000  # of a forecast: as many as make its means steady
_LEAST = 20  # requests in the span, for a forecast
_ROWS = (
    *("requests_per_s", "prompt_tokens_per_s", "output_tokens_per_s", "hit_rate", "running", "waiting"),
    *("kv_usage", "ttft_s", "tpot_s", "e2e_s", "queue_s", "preemptions"),
)
# Figures that a forecast is made from, or that a few scrapes show by chance alone: no warning stands on them.
_GIVEN = ("requests_per_s", "prompt_tokens_per_s", "output_tokens_per_s", "hit_rate")
_BY_CHANCE = ("running", "waiting", "kv_usage", "preemptions", "queue_s")


class WatchOptions(Options):
    """How often the server is asked, and what is shown of it."""

    interval: float = Field(
        default=5.0, ge=0.1, description="seconds from one look at the server to the next"
    )
    window: float = Field(default=60.0, ge=1, description="seconds that figures are means of")
    times: int | None = Field(default=None, ge=1, description="end after so many tables [never]")
    tolerance: float = Field(
        default=10.0, gt=0, description="warn where TTFT, TPOT or E2E are off by more percent"
    )


@with_options
def watch_command(
    url: Annotated[
        str,
        typer.Argument(
            help="address of a server, as http://localhost:8000, or of its metrics, as .../prometheus/metrics"
        ),
    ],
    arguments: ScenarioOnly,
    ask: WatchOptions,
    output: Output,
) -> None:
    """Shows what a server serves, beside what its scenario forecasts for the same load.

    Its /metrics are read, and nothing else is sent. The forecast replays a trace with the load of the last
    --window seconds. Ends with Ctrl-C, after --times tables, or with exit code 2 where the server is gone.
    """
    place = metrics_address(url)
    scenario, notes = started(arguments)
    for note in notes:
        console.err.print(f"note: {note}", soft_wrap=True, markup=False)
    shown = 0
    live = None if output.json_only or not console.out.is_terminal else Live(console=console.out)
    try:
        if live is not None:
            live.start()
        for scrapes in _looks(place, ask):
            server = figures_of_scrapes(scrapes, place)
            ours, why = _forecast(server, scenario)
            if output.json_only:
                console.print_json(as_dict(server, ours, ask.tolerance, why))
            elif live is not None:
                live.update(_table(server, ours, ask, why))
            else:
                console.out.print(_table(server, ours, ask, why))
            shown += 1
            if shown == ask.times or console.out.reader_gone:
                return
    finally:
        if live is not None:
            live.stop()


def metrics_address(url: str) -> str:
    """The address of a server's metrics. Errors: BadInput."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInput(f"{url}: no address of a server; give it as http://HOST:PORT")
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path if path.endswith('/metrics') else f'{path}/metrics'}"


def _looks(place: str, ask: WatchOptions) -> Iterator[list[Scrape]]:
    """The looks at a server within the window, each time there is another; two at least."""
    looks: deque[Scrape] = deque([_look(place)])
    while True:
        time.sleep(ask.interval)
        looks.append(_look(place))
        now = looks[-1].time_s or 0.0
        while len(looks) > 2 and now - (looks[1].time_s or 0.0) >= ask.window:
            looks.popleft()
        yield list(looks)


def _look(place: str) -> Scrape:
    """One answer of the server. Errors: BadInput where it does not answer, or with something else."""
    try:
        with urlopen(Request(place, method="GET"), timeout=_TIMEOUT_S) as answer:
            text = answer.read(_MOST_BYTES).decode("utf-8", errors="replace")
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise BadInput(f"{place}: the server does not answer ({reason})") from None
    if text.lstrip().startswith(("{", "[", "<")):
        raise BadInput(
            f"{place}: answers with something else than Prometheus metrics; TensorRT-LLM has them at "
            "/prometheus/metrics, SGLang with --enable-metrics"
        )
    look = parse_metrics(text, place)
    # `pagecast serve --simulate --time-scale` has a clock of its own.
    return replace(look, time_s=time.monotonic() * (look.mean("pagecast:time_scale") or 1.0))


def _forecast(server: ServerFigures, scenario: Scenario) -> tuple[dict[str, float], str | None]:
    """The figures of the forecast, or why there is none."""
    if server.requests < _LEAST:
        return {}, f"{server.requests:.0f} requests so far; a forecast needs {_LEAST}"
    if server.num_blocks and scenario.num_gpu_blocks is None:
        scenario = scenario.changed(num_gpu_blocks=server.num_blocks)
    return forecast_of_metrics(server, scenario, requests=_REQUESTS), None


def _parting(server: ServerFigures, ours: dict[str, float], tolerance: float) -> list[str]:
    """What parts by more than is tolerated, in words."""
    words = []
    for name in _ROWS:
        if name in _GIVEN or name in _BY_CHANCE or name not in ours or not server.figures.get(name):
            continue
        off = 100 * (ours[name] / server.figures[name] - 1)
        if abs(off) > tolerance:
            words.append(f"{title(name)} is forecast {off:+.0f}% off")
    return words


def as_dict(
    server: ServerFigures, ours: dict[str, float], tolerance: float, why: str | None
) -> dict[str, object]:
    """One look as plain JSON."""
    return {
        "engine": server.engine,
        "seconds": server.seconds,
        "requests": server.requests,
        "server": server.figures,
        "forecast": ours,
        "warnings": _parting(server, ours, tolerance),
        "notes": [*server.notes, *([why] if why else [])],
    }


def _table(server: ServerFigures, ours: dict[str, float], ask: WatchOptions, why: str | None) -> Table:
    warnings = _parting(server, ours, ask.tolerance)
    notes = [*(f"warning: {words}" for words in warnings), *server.notes, *([why] if why else [])]
    table = Table(box=None, pad_edge=False, caption="\n".join(notes) or None, caption_justify="left")
    said = f"{server.engine}, {server.requests:,.0f} requests in {server.seconds or 0:.0f} s"
    for number, one in enumerate((said, "server", "forecast", "difference")):
        table.add_column(one, justify="right" if number else "left", no_wrap=True)
    for name in _ROWS:
        real = server.figures.get(name)
        if real is None:
            continue
        value = ours.get(name)
        off = None if value is None or not real else 100 * (value / real - 1)
        table.add_row(title(name), figure(name, real), figure(name, value), percent(off))
    return table
