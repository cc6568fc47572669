"use strict";
/* global onnxpar */
/* A traced run beside what the cost model predicts of it. */

onnxpar.measured = (() => {
  const { make, name, remade } = onnxpar.elements;
  const { sizes, numbers, table, charts, time, timeline } = onnxpar;
  const RUNTIME = "by the runtime itself";
  const PARTS = {
    compute: "computing", communication: "exposed communication", waiting: "waiting for other ranks",
    bubble: "waiting for other stages", input: "input", checkpoint: "checkpoint", python: "Python",
  };

  /* Adds numbers to the entry of a key. */
  function add(map, key, more) {
    if (!map.has(key)) map.set(key, { predicted: 0, measured: 0, waiting: 0, runs: 0 });
    const entry = map.get(key);
    for (const [field, number] of Object.entries(more)) entry[field] += number;
  }

  /*
   * The programs of a rank that ran, with how often a step of a mean rank runs each, and what is
   * predicted of a run at the chosen sizes.
   */
  function programs(directory, { programs: ran }) {
    return ran.flatMap(([called, runs]) => {
      const program = directory.ranks.find((one) => one.name === called);
      if (program === undefined) return [];
      const played = time.play(directory, program);
      const layers = time.layersOf(directory, program);
      const sent = played.transfers.map((one) => time.overlap(played, layers, one));
      return [{ program, runs, played, layers, sent }];
    });
  }

  /* The parts of a step of a mean rank, predicted. What is left of the step is for other stages. */
  function parts(directory, found) {
    const sum = (of) => found.reduce((total, one) => total + one.runs * of(one), 0);
    const compute = sum(({ played }) => played.nodes.reduce((total, node) => total + node.seconds, 0));
    const communication = sum(({ program, sent }) =>
      sent.reduce((total, { seconds, hidden }) => total + seconds - hidden, 0) + time.exposed(directory, program));
    const trains = directory.pipeline && found.some(({ program }) => program.of === directory.programs[0].name);
    const step = trains ? time.total(directory) : compute + communication;
    return { step, compute, communication, bubble: trains ? Math.max(step - compute - communication, 0) : 0 };
  }

  /* The collectives by kind and axis. */
  function kinds(directory, found, { calls }) {
    const rows = new Map();
    const key = ({ op, over }) => `${op}\n${over || "stages"}`;
    const known = new Map();
    for (const { program, runs, sent } of found) {
      for (const { transfer, seconds } of sent) {
        known.set(directory.texts[program.nodes[transfer.node].name], key(transfer));
        add(rows, key(transfer), { predicted: runs * seconds });
      }
      for (const one of program.apart) {
        known.set(directory.texts[one.node], key(one));
        add(rows, key(one), { predicted: runs * sizes.seconds(directory, one.seconds) });
      }
    }
    for (const [kind, node, runs, , seconds, waiting] of calls) {
      const own = kind === "collective" ? known.get(node) ?? `collective\n${RUNTIME}` : `${kind}\nstages`;
      add(rows, own, { measured: seconds, waiting, runs });
    }
    return [...rows].map(([own, row]) => {
      const [op, over] = own.split("\n");
      return { op, over, ...row, predicted: row.predicted || null };
    }).filter(({ runs }) => runs > 0);
  }

  /* The layers, from the times of operators. */
  function layers(directory, found, { operators, calls }) {
    const rows = new Map();
    const place = new Map();
    for (const { program, runs, played, layers: own, sent } of found) {
      const update = program.of !== directory.programs[0].name && directory.step.includes(program.of);
      const said = own.map((layer) => (update ? "the update" : layer));
      program.nodes.forEach((node, i) => {
        place.set(`${program.name}\n${directory.texts[node.name]}`, said[i]);
        add(rows, said[i], { predicted: runs * played.nodes[i].seconds, runs: 1 });
      });
      for (const { transfer } of sent) place.set(directory.texts[program.nodes[transfer.node].name], said[transfer.node]);
    }
    for (const [program, node, seconds] of operators) {
      const own = node === program ? "between operators" : place.get(`${program}\n${node}`) ?? "made by onnxruntime";
      add(rows, own, { measured: seconds });
    }
    const sent = new Map();
    for (const [, node, , , seconds] of calls) {
      if (place.has(node)) sent.set(place.get(node), (sent.get(place.get(node)) ?? 0) + seconds);
    }
    return [...rows].map(([layer, row]) => ({ layer, ...row, predicted: row.runs ? row.predicted : null, sent: sent.get(layer) ?? 0 }));
  }

  const ratio = ({ measured, predicted }) => (measured && predicted ? measured / predicted : null);
  const seconds = (title, of) => ({ title, of, number: true, shown: (row) => (of(row) === null ? "" : numbers.seconds(of(row))) });
  const compared = [
    seconds("measured", (row) => row.measured),
    seconds("predicted", (row) => row.predicted),
    { title: "measured / predicted", of: ratio, number: true, shown: (row) => (ratio(row) === null ? "" : String(Number(ratio(row).toPrecision(3)))) },
  ];

  /* The step as two bars on one scale, and its parts as numbers. */
  function step(run, predicted) {
    const mean = (field) => run.ranks.reduce((sum, rank) => sum + rank[field], 0) / run.ranks.length;
    const rows = [...Object.entries(PARTS), ["step", "step"]]
      .map(([field, said]) => ({ field, part: said, measured: mean(field), predicted: predicted?.[field] ?? null }))
      .filter((row) => row.measured >= 5e-7 || row.predicted);
    const bars = (of) => {
      let at = 0;
      return rows.filter((row) => row.field !== "step" && of(row) > 0).map((row) => {
        const [, colour, pale] = timeline.KINDS[row.field];
        const from = at;
        at += of(row);
        return { from, to: at, colour, pale, text: row.part, title: `${row.part}: ${numbers.seconds(of(row))}` };
      });
    };
    const list = [{ name: "measured", bars: bars((row) => row.measured) }];
    if (predicted) list.push({ name: "predicted", bars: bars((row) => row.predicted) });
    return [
      charts.lanes(list, Math.max(mean("step"), predicted?.step ?? 0), "A step, measured and predicted"),
      table(rows, [{ title: "of a step", of: (row) => row.part }, ...compared], { label: "parts of a step, measured and predicted" }),
    ];
  }

  /* What the prediction is for, and whether the run was like that. */
  function premise(directory, run) {
    const { sizes: ran, other_sizes: others } = run.measured;
    const chosen = directory.symbols.filter(({ name: called }) => called in ran);
    const differ = chosen.filter((symbol) => symbol.value !== ran[symbol.name]);
    const text = [`Predicted for the machine ${directory.machine} (onnxpar report --machine)${time.at(directory)}; measured on ${numbers.count(run.ranks.length)} ranks, device ${run.device}.`];
    if (differ.length) text.push(` The run had ${chosen.map((symbol) => `${symbol.name}=${ran[symbol.name]}`).join(", ")}.`);
    else if (others) text.push(" Some runs of its programs had other sizes; these are the most frequent.");
    if (!chosen.length && directory.symbols.length) text.push(" The trace does not say which sizes the run had.");
    return make("p", {}, text);
  }

  /* run: what onnxpar/report/trace_data.py returns. */
  function measured(directory, run) {
    return remade(() => {
      const found = programs(directory, run.measured);
      const predicted = found.length ? parts(directory, found) : null;
      const content = [premise(directory, run), ...step(run, predicted)];
      const rows = kinds(directory, found, run.measured);
      if (rows.length) {
        content.push(make("h3", {}, "Communication by kind and axis"),
          make("p", { class: "soft" }, "Of a step of a mean rank, hidden or not. Times begin when the last rank has arrived; waiting for it is apart."),
          table(rows, [
            { title: "collective or message", of: (row) => row.op },
            { title: "over", of: (row) => row.over },
            { title: "how many", of: (row) => row.runs, shown: (row) => numbers.count(row.runs), number: true },
            ...compared,
            seconds("waiting", (row) => row.waiting),
          ], { label: "communication, measured and predicted", by: 3 }));
      }
      if (run.measured.operators.length) {
        content.push(make("h3", {}, "Computing by layer"),
          table(layers(directory, found, run.measured), [
            { title: "layer", of: (row) => row.layer, shown: (row) => name(row.layer) },
            ...compared,
            seconds("communication, measured", (row) => row.sent),
          ], { label: "layers, measured and predicted", by: 1, first: 24 }));
      }
      return content;
    });
  }

  return measured;
})();
