// What is known of one token, beside the pointer or the token that the arrow keys have come to.

import { h } from "../dom.js";

export class Tip {
  #tokens = new WeakMap();
  #box = h("div", { id: "token-tip", role: "status", hidden: true });
  #at = null;

  constructor(root, signal) {
    this.root = root;
    root.tabIndex = 0;
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", "Tokens; the arrow keys go from one to the next");
    root.addEventListener("pointerover", (event) => this.#show(event.target));
    root.addEventListener("pointerleave", () => this.#hide());
    root.addEventListener("blur", () => this.#hide());
    root.addEventListener("keydown", (event) => this.#step(event));
    signal.addEventListener("abort", () => this.#box.remove());
    document.body.append(this.#box);
  }

  know(span, token) {
    this.#tokens.set(span, token);
  }

  #show(span) {
    const token = this.#tokens.get(span);
    if (!token) return this.#hide();
    this.#at?.classList.remove("at");
    this.#at = span;
    span.classList.add("at");
    const entries = [
      ["token", token.text === undefined ? "–" : JSON.stringify(token.text)],
      ["id", token.id],
      ["position", token.position],
      [
        "logprob",
        token.logprob === null
          ? "–"
          : `${token.logprob.toFixed(4)} (p ${Math.exp(token.logprob).toFixed(3)})`,
      ],
      ["version", token.version ?? "–"],
      ["trained", token.segment.trace === null ? "no" : `in trace ${token.segment.trace}`],
    ];
    this.#box.replaceChildren(
      h(
        "dl",
        null,
        entries.map(([name, value]) => [h("dt", null, name), h("dd", null, value)]),
      ),
    );
    this.#box.hidden = false;
    const place = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const { offsetWidth, offsetHeight } = this.#box;
    const below = place.bottom + 6 + offsetHeight < innerHeight;
    this.#box.style.left = `${Math.max(8, Math.min(place.left, innerWidth - offsetWidth - 8))}px`;
    this.#box.style.top = `${below ? place.bottom + 6 : Math.max(8, place.top - offsetHeight - 6)}px`;
  }

  #hide() {
    this.#at?.classList.remove("at");
    this.#box.hidden = true;
  }

  #step(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || event.target !== this.root) return;
    event.preventDefault();
    const spans = [...this.root.querySelectorAll(".tokens span")];
    const at = spans.indexOf(this.#at);
    const next = spans[Math.min(Math.max(at + by, 0), spans.length - 1)];
    if (!next) return;
    next.scrollIntoView({ block: "nearest" });
    this.#show(next);
  }
}
