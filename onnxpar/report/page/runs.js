"use strict";
/* global onnxpar */
/* Runs: the log of a training, and where the time of a step of a trace went. */

onnxpar.runs = (() => {
  const { make } = onnxpar.elements;
  const { numbers, table, charts } = onnxpar;
  const WORDS = {
    loss: "Loss", samples_per_s: "Samples per second", tokens_per_s: "Tokens per second", lr: "Learning rate",
    step_s: "Seconds of a step", flops_per_s: "Operations per second", mfu: "Model FLOP/s utilization",
  };
  /* A number in four digits, or with thousands separated. */
  function plain(n) {
    for (const [unit, scale] of [["T", 1e12], ["G", 1e9], ["M", 1e6]]) {
      if (Math.abs(n) >= scale) return `${Number((n / scale).toPrecision(4))} ${unit}`;
    }
    return Math.abs(n) >= 1000 || n === 0 ? numbers.count(n) : String(Number(n.toPrecision(4)));
  }

  const COUNTS = new Set(["epoch", "step", "run_step"]);

  /* What the rows are, in a sentence. */
  function logged({ name, steps, logged, stride }) {
    const all = logged > 1 ? `${numbers.count(logged)} logged steps of ${name}, from step ${numbers.count(steps[0])} to` : `One logged step of ${name},`;
    const some = stride > 1 ? ` One of every ${stride} is shown, and the last.` : "";
    return `${all} step ${numbers.count(steps.at(-1))} of the run.${some}`;
  }

  /* log: { name, columns, rows, steps, logged, stride }, see onnxpar/report/read_log.py. */
  function log({ name, columns, rows, steps, ...rest }) {
    const shown = columns.filter((column) => Object.hasOwn(WORDS, column));
    const parts = shown.map((column) => {
      const place = columns.indexOf(column);
      const points = rows.map((row, i) => [steps[i], row[place]]).filter(([, value]) => value !== null);
      if (points.length < 2) return null;
      return [make("h3", {}, WORDS[column]), charts.line(points, plain, `${WORDS[column]} over steps`, "var(--axis-0)")];
    });
    return [
      make("p", { class: "soft" }, logged({ name, steps, ...rest })),
      ...parts,
      make("details", {}, make("summary", {}, "All numbers"), table(rows, columns.map((column, place) => ({
        title: column, of: (row) => row[place], number: true,
        shown: (row) => (row[place] === null ? "" : (COUNTS.has(column) ? numbers.count : plain)(row[place])),
      })), { label: "logged steps" })),
    ];
  }

  /* trace: columns, [field, heading]; the times of each rank; and what else `onnxpar trace` prints. */
  function trace({ name, columns, ranks, remarks }) {
    const rows = ranks.map((times, rank) => ({ rank, ...times }));
    return [
      make("p", { class: "soft" }, `From ${name}.`),
      table(rows, [
        { title: "rank", of: (row) => row.rank, number: true },
        ...columns.map(([field, title]) => ({ title, of: (row) => row[field], shown: (row) => numbers.seconds(row[field]), number: true })),
      ], { label: "times of a step on each rank" }),
      ...remarks.map((remark) => make("p", {}, remark)),
    ];
  }

  return { log, trace };
})();
