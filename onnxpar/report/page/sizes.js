"use strict";
/* The sizes of symbols that the reader chose, and what formulas are worth at them. */

const onnxpar = {};

onnxpar.sizes = (() => {
  const listeners = [];
  const binary = {
    "+": (a, b) => a + b,
    "-": (a, b) => a - b,
    "*": (a, b) => a * b,
    "/": (a, b) => a / b,
    "//": (a, b) => Math.floor(a / b),
    "%": (a, b) => a - b * Math.floor(a / b),
    "**": (a, b) => a ** b,
    min: Math.min,
    max: Math.max,
  };
  const unary = { neg: (a) => -a, floor: Math.floor, ceil: Math.ceil };

  /* The value of the code of a formula: a program for a stack, see `postfix` in onnxpar_format. */
  function evaluate(code, values) {
    const stack = [];
    for (const token of code) {
      if (typeof token === "number") stack.push(token);
      else if (Array.isArray(token)) stack.push(values[token[0]]);
      else if (Object.hasOwn(unary, token)) stack.push(unary[token](stack.pop()));
      else {
        const right = stack.pop();
        stack.push(binary[token](stack.pop(), right));
      }
    }
    return stack[0];
  }

  /* The number of a size of a directory: a number, or a formula by its place; null without one. */
  function value(directory, size) {
    if (size === null || size === undefined) return null;
    if (typeof size === "number") return size;
    const formula = directory.formulas[size[0]];
    if (formula.code === null) return null;
    if (directory.known === undefined) directory.known = new Map();
    if (!directory.known.has(size[0])) {
      const values = directory.symbols.map((symbol) => symbol.value);
      directory.known.set(size[0], evaluate(formula.code, values));
    }
    return directory.known.get(size[0]);
  }

  function text(directory, size) {
    if (size === null || size === undefined) return "unknown";
    return typeof size === "number" ? String(size) : directory.formulas[size[0]].text;
  }

  function shapeText(directory, place) {
    if (place === null) return "unknown";
    return `[${directory.shapes[place].map((size) => text(directory, size)).join(", ")}]`;
  }

  /* The elements of a shape at the chosen sizes. */
  function elements(directory, place) {
    if (place === null) return null;
    let product = 1;
    for (const size of directory.shapes[place]) {
      const found = value(directory, size);
      if (found === null) return null;
      product *= found;
    }
    return product;
  }

  /*
   * The points of the directory's grid around the chosen sizes, as [place, weight]. Weights are those
   * of logarithms: between two sizes, and beyond the last, times grow by a power of the size.
   */
  function around(directory) {
    if (directory.corners !== undefined) return directory.corners;
    let corners = [[0, 1]];
    directory.grid.forEach((axis, place) => {
      const value = directory.symbols[place].value;
      const exact = axis.sizes.indexOf(value);
      let parts = [[exact, 1]];
      if (exact < 0) {
        const above = axis.sizes.findIndex((size) => size > value);
        const low = Math.min(Math.max((above < 0 ? axis.sizes.length : above) - 1, 0), axis.sizes.length - 2);
        const [a, b] = [axis.sizes[low], axis.sizes[low + 1]].map((size) => Math.log(Math.max(size, 0.5)));
        const share = (Math.log(Math.max(value, 0.5)) - a) / (b - a);
        parts = axis.sizes.length < 2 ? [[0, 1]] : [[low, 1 - share], [low + 1, share]];
      }
      corners = corners.flatMap(([at, weight]) =>
        parts.map(([part, share]) => [at * axis.sizes.length + part, weight * share]));
    });
    directory.corners = corners.filter(([, weight]) => weight !== 0);
    directory.seconds = new Map();
    return directory.corners;
  }

  /* The seconds of a time of a directory: a number, or a list for the points of the grid by its place. */
  function seconds(directory, time) {
    if (typeof time === "number") return time;
    const corners = around(directory);
    if (!directory.seconds.has(time[0])) {
      const times = directory.times[time[0]];
      const power = corners.every(([at]) => times[at] > 0);
      const sum = corners.reduce((total, [at, weight]) => total + weight * (power ? Math.log(times[at]) : times[at]), 0);
      const found = power ? Math.exp(sum) : Math.max(sum, 0);
      directory.seconds.set(time[0], corners.length === 1 ? times[corners[0][0]] : found);
    }
    return directory.seconds.get(time[0]);
  }

  /* Whether times at the chosen sizes were predicted; otherwise they are estimated from others. */
  const predicted = (directory) => around(directory).length === 1;

  /* Gives symbols of this name another size, in all directories. */
  function choose(directories, name, size) {
    for (const directory of directories) {
      const symbol = directory.symbols.find((one) => one.name === name);
      if (symbol === undefined) continue;
      symbol.value = admissible(symbol, size);
      directory.known = directory.corners = undefined;
    }
    for (const listener of listeners) listener();
  }

  /* The nearest size that the constraints of a symbol admit. */
  function admissible(symbol, size) {
    const least = symbol.least ?? 1;
    const most = symbol.most ?? Infinity;
    const steps = Math.round((size - least) / symbol.step);
    const found = least + Math.max(0, steps) * symbol.step;
    return found <= most ? found : most;
  }

  const onChange = (listener) => listeners.push(listener);

  /* The sum over the programs of a training step of one micro-batch, or of a run of a forward program. */
  function ofStep(directory, of) {
    return directory.programs.filter((one) => directory.step.includes(one.name)).reduce((sum, one) => sum + of(one.totals), 0);
  }

  /*
   * The bytes that a device sends in this step or run. In a pipeline, these are those of all
   * micro-batches of a step, collectives and messages, on the stage that sends the most.
   */
  function sent(directory) {
    const known = (size) => value(directory, size) ?? 0;
    const { stage_totals: stages, transfers } = directory.programs[0];
    if (!stages.length) return ofStep(directory, (totals) => known(totals.bytes));
    const each = stages.map(({ stage, bytes }) => {
      const messages = transfers.filter(({ from, to }) => from === stage && to !== stage);
      const batch = messages.reduce((sum, message) => sum + known(message.bytes), known(bytes));
      const update = directory.programs.find(({ name }) => directory.step.includes(name) && name.endsWith(`.${stage}`));
      return directory.micro_batches * batch + (update ? known(update.totals.bytes) : 0);
    });
    return Math.max(...each);
  }

  return { evaluate, ofStep, sent, value, text, shapeText, elements, seconds, predicted, choose, admissible, onChange };
})();

