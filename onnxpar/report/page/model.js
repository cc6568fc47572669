"use strict";
/* global onnxpar */
/* The model: a row for each node, repeated layers once, and the details of a node. */

onnxpar.model = (() => {
  const { make, live, oneLine } = onnxpar.elements;
  const { layouts, sizes, numbers } = onnxpar;
  const FIRST = 400;

  /* The programs that have nodes, with a choice if there are several. */
  function model(directory) {
    const programs = directory.programs.filter((program) => program.nodes.length > 0);
    if (!programs.length) return onnxpar.elements.empty("No program has nodes.");
    const content = make("div");
    const show = (program) => content.replaceChildren(rows(directory, program));
    show(programs[0]);
    if (programs.length === 1) return [layouts.legend(directory), content];
    const choice = make(
      "select",
      { "aria-label": "Program", onchange: (event) => show(programs[event.target.value]) },
      programs.map((program, place) => make("option", { value: place }, program.name)),
    );
    return [make("p", {}, "Program ", choice), layouts.legend(directory), content];
  }

  function rows(directory, program) {
    const list = make("div", { class: "list" });
    const note = make("span", { class: "soft", "aria-live": "polite" });
    const more = make("button", { type: "button", onclick: () => ((all = true), show()) });
    let words = [];
    let all = false;

    function show() {
      // Nodes for sizes, in the last block, are many and seldom wanted.
      const hidden = words.length || all ? 0 : program.sizes;
      const blocks = hidden ? program.blocks.slice(0, -1) : program.blocks;
      const found = blocks.map((block) => lines(directory, program, block, words)).filter((f) => f.rows.length);
      const total = found.reduce((sum, { rows: some }) => sum + some.length, 0);
      let left = all ? Infinity : FIRST;
      const shown = [];
      for (const { title, rows: some } of found) {
        if (left <= 0) break;
        if (title) shown.push(title());
        shown.push(...some.slice(0, left).map((row) => row()));
        left -= some.length;
      }
      list.replaceChildren(...shown);
      const others = hidden ? `; ${numbers.count(hidden)} only compute sizes and are not shown` : "";
      note.textContent = `${numbers.count(program.nodes.length)} nodes, shown in ${numbers.count(total)} rows${others}`;
      more.textContent = "Show all rows";
      more.hidden = left >= 0 && !hidden;
    }

    const search = make("input", {
      type: "search",
      placeholder: "Search nodes, operators, layouts",
      "aria-label": "Search nodes",
      oninput: (event) => {
        words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
        show();
      },
    });
    window.addEventListener("beforeprint", () => ((all = true), show()));
    show();
    return make(
      "div",
      { class: "table" },
      make("div", { class: "tools" }, search, note),
      make("div", { class: "model" }, head(directory), list),
      more,
    );
  }

  function head(directory) {
    const shown = layouts.shownDevices(directory);
    const each = layouts.devicesOf(directory);
    const stages = Array.from({ length: directory.stages }, (_, stage) => {
      const first = stage * each;
      const few = shown * directory.stages <= 16;
      const numbered = Array.from({ length: shown }, (_, i) => make("span", {}, String(first + i)));
      return make("span", {}, few ? numbered : make("span", {}, `${first}–${first + shown - 1}`));
    });
    const many = shown * directory.stages > 8;
    const cut = shown < each ? ` (${shown} of ${each} in each stage)` : "";
    return make(
      "div",
      { class: "row head" },
      make("span", {}, "node"),
      make("span", {}, "operator"),
      make("span", { class: "layout" }, "layout of the result"),
      make("span", {}, `devices${cut}`, make("span", { class: many ? "devices many" : "devices" }, stages)),
    );
  }

  /* The rows of a block: nodes, or the nodes of one layer that stand for all. */
  function lines(directory, program, [start, size, count, names], words) {
    const found = [];
    for (let i = 0; i < size; i++) {
      const node = program.nodes[start + i];
      const name = count > 1 ? names[i] : node.name;
      const place = node.outputs.length ? node.outputs[0][3] : null;
      const layout = node.outputs.length ? layouts.text(directory, place) : "";
      const operator = directory.texts[node.op];
      const text = `${name} ${operator} ${layout}`.toLowerCase();
      if (!words.every((word) => text.includes(word))) continue;
      found.push(() =>
        make(
          "button",
          {
            type: "button",
            class: "row",
            title: `${name}\n${layout}`,
            onclick: (event) => details(directory, program, start + i, [start, size, count], event.currentTarget),
          },
          oneLine(node.pinned ? `${name} *` : name, "mono"),
          make("span", {}, operator),
          make("span", { class: "layout mono" }, layout),
          layouts.strip(directory, place, node.stage),
        ),
      );
    }
    const titled = (text, more) => () =>
      make("div", { class: "block" }, text, make("span", { class: "soft" }, more));
    let title = null;
    if (count > 1) title = titled(`${count} equal layers`, `${size} nodes each; * is the number that differs`);
    else if (program.sizes && start === program.nodes.length - program.sizes)
      title = titled("Sizes", `${size} nodes that only compute sizes for others`);
    return { title, rows: found };
  }

  let panel = null;
  let opener = null;

  function close() {
    panel?.remove();
    panel = null;
    document.body.classList.remove("detailed");
    opener?.setAttribute("aria-pressed", "false");
    opener?.focus();
  }

  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && panel !== null) close();
  });

  function details(directory, program, number, [start, size, count], from) {
    opener?.setAttribute("aria-pressed", "false");
    panel?.remove();
    opener = from;
    opener.setAttribute("aria-pressed", "true");
    const node = program.nodes[number];
    const others = Array.from({ length: count }, (_, layer) => start + layer * size + ((number - start) % size));
    const facts = [
      ["operator", directory.texts[node.op]],
      ["sharding rule", make("code", {}, directory.texts[node.rule])],
      ["its layouts", why(directory, node)],
    ];
    if (directory.stages > 1) facts.push(["stage", String(node.stage)]);
    if (count > 1) {
      facts.push(["in equal layers", make("details", {}, make("summary", {}, `${count} nodes`),
        others.map((other) => make("div", { class: "mono" }, program.nodes[other].name)))]);
    }
    panel = make(
      "aside",
      { class: "details", role: "dialog", "aria-label": `Node ${node.name}`, tabindex: "-1" },
      make("button", { type: "button", class: "close", onclick: close }, "Close (Esc)"),
      make("h2", { class: "mono" }, node.name),
      make("dl", {}, facts.map(([name, content]) => [make("dt", {}, name), make("dd", {}, content)])),
      node.inputs.map((operand, place) => tensor(directory, node, `operand ${place}`, operand)),
      node.outputs.map((output, place) => [
        tensor(directory, node, `result ${place}`, output),
        output[4] ? tensor(directory, node, `result ${place} after resharding`, output[4]) : null,
      ]),
      communication(directory, program, node),
    );
    document.body.append(panel);
    document.body.classList.add("detailed");
    panel.focus();
  }

  function why(directory, node) {
    if (node.pinned) return "given by the strategy";
    const reason = directory.texts[node.reason];
    return reason ? `replicated: ${reason}` : "propagated from its neighbours, or chosen by the search";
  }

  function tensor(directory, node, title, [name, shape, local, layout]) {
    const text = directory.texts[name];
    if (text === "") return null;
    const facts = [
      ["shape", make("code", {}, sizes.shapeText(directory, shape))],
      ["on a device", make("code", {}, sizes.shapeText(directory, local))],
      ["elements", live("span", {}, () =>
        `${numbers.count(sizes.elements(directory, local))} of ${numbers.count(sizes.elements(directory, shape))}`)],
      ["layout", make("code", {}, layouts.text(directory, layout))],
    ];
    if (layout === null) facts.splice(1, 2);
    return make(
      "section",
      {},
      make("h3", {}, `${title}: `, make("span", { class: "mono" }, text)),
      make("dl", {}, facts.map(([key, content]) => [make("dt", {}, key), make("dd", {}, content)])),
      layouts.blocks(directory, layout, node.stage),
    );
  }

  /* The collectives that bring the operands of a node, or reshard its results. */
  function communication(directory, program, node) {
    const made = node.outputs.map(([name]) => name);
    const found = program.collectives.filter((collective) => {
      const reason = directory.texts[collective.reason];
      return reason === node.name || reason.startsWith(`${node.name} `) || made.includes(collective.value);
    });
    const conflicts = program.conflicts.filter((conflict) => conflict.node === node.name);
    if (!found.length && !conflicts.length) return null;
    return make(
      "section",
      {},
      make("h3", {}, "Communication"),
      found.map((c) =>
        make("p", {}, `${c.op} over ${c.over} of `, make("code", {}, directory.texts[c.value]), ": ",
          live("b", {}, () => numbers.bytes(sizes.value(directory, c.bytes))), ` from each device, for ${directory.texts[c.reason]}`),
      ),
      conflicts.map((c) => make("p", {}, `Conflict: ${c.reason}`)),
    );
  }

  return model;
})();
