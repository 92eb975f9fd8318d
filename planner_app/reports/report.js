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
