// One run: what belongs to it, and curves of its numbers, with those of other runs over them.

import { get, part } from "../api.js";
import { curves } from "../charts.js";
import { facts, fill, h } from "../dom.js";
import { count, moment, number, seconds } from "../format.js";
import { MOST, ended } from "./runs.js";

const FIRST = [
  "reward",
  "held_out_success",
  "loss",
  "entropy",
  "kl",
  "clip_fraction",
  "staleness",
  "tokens_per_second",
];
const MOST_SMOOTHED = 0.95;
const EVERY = 5000;
const OVER_TIME = "mean reward over time";

export async function show({ root, subject, query, router, signal, failed }) {
  const others = (query.get("with") ?? "").split(",").filter(Boolean).slice(0, MOST - 1);
  const smooth = Number(query.get("smooth"));
  const chosen = { others, smoothing: smooth >= 0 && smooth <= MOST_SMOOTHED ? smooth : 0 };
  const { runs } = await get("/runs", { limit: 200 }, signal);
  const head = h("div");
  const body = h("div");
  let found = [];
  let shown = null;
  const draw = () => fill(body, charts(found, chosen.smoothing, router));
  const note = () =>
    router.note({ with: chosen.others.join(","), smooth: chosen.smoothing ? String(chosen.smoothing) : "" });
  const load = async () => {
    const names = [subject, ...chosen.others];
    found = await Promise.all(names.map((name) => get(`/dashboard/runs/${part(name)}`, {}, signal)));
    // Drawn anew only when there is something new, so that a value that is being read stays.
    const mark = JSON.stringify(found.map(({ run }) => [run.name, run.step, run.updated_at, run.sessions]));
    if (mark === shown) return;
    shown = mark;
    fill(head, summary(found[0].run));
    draw();
  };
  const change = (to) => {
    Object.assign(chosen, to);
    note();
    if (to.others) load().then(() => fill(tools, controls())).catch(failed);
    else draw();
  };
  const controls = () => choices(subject, runs, chosen, change);
  const tools = h("div", { class: "tools" });
  await load();
  fill(tools, controls());
  fill(root, head, tools, body);
  const again = setInterval(() => load().catch(failed), EVERY);
  signal.addEventListener("abort", () => clearInterval(again));
}

function summary(run) {
  const of = `run=${part(run.name)}`;
  return [
    h(
      "div",
      { class: "head" },
      h("h1", null, run.name),
      h("span", { class: "soft" }, run.kind + (run.step === null ? "" : `, step ${count(run.step)}`)),
      h(
        "div",
        { class: "actions" },
        h("a", { href: `/tasks?${of}` }, "Groups"),
        " ",
        h("a", { href: `/sessions?${of}` }, "Sessions"),
      ),
    ),
    h(
      "section",
      { class: "card", "aria-label": "Facts" },
      facts([
        ["Tasks", count(run.tasks)],
        ["Sessions ended", ended(run)],
        ["Failed", count(run.sessions.failed ?? 0)],
        ["Mean reward", number(run.mean_reward)],
        ["Began", moment(run.created_at)],
        ["Last", moment(run.updated_at)],
      ]),
    ),
  ];
}

/** How much curves are smoothed, and which runs are drawn over this one. */
function choices(subject, runs, { others, smoothing }, change) {
  const oninput = (event) => change({ smoothing: Number(event.target.value) });
  const slider = h("input", { type: "range", name: "smooth", min: 0, max: MOST_SMOOTHED, step: 0.05, oninput });
  slider.value = smoothing;
  const more = runs.map(({ name }) => name).filter((name) => name !== subject && !others.includes(name));
  const add = ({ target }) => target.value && change({ others: [...others, target.value] });
  const select = h(
    "select",
    { name: "with", onchange: add, disabled: others.length >= MOST - 1 },
    h("option", { value: "" }, "choose a run"),
    more.map((name) => h("option", { value: name }, name)),
  );
  const remove = (name) => change({ others: others.filter((other) => other !== name) });
  return [
    h(
      "form",
      { class: "filters", onsubmit: (event) => event.preventDefault() },
      h("label", null, "Smoothing", slider),
      h("label", null, "Compare with", select),
    ),
    others.length > 0 &&
      h(
        "ul",
        { class: "compared", "aria-label": "Runs compared" },
        [subject, ...others].map((name, at) =>
          h(
            "li",
            { class: `run-${at}` },
            h("i"),
            at ? h("a", { href: `/runs/${part(name)}` }, name) : name,
            at > 0 &&
              h(
                "button",
                { type: "button", class: "quiet", "aria-label": `Remove ${name}`, onclick: () => remove(name) },
                "×",
              ),
          ),
        ),
      ),
  ];
}

function charts(found, smoothing, router) {
  const rank = (key) => (FIRST.includes(key) ? FIRST.indexOf(key) : FIRST.length);
  const names = [...new Set(found.flatMap(({ series }) => Object.keys(series)))];
  names.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  const learned = ({ name, at }) => router.go(`/tasks?run=${part(name)}&step=${at}`);
  const cards = names.map((key) => {
    const words = key.replaceAll("_", " ");
    const lines = found.map(({ run, steps, series }) => line(run.name, steps, series[key] ?? []));
    return card(words, lines, { smoothing, label: `${words} over steps`, place: (step) => `step ${count(step)}`, chosen: learned });
  });
  const rewards = found.map(({ run, hours, rewards }) => line(run.name, hours, rewards));
  if (rewards.some(({ points }) => points.length > 0))
    cards.push(card(OVER_TIME, rewards, { smoothing, label: OVER_TIME, place: (hours) => seconds(3600 * hours) }));
  if (!cards.length) return h("p", { class: "card empty" }, "Nothing has ended with a reward yet.");
  return [
    names.length > 0 && h("p", { class: "soft small" }, "Click a curve for the groups that a step learned from."),
    h("div", { class: "charts" }, cards),
  ];
}

function line(name, places, values) {
  const points = places.map((place, at) => [place, values[at]]);
  return { name, points: points.filter(([, value]) => value !== null && value !== undefined) };
}

function card(words, lines, options) {
  const latest = lines[0].points.at(-1)?.[1] ?? null;
  return h(
    "div",
    { class: "card" },
    h("h3", null, h("span", null, words), h("span", { class: "soft" }, number(latest))),
    curves(lines, options),
  );
}
