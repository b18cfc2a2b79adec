// All sessions, the newest first: searched, filtered and paged by the server.

import { get, part } from "../api.js";
import { fill, h, state, table } from "../dom.js";
import { filterRow, pager } from "../filters.js";
import { ago, count, moment, number } from "../format.js";
import { throttled } from "../live.js";

const STATUSES = ["queued", "init", "ready", "running", "postrun", "completed", "failed", "cancelled"];
const FIELDS = [
  { name: "text", label: "Search by id" },
  { name: "status", label: "Status", options: STATUSES },
  { name: "reward", label: "Reward", options: ["positive", "zero", "none"] },
  { name: "node", label: "Node", options: [] },
];
const MORE = [
  { name: "run", label: "Run" },
  { name: "harness", label: "Harness" },
  { name: "model", label: "Model" },
  { name: "version", label: "Policy version", type: "number" },
  { name: "reward_min", label: "Reward from", type: "number" },
  { name: "reward_max", label: "Reward to", type: "number" },
  { name: "seconds_min", label: "Seconds from", type: "number" },
  { name: "seconds_max", label: "Seconds to", type: "number" },
];

export async function show({ root, query, router, live, signal, failed }) {
  const { nodes } = await get("/dashboard/overview", {}, signal);
  const fields = FIELDS.map((f) =>
    f.name === "node" ? { ...f, options: nodes.map((node) => node.name) } : f,
  );
  const list = h("div", { "aria-live": "off" });
  let before = query.get("before");
  const of = { task_id: query.get("task_id"), step: query.get("step") };

  const load = async () => {
    const asked = { ...values, ...of, before };
    const page = await get("/dashboard/sessions", asked, signal);
    fill(list, rows(page.sessions), pager(page.older, before, turn));
  };
  const refresh = () => load().catch(failed);
  const turn = (place) => {
    before = place;
    router.note({ ...values, ...of, before });
    refresh();
  };
  const { form, values } = filterRow(fields, query, MORE, (changed) => {
    Object.assign(values, changed);
    turn(null);
  });
  await load();
  live.on("changes", throttled(refresh, 1000, signal), signal);
  fill(root, h("div", { class: "head" }, h("h1", null, "Sessions"), of.task_id && ofTask(of.task_id)), form, list);
}

function ofTask(id) {
  return h("span", { class: "soft" }, "of ", h("a", { href: `/tasks/${part(id)}` }, id));
}

function rows(sessions) {
  if (!sessions.length) return h("p", { class: "card empty" }, "No session matches.");
  const columns = [
    { name: "Session", id: true },
    { name: "Run", wide: true },
    { name: "Status" },
    { name: "Reward", number: true },
    { name: "Calls", number: true, wide: true },
    { name: "Tokens", number: true, wide: true },
    { name: "Node", wide: true },
    { name: "Changed", number: true, wide: true },
  ];
  return table(
    "Sessions",
    columns,
    sessions.map((session) => [
      h("a", { href: `/sessions/${part(session.id)}`, "data-line": "link" }, session.id),
      h("a", { href: `/runs/${part(session.run)}` }, session.run),
      state(session.status),
      number(session.reward),
      count(session.completions),
      count(session.sampled_tokens),
      session.node ?? "–",
      h("time", { title: moment(session.updated_at) }, ago(session.updated_at)),
    ]),
  );
}
