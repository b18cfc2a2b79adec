// A row of filters whose values live in the address, so that a list can be sent to somebody else.

import { h } from "./dom.js";

const TYPING = 250;

/** `fields` are `{ name, label, options, type }`; without options a field is searched as it is typed into.
 * Those of `more` are folded until somebody asks for them or the address names one. */
export function filterRow(fields, query, more, changed) {
  const values = Object.fromEntries([...fields, ...more].map(({ name }) => [name, query.get(name) ?? ""]));
  let waiting = null;
  const set = (name, value, delay) => {
    values[name] = value.trim();
    clearTimeout(waiting);
    waiting = setTimeout(() => changed({ ...values }), delay);
  };
  const field = ({ name, label, options, type }) => {
    if (!options) {
      const oninput = (event) => set(name, event.target.value, TYPING);
      const kind = type === "number" ? { type, step: "any" } : { type: "search", maxlength: 128 };
      const input = h("input", { ...kind, name, value: values[name], oninput });
      return h("label", { class: type ? null : "grows" }, label, input);
    }
    const choices = [["", "any"], ...options.map((option) => [option, option])];
    if (values[name] && !options.includes(values[name])) choices.push([values[name], values[name]]);
    const onchange = (event) => set(name, event.target.value, 0);
    const select = h(
      "select",
      { name, onchange },
      choices.map(([value, text]) => h("option", { value }, text)),
    );
    select.value = values[name];
    return h("label", null, label, select);
  };
  const form = h(
    "form",
    { class: "filters", role: "search", onsubmit: (e) => e.preventDefault() },
    fields.map(field),
    more.length > 0 &&
      h(
        "details",
        { open: more.some(({ name }) => values[name]) },
        h("summary", null, "More filters"),
        h("div", { class: "filters" }, more.map(field)),
      ),
  );
  return { form, values };
}

/** Links to the page after this one and back to the first. */
export function pager(older, before, go) {
  const button = (label, value) => h("button", { type: "button", onclick: () => go(value) }, label);
  return h(
    "div",
    { class: "pager" },
    before ? button("← Newest", null) : h("span"),
    older ? button("Older →", older) : h("span"),
  );
}
