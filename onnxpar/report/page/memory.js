"use strict";
/* global onnxpar */
/* The memory of a rank over a program, at the chosen sizes, and what holds the peak. */

onnxpar.memory = (() => {
  const { make, remade, name, empty } = onnxpar.elements;
  const { sizes, numbers, table, charts } = onnxpar;
  const BINS = 600;
  const TOP = 12;
  const COLOURS = { weight: "var(--held)", state: "var(--axis-5)", input: "var(--bound)", output: "var(--axis-4)" };
  const WORDS = { weight: "weights", state: "states", input: "inputs", output: "outputs" };

  /* The bytes of values while each node of a program runs. */
  function live(directory, program) {
    const change = new Array(program.nodes.length + 1).fill(0);
    for (const [, size, first, last] of program.values) {
      const bytes = sizes.value(directory, size) ?? 0;
      change[first] += bytes;
      change[last + 1] -= bytes;
    }
    const found = [];
    let now = 0;
    for (let i = 0; i < program.nodes.length; i++) found.push((now += change[i]));
    for (const [node, bytes] of program.work) found[node] += bytes;
    return found;
  }

  const boundOf = (directory, program, kind) =>
    program.bound.filter((row) => row[1] === kind).reduce((sum, row) => sum + (sizes.value(directory, row[2]) ?? 0), 0);

  /* What a rank of a stage holds for all its programs: states and weights once, the rest for each. */
  function held(directory, stage) {
    const mine = directory.ranks.filter((program) => program.stage === stage);
    const once = new Map();
    let each = 0;
    for (const program of mine) {
      for (const [text, kind, size] of program.bound) {
        const bytes = sizes.value(directory, size) ?? 0;
        if (kind === "weight" || kind === "state") once.set(text, bytes);
        else each += bytes;
      }
    }
    const kept = [...once.values()].reduce((a, b) => a + b, 0);
    const peaks = mine.map((program) => Math.max(0, ...live(directory, program)));
    return { kept, bound: each, values: Math.max(0, ...peaks), waiting: waiting(directory, mine, stage) };
  }

  /* What more micro-batches than one keep until their backward pass; one counts with the values. */
  function waiting(directory, programs, stage) {
    const runs = directory.pipeline?.kept?.[stage] ?? 1;
    const bytes = programs
      .filter((program) => program.keeps)
      .map((program) => {
        const handed = new Set(program.handed);
        return program.values.reduce((sum, [text, size]) => sum + (handed.has(text) ? sizes.value(directory, size) ?? 0 : 0), 0);
      });
    return (runs - 1) * Math.max(0, ...bytes);
  }

  const together = ({ kept, bound, values, waiting: more }) => kept + bound + values + more;

  function peak(directory) {
    const stages = Array.from({ length: directory.stages }, (_, stage) => held(directory, stage));
    return Math.max(...stages.map(together));
  }

  function memory(directory) {
    if (!directory.ranks.length) return empty("The graphs of no rank are in the directory.");
    const content = make("div");
    const show = (program) => content.replaceChildren(remade(() => ofProgram(directory, program)));
    const programs = directory.ranks.filter((program) => program.nodes.length > 0);
    show(programs[0]);
    const choice = make(
      "select",
      { "aria-label": "Program whose memory is shown", onchange: (event) => show(programs[event.target.value]) },
      programs.map((program, place) => make("option", { value: place }, label(directory, program))),
    );
    return [remade(() => overview(directory)), programs.length > 1 ? make("p", {}, "Program ", choice) : null, content];
  }

  function label(directory, program) {
    return directory.stages > 1 ? `${program.name} (stage ${program.stage})` : program.name;
  }

  function overview(directory) {
    const rows = Array.from({ length: directory.stages }, (_, stage) => ({ stage, ...held(directory, stage) }));
    const each = directory.devices / directory.stages;
    const kept = directory.pipeline?.kept;
    const bytes = (of) => ({ of, shown: (row) => numbers.bytes(of(row)), number: true });
    return table(
      rows,
      [
        { title: "ranks", kind: "unbroken", of: (row) => (each > 1 ? `${row.stage * each} to ${(row.stage + 1) * each - 1}` : String(row.stage)) },
        { title: "weights and states", ...bytes((row) => row.kept) },
        { title: "inputs and outputs", ...bytes((row) => row.bound) },
        { title: "values between nodes, at most", ...bytes((row) => row.values) },
        ...(kept
          ? [
              { title: "micro-batches that wait for their backward pass, at most", of: (row) => kept[row.stage], number: true },
              { title: "values kept for all but one of these micro-batches", ...bytes((row) => row.waiting) },
            ]
          : []),
        { title: "together", ...bytes(together) },
      ],
      { label: "memory of ranks" },
    );
  }

  function ofProgram(directory, program) {
    const curve = live(directory, program);
    const at = curve.indexOf(Math.max(...curve));
    const bins = Math.min(BINS, curve.length);
    const binned = Array.from({ length: bins }, (_, i) =>
      Math.max(...curve.slice(Math.floor((i * curve.length) / bins), Math.max(Math.floor(((i + 1) * curve.length) / bins), 1))));
    const layers = Object.keys(COLOURS)
      .map((kind) => ({ name: WORDS[kind], colour: COLOURS[kind], values: new Array(bins).fill(boundOf(directory, program, kind)) }))
      .filter((layer) => layer.values[0] > 0);
    layers.push({ name: "values between nodes", colour: "var(--axis-0)", values: binned });
    const alive = program.values
      .filter(([, , first, last]) => first <= at && at <= last)
      .map(([text, size, first, last]) => ({ text, bytes: sizes.value(directory, size) ?? 0, first, last }));
    const work = program.work.filter(([node]) => node === at).map(([, bytes]) => ({ text: null, bytes, first: at, last: at }));
    const rows = [...alive, ...work].sort((a, b) => b.bytes - a.bytes);
    const node = program.nodes[at];
    const texts = directory.texts;
    return [
      make("div", { class: "legend" }, layers.map(({ name: text, colour, values }) =>
        make("span", {}, make("i", { style: { background: colour } }), `${text}, ${numbers.bytes(Math.max(...values))}`))),
      charts.areas(layers, `Memory over the nodes of ${program.name}`, {
        format: numbers.bytes,
        feet: ["nodes in the order of execution →"],
        mark: (at * bins) / curve.length,
        at: (place) => texts[program.nodes[Math.floor((place * curve.length) / bins)].name],
      }),
      make("p", {}, "The values need most, ", make("b", {}, numbers.bytes(curve[at])), ", at node ",
        String(at), " of ", String(curve.length), ", ", name(texts[node.name]), ". They are:"),
      table(
        rows,
        [
          { title: "value", of: (row) => (row.text === null ? "" : texts[row.text]),
            shown: (row) => (row.text === null ? "memory of the kernel itself, at the sizes that the page showed first" : name(texts[row.text])) },
          { title: "bytes", of: (row) => row.bytes, shown: (row) => numbers.bytes(row.bytes), number: true },
          { title: "made at node", of: (row) => row.first, number: true },
          { title: "free after node", of: (row) => row.last, number: true },
        ],
        { label: `values at the peak of ${program.name}`, first: TOP },
      ),
      program.unknown.length ? make("p", { class: "soft" }, `Not counted, since only a run shows their sizes: ${program.unknown.slice(0, 8).join(", ")}`) : null,
    ];
  }

  return { memory, peak };
})();
