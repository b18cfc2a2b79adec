// Elements from names, properties and children. Strings only ever become text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "path", "line", "circle", "rect", "g", "text", "title", "polyline"]);

/** `h("a", { class: "x", href, onclick }, "text", child, [more])`; null and false children are left out. */
export function h(tag, properties, ...children) {
  const isSvg = SVG_TAGS.has(tag);
  const element = isSvg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Put these in place of everything inside; what had the keyboard's focus has it again if it is still there. */
export function fill(element, ...children) {
  const focused = element.contains(document.activeElement) ? likeness(document.activeElement) : null;
  element.replaceChildren();
  append(element, children);
  if (focused)
    [...element.querySelectorAll("a, button, input, select")]
      .find((one) => likeness(one) === focused)
      ?.focus();
  return element;
}

const likeness = (one) =>
  [one.tagName, one.getAttribute("href"), one.name, one.ariaLabel, one.textContent].join("\n");

/** A table in a card; columns are `{ name, number, wide }`, rows arrays of cells or `{ cells, ...properties }`. */
export function table(label, columns, rows) {
  const kind = (column) =>
    [column.number && "number", column.wide && "wide", column.id && "id"].filter(Boolean).join(" ") || null;
  return h(
    "div",
    { class: "card table" },
    h(
      "table",
      { "aria-label": label },
      h(
        "thead",
        null,
        h(
          "tr",
          null,
          columns.map((c) => h("th", { scope: "col", class: kind(c) }, c.name)),
        ),
      ),
      h(
        "tbody",
        null,
        rows.map((row) => {
          const { cells, ...properties } = Array.isArray(row) ? { cells: row } : row;
          return h(
            "tr",
            properties,
            cells.map((cell, at) => h("td", { class: kind(columns[at]) }, cell)),
          );
        }),
      ),
    ),
  );
}

/** Terms and what they are; those that are null are left out. */
export function facts(entries) {
  const shown = entries.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h(
    "dl",
    { class: "facts" },
    shown.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))),
  );
}

export function state(name) {
  return h("span", { class: `state ${name}` }, name);
}

/** A dialog that is asked and answered; resolves to true or false. */
export function confirmed(title, text, verb) {
  return new Promise((resolve) => {
    const close = (answer) => {
      dialog.close();
      dialog.remove();
      resolve(answer);
    };
    const dialog = h(
      "dialog",
      { "aria-labelledby": "dialog-title", oncancel: () => close(false) },
      h("h2", { id: "dialog-title" }, title),
      h("p", null, text),
      h(
        "div",
        { class: "actions" },
        h("button", { type: "button", onclick: () => close(false) }, "Leave it"),
        h("button", { type: "button", class: "danger", onclick: () => close(true) }, verb),
      ),
    );
    document.body.append(dialog);
    dialog.showModal();
  });
}
