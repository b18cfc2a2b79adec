// When a session was in which stage, and when the model was asked.

import { h } from "../dom.js";
import { seconds } from "../format.js";

const STAGES = ["queued", "init", "ready", "running", "postrun"];

export function timeline({ session, events, outline }) {
  const end = session.result ? (events.at(-1)?.at ?? session.updated_at) : Date.now() / 1000;
  const begin = session.created_at;
  const all = Math.max(end - begin, 1e-3);
  const spans = stageSpans(session, events, end);
  // Waiting in a queue may take hours; then what follows would be too small to see.
  const worked = events[0]?.at ?? begin;
  const isLongWait = worked - begin > 0.5 * all && session.status !== "queued";
  const from = isLongWait ? worked : begin;
  const scale = Math.max(end - from, 1e-3);
  const bar = ([start, stop, title]) => {
    const left = Math.min(Math.max((100 * (start - from)) / scale, 0), 100);
    const width = Math.min((100 * (stop - Math.max(start, from))) / scale, 100 - left);
    return h("i", { style: { left: `${left}%`, width: `${width}%` }, title });
  };
  const row = (name, list) => {
    const total = list.reduce((sum, [start, stop]) => sum + stop - start, 0);
    const isAway = isLongWait && name === "queued";
    return [
      h("span", null, name),
      h("div", { class: `track ${name === "model calls" ? "calls" : name}` }, isAway ? null : list.map(bar)),
      h("span", { class: "span" }, seconds(total)),
    ];
  };
  const calls = (outline?.completions ?? [])
    // What was replayed has the times of the session in which it was sampled.
    .filter((call) => call.started_at && !call.replayed_from)
    .map((call) => [
      call.started_at,
      call.ended_at,
      `call ${call.index}: ${seconds(call.ended_at - call.started_at)}`,
    ]);
  return h(
    "div",
    { class: "timeline" },
    STAGES.filter((name) => spans[name]).map((name) => row(name, spans[name])),
    calls.length ? row("model calls", calls) : null,
  );
}

function stageSpans(session, events, end) {
  const spans = {};
  let [status, since] = ["queued", session.created_at];
  const close = (at) => STAGES.includes(status) && (spans[status] ??= []).push([since, at, status]);
  for (const event of events) {
    close(event.at);
    [status, since] = [event.status, event.at];
  }
  close(end);
  return spans;
}
