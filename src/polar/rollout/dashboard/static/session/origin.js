// What a session shares with another: whose recorded answers it began with, where it left them, who left it.

import { part } from "../api.js";
import { callCount, leftSession, parting, sessionName } from "../branches.js";
import { facts, h } from "../dom.js";
import { count } from "../format.js";
import { folded } from "./conversation.js";

const TAKEN = {
  stop: "the agent was ended",
  live: "the model answered it",
  recorded: "it got the recorded answer",
};

/** Null for a session that begins with nothing recorded, and that nothing left. */
export function origin({ session, group }) {
  const replay = session.result?.replay;
  const branches = group.filter((row) => leftSession(row) === session.id);
  const hasOrigin = session.origin && session.origin.session_id !== session.id;
  if (!hasOrigin && !replay && !branches.length) return null;
  return h(
    "section",
    { class: "card", "aria-label": "Origin" },
    hasOrigin && h("p", null, begun(session.origin, replay)),
    replay?.origin === session.id &&
      h("p", null, `Attempt ${session.attempt} went on from what an earlier one had recorded.`),
    facts([...(replay ? told(replay) : []), ...partings(branches)]),
    replay?.variations?.length > 0 &&
      folded("Lines that varied", () => [
        h("pre", { class: "diff", tabindex: 0 }, replay.variations.join("\n")),
      ]),
    replay?.divergences.map(divergence),
  );
}

function begun({ session_id, calls, samples_on }, replay) {
  const other = h("a", { href: `/sessions/${part(session_id)}` }, session_id);
  if (!samples_on) return ["Replays ", calls === null ? "" : `the first ${callCount(calls)} of `, other, "."];
  const leaves = replay?.unused_calls ? "was to leave" : "leaves";
  return ["A branch of ", other, `, which it ${leaves} `, parting({ origin: { calls } }), "."];
}

function told(replay) {
  return [
    ["Calls replayed", count(replay.calls)],
    ["Tokens replayed", count(replay.sampled_tokens)],
    ["Not asked for", replay.unused_calls ? callCount(replay.unused_calls) : null],
    ["Messages that varied", replay.varied_messages || null],
    ["Divergences", count(replay.divergence_count)],
  ];
}

/** Who left the session, for each place where somebody did. */
function partings(branches) {
  const found = new Map();
  for (const row of branches) {
    const name = `Left ${parting(row)}`;
    const link = h("a", { href: `/sessions/${part(row.id)}` }, sessionName(row));
    found.set(name, [...(found.get(name) ?? []), found.has(name) && ", ", link]);
  }
  return [...found];
}

function divergence({ call, taken, difference }, at) {
  const what = `Model call ${call} is not the recorded one: ${TAKEN[taken] ?? taken}`;
  const label = call === null ? "The harness has another version" : what;
  return folded(label, () => [diff(difference)], at === 0);
}

const KINDS = { "+": "good", "-": "bad", "@": "soft" };

function diff(text) {
  // The first two lines of a diff name its sides.
  const kind = (line, at) => (at < 2 ? "soft" : (KINDS[line[0]] ?? null));
  const lines = text.split("\n").map((line, at) => h("span", { class: kind(line, at) }, `${line}\n`));
  return h("pre", { class: "diff", tabindex: 0 }, lines);
}
