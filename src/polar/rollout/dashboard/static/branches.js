// The tree of a group: which sessions are branches of which, where they part, and what each came to.

import { part } from "./api.js";
import { h } from "./dom.js";
import { count, number } from "./format.js";

/** The session that this one left as a branch, or null. */
export const leftSession = ({ origin }) => (origin && origin.samples_on ? origin.session_id : null);

export const sessionName = (session) => `${leftSession(session) ? "branch" : "sample"} ${session.sample}`;

export const callCount = (calls) => `${count(calls)} ${calls === 1 ? "call" : "calls"}`;

/** After how many calls a branch left its session, or is to leave it; null: after all. */
const leftAt = ({ origin, left_at }) => left_at ?? origin.calls;

/** Where a branch left its session, in words. */
export const parting = (branch) =>
  leftAt(branch) === null ? "after all calls" : `after ${callCount(leftAt(branch))}`;

/** Rows of a picture whose columns are model calls; null where no session of the group is a branch. */
export function groupTree(sessions) {
  const rows = ordered(sessions);
  if (!rows.some(({ parent }) => parent)) return null;
  const last = Math.max(...rows.map(({ start, end }) => Math.max(start, end)), 1);
  const across = (calls) => `${(100 * calls) / last}%`;
  const joints = connections(rows);
  return h(
    "ol",
    { class: "card branches", "aria-label": "Tree of the group" },
    rows.map((row, at) => line(row, at, joints, across)),
    h(
      "li",
      { class: "scale", "aria-hidden": "true" },
      h("span"),
      h("span", { class: "track" }, h("span", null, "0"), h("span", null, callCount(last))),
    ),
  );
}

/** Each session below the one it left, those that left last first: so no line crosses another. */
function ordered(sessions) {
  const known = new Map(sessions.map((session) => [session.id, session]));
  const parentOf = (session) => known.get(leftSession(session)) ?? null;
  const below = (parent) =>
    sessions
      .filter((session) => parentOf(session) === parent)
      .map((session) => ({ session, parent, ...extent(session, parent) }))
      .sort((a, b) => b.start - a.start || a.session.sample - b.session.sample)
      .flatMap((row) => [row, ...below(row.session)]);
  return below(null);
}

function extent(session, parent) {
  const start = parent ? (leftAt(session) ?? parent.completions) : 0;
  return { start, end: Math.max(session.completions, start) };
}

/** Where lines go down: from the row of a session to the last one that left it there. */
function connections(rows) {
  const found = new Map();
  const place = new Map(rows.map(({ session }, at) => [session, at]));
  rows.forEach(({ parent, start }, at) => {
    if (parent) found.set(`${parent.id} ${start}`, { calls: start, from: place.get(parent), to: at });
  });
  return [...found.values()];
}

function line({ session, parent, start, end }, at, joints, across) {
  const piece = ({ calls, from, to }) => {
    const kind = at === from ? "down begins" : at === to ? "down ends" : "down";
    return from <= at && at <= to ? h("i", { class: kind, style: { left: across(calls) } }) : null;
  };
  const own = { left: across(start), right: `calc(100% - ${across(end)})` };
  return h(
    "li",
    null,
    h(
      "span",
      { class: "name" },
      h(
        "a",
        { href: `/sessions/${part(session.id)}`, title: session.id, "data-line": "link" },
        sessionName(session),
      ),
      parent && h("small", { class: "soft" }, ` ${parting(session)}`),
    ),
    h(
      "span",
      { class: "track" },
      joints.map(piece),
      h("i", { class: "own", style: own }),
      h("span", { class: `state ${session.status}`, style: { left: across(end) }, title: session.status }),
    ),
    h("span", { class: "outcome" }, outcome(session)),
    h(
      "span",
      { class: "wide" },
      parent &&
        h(
          "a",
          {
            href: `/compare?a=${part(parent.id)}&b=${part(session.id)}`,
            "aria-label": `Compare ${sessionName(session)} with ${sessionName(parent)}`,
          },
          "compare",
        ),
    ),
  );
}

function outcome({ reward, status }) {
  return reward === null ? h("span", { class: "soft small" }, status) : number(reward);
}
