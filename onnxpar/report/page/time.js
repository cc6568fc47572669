"use strict";
/* global onnxpar */
/* Predicted times of a rank: by layer, on a line of time, and what is hidden behind what. */

onnxpar.time = (() => {
  const { make, live, name, empty, remade } = onnxpar.elements;
  const { sizes, numbers, table, charts } = onnxpar;
  const MOST_BARS = 1500;

  /* The layer of a node: its name up to the first part with a number, or its first two parts. */
  function layerOf(text) {
    const parts = text.split("/");
    const numbered = parts.findIndex((part, place) => place > 0 && place < parts.length - 1 && /\d/.test(part));
    const end = numbered > 0 ? numbered + 1 : 2;
    if (parts.length <= 2) return "outside layers";
    return parts.slice(0, Math.min(end, Math.max(parts.length - 1, 2))).join("/");
  }

  /* For each node of a rank its layer, and whether it belongs to the backward pass. */
  function layersOf(directory, program) {
    const model = directory.programs.find((one) => one.name === program.of);
    const repeated = new Map();
    for (const [start, size, count] of model?.blocks ?? []) {
      if (count < 2) continue;
      for (let i = 0; i < size * count; i++) repeated.set(start + i, Math.floor(i / size) + 1);
    }
    return program.nodes.map((node) => {
      if (node.owner < 0) return "the rest";
      const text = model.nodes[node.owner].name;
      const backward = text.includes("/grad/") ? ", backward" : "";
      if (!text.includes("/") && repeated.has(node.owner)) return `layer ${repeated.get(node.owner)}${backward}`;
      return layerOf(text) + backward;
    });
  }

  /*
   * When the nodes and transfers of a rank run, at the chosen sizes, as `played` of
   * onnxpar/cost/timeline.py: a transfer begins when it is ready and the link is free of those before
   * it, and a node waits until the transfers are complete that it needs.
   */
  function play(directory, program) {
    const nodes = program.nodes.map((node) => ({ begins: 0, seconds: sizes.seconds(directory, node.seconds) }));
    const transfers = program.transfers.map((transfer) => ({ transfer, begins: null, ends: 0 }));
    const at = (key) => {
      const found = Array.from({ length: nodes.length + 1 }, () => []);
      for (const one of transfers) found[one.transfer[key]].push(one);
      return found;
    };
    const [ready, needed] = [at("ready"), at("needed")];
    let now = 0;
    let free = 0;
    const run = (one, begins) => {
      one.begins = begins;
      one.ends = begins + sizes.seconds(directory, one.transfer.seconds);
      return one.ends;
    };
    for (let place = 0; place <= nodes.length; place++) {
      for (const one of ready[place]) {
        if (one.transfer.overlaps && place < one.transfer.needed) free = run(one, Math.max(now, free));
      }
      for (const one of needed[place]) {
        if (one.begins !== null) now = Math.max(now, one.ends);
        else if (one.transfer.overlaps) now = free = run(one, Math.max(now, free));
        else now = run(one, now);
      }
      if (place === nodes.length) break;
      nodes[place].begins = now;
      now += nodes[place].seconds;
    }
    return { nodes, transfers, end: now };
  }

  /* The part of a transfer in which nodes of the rank are computed, and their layers. */
  function overlap({ nodes }, layers, { transfer, begins, ends }) {
    let hidden = 0;
    const behind = new Map();
    for (let i = transfer.ready; i < transfer.needed; i++) {
      const both = Math.min(ends, nodes[i].begins + nodes[i].seconds) - Math.max(begins, nodes[i].begins);
      if (both <= 0) continue;
      hidden += both;
      behind.set(layers[i], (behind.get(layers[i]) ?? 0) + both);
    }
    const seconds = ends - begins;
    return { transfer, begins, ends, seconds, hidden: Math.min(hidden, seconds), behind: [...behind.keys()] };
  }

  function time(directory) {
    const programs = directory.ranks.filter((program) => program.nodes.length > 0);
    if (!programs.length) return empty("The graphs of no rank are in the directory.");
    const content = make("div");
    const show = (program) => {
      const layers = layersOf(directory, program);
      content.replaceChildren(remade(() => ofProgram(directory, program, layers)));
    };
    show(programs[0]);
    const choice = make(
      "select",
      { "aria-label": "Program whose time is shown", onchange: (event) => show(programs[event.target.value]) },
      programs.map((program, place) => make("option", { value: place }, directory.stages > 1 ? `${program.name} (stage ${program.stage})` : program.name)),
    );
    return [
      live("p", { class: "soft" }, () => `For the machine ${directory.machine} (onnxpar report --machine)${at(directory)}.`),
      directory.step.length > 1 ? live("p", {}, () => stepText(directory)) : null,
      programs.length > 1 ? make("p", {}, "Program ", choice) : null,
      content,
    ];
  }

  function stepText(directory) {
    const { main, update, between, all } = step(directory);
    const number = directory.pipeline?.micro_batches ?? 1;
    const batches = number === 1 ? "one micro-batch" : `${number} micro-batches`;
    return `A training step of ${batches} takes ${numbers.seconds(all)}: ${numbers.seconds(main)} forward and backward, ` +
      `${numbers.seconds(update)} in the update, and ${numbers.seconds(between)} of communication between the two that no computing hides.`;
  }

  /* The chosen sizes, and whether the times at them are the cost model's own. */
  function at(directory) {
    const chosen = directory.symbols.map((symbol) => `${symbol.name}=${symbol.value}`).join(", ");
    if (!chosen) return "";
    return `, at ${chosen}${sizes.predicted(directory) ? "" : ", estimated from the times at near sizes"}`;
  }

  function ofProgram(directory, program, layers) {
    const played = play(directory, program);
    const facts = played.transfers.map((one) => overlap(played, layers, one));
    const rows = new Map();
    const row = (layer) => {
      if (!rows.has(layer)) rows.set(layer, { layer, nodes: 0, computing: 0, sending: 0, hidden: 0 });
      return rows.get(layer);
    };
    played.nodes.forEach((node, i) => {
      row(layers[i]).computing += node.seconds;
      row(layers[i]).nodes += 1;
    });
    for (const { transfer, seconds, hidden } of facts) {
      row(layers[transfer.node]).sending += seconds;
      row(layers[transfer.node]).hidden += hidden;
    }
    const list = folded([...rows.values()]);
    const sum = (of) => list.reduce((total, one) => total + of(one), 0);
    const hidden = sum((r) => r.hidden);
    const seconds = (of) => ({ of, shown: (one) => numbers.seconds(of(one)), number: true });
    return [
      make("p", {}, "One run takes ", make("b", {}, numbers.seconds(played.end)), `: ${numbers.seconds(sum((r) => r.computing))} of computing and `,
        `${numbers.seconds(sum((r) => r.sending))} of communication, of which ${hidden ? `${numbers.seconds(hidden)} is` : "nothing is"} hidden behind computing.`),
      lanes(directory, program, played, layers, facts),
      table(
        list,
        [
          { title: "layer", of: (one) => one.layer, shown: (one) => name(one.layer) },
          ...(list.some(({ count }) => count > 1) ? [onnxpar.layers] : []),
          { title: "nodes", of: (one) => one.nodes, shown: (one) => numbers.count(one.nodes), number: true },
          { title: "computing", ...seconds((one) => one.computing) },
          { title: "communication", ...seconds((one) => one.sending) },
          { title: "hidden", ...seconds((one) => one.hidden) },
          { title: "share of the run", of: (one) => one.computing + one.sending - one.hidden,
            shown: (one) => numbers.share((one.computing + one.sending - one.hidden) / (played.end || 1)), number: true },
        ],
        { label: `time of ${program.name} by layer`, first: 24 },
      ),
      program.untimed.length ? make("p", { class: "soft" }, `Counted as 0 s, since only a run shows the sizes: ${numbers.count(program.untimed.length)} ${program.untimed.length > 1 ? "nodes, such as" : "node,"} ${program.untimed.slice(0, 8).map((place) => directory.texts[place]).join(", ")}`) : null,
      facts.some((one) => one.hidden > 0) || program.apart.length ? hiddenTable(directory, program, facts) : null,
    ].filter((part) => part !== null);
  }

  /* Layers that take equal times and have names that differ only in numbers are one row, with their sums. */
  function folded(rows) {
    const found = new Map();
    for (const { layer, ...of } of rows) {
      const key = [layer.replace(/\d+/g, "*"), ...Object.values(of).map((number) => number.toPrecision(4))].join("\n");
      if (!found.has(key)) found.set(key, []);
      found.get(key).push({ layer, ...of });
    }
    return [...found].map(([key, [first, ...others]]) => {
      const row = { ...first, layer: others.length ? key.split("\n")[0] : first.layer, count: 1 + others.length };
      for (const other of others) for (const field of ["nodes", "computing", "sending", "hidden"]) row[field] += other[field];
      return row;
    });
  }

  function hiddenTable(directory, program, facts) {
    const { texts } = directory;
    const inside = facts
      .filter((one) => one.hidden > 0)
      .map(({ transfer, seconds, hidden, behind }) => ({ what: texts[program.nodes[transfer.node].name], seconds, hidden, behind: behind.join(", ") }));
    const apart = program.apart.map(({ op, value, seconds, behind }) => ({ what: `${op} of ${texts[value]}`, seconds: sizes.seconds(directory, seconds), hidden: null, behind: `${behind}, another program` }));
    return make("details", {}, make("summary", {}, `What is hidden behind what (${inside.length + apart.length})`),
      table([...inside, ...apart], [
        { title: "communication", of: (one) => one.what, shown: (one) => name(one.what) },
        { title: "takes", of: (one) => one.seconds, shown: (one) => numbers.seconds(one.seconds), number: true },
        { title: "hidden", of: (one) => one.hidden, shown: (one) => (one.hidden === null ? "in another run" : numbers.seconds(one.hidden)), number: true },
        { title: "behind", of: (one) => one.behind },
      ], { label: `hidden communication of ${program.name}` }));
  }

  function lanes(directory, program, { nodes, end }, layers, facts) {
    const colours = new Map();
    const bars = [];
    nodes.forEach((node, i) => {
      if (!node.seconds) return;
      if (!colours.has(layers[i])) colours.set(layers[i], `var(--axis-${[0, 2, 5, 4][colours.size % 4]})`);
      const last = bars.at(-1);
      const to = node.begins + node.seconds;
      if (last && last.layer === layers[i] && node.begins - last.to < end / MOST_BARS) last.to = to;
      else bars.push({ layer: layers[i], from: node.begins, to, colour: colours.get(layers[i]), text: layers[i].replace(/^\//, "") });
    });
    for (const bar of bars) bar.title = `${bar.layer}: ${numbers.seconds(bar.to - bar.from)}`;
    const sent = facts.map(({ transfer, begins, ends, seconds, hidden }) => ({
      from: begins,
      to: ends,
      colour: hidden >= seconds / 2 ? "var(--bound)" : "var(--axis-1)",
      title: `${directory.texts[program.nodes[transfer.node].name]}: ${numbers.seconds(seconds)}, ${numbers.seconds(hidden)} hidden`,
    }));
    return charts.lanes([{ name: "computing", bars }, { name: "communication", bars: sent }], end, `Time of ${program.name}`);
  }

  /*
   * The seconds of a training step of one micro-batch (in a pipeline, of its micro-batches), or of a
   * run of a forward program, and the parts that add up to them.
   */
  function step(directory) {
    const first = directory.programs[0].name;
    const longest = (wanted) => Math.max(0, ...directory.ranks.filter(wanted).map((program) => play(directory, program).end));
    const main = directory.pipeline ? sizes.seconds(directory, directory.pipeline.end) : longest((program) => program.of === first);
    const updating = (program) => program.of !== first && directory.step.includes(program.of);
    const update = longest(updating);
    const between = Math.max(0, ...directory.ranks.filter(updating).map((program) => exposed(directory, program)));
    return { main, update, between, all: main + update + between };
  }

  /* The seconds of collectives between a program and another one that the other does not hide. */
  function exposed(directory, program) {
    const behind = new Map();
    let seconds = 0;
    for (const one of program.apart) {
      const takes = sizes.seconds(directory, one.seconds);
      if (one.overlaps) behind.set(one.behind, (behind.get(one.behind) ?? 0) + takes);
      else seconds += takes;
    }
    for (const [other, takes] of behind) {
      const running = directory.ranks.find((one) => one.name === other);
      seconds += Math.max(0, takes - (running ? play(directory, running).end : 0));
    }
    return seconds;
  }

  const total = (directory) => step(directory).all;

  return { time, at, play, layersOf, overlap, exposed, step, total };
})();
