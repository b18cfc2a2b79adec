// What was said: the tree of conversations as the harness led them, and one model call in full.

import { get, part } from "../api.js";
import { fill, h } from "../dom.js";
import { count, seconds } from "../format.js";

const FOLDED = 1500;
const NAMES = {
  main: "Main conversation",
  subagent: "Sub-agent",
  compacted: "Compacted: the history was rewritten",
  summary: "Summary that a later context begins with",
  auxiliary: "Side call",
};

export async function conversation({ detail, body, query, note, signal, failed }) {
  const { outline, session } = detail;
  if (!outline) return fill(body, nothing(detail));
  const view = h("div", { class: "card", "aria-live": "polite", "data-part": "call" });
  const buttons = new Map();
  const open = async (index) => {
    const line = outline.completions[index];
    const call = await get(`/dashboard/sessions/${part(session.id)}/completions/${index}`, {}, signal);
    buttons.forEach((button, at) => {
      if (at === index) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    });
    fill(view, ...exchange(line, call));
  };
  const choose = (index) => {
    note({ call: index });
    open(index).catch(failed);
  };
  const tree = h(
    "nav",
    { class: "card tree", "aria-label": "Model calls" },
    branches(outline, buttons, choose),
  );
  const asked = Number(query.get("call") ?? 0);
  if (outline.completions.length) await open(outline.completions[asked] ? asked : 0);
  return fill(body, h("div", { class: "talk" }, tree, view));
}

export function nothing({ session, unreadable }) {
  if (unreadable) return h("p", { class: "notice" }, `The recording cannot be read: ${unreadable}`);
  const text = session.result
    ? "The model was never asked, so there is no recording."
    : "This can be read here when the session has ended.";
  return h("p", { class: "card empty" }, text);
}

/** Conversations with those that came out of them inside. */
function branches({ conversations, completions }, buttons, choose) {
  const call = (index, previous) => callButton(completions[index], previous, buttons, choose);
  const inside = (parent) =>
    conversations
      .map((one, place) => ({ ...one, place }))
      .filter((one) => (one.parent ?? null) === parent)
      .map((one) => [
        h("h3", null, NAMES[one.lineage] ?? one.lineage),
        h(
          "ol",
          null,
          one.completions.map((index, at) => h("li", null, call(index, one.completions[at - 1] ?? null))),
        ),
        wrapped(inside(one.place)),
      ]);
  return inside(null);
}

const wrapped = (children) => (children.length ? h("div", { class: "inner" }, children) : null);

function callButton(line, previous, buttons, choose) {
  const said = line.excerpt || line.tools_called.map((name) => `→ ${name}`).join(" ") || "(nothing)";
  const trained = line.replayed_from
    ? "replayed"
    : line.trained_tokens === line.sampled_tokens
      ? "trained"
      : line.trained_tokens
        ? "partly trained"
        : "not trained";
  const fork =
    line.continues !== null && line.continues !== previous ? `goes on from call ${line.continues}` : null;
  const button = h(
    "button",
    { type: "button", "data-line": "open", onclick: () => choose(line.index) },
    h("span", { class: "place" }, line.index),
    h(
      "span",
      null,
      h("span", { class: "said" }, said),
      h(
        "span",
        { class: "meta" },
        [`${count(line.sampled_tokens)} tokens`, trained, fork].filter(Boolean).join(" · "),
      ),
    ),
  );
  buttons.set(line.index, button);
  return button;
}

function exchange(line, call) {
  const before = call.messages.slice(0, call.new_from);
  const fresh = call.messages.slice(call.new_from);
  return [
    h("h2", null, `Model call ${line.index}`),
    h(
      "div",
      { class: "chips" },
      chips(line).map((text) => h("span", null, text)),
    ),
    line.untrainable && h("p", { class: "notice" }, line.untrainable),
    before.length > 0 &&
      folded(`${count(before.length)} messages it had seen before`, () => before.map(message)),
    call.tools.length > 0 && folded(`${count(call.tools.length)} tools offered`, () => call.tools.map(tool)),
    fresh.map(message),
    message(call.response, true),
    folded("Sampling", () => [
      settings("asked", call.asked),
      settings("used", call.used),
      settings("extra", call.extra),
    ]),
  ];
}

function chips(line) {
  const waited = line.first_token_at && line.started_at ? line.first_token_at - line.started_at : null;
  return [
    line.dialect,
    `${count(line.prompt_tokens)} tokens given${line.cached_tokens ? `, ${count(line.cached_tokens)} cached` : ""}`,
    `${count(line.sampled_tokens)} sampled`,
    `${count(line.trained_tokens)} trained`,
    line.continuation && `continues call ${line.continues}: ${line.continuation}`,
    line.rule && `side call: ${line.rule}`,
    line.replayed_from && `replayed from ${line.replayed_from}`,
    line.version_min !== null && `policy ${[...new Set([line.version_min, line.version_max])].join("–")}`,
    `ended by ${line.finish_reason}`,
    waited !== null && `first token after ${seconds(waited)}`,
    line.ended_at > 0 && `took ${seconds(line.ended_at - line.started_at)}`,
  ].filter(Boolean);
}

export function message(one, isAnswer = false) {
  return h(
    "div",
    { class: isAnswer === true ? "message answer" : "message" },
    h("div", { class: "role" }, isAnswer === true ? "answer" : one.role),
    one.reasoning && long(one.reasoning, "reasoning"),
    one.content && long(one.content),
    one.calls.map((call) =>
      h("div", { class: "call" }, h("b", null, call.name), long(readable(call.arguments))),
    ),
  );
}

function tool({ name, description }) {
  return h("div", { class: "message" }, h("b", null, name), long(description));
}

function settings(name, values) {
  const entries = Object.entries(values);
  if (!entries.length) return null;
  return h(
    "p",
    { class: "small" },
    h("span", { class: "soft" }, `${name}: `),
    entries.map(([k, v]) => `${k} ${v}`).join(", "),
  );
}

/** Text of which only the beginning is shown until somebody wants more. */
export function long(text, kind = "") {
  if (text.length <= FOLDED) return h("pre", { class: kind }, text);
  const body = h("pre", { class: kind }, text.slice(0, FOLDED));
  const show = () => {
    body.textContent = text;
    more.remove();
  };
  const more = h(
    "button",
    { type: "button", class: "quiet more", onclick: show },
    `… ${count(text.length - FOLDED)} more characters`,
  );
  return [body, more];
}

export function folded(label, children, isOpen = false) {
  const body = h("div", null, isOpen && children());
  const toggle = () => {
    const wasOpen = body.childElementCount > 0;
    button.setAttribute("aria-expanded", String(!wasOpen));
    if (wasOpen) body.replaceChildren();
    else fill(body, children());
  };
  const button = h(
    "button",
    { type: "button", class: "quiet", "aria-expanded": String(isOpen), onclick: toggle },
    label,
  );
  return h("div", { class: "more" }, button, body);
}

function readable(json) {
  try {
    const value = JSON.parse(json);
    if (value === null || typeof value !== "object") return json;
    return Object.entries(value)
      .map(([k, v]) => `${k}: ${typeof v === "string" ? v : JSON.stringify(v)}`)
      .join("\n");
  } catch {
    return json;
  }
}
