"use strict";
/* global onnxpar */
/* A step of a pipeline: what each stage computes when, at the predicted times. */

onnxpar.pipeline = (() => {
  const { make, empty, remade } = onnxpar.elements;
  const { sizes, numbers, charts } = onnxpar;
  const COLOURS = { F: "var(--axis-0)", B: "var(--axis-1)", I: "var(--axis-1)", W: "var(--axis-2)" };
  const WORDS = { F: "forward", B: "backward", I: "backward, inputs", W: "backward, weights" };

  function pipeline(directory) {
    const found = directory.pipeline;
    if (!found) return empty("No pipeline: every device runs the complete program.");
    return remade(() => drawn(found, (time) => sizes.seconds(directory, time)));
  }

  function drawn(found, seconds) {
    const end = seconds(found.end);
    const spans = found.ranks.map((actions) => actions.map(([kind, chunk, micro, from, to]) => ({ kind, chunk, micro, from: seconds(from), to: seconds(to) })));
    const idle = spans.map((actions) => 1 - actions.reduce((busy, { from, to }) => busy + to - from, 0) / (end || 1));
    const rows = spans.map((actions, stage) => ({
      name: `stage ${stage}`,
      bars: actions.map(({ kind, chunk, micro, from, to }) => ({
        from, to,
        colour: COLOURS[kind],
        text: String(micro),
        title: `${WORDS[kind]} of micro-batch ${micro}${found.chunks > 1 ? `, chunk ${chunk}` : ""}: ${numbers.seconds(to - from)}`,
      })),
    }));
    const used = [...new Set(found.ranks.flat().map(([kind]) => kind))];
    return [
      make("p", {}, `${found.micro_batches} micro-batches by the schedule ${found.schedule}: `, make("b", {}, numbers.seconds(end)),
        `; the stages are idle for ${idle.map(numbers.share).join(", ")} of it.`),
      make("div", { class: "legend" }, used.map((kind) => make("span", {}, make("i", { style: { background: COLOURS[kind] } }), WORDS[kind])),
        make("span", { class: "soft" }, "Numbers are micro-batches.")),
      charts.lanes(rows, end, "Timeline of the pipeline"),
    ];
  }

  return pipeline;
})();
