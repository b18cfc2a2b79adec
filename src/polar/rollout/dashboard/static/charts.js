// Small charts as SVG: a sparkline without words, and curves with their scale.

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
const [W, H, LEFT, BOTTOM] = [320, 130, 44, 18];

/** An exponential moving average that is not pulled towards its beginning; 0 leaves points as they are. */
export function smoothed(points, smoothing) {
  let [mean, weight] = [0, 0];
  return points.map(([place, value]) => {
    weight = smoothing * weight + 1;
    // So written, a number that never changes stays exactly what it is.
    mean += (value - mean) / weight;
    return [place, mean];
  });
}

/** One number of one or several runs, each `{ name, points }`; few points are marked. A number that never
 * changes is a line half-way up, with its value as the only one on the scale. Pointing reads values;
 * `place` is what a reader calls a place; `chosen` is called with the run of the curve that is clicked, and the
 * place. */
export function curves(lines, { smoothing, label, place, chosen }) {
  const drawn = lines.map((one) => ({ ...one, points: smoothed(one.points, smoothing) }));
  const all = drawn.flatMap(({ points }) => points);
  const scale = scales(all);
  const reading = h("text", { x: W - 6, y: H - 4, "text-anchor": "end" }, place(scale.last));
  const places = drawn.map((_, at) => h("circle", { class: `mark run-${at}`, r: 3, visibility: "hidden" }));
  const nearest = (event) => {
    const wanted = scale.at((pointed(svg, event).x - LEFT) / (W - LEFT - 6));
    return drawn.map(({ points }) => points.length && points.reduce((best, one) => closer(best, one, wanted)));
  };
  const show = (event) => {
    const read = nearest(event);
    read.forEach((point, at) => point && mark(places[at], scale, point));
    const [first] = read.filter(Boolean);
    const values = read.map((point) => (point ? number(point[1]) : "–")).join(" · ");
    reading.textContent = `${place(first[0])}: ${values}`;
  };
  const choose = (event) => {
    const { y } = pointed(svg, event);
    const away = (point) => (point ? Math.abs(scale.y(point[1]) - y) : Infinity);
    const read = nearest(event);
    const at = read.reduce((best, point, one) => (away(point) < away(read[best]) ? one : best), 0);
    if (read[at]) chosen({ name: drawn[at].name, at: read[at][0] });
  };
  const svg = h(
    "svg",
    {
      class: chosen ? "chart chosen" : "chart",
      viewBox: `0 0 ${W} ${H}`,
      role: "img",
      "aria-label": label,
      onpointermove: show,
      onclick: chosen && choose,
    },
    [...new Set([scale.high, scale.low])].map((value) => [
      h("line", { class: "grid", x1: LEFT, x2: W - 6, y1: scale.y(value), y2: scale.y(value) }),
      h("text", { x: LEFT - 6, y: scale.y(value) + 4, "text-anchor": "end" }, shortly(value)),
    ]),
    drawn.map(({ points }, at) => drawnLine(points, scale, at)),
    places,
    reading,
  );
  return svg;
}

function pointed(svg, { clientX, clientY }) {
  const box = svg.getBoundingClientRect();
  return { x: ((clientX - box.left) / box.width) * W, y: ((clientY - box.top) / box.height) * H };
}

const shortly = (value) => number(value, Math.abs(value) >= 1000 ? 0 : 3);
const closer = (best, one, wanted) =>
  Math.abs(one[0] - wanted) < Math.abs(best[0] - wanted) ? one : best;

function scales(points) {
  const [values, places] = [points.map(([, value]) => value), points.map(([place]) => place)];
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const [first, last] = [Math.min(...places), Math.max(...places)];
  const span = last - first || 1;
  return {
    low,
    high,
    last,
    x: (place) => LEFT + ((W - LEFT - 6) * (place - first)) / span,
    y: (value) => 6 + (H - BOTTOM - 12) * (low === high ? 0.5 : (high - value) / (high - low)),
    at: (share) => first + share * span,
  };
}

function drawnLine(points, scale, at) {
  const path = points.map(
    ([place, value], n) => `${n ? "L" : "M"}${scale.x(place).toFixed(1)} ${scale.y(value).toFixed(1)}`,
  );
  const marks = points.length > FEW ? [] : points;
  return [
    h("path", { class: `line run-${at}`, d: path.join("") }),
    marks.map(([place, value]) =>
      h("circle", { class: `mark run-${at}`, r: 2, cx: scale.x(place), cy: scale.y(value) }),
    ),
  ];
}

function mark(circle, scale, [place, value]) {
  circle.setAttribute("visibility", "visible");
  circle.setAttribute("cx", scale.x(place));
  circle.setAttribute("cy", scale.y(value));
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
