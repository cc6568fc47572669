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
  const plain = (n) => (Math.abs(n) >= 1000 || n === 0 ? numbers.count(n) : String(Number(n.toPrecision(4))));

  /* log: { name, columns, rows }: numbers of each logged step. */
  function log({ name, columns, rows }) {
    const shown = columns.filter((column) => Object.hasOwn(WORDS, column));
    const parts = shown.map((column) => {
      const place = columns.indexOf(column);
      const points = rows.map((row, i) => [i + 1, row[place]]).filter(([, value]) => value !== null);
      if (points.length < 2) return null;
      return [make("h3", {}, WORDS[column]), charts.line(points, plain, `${WORDS[column]} over steps`, "var(--axis-0)")];
    });
    return [
      make("p", { class: "soft" }, `${rows.length} steps of ${name}`),
      ...parts,
      make("details", {}, make("summary", {}, "All numbers"), table(rows, columns.map((column, place) => ({
        title: column, of: (row) => row[place], shown: (row) => (row[place] === null ? "" : plain(row[place])), number: true,
      })), { label: "logged steps" })),
    ];
  }

  /* trace: what `onnxpar trace --json` prints, with the file's name. */
  function trace({ name, summary }) {
    const ranks = summary.ranks.map((times, rank) => ({ rank, ...times }));
    const parts = Object.keys(ranks[0] ?? {});
    return [
      make("p", { class: "soft" }, `${name}: ${summary.command} on ${summary.device}; seconds of a step, means over ${summary.steps} steps.`),
      summary.stragglers.length ? make("p", {}, `The others wait for rank ${summary.stragglers.join(", ")}.`) : null,
      table(ranks, parts.map((part) => ({
        title: part.replaceAll("_", " "),
        of: (row) => row[part],
        shown: (row) => (part === "rank" ? String(row[part]) : numbers.seconds(row[part])),
        number: true,
      })), { label: "time of a step on each rank" }),
    ];
  }

  return { log, trace };
})();
