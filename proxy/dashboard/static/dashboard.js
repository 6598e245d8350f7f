// What the pages do beyond links and forms: charts, the slider's number, and what is said when a request fails.
"use strict";

(() => {
  const charts = new Map();

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const missing = (value) => value === null || value === undefined;
  const short = (value) => {
    if (missing(value)) return "–";
    const size = Math.abs(value);
    for (const [step, unit] of [[1e9, " B"], [1e6, " M"], [1e3, " k"]]) {
      if (size >= step) return `${Number((value / step).toPrecision(3))}${unit}`;
    }
    return String(Number(value.toPrecision(3)));
  };
  const money = (value) => {
    if (missing(value)) return "–";
    const size = Math.abs(value);
    return `${value < 0 ? "−" : ""}$${size >= 1 || size === 0 ? size.toFixed(2) : size.toPrecision(2)}`;
  };
  const shown = { tokens: short, dollars: money, number: short };

  // The range of an axis: zero belongs to it. An axis of its own has twice the room, so that its line does not lie on the others.
  const around = (low, high, scale) => {
    const most = Math.max(high || 0, 0);
    const least = Math.min(low || 0, 0);
    const room = (most - least) * (scale === "y" ? 0.05 : 1) || 1;
    return [least < 0 ? least - room : 0, most > 0 ? most + room : room];
  };

  // How places along a chart are named: a request's number, or a day or an hour in UTC.
  const moment = (data, value) => {
    if (!data.time) return String(value);
    return new Date(value * 1000).toISOString().slice(5, data.label === "hour" ? 16 : 10).replace("T", " ");
  };
  const along = (data) => {
    const [unit, space] = data.time ? (data.label === "hour" ? [3600, 90] : [86400, 70]) : [1, 40];
    const steps = data.label === "hour" ? [1, 2, 3, 6, 12, 24, 48, 168] : [1, 2, 5, 7, 14, 28, 50, 100, 200, 500, 1000];
    return { space, incrs: steps.map((step) => step * unit), values: (_, ticks) => ticks.map((tick) => moment(data, tick)) };
  };

  // Dashed lines at these places: where a session was trimmed.
  const marks = (places) => (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = colour("--series-6");
    ctx.setLineDash([3, 3]);
    for (const place of places) {
      const x = Math.round(plot.valToPos(place, "x", true)) + 0.5;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  };

  const draw = (element) => {
    const data = JSON.parse(element.dataset.chart);
    const text = colour("--muted");
    const line = colour("--line");
    const axis = (scale, side) => ({
      scale, side, stroke: text, grid: { stroke: line, width: 1, show: side === 3 }, ticks: { stroke: line },
      size: (_, values) => 24 + 7 * Math.max(3, ...(values || []).map((value) => value.length)), font: "12px system-ui, sans-serif",
      values: (_, ticks) => ticks.map(shown[(data.units || {})[scale] || "tokens"]),
    });
    const series = data.series.map((each, number) => {
      const stroke = colour(`--series-${each.colour || number + 1}`);
      const scale = each.scale || "y";
      return {
        label: each.label, stroke, scale, width: 2, spanGaps: true, dash: each.dash ? [6, 4] : undefined,
        fill: each.fill ? `${stroke}22` : undefined,
        points: { show: data.x.length < 40 },
        value: (_, value) => (missing(value) ? "" : shown[(data.units || {})[scale] || "tokens"](value)),
      };
    });
    const scales = [...new Set(series.map((each) => each.scale))];
    const options = {
      width: Math.max(240, element.clientWidth),
      height: Number(element.dataset.height) || 220,
      scales: {
        x: { time: false },
        ...Object.fromEntries(scales.map((scale) => [scale, { range: (_, low, high) => around(low, high, scale) }])),
      },
      axes: [
        { stroke: text, grid: { show: false }, ticks: { stroke: line }, font: "12px system-ui, sans-serif", ...along(data) },
        ...scales.map((scale, place) => axis(scale, place === 0 ? 3 : 1)),
      ],
      // Where nothing is pointed at, the legend has the names alone.
      series: [{ label: "\u00a0", value: (_, value) => (missing(value) ? "" : `${data.label || "request"} ${moment(data, value)}`) }, ...series],
      hooks: { draw: data.trims && data.trims.length ? [marks(data.trims)] : [] },
    };
    element.replaceChildren();
    charts.set(element, new uPlot(options, [data.x, ...data.series.map((each) => each.values)], element));
  };

  const drawAll = (root) => root.querySelectorAll(".chart[data-chart]").forEach((element) => {
    if (!charts.has(element)) draw(element);
  });
  const redraw = () => {
    for (const [element, chart] of [...charts]) {
      chart.destroy();
      charts.delete(element);
      if (element.isConnected) draw(element);
    }
  };

  const say = (text) => { document.getElementById("status").textContent = text; };

  document.addEventListener("input", (event) => {
    const output = event.target.dataset && event.target.dataset.output;
    if (output) document.getElementById(output).textContent = event.target.value;
  });
  document.addEventListener("htmx:afterSwap", (event) => { say(""); drawAll(event.detail.elt.isConnected ? event.detail.elt : document); });
  document.addEventListener("htmx:responseError", (event) => {
    const page = new DOMParser().parseFromString(event.detail.xhr.responseText, "text/html");
    const why = page.querySelector(".why");
    say(why ? why.textContent : "This did not work. Load the page again.");
  });
  document.addEventListener("htmx:sendError", () => say("The proxy does not answer."));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(redraw, 150); });
  drawAll(document);
})();
