// Every token of a session, coloured by what is asked of it. A path is a trace, or an answer no trace trains.

import { get, part } from "../api.js";
import { fill, h } from "../dom.js";
import { count } from "../format.js";
import { nothing } from "./conversation.js";
import { colouring, COLOURS } from "./colours.js";
import { Tip } from "./tip.js";

const PAGE = 2000;

export async function tokens({ detail, body, query, note, signal, failed }) {
  const { outline, session } = detail;
  if (!outline) return fill(body, nothing(detail));
  const view = new TokenView(detail, note, signal, failed);
  view.colour = COLOURS.includes(query.get("colour")) ? query.get("colour") : "mask";
  const asked = Number(query.get("path") ?? 0);
  view.path = outline.paths[asked] ? asked : 0;
  fill(body, view.bar, view.sums, view.sequence);
  if (!outline.paths.length)
    return fill(body, h("p", { class: "card empty" }, `${session.id} sampled no token.`));
  view.draw();
  return body;
}

class TokenView {
  constructor(detail, note, signal, failed) {
    this.detail = detail;
    this.outline = detail.outline;
    this.note = note;
    this.signal = signal;
    this.failed = failed;
    this.bar = h("div", { class: "token-bar" });
    this.sums = h("div", { class: "sums" });
    this.sequence = h("div", { "data-part": "sequence" });
    this.tip = new Tip(this.sequence, signal);
    this.segmentsAfter = children(this.outline.segments);
  }

  draw(jumpTo = null) {
    this.note({ path: this.path, colour: this.colour });
    this.colours = colouring(this.colour, this.outline);
    fill(this.bar, this.#paths(), this.#choice(), this.colours.legend());
    fill(this.sums, sums(this.detail));
    fill(this.sequence, this.#sequence());
    if (jumpTo !== null)
      this.sequence.querySelector(`[data-segment="${jumpTo}"]`)?.scrollIntoView({ block: "center" });
  }

  #paths() {
    const change = (event) => {
      this.path = Number(event.target.value);
      this.draw();
    };
    const options = this.outline.paths.map((path, at) => h("option", { value: at }, pathName(path)));
    const select = h("select", { onchange: change, name: "path" }, options);
    select.value = String(this.path);
    return h("label", { class: "field" }, `Sequence, one of ${count(options.length)}`, select);
  }

  #choice() {
    const radio = (name) => {
      const onchange = () => {
        this.colour = name;
        this.draw();
      };
      const input = h("input", { type: "radio", name: "colour", value: name, onchange });
      input.checked = name === this.colour;
      return h("label", null, input, name);
    };
    return h(
      "div",
      { class: "choice", role: "radiogroup", "aria-label": "Colour tokens by" },
      COLOURS.map(radio),
    );
  }

  #sequence() {
    const { segments, paths } = this.outline;
    const path = paths[this.path];
    const indices = [];
    for (let at = path.leaf; at >= 0; at = segments[at].parent) indices.unshift(at);
    let start = 0;
    return indices.map((index) => {
      const parts = [this.#fork(index), this.#segment(index, start)];
      start += segments[index].tokens;
      return parts;
    });
  }

