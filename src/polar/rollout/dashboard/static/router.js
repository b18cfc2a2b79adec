// From addresses to pages; links inside the dashboard change the page without loading it again.

const PAGES = [
  [/^\/$/, "overview", "Overview"],
  [/^\/tasks$/, "tasks", "Tasks"],
  [/^\/tasks\/([^/]+)$/, "task", "Task"],
  [/^\/sessions$/, "sessions", "Sessions"],
  [/^\/sessions\/([^/]+)$/, "session", "Session"],
  [/^\/compare$/, "compare", "Compare"],
  [/^\/runs$/, "runs", "Runs"],
  [/^\/runs\/([^/]+)$/, "run", "Run"],
];
const SECTIONS = { task: "tasks", session: "sessions", compare: "sessions", run: "runs" };

export class Router {
  #leaving = new AbortController();

  constructor(main, context) {
    this.main = main;
    this.context = context;
    addEventListener("popstate", () => this.show());
    document.addEventListener("click", (event) => this.#follow(event));
  }

  go(address, { replace = false } = {}) {
    history[replace ? "replaceState" : "pushState"](null, "", address);
    this.show();
  }

  /** Change what stands after `?` without leaving the page: it has shown the change already. */
  note(query) {
    const entries = Object.entries(query).filter(([, value]) => value !== null && value !== "");
    const search = entries.length ? `?${new URLSearchParams(entries)}` : "";
    history.replaceState(null, "", location.pathname + search);
  }

  async show() {
    this.#leaving.abort();
    const leaving = (this.#leaving = new AbortController());
    const found = PAGES.map(([pattern, ...rest]) => [location.pathname.match(pattern), ...rest]).find(
      ([m]) => m,
    );
    const [match, name, title] = found ?? [null, "missing", "Not found"];
    const section = SECTIONS[name] ?? name;
    for (const link of document.querySelectorAll("nav [data-page]")) {
      if (link.dataset.page === section) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    const subject = match?.[1] ? decodeURIComponent(match[1]) : null;
    document.title = `${subject ?? title} · Polar`;
    const root = document.createElement("div");
    root.dataset.page = name;
    try {
      const { show } = await import(`./pages/${name}.js`);
      if (leaving.signal.aborted) return;
      await show({
        ...this.context,
        root,
        subject,
        query: new URLSearchParams(location.search),
        signal: leaving.signal,
        router: this,
      });
      if (leaving.signal.aborted) return;
      this.main.replaceChildren(root);
      scrollTo(0, 0);
    } catch (error) {
      if (!leaving.signal.aborted) this.context.failed(error);
    }
  }

  #follow(event) {
    const link = event.target.closest("a[href^='/']");
    const isPlain =
      event.button === 0 && !event.metaKey && !event.ctrlKey && !event.shiftKey && !event.altKey;
    if (!link || !isPlain || link.target || link.hasAttribute("download")) return;
    event.preventDefault();
    this.go(link.getAttribute("href"));
  }
}
