// Small charts as SVG: a sparkline without words, and a curve with its scale.

import { h } from "./dom.js";
import { number } from "./format.js";

/** Bars of one hour; the label is what a screen reader says of it. */
export function bars(values, label) {
  const top = Math.max(...values, 1e-9);
  const width = 100 / values.length;
  return h(
    "svg",
    { class: "chart", viewBox: "0 0 100 24", preserveAspectRatio: "none", role: "img", "aria-label": label },
    h("line", { class: "grid", x1: 0, x2: 100, y1: 23.5, y2: 23.5 }),
    values.map((value, at) => {
      const height = (23 * value) / top;
      return height > 0
        ? h("rect", {
            class: "mark",
            x: at * width + width * 0.15,
            width: width * 0.7,
            y: 24 - height,
            height,
          })
        : null;
    }),
  );
}

const FEW = 20;

/** One number over steps; steps at which it has no value are passed over, and few values are marked. One
 * that never changes is a line half-way up, with its value as the only one on the scale. */
export function curve(steps, values, label) {
  const [W, H, LEFT, BOTTOM] = [320, 130, 44, 18];
  const known = values.filter((value) => value !== null);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const first = steps[0];
  const span = steps[steps.length - 1] - first || 1;
  const x = (step) => LEFT + ((W - LEFT - 6) * (step - first)) / span;
  const y = (value) => 6 + (H - BOTTOM - 12) * (low === high ? 0.5 : (high - value) / (high - low));
  const points = steps.map((step, at) => [step, values[at]]).filter(([, value]) => value !== null);
  const path = points.map(
    ([step, value], at) => `${at ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`,
  );
  const marks = points.length > FEW ? [] : points;
  const place = h("circle", { class: "mark", r: 3, visibility: "hidden" });
  const read = h("text", { x: W - 6, y: H - 4, "text-anchor": "end" }, `step ${steps[steps.length - 1]}`);
  const show = (event) => {
    const box = svg.getBoundingClientRect();
    const wanted = first + ((((event.clientX - box.left) / box.width) * W - LEFT) / (W - LEFT - 6)) * span;
    const [step, value] = points.reduce((best, one) =>
      Math.abs(one[0] - wanted) < Math.abs(best[0] - wanted) ? one : best,
    );
    place.setAttribute("visibility", "visible");
    place.setAttribute("cx", x(step));
    place.setAttribute("cy", y(value));
    read.textContent = `step ${step}: ${number(value)}`;
  };
  const svg = h(
    "svg",
    { class: "chart", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label, onpointermove: show },
    [...new Set([high, low])].map((value) => [
      h("line", { class: "grid", x1: LEFT, x2: W - 6, y1: y(value), y2: y(value) }),
      h("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, number(value)),
    ]),
    h("path", { class: "line", d: path.join("") }),
    marks.map(([step, value]) => h("circle", { class: "mark", r: 2, cx: x(step), cy: y(value) })),
    place,
    read,
  );
  return svg;
}

/** Rewards of a group's samples, one bar each. */
export function rewardBars(rewards) {
  const top = Math.max(...rewards.map(Math.abs), 1e-9);
  return h(
    "span",
    { class: "rewards", role: "img", "aria-label": `rewards ${rewards.map((r) => number(r)).join(", ")}` },
    rewards.map((reward) => h("i", { style: { height: `${Math.max((100 * reward) / top, 8)}%` } })),
  );
}
