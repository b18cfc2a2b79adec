// One training run: a curve for each of its numbers.

import { get } from "../api.js";
import { curve } from "../charts.js";
import { fill, h } from "../dom.js";
import { count, number } from "../format.js";

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
const EVERY = 5000;

export async function show({ root, subject, signal, failed }) {
  const path = `/dashboard/runs/${subject.split("/").map(encodeURIComponent).join("/")}`;
  let shown = null;
  const load = async () => {
    const curves = await get(path, {}, signal);
    // Drawn anew only when there is something new, so that a value that is being read stays.
    if (curves.steps.at(-1) !== shown) fill(root, ...sections(curves));
    shown = curves.steps.at(-1);
  };
  await load();
  const again = setInterval(() => load().catch(failed), EVERY);
  signal.addEventListener("abort", () => clearInterval(again));
}

function sections({ name, steps, series }) {
  const rank = (key) => (FIRST.includes(key) ? FIRST.indexOf(key) : FIRST.length);
  const names = Object.keys(series).sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  return [
    h(
      "div",
      { class: "head" },
      h("h1", null, name),
      h("span", { class: "soft" }, `${count(steps.at(-1))} steps`),
    ),
    h(
      "div",
      { class: "charts" },
      names.map((key) => {
        const latest = series[key].findLast((value) => value !== null);
        const words = key.replaceAll("_", " ");
        return h(
          "div",
          { class: "card" },
          h("h3", null, h("span", null, words), h("span", { class: "soft" }, number(latest))),
          curve(steps, series[key], `${words} over steps`),
        );
      }),
    ),
  ];
}
