"""The reports' style sheet and script, as text that a page carries inside."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --paper: #ffffff; --card: #f3f5f8;
  --line: #d5dae0; --mark: #fff0db; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #a4adb8; --paper: #14181d;
  --card: #1e242b; --line: #38414b; --mark: #43331a; } }
* { box-sizing: border-box; }
body { margin: 0; font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); }
main { max-width: 80rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: 1rem; margin: 0 0 .2rem; }
.lead { font-size: 1.05rem; margin: 0 0 1.2rem; max-width: 60rem; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); gap: .7rem; }
.card { background: var(--card); border-radius: .5rem; padding: .6rem .8rem; }
.what, .hint, .caption { color: var(--soft); font-size: .87rem; overflow-wrap: anywhere; }
.value { font-size: 1.45rem; font-weight: 600; line-height: 1.3; }
.parts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(34rem, 100%), 1fr)); gap: 1.6rem; }
.parts > * { min-width: 0; }
figure { margin: 0; }
.table { grid-column: 1 / -1; }
.caption { margin: 0 0 .4rem; max-width: 46rem; }
.chart { min-height: 15rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { color: var(--soft); font-weight: 600; }
tr.marked td { background: var(--mark); }
ul { max-width: 60rem; padding-left: 1.2rem; }
li { margin: .3rem 0; overflow-wrap: anywhere; }
.failed { color: var(--soft); font-style: italic; }
@media print { .chart { break-inside: avoid; } }
"""

# plotly.js travels packed (base64 of gzip); it is unpacked and run when the page opens. Charts take the
# page's ink and paper, again when the reader's system turns dark or light.
SCRIPT = """
(async () => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const boxes = figures.map((_, i) => document.getElementById("chart" + i));
  const ink = () => {
    const of = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    return { "font.color": of("--ink"), "hoverlabel.bgcolor": of("--card"),
      "hoverlabel.font.color": of("--ink"), "hoverlabel.bordercolor": of("--line") };
  };
  try {
    const packed = atob(document.getElementById("plotly").textContent);
    const bytes = Uint8Array.from(packed, c => c.charCodeAt(0));
    const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const code = document.createElement("script");
    code.textContent = await new Response(plain).text();
    document.head.append(code);
    for (const [i, figure] of figures.entries()) {
      await Plotly.newPlot(boxes[i], figure.data, figure.layout, { responsive: true, displaylogo: false,
        modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] });
      await Plotly.relayout(boxes[i], ink());
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change",
      () => boxes.forEach(box => Plotly.relayout(box, ink())));
    document.documentElement.dataset.drawn = figures.length;
  } catch (error) {
    for (const box of boxes) {
      box.className = "failed";
      box.textContent = "This browser can't draw the chart (" + error + "); a version of 2023 or later can.";
    }
  }
})();
"""
