"""The plot of a calibration: each recorded step as fitted and as measured. Needs plotly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from pagecast.planner_app.reports.html_page import HtmlTable, Section, SummaryCard, page
from pagecast.planner_app.reports.style import chart, marker
from pagecast.planner_app.wording.quantities import seconds
from pagecast.sim.costs.calibration.file import Calibration
from pagecast.sim.fitting.build import CalibrationRun
from pagecast.sim.fitting.features import step_table
from pagecast.sim.fitting.fit import Fit
from pagecast.traces.arrays import Flags, Floats

_MOST_POINTS = 3000  # of a chart
_DECODE = {"1 to 8 requests": (1, 8), "9 to 64": (9, 64), "65 or more": (65, 1 << 40)}
_PROMPTS = {"up to 256 tokens": (1, 256), "257 to 2,048": (257, 2048), "2,049 or more": (2049, 1 << 40)}


@dataclass(frozen=True)
class _Steps:
    """Steps as charts need them: milliseconds measured and fitted, and what they computed."""

    measured: Floats
    fitted: Floats
    n: Floats
    ctx: Floats
    tokens: Floats
    prompts: Flags

    def where(self, rows: Flags) -> _Steps:
        """Those rows, thinned out to what a chart can show."""
        indices = np.flatnonzero(rows)
        if len(indices) > _MOST_POINTS:
            indices = np.random.default_rng(0).choice(indices, _MOST_POINTS, replace=False)
        return _Steps(**{name: values[indices] for name, values in vars(self).items()})


def fit_page(calibration: Calibration, sources: list[CalibrationRun]) -> str:
    """The HTML page: errors by region of batch shape, and charts of the synchronous runs' steps."""
    steps = _steps(calibration, sources)
    whole = next(row for row in calibration.regions if row["region"] == "all steps")
    about = calibration.made_for
    cards = [
        SummaryCard("Steps", f"{whole['steps']:,}", f"{steps.measured.sum() / 1e3:,.0f} s of them"),
        SummaryCard("Total", f"{whole['error_percent']:+.2f}%", "fitted against measured"),
        SummaryCard("A step, half of them within", f"{whole['p50_percent']:.1f}%"),
        SummaryCard("Nine in ten within", f"{whole['p90_percent']:.1f}%"),
    ]
    sections = [
        Section("Steps that only decode", [_times(steps, False), _errors(steps, False)]),
        Section("Steps with prompts", [_times(steps, True), _errors(steps, True)]),
        Section("By region of batch shape", [_table(calibration)]),
    ]
    lead = f"{about['engine']} {about['engine_version']}, {about['model']} on {about['gpu']}: what the fit "
    return page(
        f"{calibration.name}: fit and measurement", f"{lead}says beside what was measured.", cards, sections
    )


def _steps(calibration: Calibration, sources: list[CalibrationRun]) -> _Steps:
    plain = [source for source in sources if not source.run.pipeline_depth]
    tables = [step_table(source.run, calibration.shape, source.upto) for source in plain]
    fit = Fit.of(calibration)

    def column(values: list[Floats]) -> Floats:
        return np.concatenate(values).astype(np.float64)

    return _Steps(
        measured=column([table.ns for table in tables]) / 1e6,
        fitted=column([fit.predict(table, calibration.shape) for table in tables]) / 1e6,
        n=column([table.n for table in tables]),
        ctx=column([table.ctx for table in tables]),
        tokens=column([table.tokens.astype(np.float64) for table in tables]),
        prompts=np.concatenate([table.mixed for table in tables]),
    )


def _groups(steps: _Steps, prompts: bool) -> dict[str, _Steps]:
    size = steps.tokens if prompts else steps.n
    bounds = _PROMPTS if prompts else _DECODE
    groups = {
        name: steps.where((steps.prompts == prompts) & (size >= low) & (size <= high))
        for name, (low, high) in bounds.items()
    }
    return {name: group for name, group in groups.items() if len(group.measured)}


def _times(steps: _Steps, prompts: bool) -> go.Figure:
    """Measured and fitted time of steps by what they compute."""
    mine = steps.where(steps.prompts == prompts)
    size, x = (mine.tokens, "tokens in the step (log)") if prompts else (mine.n, "decoding requests (log)")
    slowest = seconds(float(mine.measured.max()) / 1e3) if len(size) else "-"
    caption = f"The longest step took {slowest}. At one size, time grows with the context that is read."
    figure = chart("Time of a step", caption, x, "milliseconds (log)", xaxis_type="log", yaxis_type="log")
    for index, (name, values) in enumerate((("measured", mine.measured), ("fitted", mine.fitted))):
        figure.add_scattergl(
            x=size,
            y=values,
            name=name,
            mode="markers",
            marker=marker(index, size=4),
            customdata=mine.ctx,
            hovertemplate="%{y:.3g} ms, decode context %{customdata:,.0f} tokens",
        )
    return figure


def _errors(steps: _Steps, prompts: bool) -> go.Figure:
    """By how many percent the fit is off, by measured time, a colour for each region."""
    groups = _groups(steps, prompts)
    rows = steps.prompts == prompts
    total = 100 * (steps.fitted[rows].sum() / max(steps.measured[rows].sum(), 1e-9) - 1)
    caption = f"Together they are off by {total:+.2f}%. A region that leans to one side is fitted badly."
    figure = chart(
        "Error of the fit",
        caption,
        "milliseconds measured (log)",
        "% off",
        xaxis_type="log",
        yaxis_range=[-30, 30],
    )
    for index, (name, group) in enumerate(groups.items()):
        figure.add_scattergl(
            x=group.measured,
            y=100 * (group.fitted / group.measured - 1),
            name=name,
            mode="markers",
            marker=marker(index, size=4),
            customdata=np.stack([group.n, group.tokens, group.ctx], axis=1),
            hovertemplate="%{y:+.1f}%: %{customdata[0]} decodes, %{customdata[1]} tokens, "
            "decode context %{customdata[2]:,.0f}",
        )
    return figure


def _table(calibration: Calibration) -> HtmlTable:
    rows = [
        (
            str(row["region"]),
            f"{row['steps']:,}",
            f"{row['time_percent']:.1f}%",
            f"{row['error_percent']:+.2f}%",
            f"{row['p50_percent']:.2f}%",
            f"{row['p90_percent']:.2f}%",
        )
        for row in calibration.regions
    ]
    header = ("region", "steps", "of the time", "total off by", "per step: p50", "p90")
    return HtmlTable(
        "", header, rows, "Signed error of the region's total, and how far single steps are off."
    )
