// Two sessions of a group side by side: what came of each, and what each model call answered from where they
// part.

import { get, part } from "../api.js";
import { callCount } from "../branches.js";
import { facts, fill, h, state } from "../dom.js";
import { count, number, seconds } from "../format.js";

export async function show({ root, query, router, signal, failed }) {
  const ids = [query.get("a"), query.get("b")];
  if (ids.some((id) => !id))
    return fill(root, h("p", { class: "card empty" }, "Choose two sessions on a task's page."));
  const both = await Promise.all(ids.map((id) => get(`/dashboard/sessions/${part(id)}`, {}, signal)));
  const calls = both.map((detail) => detail.outline?.completions ?? []);
  const shared = sharedCalls(...calls);
  const turns = await exchanges(both, calls, shared, undefined, signal);
  const loadShared = () => exchanges(both, calls, 0, shared, signal);
  return fill(
    root,
    h("div", { class: "head" }, h("h1", null, "Compare"), h("span", { class: "soft" }, sameTask(both))),
    h(
      "div",
      { class: "pair" },
      both.map((detail, side) => head(detail, side, ids, router)),
    ),
    h("section", null, h("h2", null, "Model calls"), beginning(shared, loadShared, failed), turns),
  );
}

/** With how many calls both begin that were sampled once: a branch has the answers of the session it left. */
function sharedCalls(one, other) {
  const parted = one.findIndex((call, at) => call.id !== other[at]?.id);
  return parted < 0 ? one.length : parted;
}

/** The calls of both sides from one place to another. */
async function exchanges(both, calls, from, to, signal) {
  const sides = calls.map((side) => side.slice(from, to));
  const answers = await Promise.all(both.map((detail, side) => said(detail, sides[side], signal)));
  const turns = Math.max(answers[0].length, answers[1].length);
  return Array.from({ length: turns }, (_, at) => pair(from + at, answers[0][at], answers[1][at]));
}

/** What both have in common, which is shown when somebody asks for it. */
function beginning(shared, load, failed) {
  if (!shared) return null;
  const body = h("div");
  const toggle = async () => {
    const wasOpen = body.childElementCount > 0;
    button.setAttribute("aria-expanded", String(!wasOpen));
    fill(body, ...(wasOpen ? [] : await load()));
  };
  const button = h(
    "button",
    { type: "button", class: "quiet", "aria-expanded": "false", onclick: () => toggle().catch(failed) },
    `They part after ${callCount(shared)} that both share, token for token`,
  );
  return h("div", { class: "shared" }, button, body);
}

const LONGEST = 200;

async function said(detail, calls, signal) {
  const url = `/dashboard/sessions/${part(detail.session.id)}/completions`;
  return Promise.all(
    calls
      .slice(0, LONGEST)
      .map(async (line) => ({ line, call: await get(`${url}/${line.index}`, {}, signal) })),
  );
}

function sameTask([one, other]) {
  return one.session.task_id === other.session.task_id ? `of ${one.session.task_id}` : "of different tasks";
}

function head({ session, outline, group }, side, ids, router) {
  const result = session.result;
  const change = (event) => {
    const next = [...ids];
    next[side] = event.target.value;
    router.go(`/compare?a=${part(next[0])}&b=${part(next[1])}`);
  };
  const options = group.map((row) =>
    h("option", { value: row.id }, `${row.id}, reward ${number(row.reward)}`),
  );
  const select = h(
    "select",
    { onchange: change, "aria-label": side ? "Right session" : "Left session" },
    options,
  );
  select.value = session.id;
  return h(
    "div",
    { class: "card" },
    h("p", { class: "chips" }, select, h("a", { href: `/sessions/${part(session.id)}` }, "Open")),
    facts([
      ["Status", state(session.status)],
      ["Reward", number(result?.verdict?.reward)],
      ["Agent", result?.agent_end],
      ["Model calls", count(session.progress.completions)],
      ["Sampled", count(session.progress.sampled_tokens)],
      ["Trained", result ? count(result.stats.trainable_tokens) : null],
      ["Traces", outline ? count(result.stats.traces) : null],
      ["Running", result ? seconds(result.seconds.running) : null],
    ]),
  );
}

function pair(at, one, other) {
  const isSame = one && other && words(one.call.response) === words(other.call.response);
  if (isSame)
    return h("div", { class: "pair" }, turn(at, one, "the same on both sides"), turn(at, other, null));
  return h("div", { class: "pair" }, turn(at, one, null), turn(at, other, null));
}

const words = (response) => JSON.stringify([response.reasoning, response.content, response.calls]);

function turn(at, one, remark) {
  if (!one) return h("div", { class: "card gone" }, `no call ${at}`);
  const { line, call } = one;
  return h(
    "div",
    { class: "card" },
    h(
      "div",
      { class: "chips" },
      h("span", null, `call ${at}`),
      h("span", null, `${count(line.sampled_tokens)} tokens`),
      remark && h("span", null, remark),
    ),
    call.response.reasoning && h("pre", { class: "reasoning soft" }, call.response.reasoning),
    call.response.content && h("pre", null, call.response.content),
    call.response.calls.map((made) =>
      h("div", { class: "call" }, h("b", null, made.name), h("pre", null, made.arguments)),
    ),
  );
}
