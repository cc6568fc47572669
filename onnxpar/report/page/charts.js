"use strict";
/* global onnxpar */
/* Drawings with an axis of time, of steps or of nodes: bars in lanes, areas, and curves. */

onnxpar.charts = (() => {
  const { make, draw } = onnxpar.elements;
  /* Points: the height of a lane, the width of a letter, and the room at the right and below. */
  const LANE = 26;
  const LETTER = 6.4;
  const RIGHT = 12;
  const FOOT = 22;

  /* Round numbers from `least` to `most`, about `count` of them. */
  function ticks(most, count = 6, base = 10, least = 0) {
    if (!(most > least)) return [least];
    const rough = (most - least) / count;
    const unit = base ** Math.floor(Math.log(rough) / Math.log(base) + 1e-9);
    const round = base === 2 ? [1, 2] : [1, 2, 2.5, 5, 10];
    const step = round.map((n) => n * unit).find((n) => n >= rough * 0.999) ?? base * unit;
    const first = Math.ceil(least / step - 1e-9);
    return Array.from({ length: Math.floor(most / step + 1e-9) - first + 1 }, (_, i) => (first + i) * step);
  }

  const tip = make("div", { class: "tip", role: "status", hidden: true });

  /* Shows a text beside the pointer; none hides it. */
  function point(event, text) {
    tip.hidden = !text;
    if (!text) return;
    if (!tip.isConnected) document.body.append(tip);
    tip.textContent = text;
    const { width, height } = tip.getBoundingClientRect();
    const room = document.documentElement.clientWidth;
    const left = event.clientX + 14 + width > room ? Math.max(event.clientX - width - 10, 4) : event.clientX + 14;
    const top = event.clientY + 18 + height > window.innerHeight ? event.clientY - height - 10 : event.clientY + 18;
    Object.assign(tip.style, { left: `${left}px`, top: `${top}px` });
  }

  /*
   * A drawing as wide as its place, so that its text has one size everywhere: it is made again when
   * the width changes. compute(width) -> { height, parts, at }, where at(x, y) -> text about a point.
   */
  function fitted(label, compute) {
    const figure = make("figure", { class: "chart" });
    let drawn = 0;
    let found = null;
    const show = (width) => {
      drawn = Math.max(Math.round(width), 200);
      found = compute(drawn);
      figure.replaceChildren(draw("svg", { viewBox: `0 0 ${drawn} ${found.height}`, role: "img", "aria-label": label,
        style: { width: "100%" } }, found.parts));
    };
    show(Math.min(document.documentElement.clientWidth, 1360) - 40);
    figure.addEventListener("pointermove", (event) => {
      if (!found.at) return;
      const box = figure.firstChild.getBoundingClientRect();
      const scale = drawn / box.width;
      point(event, found.at((event.clientX - box.left) * scale, (event.clientY - box.top) * scale));
    });
    figure.addEventListener("pointerleave", (event) => point(event, null));
    new ResizeObserver(([{ contentRect }]) => {
      if (contentRect.width > 0 && Math.abs(contentRect.width - drawn) > 8) show(contentRect.width);
    }).observe(figure);
    figure.redraw = () => show(drawn);
    return figure;
  }

  /* The texts below an axis of time. Those at its ends stay inside. */
  function below(values, x, y, format, width) {
    return values.map((at) => {
      const text = format(at);
      const half = (text.length * LETTER) / 2;
      const anchor = x(at) + half > width ? "end" : "middle";
      return draw("text", { class: "soft", x: anchor === "end" ? width : x(at), y, "text-anchor": anchor }, text);
    });
  }

  const longest = (texts) => LETTER * Math.max(0, ...texts.map((text) => text.length)) + 12;

  /* lanes: [{ name, bars: [{ from, to, colour, pale, title, text }] }], in seconds */
  function lanes(rows, end, label) {
    const format = onnxpar.numbers.secondsAs(end);
    return fitted(label, (width) => {
      const height = rows.length * LANE + FOOT;
      const left = Math.min(longest(rows.map(({ name }) => name)), 120);
      const x = (at) => left + ((width - left - RIGHT) * at) / (end || 1);
      const marks = ticks(end, Math.max(2, Math.min(8, width / 110)));
      const parts = [
        marks.map((at) => draw("line", { class: "axis", x1: x(at), x2: x(at), y1: 0, y2: height - 20 })),
        below(marks, x, height - 6, format, width),
      ];
      rows.forEach(({ name, bars }, place) => {
        const y = place * LANE + 4;
        parts.push(draw("text", { x: 0, y: y + 13 }, name));
        for (const bar of bars) {
          const wide = Math.max(x(bar.to) - x(bar.from), 0.4);
          parts.push(draw("rect", { x: x(bar.from), y, width: wide, height: LANE - 8, style: { fill: bar.colour } },
            draw("title", {}, bar.title)));
          if (bar.text && wide > LETTER * bar.text.length + 8) {
            parts.push(draw("text", { x: x(bar.from) + wide / 2, y: y + 13, "text-anchor": "middle", class: bar.pale ? undefined : "inside" }, bar.text));
          }
        }
      });
      return { height, parts };
    });
  }

  /*
   * An area for each layer, one on the other: [{ name, colour, values }], values by place.
   * options: format(value); feet, the texts below both ends; mark, a place; most; at(place) -> what
   * a place is; base, of round numbers.
   */
  function areas(layers, label, { format, feet, mark, most, at, base = 2, height = 220 }) {
    const count = layers[0].values.length;
    const sums = Array.from({ length: count }, (_, i) => layers.reduce((sum, { values }) => sum + values[i], 0));
    const top = most ?? Math.max(...sums, 1);
    const marks = ticks(top, 4, base);
    const left = longest(marks.map(format));
    return fitted(label, (width) => {
      const x = (place) => left + ((width - left - RIGHT) * place) / Math.max(count, 1);
      const y = (value) => height - FOOT - ((height - FOOT - 12) * Math.min(value, top)) / top;
      const parts = marks.map((value) => [
        draw("line", { class: "axis", x1: left, x2: width - RIGHT, y1: y(value), y2: y(value) }),
        draw("text", { class: "soft", x: left - 8, y: y(value) + 4, "text-anchor": "end" }, format(value)),
      ]);
      const under = new Array(count).fill(0);
      for (const { colour, values } of layers) {
        const over = values.map((value, i) => under[i] + value);
        const forth = over.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)} ${x(i + 1).toFixed(1)},${y(value).toFixed(1)}`);
        const back = under.map((value, i) => `${x(i + 1).toFixed(1)},${y(value).toFixed(1)} ${x(i).toFixed(1)},${y(value).toFixed(1)}`).reverse();
        parts.push(draw("polygon", { points: `${forth.join(" ")} ${back.join(" ")}`, class: "area", style: { fill: colour } }));
        over.forEach((value, i) => (under[i] = value));
      }
      if (mark !== undefined) {
        parts.push(draw("line", { x1: x(mark + 0.5), x2: x(mark + 0.5), y1: 6, y2: height - FOOT,
          style: { stroke: "var(--bad)", strokeDasharray: "4 3" } }));
      }
      parts.push(ends(feet, left, width, height));
      const about = (px) => {
        const place = Math.floor(((px - left) * count) / (width - left - RIGHT));
        if (place < 0 || place >= count) return null;
        const lines = layers.map(({ name, values }) => `${name}: ${format(values[place])}`).reverse();
        return [at(place), ...lines].join("\n");
      };
      return { height, parts, at: about };
    });
  }

  const ends = ([first, last], left, width, height) => [
    draw("text", { class: "soft", x: left, y: height - 6 }, first),
    last ? draw("text", { class: "soft", x: width - RIGHT, y: height - 6, "text-anchor": "end" }, last) : null,
  ];

  /*
   * Curves through points of steps: [{ name, colour, points: [[step, value]], dots }].
   * options: format(value); zero, whether the axis begins at 0; base, of round numbers; height.
   */
  function curves(list, label, { format, zero = false, base = 10, height = 170 }) {
    const all = list.flatMap(({ points }) => points);
    const values = all.map(([, value]) => value);
    let [low, high] = [Math.min(...values), Math.max(...values)];
    if (zero) low = Math.min(low, 0);
    if (high === low) [low, high] = [low - Math.abs(low || 1) / 2, high + Math.abs(high || 1) / 2];
    const steps = all.map(([step]) => step);
    const [first, last] = [Math.min(...steps), Math.max(...steps)];
    const marks = ticks(high, 4, base, low);
    const left = longest(marks.map(format));
    const { count } = onnxpar.numbers;
    return fitted(label, (width) => {
      const x = (step) => left + ((width - left - RIGHT) * (step - first)) / (last - first || 1);
      const y = (value) => height - FOOT - 4 - ((height - FOOT - 14) * (value - low)) / (high - low);
      const parts = marks.map((value) => [
        draw("line", { class: "axis", x1: left, x2: width - RIGHT, y1: y(value), y2: y(value) }),
        draw("text", { class: "soft", x: left - 8, y: y(value) + 4, "text-anchor": "end" }, format(value)),
      ]);
      for (const { colour, points, dots } of list) {
        const places = points.map(([step, value]) => [x(step).toFixed(1), y(value).toFixed(1)]);
        parts.push(draw("polyline", { points: places.map((place) => place.join(",")).join(" "),
          style: { fill: "none", stroke: colour, strokeWidth: "1.6", strokeDasharray: dots ? "3 3" : "none" } }));
        if (dots) parts.push(places.map(([cx, cy]) => draw("circle", { cx, cy, r: 3, style: { fill: colour } })));
      }
      parts.push(ends([`step ${count(first)}`, first < last ? `step ${count(last)}` : ""], left, width, height));
      const about = (px) => {
        const wanted = first + ((px - left) * (last - first)) / (width - left - RIGHT);
        const near = list.map(({ name, points }) => [name, points.reduce((a, b) => (Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a))]);
        return near.map(([name, [step, value]]) => `${name} at step ${count(step)}: ${format(value)}`).join("\n");
      };
      return { height, parts, at: about };
    });
  }

  return { lanes, areas, curves, fitted, ticks, below, longest, RIGHT, FOOT };
})();
