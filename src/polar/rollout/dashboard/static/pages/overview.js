// The fleet at a glance: pools, throughput, nodes, and what changed last.

import { drainNode, policyActions } from "../actions.js";
import { get, part } from "../api.js";
import { bars } from "../charts.js";
import { fill, h, state, table } from "../dom.js";
import { clock, compact, count, number, percent, seconds } from "../format.js";

const POOLS = ["init", "ready", "running", "postrun"];
const STAGES = ["queued", ...POOLS];
const RATE_MINUTES = 5;

export async function show(context) {
  const { root, live, signal } = context;
  const draw = (overview) => fill(root, ...sections(context, overview));
  draw(await get("/dashboard/overview", {}, signal));
  live.on("overview", draw, signal);
}

function changes(events) {
  if (!events.length) return h("p", { class: "card empty" }, "Nothing has happened yet.");
  return h("div", { class: "card" }, h("ol", { class: "events" }, events.map(line)));
}

function line(event) {
  return h(
    "li",
    null,
    h("time", null, clock(event.at)),
    state(event.status),
    h("a", { href: `/sessions/${part(event.session_id)}` }, event.session_id),
  );
}

function sections(context, overview) {
  return [
    h(
      "div",
      { class: "head" },
      h("h1", null, "Overview"),
      h("span", { class: "soft" }, policyText(overview.policy)),
      h("div", { class: "actions" }, policyActions(context, overview.policy)),
    ),
    h("section", { "aria-label": "Pools" }, pipeline(overview)),
    h("section", { "aria-label": "Throughput" }, figures(overview)),
    h("section", null, h("h2", null, "Nodes"), nodes(context, overview)),
    h("section", null, h("h2", null, "Latest changes"), changes(overview.changes)),
  ];
}

function policyText(policy) {
  const version = `policy version ${policy.version}`;
  if (!policy.is_paused) return version;
  return `${version}, paused by ${policy.holder} for at most ${seconds(policy.seconds_left ?? 0)} more`;
}

function pipeline({ sessions, nodes }) {
  const places = (stage) =>
    nodes.reduce((sum, node) => sum + (node.is_silent ? 0 : (node.places[stage] ?? 0)), 0);
  const ended = ["completed", "failed", "cancelled"].reduce((sum, name) => sum + (sessions[name] ?? 0), 0);
  const step = (name, value, href) =>
    h(
      "a",
      { href, class: value ? null : "zero", "data-stage": name },
      h("span", { class: "name" }, name),
      h("span", { class: "count" }, compact(value)),
      places(name) ? h("span", { class: "places" }, `of ${compact(places(name))}`) : null,
    );
  return h(
    "div",
    { class: "card pipeline" },
    STAGES.map((name) => step(name, sessions[name] ?? 0, `/sessions?status=${name}`)),
    step("ended", ended, "/sessions"),
  );
}

function figures({ at, minutes }) {
  const sum = (name, list = minutes) => list.reduce((total, minute) => total + minute[name], 0);
  const latest = minutes.slice(-RATE_MINUTES);
  // The last minute is not over yet.
  const passed = RATE_MINUTES - 1 + Math.min((at - minutes.at(-1).at) / 60, 1);
  const scored = minutes.filter((minute) => minute.mean_reward !== null);
  const mean = scored.length ? scored[scored.length - 1].mean_reward : null;
  const ended = sum("ended");
  const series = (name) => minutes.map((minute) => minute[name] ?? 0);
  return h(
    "div",
    { class: "figures" },
    figure("sessions", number(sum("ended", latest) / passed, 1), "a minute", series("ended")),
    figure(
      "tokens sampled",
      compact(sum("sampled_tokens", latest) / passed),
      "a minute",
      series("sampled_tokens"),
    ),
    figure("acceptance", percent(sum("usable"), ended), `of ${count(ended)} in an hour`, series("usable")),
    figure("mean reward", number(mean, 2), "latest minute", series("mean_reward")),
  );
}

function figure(name, value, unit, series) {
  return h(
    "div",
    { class: "card figure", "data-figure": name },
    h("span", { class: "name" }, name),
    h("span", { class: "value" }, value, " ", h("small", null, unit)),
    bars(series, `${name}, each minute of the last hour`),
  );
}

function nodes(context, { nodes: list, policy }) {
  if (!list.length) return h("p", { class: "card empty" }, "No node has joined. `polar node` starts one.");
  const isAdmin = context.me.role === "admin";
  const columns = [
    { name: "Node", id: true },
    { name: "State" },
    { name: "Engine" },
    { name: "Policy", number: true, wide: true },
    ...POOLS.map((name) => ({ name, number: true, wide: true })),
    ...(isAdmin ? [{ name: "Work" }] : []),
  ];
  return table(
    "Nodes",
    columns,
    list.map((node) => [
      h("a", { href: `/sessions?node=${part(node.name)}` }, node.name),
      nodeState(node),
      node.trouble || node.error
        ? h("span", { class: "bad" }, node.trouble || node.error)
        : node.version === policy.version
          ? "in step"
          : "loading",
      node.version,
      ...POOLS.map((name) => pool(node, name)),
      ...(isAdmin ? [drainNode(context, node)] : []),
    ]),
  );
}

function nodeState(node) {
  if (node.is_silent)
    return h("span", { class: "state silent" }, `silent ${seconds(node.seconds_silent)}`);
  if (!node.is_draining) return state(node.trouble ? "troubled" : "running");
  return state(POOLS.some((name) => node.sessions[name]) ? "draining" : "drained");
}

/** How many sessions a pool of a node has, of how many it takes. */
function pool(node, name) {
  const size = node.places[name];
  const held = node.sessions[name] ?? 0;
  return size === undefined ? held : [held, h("span", { class: "places" }, ` of ${size}`)];
}
