// What was kept of a session's files and logs: a list, one file to read, and the whole to take away.

import { get, part, request } from "../api.js";
import { fill, h, table } from "../dom.js";
import { bytes } from "../format.js";

export async function artifacts({ detail, body, signal, failed, query, note }) {
  const { session } = detail;
  if (!session.result?.has_artifacts) {
    const text = session.result
      ? "Nothing was kept of this session's files."
      : "Logs and files come when it has ended.";
    return fill(body, h("p", { class: "card empty" }, text));
  }
  const url = `/dashboard/sessions/${part(session.id)}`;
  const { files } = await get(`${url}/artifacts`, {}, signal);
  const view = h("div", { "aria-live": "polite" });
  const open = async (name) => {
    const file = await get(`${url}/artifact`, { name }, signal);
    note({ file: name });
    fill(view, h("section", null, h("h2", null, name), content(file)));
  };
  const link = (name) =>
    h(
      "button",
      { type: "button", class: "link", "data-line": "link", onclick: () => open(name).catch(failed) },
      name,
    );
  const list = table(
    "Artifacts",
    [
      { name: "File", id: true },
      { name: "Size", number: true },
    ],
    files.map((file) => [link(file.name), bytes(file.size)]),
  );
  const take = h(
    "button",
    { type: "button", onclick: () => download(session.id).catch(failed) },
    "Download all",
  );
  const asked = query.get("file");
  if (asked && files.some((file) => file.name === asked)) await open(asked);
  return fill(body, list, h("div", { class: "pager" }, h("span"), take), view);
}

function content({ text, is_cut }) {
  if (text === null) return h("p", { class: "card empty" }, "This file is not text; it is in the archive.");
  return [
    h("pre", { class: "card", tabindex: 0 }, text || "(empty)"),
    is_cut && h("p", { class: "soft small" }, "It goes on; the whole of it is in the archive."),
  ];
}

async function download(id) {
  const answer = await request(`/sessions/${part(id)}/artifacts`);
  const link = h("a", { href: URL.createObjectURL(await answer.blob()), download: `${id}.zip` });
  link.click();
  URL.revokeObjectURL(link.href);
}