onnxpar.numbers = (() => {
  const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });
  const three = (n) => (n >= 999.5 ? String(Math.round(n)) : String(toEven(n)));

  /* Three digits. What is in the middle of two becomes the even one, as in the texts of commands. */
  function toEven(n) {
    const near = Number(n.toPrecision(3));
    const unit = 10 ** (Math.floor(Math.log10(Math.abs(n))) - 2);
    const middle = Math.abs(Math.abs(near - n) - unit / 2) < 1e-9 * unit;
    return middle && Math.round(near / unit) % 2 ? Number((near - Math.sign(near - n) * unit).toPrecision(3)) : near;
  }

  function count(n) {
    return n === null || n === undefined ? "unknown" : whole.format(n);
  }

  function bytes(n) {
    if (n === null || n === undefined) return "unknown";
    for (const [unit, scale] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
      if (Math.abs(n) >= scale) return `${three(n / scale)} ${unit}`;
    }
    return `${whole.format(n)} B`;
  }

  function seconds(n) {
    if (n === null || n === undefined) return "unknown";
    if (n === 0) return "0 s";
    for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
      if (Math.abs(n) >= scale) return `${three(n / scale)} ${unit}`;
    }
    return `${three(n / 1e-9)} ns`;
  }

  /* Seconds up to `most`, all in one unit, which suits the largest. */
  function secondsAs(most) {
    const [unit, scale] = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]].find(([, one]) => most >= one) ?? ["s", 1];
    return (n) => (n === 0 ? "0" : `${Number((n / scale).toPrecision(4))} ${unit}`);
  }

  const share = (n) => `${whole.format(100 * n)} %`;
  return { count, bytes, seconds, secondsAs, share };
})();
