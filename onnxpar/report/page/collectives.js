"use strict";
/* global onnxpar */
/* What moves between devices, and why: collectives, transfers of a pipeline, conflicts, replicas. */

onnxpar.collectives = (() => {
  const { make, live, name, formula, empty } = onnxpar.elements;
  const { sizes, numbers, table, layers } = onnxpar;

  const way = ({ before, after }) => (before || after ? `${before} → ${after}` : "inside the operator");
  const bytesOf = (directory) => (row) => sizes.value(directory, row.bytes);
  const sizeColumns = (directory, title) => [
    {
      title: `${title}, formula`,
      of: (row) => sizes.text(directory, row.bytes),
      shown: (row) => formula(sizes.text(directory, row.bytes)),
      kind: "formula mono",
    },
    {
      title: `${title}, at the chosen sizes`,
      of: bytesOf(directory),
      shown: (row) => live("span", {}, () => numbers.bytes(sizes.value(directory, row.bytes))),
      number: true,
      live: true,
    },
  ];

  const numbered = (n) => `${numbers.count(n)} collective${n === 1 ? "" : "s"}`;

  function sum(directory, rows) {
    let total = 0;
    for (const row of rows) {
      const bytes = sizes.value(directory, row.bytes);
      if (bytes === null) return null;
      total += bytes;
    }
    return total;
  }

  /* Rows by kind and axis: how often, and how many bytes together. */
  function byKind(directory, collectives) {
    const groups = new Map();
    for (const collective of collectives) {
      const key = `${collective.op}\n${collective.over}`;
      if (!groups.has(key)) groups.set(key, { op: collective.op, over: collective.over || "stages", size: collective.over ? collective.size : directory.stages, rows: [] });
      groups.get(key).rows.push(collective);
    }
    return [...groups.values()];
  }

  function formulas(directory, rows) {
    const counts = new Map();
    for (const row of rows) {
      const text = sizes.text(directory, row.bytes);
      counts.set(text, (counts.get(text) ?? 0) + 1);
    }
    const terms = [...counts].map(([text, count]) => (count > 1 ? `${count} × ${/[ ]/.test(text) ? `(${text})` : text}` : text));
    return terms.length > 6 ? `${terms.slice(0, 6).join(" + ")} + …` : terms.join(" + ");
  }

  function collectives(directory) {
    return directory.programs.map((program) => ofProgram(directory, program));
  }

  function ofProgram(directory, program) {
    const all = program.collectives;
    const title = directory.programs.length > 1 ? make("h3", {}, program.name) : null;
    const transfers = program.transfers.length
      ? [
          make("h3", {}, "Between stages, in each micro-batch"),
          table(
            program.transfers,
            [
              { title: "value", of: (row) => row.value, shown: (row) => name(row.value) },
              { title: "from stage", of: (row) => row.from, number: true },
              { title: "to stage", of: (row) => row.to, number: true },
              ...sizeColumns(directory, "bytes of a rank"),
            ],
            { label: "transfers between stages" },
          ),
        ]
      : [];
    if (!all.length) return [title, empty("No collectives."), ...transfers];
    const groups = byKind(directory, all);
    // A program without a number is that of all stages.
    const together = directory.stages > 1 && !/\.\d+$/.test(program.name) ? ", summed over the stages" : "";
    return [
      title,
      make("p", {}, "A device sends ", live("b", {}, () => numbers.bytes(sum(directory, all))), ` in ${numbered(all.length)} of one run${together}.`),
      table(
        groups,
        [
          { title: "collective", of: (row) => row.op },
          { title: "over", of: (row) => row.over },
          { title: "devices in a group", of: (row) => row.size, number: true },
          { title: "how many", of: (row) => row.rows.length, number: true },
          { title: "bytes sent, formula", of: (row) => formulas(directory, row.rows),
            shown: (row) => formula(formulas(directory, row.rows)), kind: "formula mono" },
          {
            title: "bytes sent, at the chosen sizes",
            of: (row) => sum(directory, row.rows),
            shown: (row) => live("span", {}, () => numbers.bytes(sum(directory, row.rows))),
            number: true,
            live: true,
          },
        ],
        { label: `collectives of ${program.name} by kind`, by: 5 },
      ),
      make(
        "details",
        {},
        make("summary", {}, all.length === 1 ? "The collective" : `All ${numbered(all.length)}`),
        table(
          all,
          [
            { title: "collective", of: (row) => row.op },
            { title: "over", of: (row) => row.over || "stages" },
            { title: "value", of: (row) => directory.texts[row.value], shown: (row) => name(directory.texts[row.value]) },
            { title: "before → after", of: way, shown: (row) => formula(way(row)), kind: "mono" },
            { title: "for", of: (row) => directory.texts[row.reason], shown: (row) => name(directory.texts[row.reason]) },
            { title: "behind", of: (row) => row.behind ?? "nothing" },
            ...sizeColumns(directory, "bytes sent"),
          ],
          { label: `all collectives of ${program.name}` },
        ),
      ),
      ...transfers,
    ];
  }

  function conflicts(directory) {
    const rows = directory.programs.flatMap((program) => program.conflicts.map((c) => ({ ...c, program: program.name })));
    if (!rows.length) return empty("No conflicts: neighbours agree on every layout.");
    return table(
      rows,
      [
        { title: "value", of: (row) => row.value, shown: (row) => name(row.value) },
        { title: "from → to", of: (row) => `${row.from} → ${row.to}`, shown: (row) => formula(`${row.from} → ${row.to}`), kind: "mono" },
        { title: "reader", of: (row) => row.node || "the output", shown: (row) => (row.node ? name(row.node) : "the output") },
        { title: "by", of: (row) => row.steps.join(", ") },
        ...sizeColumns(directory, "bytes sent"),
        {
          title: "more, at typical sizes, than without it",
          of: (row) => (row.cost_in_current_layout === null ? null : row.cost - row.cost_in_current_layout),
          shown: (row) =>
            row.cost_in_current_layout === null ? "it is needed" : numbers.bytes(row.cost - row.cost_in_current_layout),
          number: true,
        },
        { title: "why", of: (row) => row.reason },
      ],
      { label: "conflicts", by: 5 },
    );
  }

  /*
   * Nodes that every device computes completely, and parameters of which several devices have copies.
   * Those of equal layers are shown once, with * for what differs in their names.
   */
  function replicated(directory) {
    const { texts } = directory;
    const [why, plain] = [new Map(), new Map()];
    for (const program of directory.programs) {
      const reasons = new Map(program.replicated.map((row) => [row.name, row.reason]));
      for (const [start, size, count, names] of program.blocks) {
        // Of equal layers, the first stands for all.
        program.nodes.slice(start, start + size).forEach((node, place) => {
          const reason = reasons.get(node.name);
          if (reason === undefined && node.sharded) return;
          const row = { name: count > 1 ? names[place] : node.name, op: texts[node.op], program: program.name, reason, count: 0 };
          const key = Object.values(row).join("\n");
          const rows = reason === undefined ? plain : why;
          if (!rows.has(key)) rows.set(key, row);
          rows.get(key).count += count;
        });
      }
    }
    const columns = [
      { title: "node", of: (row) => row.name, shown: (row) => name(row.name) },
      layers,
      { title: "operator", of: (row) => row.op },
      ...(directory.programs.length > 1 ? [{ title: "program", of: (row) => row.program }] : []),
    ];
    const total = (rows) => [...rows.values()].reduce((sum, { count }) => sum + count, 0);
    const copied = directory.parameters.filter((parameter) => parameter.copies > 1);
    return [
      make("h3", {}, "Nodes"),
      why.size ? table([...why.values()], [...columns, { title: "reason", of: (row) => row.reason }], { label: "replicated nodes", first: 20 }) : null,
      plain.size
        ? make("details", {}, make("summary", {}, `${numbers.count(total(plain))} nodes${directory.programs.length > 1 ? " of all programs" : ""} that read nothing sharded, such as the arithmetic of shapes`),
            table([...plain.values()], columns, { label: "nodes that read nothing sharded" }))
        : null,
      why.size + plain.size ? null : empty("Every node has a sharded operand or result."),
      make("h3", {}, "Parameters"),
      copied.length
        ? table(
            copied,
            [
              { title: "parameter", of: (row) => row.name, shown: (row) => name(row.name) },
              layers,
              { title: "shape", of: (row) => `[${row.shape.join(", ")}]`, shown: (row) => formula(`[${row.shape.join(", ")}]`), kind: "mono" },
              { title: "layout", of: (row) => row.layout, shown: (row) => formula(row.layout), kind: "mono" },
              { title: "shards", of: (row) => row.shards, number: true },
              { title: "devices with a copy of each", of: (row) => row.copies, number: true },
              { title: "bytes of each on a device", of: (row) => row.local, shown: (row) => numbers.bytes(row.local), number: true },
            ],
            { label: "replicated parameters", by: 6, first: 20 },
          )
        : empty("No two devices hold the same part of a parameter."),
    ];
  }

  return { collectives, conflicts, replicated, sum };
})();
