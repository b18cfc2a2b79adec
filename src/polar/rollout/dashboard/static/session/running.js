// A running session as it grows: each model call once it has ended, with what is new in it.

import { part } from "../api.js";
import { h } from "../dom.js";
import { count, seconds } from "../format.js";
import { follow } from "../live.js";
import { message } from "./conversation.js";

export function running({ session, signal, failed }) {
  const calls = h("div", { role: "log", "aria-label": "Model calls" });
  const tell = ({ kind, ...told }) => {
    if (kind === "restart") calls.replaceChildren();
    if (kind === "call") calls.append(shown(told));
  };
  follow(`/dashboard/sessions/${part(session.id)}/watch`, tell, signal).catch(failed);
  return h(
    "div",
    { class: "card", "data-part": "running" },
    h("p", { class: "soft small" }, "The agent is at work. Each model call appears here once it has ended."),
    calls,
  );
}

function shown(call) {
  const chips = [
    call.continues === null ? null : `continues call ${call.continues}`,
    call.replayed_from && `replayed from ${call.replayed_from}`,
    `${count(call.prompt_tokens)} tokens given`,
    `${count(call.ids.length)} sampled`,
    call.versions.length > 0 && `policy ${[...new Set(call.versions)].join(", ")}`,
    `took ${seconds(call.ended_at - call.started_at)}`,
  ];
  return h(
    "section",
    { "data-part": "call" },
    h("h2", null, `Model call ${call.index}`),
    h(
      "div",
      { class: "chips" },
      chips.filter(Boolean).map((text) => h("span", null, text)),
    ),
    call.messages.map((one) => message(one)),
    message(call.response, true),
  );
}
