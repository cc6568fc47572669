"use strict";
/* global onnxpar */
/* Steps of a trace as timelines: what each rank did when. The reader zooms into them. */

onnxpar.timeline = (() => {
  const { make, draw } = onnxpar.elements;
  const { numbers, charts } = onnxpar;
  /* The kinds of onnxpar/report/trace_segments.py, and the rest of a step: what people call each, its colour, and whether that is pale. */
  const KINDS = {
    compute: ["computing", "var(--axis-0)"],
    backward: ["backward pass", "var(--axis-5)"],
    optimizer: ["optimizer", "var(--axis-2)"],
    communication: ["communication", "var(--axis-1)"],
    waiting: ["waiting for other ranks", "var(--waiting)", "pale"],
    bubble: ["waiting for another stage", "var(--grey)", "pale"],
    input: ["input", "var(--axis-4)"],
    checkpoint: ["checkpoint", "var(--axis-3)"],
    python: ["Python", "var(--raised)", "pale"],
  };
  /* What is narrower, in points, shares a column with what is beside it. */
  const COLUMN = 0.8;
  /* The shortest time to zoom into, in units of the data. */
  const SHORTEST = 100;

  /* The lanes of a step, with the beginning and the end of each segment. */
  function unpacked({ lanes }) {
    return lanes.map(({ rank, track, segments }) => {
      const count = segments.length / 4;
      const [from, to] = [new Float64Array(count), new Float64Array(count)];
      let at = 0;
      for (let i = 0; i < count; i++) {
        from[i] = at + segments[4 * i];
        at = to[i] = from[i] + segments[4 * i + 1];
      }
      return { rank, track, count, from, to, kind: (i) => segments[4 * i + 2], name: (i) => segments[4 * i + 3] };
    });
  }

  /* The first segment of a lane that ends after a time. */
  function after({ count, to }, time) {
    let [low, high] = [0, count];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (to[middle] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /* For each kind a path of its rectangles. Of those that share a column, the longest is drawn. */
  function paths(lane, [begin, end], x, y, height, kinds) {
    const found = new Map();
    const paint = (kind, left, right) =>
      found.set(kind, `${found.get(kind) ?? ""}M${left.toFixed(2)} ${y}H${right.toFixed(2)}v${height}H${left.toFixed(2)}z`);
    let column = null;
    const flush = () => {
      if (column === null) return;
      const [kind] = [...column.times].reduce((a, b) => (b[1] > a[1] ? b : a));
      paint(kind, column.left, column.right);
      column = null;
    };
    for (let i = after(lane, begin); i < lane.count && lane.from[i] < end; i++) {
      const left = x(Math.max(lane.from[i], begin));
      const right = x(Math.min(lane.to[i], end));
      const kind = kinds[lane.kind(i)];
      if (right - left >= COLUMN) {
        flush();
        paint(kind, left, right);
        continue;
      }
      if (column !== null && right > column.left + COLUMN) flush();
      column ??= { left, right: left + COLUMN, times: new Map() };
      column.times.set(kind, (column.times.get(kind) ?? 0) + right - left);
    }
    flush();
    return [...found].map(([kind, d]) => draw("path", { d, style: { fill: KINDS[kind][1] } }));
  }

  /* The seconds of each kind between two times, means over the ranks; the rest is Python. */
  function shares(lanes, [begin, end], kinds) {
    const sums = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, 0]));
    const own = lanes.filter(({ track }) => !track);
    for (const lane of own) {
      for (let i = after(lane, begin); i < lane.count && lane.from[i] < end; i++) {
        sums[kinds[lane.kind(i)]] += (Math.min(lane.to[i], end) - Math.max(lane.from[i], begin)) / own.length;
      }
    }
    sums.python = end - begin - Object.values(sums).reduce((a, b) => a + b, 0);
    return Object.entries(sums).map(([kind, sum]) => [kind, sum / (end - begin)]);
  }

  /* Where each lane is drawn: a rank's own, and below it thin ones of what runs beside it. */
  function placed(lanes) {
    const ranks = new Set(lanes.map(({ rank }) => rank)).size;
    const [tall, thin, gap] = ranks <= 4 ? [24, 5, 8] : ranks <= 20 ? [15, 4, 6] : ranks <= 64 ? [9, 2, 3] : [5, 1, 1];
    let y = 2 - gap;
    const places = lanes.map(({ track }) => {
      y += track ? 1 : gap;
      const height = track ? thin : tall;
      const place = { y, height };
      y += height;
      return place;
    });
    return { places, bottom: y + 4, every: Math.ceil(13 / (tall + gap)) };
  }

  /* found: what onnxpar/report/step_timelines.py returns; staged: the ranks of a stage, or null. */
  function timeline(found, staged) {
    const { unit, kinds, names, steps } = found;
    let step = steps[found.first];
    let lanes = unpacked(step);
    let window = [0, step.end];
    const legend = make("div", { class: "legend" });
    const note = make("p", { class: "soft" });
    const seconds = (units) => numbers.seconds(units * unit);

    function about(lane, i) {
      const [said] = KINDS[kinds[lane.kind(i)]];
      const place = lane.name(i);
      const [name, bytes] = place < 0 ? [`${-place} short ones, mostly ${said}`, null] : names[place];
      const where = `rank ${lane.rank}${staged ? `, stage ${Math.floor(lane.rank / staged)}` : ""}${lane.track ? `, ${lane.track}` : ""}`;
      const size = bytes === null ? "" : `, ${numbers.bytes(bytes)}`;
      return `${said}, ${where}\n${name}\nfrom ${seconds(lane.from[i])}, for ${seconds(lane.to[i] - lane.from[i])}${size}`;
    }

    let geometry = null;
    let brush = null;
    const figure = charts.fitted("Timeline of a step", (width) => {
      const { places, bottom, every } = placed(lanes);
      const left = charts.longest([`rank ${Math.max(...lanes.map(({ rank }) => rank))}`]);
      const right = width - charts.RIGHT;
      const [begin, end] = window;
      const x = (time) => left + ((right - left) * (time - begin)) / (end - begin);
      const time = (px) => begin + (Math.min(Math.max(px, left), right) - left) * ((end - begin) / (right - left));
      geometry = { left, right, time, bottom };
      // Within a step, times are told apart by as many digits as that needs.
      const ticks = charts.ticks(end * unit, Math.max(2, Math.min(9, width / 120)), 10, begin * unit);
      const format = numbers.secondsAs(end * unit);
      const height = bottom + charts.FOOT - 4;
      brush = draw("rect", { class: "brush", y: 0, height: bottom, width: 0 });
      const parts = [
        lanes.map((lane, i) => {
          const { y, height: tall } = places[i];
          return lane.track ? null : [
            draw("rect", { class: "lane", x: left, y, width: right - left, height: tall }),
            lane.rank % every ? null : draw("text", { x: 0, y: y + tall / 2 + 4 }, `rank ${lane.rank}`),
          ];
        }),
        ticks.map((at) => draw("line", { class: "axis", x1: x(at / unit), x2: x(at / unit), y1: 0, y2: bottom })),
        lanes.map((lane, i) => paths(lane, window, x, places[i].y, places[i].height, kinds)),
        charts.below(ticks, (at) => x(at / unit), height - 5, format, width),
        brush,
      ];
      const at = (px, py) => {
        const number = places.findIndex(({ y, height: tall }) => py >= y - 0.5 && py < y + tall + 0.5);
        if (number < 0 || px < left || px > right) return null;
        const lane = lanes[number];
        // What is narrower than a point is hit beside it, too.
        const slack = (end - begin) / (right - left);
        const i = after(lane, time(px) - slack / 2);
        return i < lane.count && lane.from[i] <= time(px) + slack / 2 ? about(lane, i) : null;
      };
      return { height, parts, at };
    });
    figure.classList.add("timeline");
    figure.tabIndex = 0;

    function show(from, to) {
      const length = Math.max(Math.min(to - from, step.end), Math.min(SHORTEST, step.end));
      const begin = Math.min(Math.max(from, 0), step.end - length);
      window = [begin, begin + length];
      figure.redraw();
      legend.replaceChildren(...shares(lanes, window, kinds).filter(([, share]) => share >= 5e-4).map(([kind, share]) => {
        const [said, background] = KINDS[kind];
        return make("span", {}, make("i", { style: { background } }), `${said} `, make("b", {}, numbers.share(share)));
      }));
      const part = length < step.end ? `${seconds(begin)} to ${seconds(begin + length)} of ${seconds(step.end)}` : `The whole step, ${seconds(step.end)}`;
      const joined = step.finest ? ` What is shorter than ${seconds(step.finest)} is joined with what is beside it.` : "";
      const beside = lanes.some(({ track }) => track) ? " Thin lines are what runs beside a rank: messages and other threads." : "";
      note.textContent = `${part}; shares are means over the ranks.${beside}${joined}`;
    }

    const zoom = (factor, middle = (window[0] + window[1]) / 2) =>
      show(middle - (middle - window[0]) * factor, middle + (window[1] - middle) * factor);
    const shift = (part) => show(window[0] + part * (window[1] - window[0]), window[1] + part * (window[1] - window[0]));
    const keys = { ArrowLeft: () => shift(-0.2), ArrowRight: () => shift(0.2), "+": () => zoom(0.5), "-": () => zoom(2), Escape: () => show(0, step.end) };
    figure.addEventListener("keydown", (event) => {
      if (!keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });

    /* A drag chooses what to zoom into; a double click shows all again. */
    let drag = null;
    const px = (event) => {
      const box = figure.firstChild.getBoundingClientRect();
      return ((event.clientX - box.left) * figure.firstChild.viewBox.baseVal.width) / box.width;
    };
    figure.addEventListener("pointerdown", (event) => {
      if (event.button === 0 && event.pointerType === "mouse") drag = px(event);
    });
    document.addEventListener("pointermove", (event) => {
      if (drag === null) return;
      const [a, b] = [drag, px(event)].sort((m, n) => m - n).map((at) => Math.min(Math.max(at, geometry.left), geometry.right));
      brush.setAttribute("x", a);
      brush.setAttribute("width", b - a);
    });
    document.addEventListener("pointerup", (event) => {
      if (drag === null) return;
      const [a, b] = [drag, px(event)].sort((m, n) => m - n);
      drag = null;
      if (b - a > 4) show(geometry.time(a), geometry.time(b));
    });
    figure.addEventListener("dblclick", () => show(0, step.end));

    const choice = make("select", {
      "aria-label": "Step that is shown",
      onchange: (event) => {
        step = steps[event.target.value];
        lanes = unpacked(step);
        show(0, step.end);
      },
    }, steps.map(({ number, is, end }, place) =>
      make("option", { value: place, selected: place === found.first }, `step ${number}: ${seconds(end)}${is ? `, ${is}` : ""}`)));
    const button = (text, label, onclick) => make("button", { type: "button", "aria-label": label, title: label, onclick }, text);
    show(0, step.end);
    return [
      make("div", { class: "controls" }, choice,
        steps.length < found.count ? make("span", { class: "soft" }, `${steps.length} of ${numbers.count(found.count)} steps`) : null,
        make("span", { class: "zoom" }, button("+", "Zoom in", () => zoom(0.5)), button("−", "Zoom out", () => zoom(2)),
          button("Whole step", "Show the whole step", () => show(0, step.end)))),
      legend,
      figure,
      note,
    ];
  }

  return { timeline, KINDS };
})();
