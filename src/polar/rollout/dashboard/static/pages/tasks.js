// All tasks, the newest first, each with the rewards of its group.

import { get, part } from "../api.js";
import { rewardBars } from "../charts.js";
import { fill, h, state, table } from "../dom.js";
import { filterRow, pager } from "../filters.js";
import { ago, count, moment, number } from "../format.js";
import { throttled } from "../live.js";

const FIELDS = [
  { name: "text", label: "Search by id" },
  { name: "status", label: "Status", options: ["queued", "running", "finished", "cancelled"] },
  { name: "harness", label: "Harness", options: [] },
];

export async function show({ root, query, router, live, signal, failed }) {
  const list = h("div");
  const of = { run: query.get("run"), step: query.get("step") };
  let before = query.get("before");
  const known = new Set();
  const load = async () => {
    const page = await get("/dashboard/tasks", { ...values, ...of, before }, signal);
    page.tasks.forEach((task) => task.harness && known.add(task.harness));
    fill(list, rows(page.tasks), pager(page.older, before, turn));
    return page;
  };
  const refresh = () => load().catch(failed);
  const turn = (place) => {
    before = place;
    router.note({ ...values, ...of, before });
    refresh();
  };
  let values = Object.fromEntries(FIELDS.map(({ name }) => [name, query.get(name) ?? ""]));
  await load();
  const fields = FIELDS.map((f) => (f.name === "harness" ? { ...f, options: [...known].sort() } : f));
  const { form } = filterRow(fields, query, [], (changed) => {
    values = changed;
    turn(null);
  });
  live.on("changes", throttled(refresh, 1000, signal), signal);
  fill(root, h("div", { class: "head" }, h("h1", null, "Tasks"), of.run && ofRun(of)), form, list);
}

/** Whose tasks or sessions a list holds. */
export function ofRun({ run, step }) {
  const learned = step === null ? "" : `, learned from in step ${count(Number(step))}`;
  return h("span", { class: "soft" }, "of ", h("a", { href: `/runs/${part(run)}` }, run), learned);
}

function rows(tasks) {
  if (!tasks.length) return h("p", { class: "card empty" }, "No task matches.");
  const columns = [
    { name: "Task", id: true },
    { name: "Status" },
    { name: "Harness", wide: true },
    { name: "Step", number: true, wide: true },
    { name: "Ended", number: true, wide: true },
    { name: "Rewards" },
    { name: "Mean", number: true },
    { name: "Std dev", number: true, wide: true },
    { name: "Submitted", number: true, wide: true },
  ];
  return table(
    "Tasks",
    columns,
    tasks.map((task) => {
      const all = Object.values(task.sessions).reduce((sum, value) => sum + value, 0);
      const ended = ["completed", "failed", "cancelled"].reduce(
        (sum, name) => sum + (task.sessions[name] ?? 0),
        0,
      );
      const { mean, deviation } = moments(task.rewards);
      return [
        h("a", { href: `/tasks/${part(task.id)}`, "data-line": "link" }, task.id),
        state(task.status),
        task.harness ?? "–",
        task.step === null ? "–" : count(task.step),
        `${count(ended)} of ${count(all)}`,
        task.rewards.length ? rewardBars(task.rewards.slice(0, 16)) : h("span", { class: "soft" }, "–"),
        number(mean, 2),
        number(deviation, 2),
        h("time", { title: moment(task.created_at) }, ago(task.created_at)),
      ];
    }),
  );
}

function moments(rewards) {
  if (!rewards.length) return { mean: null, deviation: null };
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const variance = rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / rewards.length;
  return { mean, deviation: Math.sqrt(variance) };
}
