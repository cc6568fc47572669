"use strict";
/* global onnxpar */
/* The mesh: the devices of each stage as tables, rows and columns of its last two axes. */

onnxpar.mesh = (() => {
  const { make } = onnxpar.elements;
  const { axes, shade, devicesOf } = onnxpar.layouts;
  const MOST_TABLES = 16;
  const MOST = 32;

  function mesh(directory) {
    const long = axes(directory).filter((axis) => axis.size > 1);
    const rows = long.at(-2);
    const columns = long.at(-1);
    const outer = long.slice(0, -2);
    const tables = [];
    const each = devicesOf(directory);
    const inside = (rows?.size ?? 1) * (columns?.size ?? 1);
    for (let first = 0; first < directory.devices; first += inside) {
      const stage = Math.floor(first / each);
      const place = first % each;
      const names = directory.stages > 1 ? [`stage ${stage}`] : [];
      let left = place / inside;
      for (const axis of [...outer].reverse()) {
        names.push(`${axis.name}=${left % axis.size}`);
        left = Math.floor(left / axis.size);
      }
      tables.push({ first, label: names.join(", ") });
    }
    const cut = tables.length > MOST_TABLES || (rows?.size ?? 1) > MOST || (columns?.size ?? 1) > MOST;
    return [
      make("p", {}, sentence(directory, long)),
      strides(directory),
      make("div", { class: "mesh" }, tables.slice(0, MOST_TABLES).map((table) => draw(table, rows, columns))),
      cut ? make("p", { class: "soft" }, `Only a part of the ${directory.devices} devices is drawn.`) : null,
    ];
  }

  function sentence(directory, long) {
    const named = long.map((axis) => `${axis.name}=${axis.size}`).join(", ") || "one device";
    const stages = directory.stages > 1 ? ` in each of ${directory.stages} pipeline stages` : "";
    return `${directory.devices} devices; mesh ${named}${stages}.`;
  }

  /* What the names of axes mean that have none of their own, such as 8@1. */
  function strides(directory) {
    const over = directory.programs.flatMap((program) => program.collectives.map((one) => one.over));
    const texts = [...axes(directory).map((axis) => axis.name), ...directory.layouts.map((one) => one.text), ...over];
    const used = new Set(texts.join(" ").match(/\b\d+@\d+\b/g));
    const sentences = [...used].map((name) => {
      const [size, apart] = name.split("@");
      return `${name} means over ${size} devices that are ${apart} rank${apart === "1" ? "" : "s"} apart.`;
    });
    return used.size ? make("p", { class: "soft" }, sentences.join(" ")) : null;
  }

  function head(axis, place) {
    const background = `color-mix(in oklab, ${shade(axis, place, axis.size)} 45%, var(--paper))`;
    return make("th", { style: { background } }, `${axis.name}=${place}`);
  }

  function draw({ first, label }, rows, columns) {
    const across = Array.from({ length: Math.min(columns?.size ?? 1, MOST) }, (_, i) => i);
    const down = Array.from({ length: Math.min(rows?.size ?? 1, MOST) }, (_, i) => i);
    const top = columns ? make("tr", {}, rows ? make("td") : null, across.map((c) => head(columns, c))) : null;
    const lines = down.map((r) =>
      make(
        "tr",
        {},
        rows ? head(rows, r) : null,
        across.map((c) => make("td", {}, `device ${first + r * (columns?.size ?? 1) + c}`)),
      ),
    );
    return make("div", {}, label ? make("div", { class: "soft" }, label) : null, make("table", {}, top, lines));
  }

  return mesh;
})();
