// What the evaluator said, and every change of the session's status.

import { facts, fill, h, state, table } from "../dom.js";
import { clock, number } from "../format.js";

export async function report({ detail, body }) {
  const { session, events, instruction } = detail;
  const verdict = session.result?.verdict;
  fill(
    body,
    h(
      "section",
      null,
      h("h2", null, "Evaluator"),
      verdict ? judged(verdict) : h("p", { class: "card empty" }, "There is no verdict."),
    ),
    h("section", null, h("h2", null, "Instruction"), h("pre", { class: "card" }, instruction)),
    h("section", null, h("h2", null, "Events"), history(events)),
  );
}

function judged(verdict) {
  const components = Object.entries(verdict.components).map(([name, value]) => [name, number(value)]);
  return [
    h("div", { class: "card" }, facts([["Reward", number(verdict.reward)], ...components])),
    verdict.report && h("pre", { class: "card more" }, verdict.report),
  ];
}

function history(events) {
  const columns = [
    { name: "At" },
    { name: "Status" },
    { name: "Attempt", number: true },
    { name: "Node", wide: true },
    { name: "Why", id: true },
  ];
  return table(
    "Events",
    columns,
    events.map((event) => [
      clock(event.at),
      state(event.status),
      event.attempt,
      event.node ?? "–",
      event.detail ?? "",
    ]),
  );
}
