"use strict";
/* global onnxpar */
/* Drawings with an axis of time or of nodes: bars in lanes, and a curve. */

onnxpar.charts = (() => {
  const { make, draw } = onnxpar.elements;
  const WIDTH = 1000;
  const LEFT = 120;
  const LANE = 26;

  /* Round numbers from 0 to `most`, about `count` of them. */
  function ticks(most, count = 6, base = 10) {
    if (!(most > 0)) return [0];
    const rough = most / count;
    const unit = base ** Math.floor(Math.log(rough) / Math.log(base));
    const step = [1, 2, 4, 5, 8, base].map((n) => n * unit).find((n) => n >= rough) ?? base * unit;
    return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
  }

  /* lanes: [{ name, bars: [{ from, to, colour, title, text }] }] */
  function lanes(rows, end, format, label) {
    const height = rows.length * LANE + 24;
    const x = (at) => LEFT + ((WIDTH - LEFT - 10) * at) / (end || 1);
    const parts = ticks(end).map((at) => [
      draw("line", { class: "axis", x1: x(at), x2: x(at), y1: 0, y2: height - 20 }),
      draw("text", { class: "soft", x: x(at), y: height - 6, "text-anchor": "middle" }, format(at)),
    ]);
    rows.forEach(({ name, bars }, place) => {
      const y = place * LANE + 4;
      parts.push(draw("text", { x: 0, y: y + 13 }, name));
      for (const bar of bars) {
        const width = Math.max(x(bar.to) - x(bar.from), 0.4);
        const shape = draw("rect", { x: x(bar.from), y, width, height: LANE - 8, style: { fill: bar.colour } },
          draw("title", {}, bar.title));
        parts.push(shape);
        if (bar.text && width > 9 * bar.text.length) {
          parts.push(draw("text", { x: x(bar.from) + width / 2, y: y + 13, "text-anchor": "middle",
            style: { fill: "var(--paper)" } }, bar.text));
        }
      }
    });
    return make("figure", { style: { margin: "0 0 8px", overflowX: "auto" } },
      draw("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label,
        style: { minWidth: "560px", width: "100%" } }, parts));
  }

  /* An area for each layer of `areas`, one on the other: [{ name, colour, values }], values by place. */
  function areas(layers, format, label, mark) {
    const HEIGHT = 220;
    const count = layers[0].values.length;
    const most = Math.max(...Array.from({ length: count }, (_, i) => layers.reduce((sum, l) => sum + l.values[i], 0)), 1);
    const x = (at) => LEFT + ((WIDTH - LEFT - 10) * at) / Math.max(count, 1);
    const y = (value) => HEIGHT - 22 - ((HEIGHT - 34) * value) / most;
    const parts = ticks(most, 4, 2).map((at) => [
      draw("line", { class: "axis", x1: LEFT, x2: WIDTH - 10, y1: y(at), y2: y(at) }),
      draw("text", { class: "soft", x: LEFT - 8, y: y(at) + 4, "text-anchor": "end" }, format(at)),
    ]);
    const below = new Array(count).fill(0);
    for (const { colour, values, name } of layers) {
      const top = values.map((value, i) => below[i] + value);
      const forth = top.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)} ${x(i + 1).toFixed(1)},${y(value).toFixed(1)}`);
      const back = below.map((value, i) => `${x(i + 1).toFixed(1)},${y(value).toFixed(1)} ${x(i).toFixed(1)},${y(value).toFixed(1)}`).reverse();
      parts.push(draw("polygon", { points: `${forth.join(" ")} ${back.join(" ")}`, style: { fill: colour } }, draw("title", {}, name)));
      top.forEach((value, i) => (below[i] = value));
    }
    if (mark !== undefined) {
      parts.push(draw("line", { x1: x(mark + 0.5), x2: x(mark + 0.5), y1: 6, y2: HEIGHT - 22,
        style: { stroke: "var(--bad)", strokeDasharray: "4 3" } }));
    }
    parts.push(draw("text", { class: "soft", x: LEFT, y: HEIGHT - 6 }, "nodes in the order of execution →"));
    return make("figure", { style: { margin: "0 0 8px", overflowX: "auto" } },
      draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label,
        style: { minWidth: "560px", width: "100%" } }, parts));
  }

  /* A line through points [[x, y]]. */
  function line(points, format, label, colour) {
    const HEIGHT = 200;
    const values = points.map(([, value]) => value);
    const low = Math.min(...values);
    const high = Math.max(...values);
    const first = points[0][0];
    const last = points.at(-1)[0];
    const x = (at) => LEFT + ((WIDTH - LEFT - 10) * (at - first)) / (last - first || 1);
    const part = (value) => (high > low ? (value - low) / (high - low) : 0.5);
    const y = (value) => HEIGHT - 24 - (HEIGHT - 36) * part(value);
    const parts = (high > low ? [low, (low + high) / 2, high] : [low]).map((value) => [
      draw("line", { class: "axis", x1: LEFT, x2: WIDTH - 10, y1: y(value), y2: y(value) }),
      draw("text", { class: "soft", x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, format(value)),
    ]);
    parts.push(draw("polyline", {
      points: points.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join(" "),
      style: { fill: "none", stroke: colour, strokeWidth: "1.6" },
    }));
    parts.push(draw("text", { class: "soft", x: LEFT, y: HEIGHT - 6 }, `step ${onnxpar.numbers.count(first)}`));
    parts.push(draw("text", { class: "soft", x: WIDTH - 10, y: HEIGHT - 6, "text-anchor": "end" }, `step ${onnxpar.numbers.count(last)}`));
    return make("figure", { style: { margin: "0 0 8px", overflowX: "auto" } },
      draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label,
        style: { minWidth: "560px", width: "100%" } }, parts));
  }

  return { lanes, areas, line };
})();
