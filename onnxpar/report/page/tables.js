"use strict";
/* global onnxpar */
/* Tables that the reader sorts by a click on a column's title, and filters by text. */

onnxpar.table = (() => {
  const { make } = onnxpar.elements;
  const FEW = 8;

  /*
   * columns: { title, of(row) -> text or number, shown(row) -> text or element, number, live }
   * A column that is `live` depends on the chosen sizes.
   */
  function table(rows, columns, options = {}) {
    const state = { by: options.by ?? null, down: options.down ?? true, filter: "", all: false };
    const body = make("tbody");
    const shown = make("span", { class: "soft", "aria-live": "polite" });
    const more = make("button", { type: "button", onclick: () => ((state.all = true), show()) });
    const heads = columns.map((column, place) =>
      make(
        "th",
        { class: column.number ? "number" : undefined, scope: "col" },
        make("button", { type: "button", onclick: () => sort(place) }, column.title),
      ),
    );
    const cells = new Map();

    function sort(place) {
      const first = columns[place].number === true;
      state.down = state.by === place ? !state.down : first;
      state.by = place;
      show();
    }

    function ordered() {
      const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
      const found = rows.filter((row) => {
        const text = columns.map((column) => String(column.of(row) ?? "")).join(" ").toLowerCase();
        return words.every((word) => text.includes(word));
      });
      if (state.by === null) return found;
      const { of, number } = columns[state.by];
      const keyed = found.map((row, place) => [of(row), place, row]);
      const sign = state.down ? -1 : 1;
      keyed.sort(([a, i], [b, j]) => {
        const less = number ? (a ?? -1) - (b ?? -1) : String(a ?? "").localeCompare(String(b ?? ""));
        return sign * less || i - j;
      });
      return keyed.map(([, , row]) => row);
    }

    function line(row) {
      if (!cells.has(row)) {
        const made = columns.map((column) => {
          const content = column.shown === undefined ? column.of(row) : column.shown(row);
          const kind = [column.number && "number", column.kind].filter(Boolean).join(" ");
          return make("td", { class: kind || undefined }, content);
        });
        cells.set(row, make("tr", {}, made));
      }
      return cells.get(row);
    }

    function show() {
      const found = ordered();
      const visible = state.all ? found : found.slice(0, options.first ?? 100);
      body.replaceChildren(...visible.map(line));
      heads.forEach((head, place) => {
        if (state.by === place) head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
        else head.removeAttribute("aria-sort");
      });
      shown.textContent = found.length < rows.length ? `${found.length} of ${rows.length} rows` : `${rows.length} rows`;
      more.textContent = `Show all ${found.length} rows`;
      more.hidden = visible.length === found.length;
    }

    const search = make("input", {
      type: "search",
      placeholder: "Search",
      "aria-label": `Search ${options.label ?? "this table"}`,
      oninput: (event) => ((state.filter = event.target.value), show()),
    });
    if (columns.some((column) => column.live)) {
      onnxpar.sizes.onChange(() => {
        cells.clear();
        show();
      });
    }
    window.addEventListener("beforeprint", () => ((state.all = true), show()));
    show();
    return make(
      "div",
      { class: "table" },
      rows.length > FEW ? make("div", { class: "tools" }, search, shown) : null,
      make("table", { "aria-label": options.label }, make("thead", {}, make("tr", {}, heads)), body),
      more,
    );
  }

  return table;
})();

/* The column of how many equal layers a row stands for. */
onnxpar.layers = {
  title: "layers", of: (row) => row.count, shown: (row) => (row.count > 1 ? `× ${row.count}` : ""), number: true,
};
