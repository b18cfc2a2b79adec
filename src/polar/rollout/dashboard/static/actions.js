// What changes something: only for those who hold an admin's token, and never without being asked.

import { part, post } from "./api.js";
import { confirmed, h } from "./dom.js";

const HOLDER = "dashboard";
const LONGEST_PAUSE = 1200;

const ended = (status) => ["completed", "failed", "cancelled"].includes(status);

function action({ me, failed }, label, title, text, act, then) {
  if (me.role !== "admin") return null;
  const run = async () => {
    if (!(await confirmed(title, text, label))) return;
    button.disabled = true;
    try {
      await act();
      then?.();
    } catch (error) {
      failed(error);
    }
  };
  const button = h("button", { type: "button", onclick: run }, label);
  return button;
}

export function cancelSession(context, session, then) {
  if (ended(session.status)) return null;
  const text = "Its agent is ended. What it did so far is kept, and it is not run again.";
  const act = () => post(`/sessions/${part(session.id)}/cancel`);
  return action(context, "Cancel session", `Cancel ${session.id}?`, text, act, then);
}

export function cancelTask(context, task, then) {
  if (task.samples.every((sample) => ended(sample.session.status))) return null;
  const text = "Every session of the task that has not ended is cancelled.";
  const act = () => post(`/tasks/${part(task.id)}/cancel`);
  return action(context, "Cancel task", `Cancel ${task.id}?`, text, act, then);
}

/** Give a node no more sessions, or give it some again. */
export function drainNode(context, node, then) {
  const [verb, text] = node.is_draining
    ? ["Resume", "It is given sessions again."]
    : ["Drain", "It finishes what it holds, and is given nothing more until it is resumed."];
  const act = () => post(`/nodes/${part(node.name)}/${verb.toLowerCase()}`);
  const button = action(context, verb, `${verb} ${node.name}?`, text, act, then);
  button?.setAttribute("aria-label", `${verb} ${node.name}`);
  return button;
}

/** Pause, drain or resume sampling on every engine. */
export function policyActions(context, policy, then) {
  const ask = (mode) => () =>
    post("/policy/pause", { holder: HOLDER, mode, timeout_seconds: LONGEST_PAUSE, wait_seconds: 0 });
  if (policy.is_paused) {
    const text = `The pause of ${policy.holder} ends, and every engine goes on sampling.`;
    const act = () => post("/policy/resume", { wait_seconds: 0 });
    return [action(context, "Resume", "Resume sampling?", text, act, then)];
  }
  const minutes = LONGEST_PAUSE / 60;
  return [
    action(
      context,
      "Pause",
      "Pause sampling?",
      `Every engine stops between two tokens. Agents wait; their time does not run. Ends by itself in ${minutes} minutes.`,
      ask("keep"),
      then,
    ),
    action(
      context,
      "Drain",
      "Drain the engines?",
      `Answers under way are sampled to their end, and no new one begins. Ends by itself in ${minutes} minutes.`,
      ask("drain"),
      then,
    ),
  ];
}
