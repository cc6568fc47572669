"use strict";
/* global onnxpar */
/* Which device holds which block of a tensor: as colours of a row, and as a drawing of blocks. */

onnxpar.layouts = (() => {
  const { make } = onnxpar.elements;
  const COLOURS = 6;
  const MOST_DEVICES = 64;
  const MOST_BLOCKS = 16;

  /* The axes of a mesh, with the atoms of each; atoms without a name are axes of their own. */
  function axes(directory) {
    if (directory.axes !== undefined) return directory.axes;
    const { atoms, axes: named } = directory.mesh;
    const found = [];
    let next = 0;
    for (const [name, size] of named) {
      const mine = [];
      for (let left = size; left > 1 && next < atoms.length; left /= atoms[next - 1]) mine.push(next++);
      found.push({ name, size, atoms: mine });
    }
    const strides = stridesOf(atoms);
    for (; next < atoms.length; next++) {
      found.push({ name: `${atoms[next]}@${strides[next]}`, size: atoms[next], atoms: [next] });
    }
    found.forEach((axis, place) => (axis.colour = place % COLOURS));
    return (directory.axes = found);
  }

  function stridesOf(atoms) {
    const strides = Array(atoms.length).fill(1);
    for (let i = atoms.length - 2; i >= 0; i--) strides[i] = strides[i + 1] * atoms[i + 1];
    return strides;
  }

  const devicesOf = (directory) => directory.devices / directory.stages;
  const shownDevices = (directory) => Math.min(devicesOf(directory), MOST_DEVICES);

  /* The number of the block that a device has along some atoms, major first. */
  function index(directory, device, atoms) {
    const sizes = directory.mesh.atoms;
    const strides = stridesOf(sizes);
    return atoms.reduce((sum, atom) => sum * sizes[atom] + (Math.floor(device / strides[atom]) % sizes[atom]), 0);
  }

  const count = (directory, atoms) => atoms.reduce((product, atom) => product * directory.mesh.atoms[atom], 1);

  function shade(axis, place, of) {
    const part = of < 2 ? 100 : Math.round(100 - (70 * place) / (of - 1));
    return `color-mix(in oklab, var(--axis-${axis.colour}) ${part}%, var(--paper))`;
  }

  /* For each axis that shards a layout, its atoms that do. */
  function bands(directory, layout) {
    const used = layout.dims.flat().flatMap(([, atoms]) => atoms);
    return axes(directory)
      .map((axis) => ({ axis, atoms: axis.atoms.filter((atom) => used.includes(atom)) }))
      .filter((band) => band.atoms.length > 0);
  }

  function gradient(directory, band) {
    const devices = shownDevices(directory);
    const of = count(directory, band.atoms);
    const stops = Array.from({ length: devices }, (_, device) => {
      const colour = shade(band.axis, index(directory, device, band.atoms), of);
      return `${colour} ${(100 * device) / devices}% ${(100 * (device + 1)) / devices}%`;
    });
    return `linear-gradient(to right, ${stops.join(", ")})`;
  }

  /* What `strip` paints for a layout; made once for each. */
  function paint(directory, place) {
    directory.painted ??= new Map();
    if (!directory.painted.has(place)) {
      const layout = place === null ? null : directory.layouts[place];
      const found = layout === null ? [] : bands(directory, layout).map((band) => gradient(directory, band));
      directory.painted.set(place, {
        backgrounds: found.length ? found : ["var(--grey)"],
        partial: layout !== null && layout.partial !== null,
      });
    }
    return directory.painted.get(place);
  }

  /* A row of all devices: equal colours hold equal blocks. Only the devices of a stage compute it. */
  function strip(directory, place, stage) {
    const { backgrounds, partial } = paint(directory, place);
    const parts = Array.from({ length: directory.stages }, (_, number) => {
      if (number !== stage) return make("span", { class: "none" });
      const colours = backgrounds.map((background) => make("i", { style: { background } }));
      return make("span", { class: partial ? "partial" : undefined }, colours);
    });
    return make("span", { class: "strip", "aria-hidden": "true" }, parts);
  }

  function text(directory, place) {
    if (place === null) return "current layout";
    const { text: dims, partial } = directory.layouts[place];
    return partial === null ? dims : `${dims} partial ${partial.reduction} over ${partial.over}`;
  }

  /* The segments of a dim: for each the number of the block along each component that is sharded. */
  function segments(directory, dim) {
    let found = [[]];
    dim.forEach(([, atoms], place) => {
      const of = count(directory, atoms);
      const later = dim.slice(place + 1).some(([, others]) => others.length > 0);
      // A component that is not sharded repeats what is inside it; two repetitions show that.
      const choices = of > 1 ? Array.from({ length: of }, (_, i) => [i]) : later ? [[null], [null]] : [[null]];
      found = found.flatMap((before) => choices.map((choice) => [...before, ...choice]));
    });
    return found;
  }

  const holds = (directory, device, dim, segment) =>
    dim.every(([, atoms], place) => segment[place] === null || index(directory, device, atoms) === segment[place]);

  function ranges(numbers) {
    const found = [];
    for (const n of numbers) {
      const last = found.at(-1);
      if (last && last[1] === n - 1) last[1] = n;
      else found.push([n, n]);
    }
    const texts = found.map(([a, b]) => (a === b ? `${a}` : b === a + 1 ? `${a}, ${b}` : `${a}–${b}`));
    return texts.length > 6 ? `${texts.slice(0, 5).join(", ")}, …` : texts.join(", ");
  }

  /* A drawing of a tensor as the blocks that devices hold, rows and columns of its sharded dims. */
  function blocks(directory, place, stage) {
    if (place === null) return null;
    const layout = directory.layouts[place];
    const split = layout.dims.map((dim, d) => ({ dim, d })).filter(({ dim }) => dim.some(([, atoms]) => atoms.length));
    const last = layout.dims.length - 1;
    const columns = split.length > 1 || (split.length === 1 && split[0].d === last && last > 0) ? split.at(-1) : null;
    const rows = split.filter((item) => item !== columns);
    const across = columns === null ? [[]] : segments(directory, columns.dim);
    let down = [[]];
    for (const { dim } of rows) down = down.flatMap((before) => segments(directory, dim).map((s) => [...before, s]));
    const devices = Array.from({ length: devicesOf(directory) }, (_, device) => device);
    const cells = [];
    for (const row of down.slice(0, MOST_BLOCKS)) {
      for (const column of across.slice(0, MOST_BLOCKS)) {
        const mine = devices.filter(
          (device) =>
            rows.every(({ dim }, i) => holds(directory, device, dim, row[i])) &&
            (columns === null || holds(directory, device, columns.dim, column)),
        );
        const colours = mine.length ? bands(directory, layout).map((band) =>
          shade(band.axis, index(directory, mine[0], band.atoms), count(directory, band.atoms))) : [];
        const parts = colours.map((colour, i) => `${colour} ${4 * i}px ${4 * (i + 1)}px`);
        const image = colours.length
          ? `linear-gradient(to bottom, ${parts.join(", ")}, transparent ${4 * colours.length}px)`
          : undefined;
        const first = stage * devicesOf(directory);
        cells.push(
          make(
            "div",
            { style: { backgroundImage: image ?? "none", paddingTop: `${4 * colours.length + 3}px` } },
            ranges(mine.map((device) => first + device)),
          ),
        );
      }
    }
    const width = Math.min(across.length, MOST_BLOCKS);
    const label = describe(rows, columns, down.length, across.length);
    return make(
      "figure",
      { style: { margin: "0" } },
      make("div", { class: "blocks", style: { gridTemplateColumns: `repeat(${width}, auto)` } }, cells),
      make("figcaption", { class: "soft" }, label),
    );
  }

  function describe(rows, columns, down, across) {
    const names = (items) => items.map(({ d }) => d).join(" and ");
    const parts = [];
    if (rows.length) parts.push(`${down} rows: dim ${names(rows)}`);
    if (columns !== null) parts.push(`${across} columns: dim ${columns.d}`);
    const cut = Math.max(down, across) > MOST_BLOCKS ? `; the first ${MOST_BLOCKS} are shown` : "";
    return parts.length ? `Blocks with the devices that hold them; ${parts.join(", ")}${cut}` : "Every device holds all of it";
  }

  function legend(directory) {
    const chips = axes(directory)
      .filter((axis) => axis.size > 1)
      .map((axis) =>
        make("span", {}, make("i", { style: { background: `var(--axis-${axis.colour})` } }), `sharded over ${axis.name}`),
      );
    return make(
      "div",
      { class: "legend" },
      chips,
      make("span", {}, make("i", { style: { background: "var(--grey)" } }), "replicated"),
      make("span", {}, make("i", {
        style: { background: "repeating-linear-gradient(45deg, var(--grey) 0 3px, var(--paper) 3px 4.5px)" },
      }), "partial: a reduction is still to come"),
      make("span", { class: "soft" }, "Devices with equal colours hold equal blocks."),
    );
  }

  return { axes, strip, text, blocks, legend, shade, index, devicesOf, shownDevices };
})();
