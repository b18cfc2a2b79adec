// Training runs, the liveliest first.

import { get } from "../api.js";
import { fill, h, table } from "../dom.js";
import { ago, count, moment, number } from "../format.js";

export async function show({ root, signal }) {
  const { runs, is_configured } = await get("/dashboard/runs", {}, signal);
  const hint = is_configured
    ? "No run has written a metrics.jsonl below server.runs_dir yet."
    : "Set server.runs_dir to the directory that `polar train` writes its runs to, and they are shown here.";
  fill(
    root,
    h("div", { class: "head" }, h("h1", null, "Training")),
    runs.length ? list(runs) : h("p", { class: "card empty" }, hint),
  );
}

function list(runs) {
  const columns = [
    { name: "Run", id: true },
    { name: "Steps", number: true },
    { name: "Reward", number: true },
    { name: "Loss", number: true, wide: true },
    { name: "Held-out success", number: true, wide: true },
    { name: "Written", number: true, wide: true },
  ];
  return table(
    "Training runs",
    columns,
    runs.map((run) => [
      h(
        "a",
        { href: `/runs/${run.name.split("/").map(encodeURIComponent).join("/")}`, "data-line": "link" },
        run.name,
      ),
      count(run.steps),
      number(run.latest.reward),
      number(run.latest.loss),
      number(run.latest.held_out_success),
      h("time", { title: moment(run.updated_at) }, ago(run.updated_at)),
    ]),
  );
}
