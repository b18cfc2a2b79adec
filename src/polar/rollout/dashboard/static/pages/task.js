// One task and its group: what was asked, what each sample earned, and how far it is from the others.

import { cancelTask } from "../actions.js";
import { get, part } from "../api.js";
import { groupTree } from "../branches.js";
import { facts, fill, h, state, table } from "../dom.js";
import { count, moment, number, signed } from "../format.js";
import { throttled } from "../live.js";

export async function show(context) {
  const { root, subject, live, signal, failed, router } = context;
  const chosen = new Set();
  const load = async () => {
    const task = await get(`/dashboard/tasks/${part(subject)}`, {}, signal);
    fill(root, ...sections(context, task, chosen, refresh, router));
  };
  const refresh = () => load().catch(failed);
  await load();
  const later = throttled(refresh, 1000, signal);
  live.on("changes", (page) => page.events.some((event) => event.task_id === subject) && later(), signal);
}

function sections(context, task, chosen, refresh, router) {
  return [
    h(
      "div",
      { class: "head" },
      h("h1", null, task.id),
      state(task.status),
      h("div", { class: "actions" }, cancelTask(context, task, refresh)),
    ),
    h(
      "section",
      { class: "card", "aria-label": "Facts" },
      facts([
        ["Run", h("a", { href: `/runs/${part(task.run)}` }, task.run)],
        ["Step", stepLink(task)],
        ["Harness", task.harness],
        ["Runtime", task.runtime],
        ["Evaluator", task.evaluator],
        ["Builder", task.builder],
        ["Priority", task.priority],
        ["Early stop", task.early_stop],
        ["Branching", task.branching],
        ["Submitted", moment(task.created_at)],
        ["Files", task.files.length ? task.files.join(", ") : null],
      ]),
    ),
    h("section", null, h("h2", null, "Instruction"), h("pre", { class: "card" }, task.instruction)),
    h(
      "section",
      null,
      h("h2", null, "Group"),
      groupLine(task),
      groupTree(task.samples.map(({ session }) => session)),
      samples(task, chosen, router),
    ),
  ];
}

/** A link to all groups that a run's step learned from; null where none has learned from this one. */
export function stepLink({ run, step }) {
  return step === null ? null : h("a", { href: `/tasks?run=${part(run)}&step=${step}` }, count(step));
}

function groupLine({ mean, standard_deviation: deviation, samples: all }) {
  const scored = all.filter(({ session }) => session.reward !== null).length;
  if (mean === null) return h("p", { class: "soft small" }, "No sample has a reward yet.");
  const learnable = deviation ? "" : " All rewards are equal, so the group teaches nothing.";
  const text = `${count(scored)} of ${count(all.length)} scored · mean ${number(mean)} · standard deviation ${number(deviation)}.`;
  return h("p", { class: "soft small" }, text + learnable);
}

function samples(task, chosen, router) {
  const compare = h("button", { type: "button", disabled: true }, "Compare the two chosen");
  compare.addEventListener("click", () => {
    const [a, b] = chosen;
    router.go(`/compare?a=${part(a)}&b=${part(b)}`);
  });
  const choose = (id) => {
    const onchange = (event) => {
      if (event.target.checked) chosen.add(id);
      else chosen.delete(id);
      compare.disabled = chosen.size !== 2;
    };
    const box = h("input", { type: "checkbox", "aria-label": `Choose ${id}`, onchange });
    box.checked = chosen.has(id);
    return box;
  };
  compare.disabled = chosen.size !== 2;
  const top = Math.max(...task.samples.map(({ advantage }) => Math.abs(advantage ?? 0)), 1e-9);
  const columns = [
    { name: h("span", { class: "hidden-text" }, "Choose") },
    { name: "Session", id: true },
    { name: "Status" },
    { name: "Reward", number: true },
    { name: "Advantage", number: true },
    { name: h("span", { class: "hidden-text" }, "Advantage as a bar"), wide: true },
    { name: "Calls", number: true, wide: true },
    { name: "Tokens", number: true, wide: true },
  ];
  const lines = task.samples.map(({ session, advantage }) => [
    choose(session.id),
    h("a", { href: `/sessions/${part(session.id)}`, "data-line": "link" }, session.id),
    state(session.status),
    number(session.reward),
    signed(advantage),
    advantage === null ? "" : advantageBar(advantage / top),
    count(session.completions),
    count(session.sampled_tokens),
  ]);
  return [table("Samples", columns, lines), h("div", { class: "pager" }, h("span"), compare)];
}

function advantageBar(share) {
  const left = share < 0 ? 50 + 50 * share : 50;
  const style = { left: `${left}%`, width: `${Math.max(50 * Math.abs(share), 1)}%` };
  return h("span", { class: share < 0 ? "advantage below" : "advantage" }, h("i", { style }));
}