  /** Other ways on from where this segment begins. */
  #fork(index) {
    const { segments, paths } = this.outline;
    const others = (this.segmentsAfter.get(segments[index].parent) ?? []).filter((other) => other !== index);
    if (!others.length || segments[index].parent < 0) return null;
    const jump = (other) => {
      const at = paths.findIndex((path) => isOnPath(segments, path.leaf, other));
      if (at < 0) return null;
      const onclick = () => {
        this.path = at;
        this.draw(other);
      };
      return h("button", { type: "button", onclick }, pathName(paths[at]));
    };
    return h("div", { class: "fork" }, "Fork here, the other way:", others.map(jump));
  }

  #segment(index, start) {
    const segment = this.outline.segments[index];
    const isSampled = segment.completion !== null;
    const isTrained = segment.trace !== null;
    const isHere = segment.trace === this.outline.paths[this.path].trace;
    const body = h("div", { class: "tokens" });
    const load = (from = 0) => this.#load(body, index, start, from).catch(this.failed);
    const header = h("header");
    if (isSampled) {
      const where = isTrained
        ? isHere
          ? "trained here"
          : `trained in trace ${segment.trace}`
        : "not trained";
      append(
        header,
        h("b", null, `answer of call ${segment.completion}`),
        `${count(segment.tokens)} tokens`,
        where,
      );
      if (!segment.is_exact)
        append(header, h("span", { class: "warn" }, "after other tokens than the policy saw"));
      load();
    } else {
      const fold = () => {
        const isOpen = body.childElementCount > 0;
        button.setAttribute("aria-expanded", String(!isOpen));
        if (isOpen) body.replaceChildren();
        else load();
      };
      const label = `${start === 0 ? "prompt" : "given"}, ${count(segment.tokens)} tokens`;
      const button = h(
        "button",
        { type: "button", class: "quiet", "aria-expanded": "false", onclick: fold },
        label,
      );
      append(header, button);
    }
    const kind = isSampled ? (isTrained ? "segment sampled" : "segment left-out") : "segment";
    return h("div", { class: kind, "data-segment": index }, header, body);
  }

  async #load(body, index, start, from) {
    const segment = this.outline.segments[index];
    const url = `/dashboard/sessions/${part(this.detail.session.id)}/tokens`;
    const page = await get(url, { segment: index, start: from, count: PAGE }, this.signal);
    const made = page.ids.map((id, at) => {
      const text = page.texts?.[at];
      const token = {
        id,
        text,
        position: start + from + at,
        logprob: page.logprobs?.[at] ?? null,
        version: page.versions?.[at] ?? null,
        segment,
      };
      const span = h("span", { class: this.colours.of(token) }, text === undefined ? id : visible(text));
      if (text === undefined) span.classList.add("id");
      this.tip.know(span, token);
      return span;
    });
    body.append(...made);
    if (page.next === null) return;
    const more = h(
      "button",
      { type: "button", class: "quiet" },
      `… ${count(segment.tokens - page.next)} more tokens`,
    );
    more.addEventListener("click", () => {
      more.remove();
      this.#load(body, index, start, page.next).catch(this.failed);
    });
    body.append(more);
  }
}

const append = (element, ...parts) =>
  parts.forEach((one) => element.append(one instanceof Node ? one : h("span", null, one)));
const visible = (text) => text.replaceAll("\n", "↵\n") || "·";

export function pathName(path) {
  if (path.trace === null) return `call ${path.completion}, in no trace (${path.lineage})`;
  const reward = path.reward === null ? "" : `, reward ${+path.reward.toFixed(3)}`;
  return `trace ${path.trace}: ${path.lineage}${reward}`;
}

function children(segments) {
  const found = new Map();
  segments.forEach((segment, index) =>
    found.set(segment.parent, [...(found.get(segment.parent) ?? []), index]),
  );
  return found;
}

function isOnPath(segments, leaf, wanted) {
  for (let at = leaf; at >= wanted; at = segments[at].parent) if (at === wanted) return true;
  return false;
}

/** The accounts of the node's builder beside what is counted here from the recording itself. */
function sums({ session, outline }) {
  const stats = session.result.stats;
  const trained = outline.segments.reduce((sum, one) => sum + (one.trace === null ? 0 : one.tokens), 0);
  const excluded = Object.entries(stats.excluded);
  const left = excluded.reduce((sum, [, tokens]) => sum + tokens, 0);
  const isSound = trained === stats.trainable_tokens && stats.sampled_tokens === trained + left;
  const reasons = excluded
    .map(([reason, tokens]) => `${count(tokens)} ${reason.replaceAll("_", " ")}`)
    .join(", ");
  return h(
    "p",
    { "data-part": "sums" },
    h("b", null, count(stats.sampled_tokens)),
    " sampled = ",
    h("b", null, count(trained)),
    " trained + ",
    h("b", null, count(left)),
    ` left out${reasons ? ` (${reasons})` : ""} `,
    isSound
      ? h("span", { class: "good" }, "✓ adds up")
      : h("span", { class: "bad" }, `✗ the result says ${count(stats.trainable_tokens)} trained`),
    stats.faults.map((fault) => h("span", { class: "bad" }, ` ${fault.completion ?? ""}: ${fault.problem}`)),
  );
}
