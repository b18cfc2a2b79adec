// One session: what came of it, when what happened, what was said, token by token, and what it left behind.

import { cancelSession } from "../actions.js";
import { get, part } from "../api.js";
import { leftSession, sessionName } from "../branches.js";
import { facts, fill, h, state } from "../dom.js";
import { count, number, seconds } from "../format.js";
import { throttled } from "../live.js";
import { artifacts } from "../session/artifacts.js";
import { conversation } from "../session/conversation.js";
import { origin } from "../session/origin.js";
import { report } from "../session/report.js";
import { running } from "../session/running.js";
import { timeline } from "../session/timeline.js";
import { tokens } from "../session/tokens.js";
import { stepLink } from "./task.js";

const PROGRESS = 2000;
const VIEWS = { conversation, tokens, artifacts, report };

export async function show(context) {
  const { root, subject, live, signal, failed } = context;
  let shown = null;
  let watched = null;
  const load = async () => {
    const detail = await get(`/dashboard/sessions/${part(subject)}`, {}, signal);
    // A session that has ended changes no more, and somebody may be reading it.
    if (shown?.session.result) return;
    shown = detail;
    // One stream for the page, however often the rest of it is drawn anew.
    if (!detail.session.result) watched ??= running({ session: detail.session, signal, failed });
    await draw(context, detail, watched, refresh);
  };
  const refresh = () => load().catch(failed);
  const later = throttled(refresh, 500, signal);
  live.on("changes", (page) => page.events.some((event) => event.session_id === subject) && later(), signal);
  await load();
  // What a running agent has used so far comes with heartbeats, which are no changes of its status.
  const again = setInterval(() => shown.session.result || later(), PROGRESS);
  signal.addEventListener("abort", () => clearInterval(again));
}

async function draw(context, detail, watched, refresh) {
  const { root, query, router } = context;
  const { session } = detail;
  const body = h("div");
  const view = query.get("view") in VIEWS ? query.get("view") : "conversation";
  const tab = (name) => {
    const href = `${location.pathname}?view=${name}`;
    return h(
      "a",
      { href, "aria-current": name === view ? "page" : null },
      name[0].toUpperCase() + name.slice(1),
    );
  };
  const note = (more) => router.note({ view, ...more });
  if (!session.result && view === "conversation") body.append(watched);
  else await VIEWS[view]({ ...context, detail, body, note });
  fill(
    root,
    h(
      "div",
      { class: "head" },
      h("h1", null, session.id),
      state(session.status),
      h("div", { class: "actions" }, compareLink(detail), cancelSession(context, session, refresh)),
    ),
    session.result?.error && h("p", { class: "notice" }, session.result.error),
    h("section", { class: "card", "aria-label": "Facts" }, summary(detail)),
    origin(detail),
    h("section", { class: "card", "aria-label": "Timeline" }, timeline(detail)),
    h("nav", { class: "tabs", "aria-label": "Parts of the session" }, Object.keys(VIEWS).map(tab)),
    body,
  );
}

function compareLink({ session, group }) {
  const others = group.filter((row) => row.id !== session.id);
  const other =
    others.find((row) => row.id === leftSession(session)) ??
    others.find((row) => row.reward !== null && row.reward !== session.result?.verdict?.reward) ??
    others[0];
  if (!other) return null;
  return h(
    "a",
    { href: `/compare?a=${part(session.id)}&b=${part(other.id)}` },
    `Compare with ${sessionName(other)}`,
  );
}

function summary({ session, step, harness, evaluator, outline }) {
  const result = session.result;
  const versions = [result?.policy_version_min, result?.policy_version_max].filter(
    (v) => v !== null && v !== undefined,
  );
  return facts([
    ["Reward", result?.verdict ? number(result.verdict.reward) : "–"],
    ["Run", h("a", { href: `/runs/${part(session.run)}` }, session.run)],
    ["Step", stepLink({ run: session.run, step })],
    ["Task", h("a", { href: `/tasks/${part(session.task_id)}` }, session.task_id)],
    [leftSession(session) ? "Branch" : "Sample", `${session.sample}, attempt ${session.attempt}`],
    ["Harness", [harness, result?.harness_version].filter(Boolean).join(" ")],
    [
      "Agent",
      result ? result.agent_end + (result.exit_code === null ? "" : `, exit code ${result.exit_code}`) : null,
    ],
    ["Evaluator", evaluator],
    ["Model", result?.model],
    ["Policy version", versions.length ? [...new Set(versions)].join("–") : null],
    ["Model calls", count(session.progress.completions)],
    ["Tokens sampled", count(session.progress.sampled_tokens)],
    ["Traces", outline ? count(result.stats.traces) : null],
    ["Node", session.node],
    ["Time", result ? seconds(Object.values(result.seconds).reduce((sum, value) => sum + value, 0)) : null],
  ]);
}
