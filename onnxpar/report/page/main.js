"use strict";
/* global onnxpar */
/* The page: its title, the choice of sizes, and the sections for each directory. */

(() => {
  const { make, live, tile } = onnxpar.elements;
  const { sizes, numbers } = onnxpar;
  const data = JSON.parse(document.getElementById("data").textContent);
  const { directories } = data;
  const LARGEST = 16;

  const SECTIONS = [
    ["mesh", "Mesh", "", onnxpar.mesh],
    ["model", "Model", "A click on a node shows its shapes, its sharding rule and the blocks of its tensors.", onnxpar.model],
    ["communication", "Communication", "Bytes are those that one device sends.", onnxpar.collectives.collectives],
    ["memory", "Memory", "What a rank holds while its programs run; all ranks of a stage hold the same.", onnxpar.memory.memory],
    ["time", "Predicted time", "", onnxpar.time.time],
    ["pipeline", "Pipeline", "", onnxpar.pipeline],
    ["conflicts", "Conflicts", "Neighbours that want a value in different layouts, the most expensive first.", onnxpar.collectives.conflicts],
    ["replicated", "Replicated", "What several devices compute or hold, and why.", onnxpar.collectives.replicated],
  ];

  function summary(directory) {
    const [first] = directory.programs;
    const { totals } = first;
    return [
      make("p", { class: "soft" }, `${directory.model}, sharded by ${directory.generator}`),
      make(
        "div",
        { class: "tiles" },
        tile("devices", make("b", {}, numbers.count(directory.devices))),
        directory.stages > 1 ? tile("pipeline stages", make("b", {}, String(directory.stages))) : null,
        tile(`nodes of ${first.name}`, make("b", {}, numbers.count(totals.nodes))),
        tile("sharded", make("b", {}, numbers.count(totals.sharded))),
        tile("parameters on a device", make("b", {}, numbers.bytes(totals.parameter_bytes_per_device))),
        tile("parameters together", make("b", {}, numbers.bytes(totals.parameter_bytes))),
        directory.ranks.length ? tile("of memory at the peak", live("b", {}, () => numbers.bytes(onnxpar.memory.peak(directory)))) : null,
        directory.ranks.length ? tile(`predicted, ${directory.machine}`, live("b", {}, () => numbers.seconds(onnxpar.time.total(directory)))) : null,
        tile(`sent by a device in a ${directory.step.length > 1 ? "step" : "run"}${directory.stages > 1 ? ", on the stage that sends most" : ""}`, live("b", {}, () => numbers.bytes(sizes.sent(directory)))),
      ),
    ];
  }

  /* A slider in powers of two, and a field for any admissible number, for each symbol. */
  function choices() {
    const names = new Map();
    for (const directory of directories) {
      for (const symbol of directory.symbols) if (!names.has(symbol.name)) names.set(symbol.name, symbol);
    }
    return [...names.values()].map((symbol) => {
      const powers = Array.from({ length: LARGEST + 1 }, (_, i) => sizes.admissible(symbol, 2 ** i));
      const values = [...new Set([...powers, symbol.value])].sort((a, b) => a - b);
      const slider = make("input", {
        type: "range", min: 0, max: values.length - 1, step: 1, value: values.indexOf(symbol.value),
        "aria-label": `Size of ${symbol.name}`,
        oninput: () => sizes.choose(directories, symbol.name, values[slider.value]),
      });
      const field = make("input", {
        type: "number", min: symbol.least, max: symbol.most, step: symbol.step, value: symbol.value,
        "aria-label": `Size of ${symbol.name}, exactly`,
        onchange: () => sizes.choose(directories, symbol.name, Number(field.value)),
      });
      sizes.onChange(() => {
        field.value = symbol.value;
        const nearest = values.findIndex((n) => n >= symbol.value);
        slider.value = nearest < 0 ? values.length - 1 : nearest;
      });
      return make("label", { title: symbol.constraint }, symbol.name, slider, field);
    });
  }

  function theme() {
    const root = document.documentElement;
    const dark = () =>
      root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    return make("button", {
      type: "button", class: "theme",
      onclick: () => (root.dataset.theme = dark() ? "light" : "dark"),
    }, "Light or dark");
  }

  function sides(render) {
    const two = directories.length > 1;
    return make(
      "div",
      { class: two ? "sides two" : "sides" },
      directories.map((directory) =>
        make("div", { class: "side" }, two ? make("div", { class: "label" }, directory.name) : null, render(directory)),
      ),
    );
  }

  /* The sections: those of each directory, and those of the comparison and of runs, if there are any. */
  const shown = SECTIONS
    .filter(([id]) => id !== "pipeline" || directories.some((directory) => directory.stages > 1))
    .map(([id, name, text, render]) => [id, name, text, () => sides(render)]);
  if (directories.length > 1) shown.unshift(["comparison", "Comparison", "", () => onnxpar.compare(directories)]);
  if (data.log) shown.push(["log", "Training log", "", () => onnxpar.runs.log(data.log)]);
  if (data.trace) shown.push(["trace", "Trace", "", () => onnxpar.runs.trace(data.trace, directories)]);

  const title = directories.map((directory) => directory.name).join(" and ");
  const links = shown.map(([id, name]) => make("a", { href: `#${id}` }, name));
  document.body.append(
    make("header", { class: "top" }, make("h1", {}, title), sides(summary)),
    make("nav", { class: "bar", "aria-label": "Sections and sizes" },
      make("div", {}, make("span", { class: "links" }, links),
        make("span", { class: "sizes" }, choices(), theme()))),
    make("main", {}, shown.map(([id, name, text, render]) =>
      make("section", { id, "aria-labelledby": `${id}-title` },
        make("h2", { id: `${id}-title` }, name), text ? make("p", { class: "soft" }, text) : null, render()))),
    make("footer", { class: "bottom soft" }, `onnxpar ${data.version}`),
  );
  document.documentElement.dataset.ready = "yes";
})();
