// Keys for those who leave the mouse alone.

import { h } from "./dom.js";

const PLACES = { o: "/", t: "/tasks", s: "/sessions", r: "/runs" };
const HELP = [
  [["g", "o"], "overview"],
  [["g", "t"], "tasks"],
  [["g", "s"], "sessions"],
  [["g", "r"], "runs"],
  [["/"], "search"],
  [["j"], "next line or model call"],
  [["k"], "the one before"],
  [["Enter"], "open it"],
  [["←", "→"], "token before and after, in the token view"],
  [["?"], "this list"],
];

export function listenToKeys(router) {
  let isGoing = false;
  document.getElementById("help").addEventListener("click", help);
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.target.closest("input, select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (isGoing && PLACES[event.key]) router.go(PLACES[event.key]);
    else if (event.key === "/") focusSearch(event);
    else if (event.key === "j") step(1);
    else if (event.key === "k") step(-1);
    else if (event.key === "?") help();
    isGoing = event.key === "g";
  });
}

function focusSearch(event) {
  const search = document.querySelector("input[type=search]");
  if (!search) return;
  event.preventDefault();
  search.focus();
  search.select();
}

/** Lines are whatever a page marks as such; the focus moves between their links and buttons. */
function step(by) {
  const lines = [...document.querySelectorAll("[data-line]")];
  if (!lines.length) return;
  const at = lines.indexOf(document.activeElement);
  const next =
    lines[at < 0 ? (by > 0 ? 0 : lines.length - 1) : Math.min(Math.max(at + by, 0), lines.length - 1)];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
  if (next.dataset.line === "open") next.click();
}

function help() {
  const dialog = h(
    "dialog",
    { "aria-labelledby": "help-title", onclose: () => dialog.remove() },
    h("h2", { id: "help-title" }, "Keys"),
    h(
      "dl",
      { class: "keys" },
      HELP.map(([keys, text]) => [
        h(
          "dt",
          null,
          keys.map((key) => [h("kbd", null, key), " "]),
        ),
        h("dd", null, text),
      ]),
    ),
    h("div", { class: "actions" }, h("button", { type: "button", onclick: () => dialog.close() }, "Close")),
  );
  document.body.append(dialog);
  dialog.showModal();
}
