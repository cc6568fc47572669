"use strict";
/* global onnxpar */
/* Elements of the page. All text from the data is set as text, never as markup. */

onnxpar.elements = (() => {
  const SVG = "http://www.w3.org/2000/svg";

  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes ?? {})) {
      if (value === undefined || value === null || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "style") Object.assign(element.style, value);
      else element.setAttribute(name, value === true ? "" : String(value));
    }
    for (const child of children.flat(Infinity)) {
      if (child === undefined || child === null) continue;
      element.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
    return element;
  }

  const make = (name, attributes, ...children) =>
    fill(document.createElement(name), attributes, children);
  const draw = (name, attributes, ...children) =>
    fill(document.createElementNS(SVG, name), attributes, children);

  /* An element whose text is computed again when sizes change. */
  function live(name, attributes, compute) {
    const element = make(name, attributes);
    const show = () => {
      element.textContent = compute();
    };
    show();
    onnxpar.sizes.onChange(show);
    return element;
  }

  /* A part of the page that is made again when sizes change. */
  function remade(compute) {
    const element = make("div");
    const show = () => element.replaceChildren(...[compute()].flat().filter((part) => part !== null));
    show();
    onnxpar.sizes.onChange(show);
    return element;
  }

  function tile(label, content) {
    return make("div", { class: "tile" }, content, make("span", { class: "soft" }, label));
  }

  /* A name in code, which may break after a slash, a dot or an underscore. */
  function name(text) {
    const pieces = text.split(/(?<=[/._:])/);
    return make("code", {}, pieces.flatMap((piece, place) => (place ? [make("wbr"), piece] : [piece])));
  }

  /* A name in one line, from whose middle what does not fit is left out. */
  function oneLine(text, kind) {
    const end = text.lastIndexOf("/");
    return make("span", { class: `middle ${kind}` }, make("span", { class: "begin" }, text.slice(0, Math.max(end, 0))),
      make("span", { class: "end" }, text.slice(Math.max(end, 0))));
  }

  /* A formula or a layout, which breaks after spaces and products, but not within the innermost brackets. */
  function formula(text) {
    return text.split(/(\([^()]*\)|\[[^\][]*\])/).flatMap((part, place) =>
      place % 2
        ? [make("span", { class: "unbroken" }, part)]
        : part.split(/(?<=\*)/).flatMap((piece, i) => (i ? [make("wbr"), piece] : [piece])));
  }

  const empty = (text) => make("p", { class: "empty" }, text);
  return { make, draw, live, remade, tile, name, oneLine, formula, empty };
})();
