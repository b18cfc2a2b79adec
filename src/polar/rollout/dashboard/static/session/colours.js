// What a token's colour says: whether it is trained, how likely it was, or which policy sampled it.

import { h } from "../dom.js";

export const COLOURS = ["mask", "logprob", "version"];
const STEPS = [
  [Math.log(0.9), "p ≥ 0.9"],
  [Math.log(0.5), "p ≥ 0.5"],
  [Math.log(0.1), "p ≥ 0.1"],
  [Math.log(0.01), "p ≥ 0.01"],
  [-Infinity, "p < 0.01"],
];
const HUES = 6;

const key = (entries) =>
  h(
    "div",
    { class: "legend" },
    entries.map(([kind, text]) => h("span", { class: kind }, text)),
  );

const mask = {
  of: ({ segment }) => (segment.trace === null ? "t-left-out" : "t-trained"),
  legend: () =>
    key([
      ["t-trained", "trained"],
      ["t-left-out", "context or left out"],
    ]),
};

const logprob = {
  of: (token) =>
    token.logprob === null ? "t-none" : `t-p${STEPS.findIndex(([floor]) => token.logprob >= floor)}`,
  legend: () => key([...STEPS.map(([, text], at) => [`t-p${at}`, text]), ["t-none", "not sampled"]]),
};

function version(outline) {
  const found = outline.completions
    .flatMap((call) => [call.version_min, call.version_max])
    .filter((v) => v !== null);
  const known = [...new Set(found)].sort((a, b) => a - b);
  return {
    of: (token) => (token.version === null ? "t-none" : `t-v${token.version % HUES}`),
    legend: () => key([...known.map((v) => [`t-v${v % HUES}`, `version ${v}`]), ["t-none", "not sampled"]]),
  };
}

export const colouring = (name, outline) => ({ mask, logprob, version: version(outline) })[name];
