"use strict";
/* global onnxpar */
/* Runs: the log of a training, and a trace. */

onnxpar.runs = (() => {
  const { make, tile } = onnxpar.elements;
  const { numbers, table, charts } = onnxpar;

  /* A number in four digits, or with thousands separated. */
  function plain(n) {
    for (const [unit, scale] of [["T", 1e12], ["G", 1e9], ["M", 1e6]]) {
      if (Math.abs(n) >= scale) return `${Number((n / scale).toPrecision(4))} ${unit}`;
    }
    return Math.abs(n) >= 1000 || n === 0 ? numbers.count(n) : String(Number(n.toPrecision(4)));
  }

  const SAMPLES = "Samples per second";
  const RATE = "Learning rate";
  const LOSS = "var(--axis-0)";
  const EVALUATED = "var(--axis-1)";
  /*
   * Curves: the title; [column, what it is, colour]; how numbers up to a largest are written; whether
   * the axis begins at 0; and the base of round numbers.
   */
  const CURVES = [
    ["Loss", [["loss", "training", LOSS], ["evaluation_loss", "evaluation", EVALUATED]], () => plain],
    ["Accuracy in evaluations", [["evaluation_accuracy", "accuracy", EVALUATED]], () => numbers.share],
    ["Tokens per second", [["tokens_per_s", "tokens/s", "var(--axis-2)"]], () => plain, true],
    [SAMPLES, [["samples_per_s", "samples/s", "var(--axis-2)"]], () => plain, true],
    ["Memory of rank 0, at most so far", [["memory_bytes", "memory", "var(--axis-5)"]], () => numbers.bytes, true, 2],
    ["Time of a step", [["step_s", "step", "var(--axis-0)"]], numbers.secondsAs, true],
    ["Operations per second", [["flops_per_s", "operations/s", "var(--axis-2)"]], () => plain, true],
    ["Share of the peak FLOP/s", [["mfu", "utilization", "var(--axis-2)"]], () => numbers.share, true],
    ["Norm of the gradients", [["grad_norm", "norm", "var(--axis-3)"]], () => plain],
    [RATE, [["lr", "rate", "var(--axis-4)"]], () => plain],
  ];
  /* The parts of a step that a log has; the rest of it is computing. */
  const SPLIT = [
    ["input_s", "waiting for input", "var(--axis-4)"],
    ["checkpoint_s", "checkpoint", "var(--axis-3)"],
    ["communication_s", "communication, with waiting for other ranks", "var(--axis-1)"],
    ["optimizer_s", "optimizer", "var(--axis-2)"],
  ];
  const COUNTS = new Set(["epoch", "step", "run_step"]);

  /* What the rows are, in a sentence. */
  function logged({ name, steps, logged, stride }) {
    const all = logged > 1 ? `${numbers.count(logged)} logged steps of ${name}, from step ${numbers.count(steps[0])} to` : `One logged step of ${name},`;
    const some = stride > 1 ? ` One of every ${stride} is shown, and the last.` : "";
    return `${all} step ${numbers.count(steps.at(-1))} of the run.${some}`;
  }

  /* The points [step, value] of a column of steps or of evaluations. */
  function points({ columns, rows, steps, evaluations }, column) {
    if (Object.hasOwn(evaluations, column)) return evaluations[column];
    const place = columns.indexOf(column);
    return place < 0 ? [] : rows.map((row, i) => [steps[i], row[place]]).filter(([, value]) => value !== null);
  }

  function curve(found, [title, columns, formatted, zero, base]) {
    const list = columns
      .map(([column, name, colour]) => ({ name, colour, points: points(found, column), dots: Object.hasOwn(found.evaluations, column) }))
      .filter((one) => one.points.length > (one.dots ? 0 : 1));
    if (!list.length || (title === SAMPLES && found.columns.includes("tokens_per_s"))) return null;
    const values = list.flatMap((one) => one.points.map(([, value]) => value));
    // What never changes is not drawn; the table has it.
    if (title === RATE && values.every((value) => value === values[0])) return null;
    const format = formatted(Math.max(...values));
    const key = list.length > 1 ? legend(list) : null;
    return make("div", {}, make("h3", {}, title), key, charts.curves(list, `${title} over steps`, { format, zero, base }));
  }

  const legend = (list) =>
    make("div", { class: "legend" }, list.map(({ name, colour }) => make("span", {}, make("i", { style: { background: colour } }), name)));

  /* What a step's time went into, as shares of it. */
  function split({ columns, rows, steps }) {
    const whole = columns.indexOf("step_s");
    const known = SPLIT.filter(([column]) => columns.includes(column));
    const shown = rows.map((row, i) => [row, steps[i]]).filter(([row]) => row[whole] > 0);
    if (whole < 0 || !known.length || shown.length < 2) return null;
    const parts = known.map(([column, name, colour]) => {
      const place = columns.indexOf(column);
      return { name, colour, values: shown.map(([row]) => Math.min((row[place] ?? 0) / row[whole], 1)) };
    });
    const rest = shown.map((_, i) => Math.max(1 - parts.reduce((sum, { values }) => sum + values[i], 0), 0));
    const apart = columns.includes("communication_s") ? "the rest: forward, backward, Python" : "the rest, with communication";
    const layers = [{ name: apart, colour: "var(--axis-0)", values: rest }, ...parts.reverse()];
    const seconds = shown.map(([row]) => row[whole]);
    const sum = (values) => values.reduce((a, b) => a + b, 0);
    // Of the time of all these steps, so that a long step counts for more than a short one.
    const mean = (values) => sum(values.map((value, i) => value * seconds[i])) / sum(seconds);
    const used = layers.filter(({ values }) => mean(values) >= 5e-4);
    return make("div", { class: "wide" }, make("h3", {}, "What rank 0 did in a step"),
      legend(used.map(({ name, colour, values }) => ({ name: `${name}, ${numbers.share(mean(values))}`, colour }))),
      charts.areas(used, "Parts of a step over steps", {
        format: numbers.share, most: 1, base: 10, height: 170,
        feet: [`step ${numbers.count(shown[0][1])}`, `step ${numbers.count(shown.at(-1)[1])}`],
        at: (place) => `step ${numbers.count(shown[place][1])}`,
      }));
  }

  /* The last numbers, as people ask for them. */
  function tiles(found) {
    const last = (column) => points(found, column).at(-1)?.[1];
    const shown = [
      ["last loss", last("loss"), plain],
      ["last loss in an evaluation", last("evaluation_loss"), plain],
      ["last accuracy", last("evaluation_accuracy"), numbers.share],
      ["the last step", last("step_s"), numbers.seconds],
      last("tokens_per_s") === undefined ? ["samples per second in it", last("samples_per_s"), plain] : ["tokens per second in it", last("tokens_per_s"), plain],
      ["of memory on rank 0", last("memory_bytes"), numbers.bytes],
    ];
    return make("div", { class: "tiles" }, shown.filter(([, value]) => value !== undefined)
      .map(([label, value, format]) => tile(label, make("b", {}, format(value)))));
  }

  /* found: { name, columns, rows, steps, logged, stride, evaluations }, see onnxpar/report/read_log.py. */
  function log(found) {
    const { columns, rows } = found;
    return [
      make("p", { class: "soft" }, logged(found)),
      tiles(found),
      make("div", { class: "grid" }, CURVES.slice(0, 2).map((one) => curve(found, one)), split(found), CURVES.slice(2).map((one) => curve(found, one))),
      make("details", {}, make("summary", {}, "All numbers"), table(rows, columns.map((column, place) => ({
        title: column, of: (row) => row[place], number: true,
        shown: (row) => (row[place] === null ? "" : (COUNTS.has(column) ? numbers.count : plain)(row[place])),
      })), { label: "logged steps" })),
    ];
  }

  /* run: what onnxpar/report/trace_data.py returns, and the place of its directory. */
  function trace(run, directories) {
    const { columns, ranks, remarks } = run;
    const directory = directories[run.directory];
    const rows = ranks.map((times, rank) => ({ rank, ...times }));
    return [
      make("p", { class: "soft" }, `From ${run.name}${directories.length > 1 ? `, a run of ${directory.name}` : ""}. Drag to zoom; arrow keys, + and − work, too.`),
      ...onnxpar.timeline.timeline(run.timelines, run.stage_devices < ranks.length ? run.stage_devices : null),
      make("h3", {}, "Means over the steps"),
      table(rows, [
        { title: "rank", of: (row) => row.rank, number: true },
        ...columns.map(([field, title]) => ({ title, of: (row) => row[field], shown: (row) => numbers.seconds(row[field]), number: true })),
      ], { label: "times of a step on each rank", first: 16 }),
      make("p", { class: "soft" }, remarks.map((remark) => `${remark[0].toUpperCase()}${remark.slice(1)}.`).join(" ")),
      make("h3", {}, "Compared with the prediction"),
      onnxpar.measured(directory, run),
    ];
  }

  return { log, trace };
})();
