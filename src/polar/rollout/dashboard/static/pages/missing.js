// An address that leads nowhere.

import { fill, h } from "../dom.js";

export async function show({ root }) {
  fill(
    root,
    h("p", { class: "empty" }, "There is nothing at this address. ", h("a", { href: "/" }, "Overview")),
  );
}
