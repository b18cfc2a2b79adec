// All runs, the newest first: trainings, evaluations, generations, submissions.

import { get, part } from "../api.js";
import { fill, h, table } from "../dom.js";
import { filterRow, pager } from "../filters.js";
import { ago, count, moment, number } from "../format.js";
import { throttled } from "../live.js";

const KINDS = ["training", "evaluation", "generation", "submission", "bridge"];
const FIELDS = [
  { name: "text", label: "Search by name" },
  { name: "kind", label: "Kind", options: KINDS },
];
const OFTEN = 3000;
export const MOST = 6;

export async function show({ root, query, router, live, signal, failed }) {
  const list = h("div");
  const chosen = new Set();
  let after = query.get("after");
  const load = async () => {
    const page = await get("/runs", { ...values, after }, signal);
    fill(list, rows(page.runs, chosen, router), pager(page.next, after, turn));
  };
  const refresh = () => load().catch(failed);
  const turn = (place) => {
    after = place;
    router.note({ ...values, after });
    refresh();
  };
  const { form, values } = filterRow(FIELDS, query, [], (changed) => {
    Object.assign(values, changed);
    turn(null);
  });
  await load();
  live.on("changes", throttled(refresh, OFTEN, signal), signal);
  fill(root, h("div", { class: "head" }, h("h1", null, "Runs")), form, list);
}

function rows(runs, chosen, router) {
  if (!runs.length) return h("p", { class: "card empty" }, "No run matches.");
  const compare = h("button", { type: "button" });
  compare.addEventListener("click", () => {
    const [first, ...others] = chosen;
    router.go(`/runs/${part(first)}?with=${others.map(part).join(",")}`);
  });
  const enable = () => {
    compare.disabled = chosen.size < 2 || chosen.size > MOST;
    compare.textContent = chosen.size > MOST ? `Compare at most ${MOST}` : "Compare the chosen";
  };
  const choose = (name) => {
    const onchange = ({ target }) => {
      chosen[target.checked ? "add" : "delete"](name);
      enable();
    };
    const box = h("input", { type: "checkbox", "aria-label": `Choose ${name}`, onchange });
    box.checked = chosen.has(name);
    return box;
  };
  enable();
  const columns = [
    { name: h("span", { class: "hidden-text" }, "Choose") },
    { name: "Run", id: true },
    { name: "Kind", wide: true },
    { name: "Ended", number: true },
    { name: "Failed", number: true, wide: true },
    { name: "Mean reward", number: true },
    { name: "Step", number: true, wide: true },
    { name: "Began", number: true, wide: true },
    { name: "Last", number: true, wide: true },
  ];
  const lines = runs.map((run) => [
    choose(run.name),
    h("a", { href: `/runs/${part(run.name)}`, "data-line": "link" }, run.name),
    run.kind,
    ended(run),
    count(run.sessions.failed ?? 0),
    number(run.mean_reward),
    run.step === null ? "–" : count(run.step),
    time(run.created_at),
    time(run.updated_at),
  ]);
  return [table("Runs", columns, lines), h("div", { class: "pager" }, h("span"), compare)];
}

const time = (at) => h("time", { title: moment(at) }, ago(at));

/** How many of a run's sessions have ended. */
export function ended({ sessions }) {
  const all = Object.values(sessions).reduce((sum, value) => sum + value, 0);
  const over = ["completed", "failed", "cancelled"].reduce((sum, name) => sum + (sessions[name] ?? 0), 0);
  return all ? `${count(over)} of ${count(all)}` : "–";
}
