// Starts the page: the token, the theme, the stream, then whatever the address asks for.

import { get, keepToken, Problem, takeTokenFromAddress, token } from "./api.js";
import { fill, h } from "./dom.js";
import { listenToKeys } from "./keyboard.js";
import { Live } from "./live.js";
import { Router } from "./router.js";
import { setUpTheme } from "./theme.js";

const main = document.getElementById("main");
const live = new Live();
const router = new Router(main, { live, failed, me: null });

async function start() {
  if (!token()) return askForToken();
  try {
    router.context.me = await get("/dashboard/me");
  } catch (error) {
    return failed(error);
  }
  live.start();
  router.show();
}

/** What a page shows instead when it cannot be made. */
function failed(error) {
  if (error.name === "AbortError") return;
  if (error instanceof Problem && error.status === 401) {
    live.stop();
    askForToken(token() ? "The server does not accept this token." : null);
    return;
  }
  fill(main, h("p", { class: "notice", role: "alert" }, error.message));
}

function askForToken(problem) {
  keepToken(null);
  const input = h("input", { type: "password", name: "token", autocomplete: "off", required: true });
  const enter = (event) => {
    event.preventDefault();
    keepToken(input.value.trim());
    start();
  };
  document.title = "Polar";
  fill(
    main,
    h(
      "form",
      { class: "entry", onsubmit: enter },
      h("h1", null, "A token, please"),
      h(
        "p",
        { class: "soft" },
        "The dashboard shows what tasks and agents say, so it asks who you are. `polar serve` prints a link that",
        " lets you read; `polar token create` makes other tokens.",
      ),
      problem && h("p", { class: "notice", role: "alert" }, problem),
      h("label", null, "Token", input),
      h("button", { class: "primary", type: "submit" }, "Open"),
    ),
  );
  input.focus();
}

live.on("state", (state) => {
  const pulse = document.getElementById("pulse");
  pulse.className = `pulse ${state}`;
  pulse.textContent = state;
});
takeTokenFromAddress();
addEventListener("hashchange", () => takeTokenFromAddress() && start());
setUpTheme(document.getElementById("theme"));
listenToKeys(router);
start();
