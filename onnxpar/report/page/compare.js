"use strict";
/* global onnxpar */
/* Two directories in numbers, at the chosen sizes. */

onnxpar.compare = (() => {
  const { remade } = onnxpar.elements;
  const { sizes, numbers, table } = onnxpar;

  const ROWS = [
    ["devices", (d) => d.devices, numbers.count],
    ["pipeline stages", (d) => d.stages, numbers.count],
    ["sharded nodes", (d) => d.programs[0].totals.sharded, numbers.count],
    ["parameters on a device", (d) => d.programs[0].totals.parameter_bytes_per_device, numbers.bytes],
    ["memory of a device at the peak", (d) => (d.ranks.length ? onnxpar.memory.peak(d) : null), numbers.bytes],
    ["collectives in the programs of a step or run", (d) => sizes.ofStep(d, (totals) => totals.collectives), numbers.count],
    ["bytes that a device sends in a step or run", sizes.sent, numbers.bytes],
    ["conflicts", (d) => d.programs[0].totals.conflicts, numbers.count],
    ["predicted seconds of a step or run", (d) => (d.ranks.length ? onnxpar.time.total(d) : null), numbers.seconds],
    ["bytes of all files", (d) => d.files.bytes, numbers.bytes],
  ];

  function compare([first, second]) {
    return remade(() => {
      const rows = ROWS.map(([title, of, format]) => ({ title, a: of(first), b: of(second), format }));
      return table(rows, [
        { title: "", of: (row) => row.title },
        { title: first.name, of: (row) => row.a, shown: (row) => row.format(row.a), number: true },
        { title: second.name, of: (row) => row.b, shown: (row) => row.format(row.b), number: true },
        { title: `${second.name} / ${first.name}`, of: (row) => ratio(row), shown: (row) => (ratio(row) === null ? "" : ratio(row).toFixed(2)), number: true },
      ], { label: "comparison" });
    });
  }

  const ratio = ({ a, b }) => (a && b != null ? b / a : null);
  return compare;
})();
