// What happens now: one stream of server-sent events for the whole tab, read with the token in a header.

import { Problem, request } from "./api.js";

const LONGEST_WAIT = 10_000;
const AGAIN = 1000;

export class Live extends EventTarget {
  #aborting = null;

  /** Listen until `signal` is aborted: kinds are `overview`, `changes` and `state`. */
  on(kind, listener, signal) {
    this.addEventListener(kind, (event) => listener(event.detail), { signal });
  }

  async start() {
    this.stop();
    const aborting = (this.#aborting = new AbortController());
    let wait = 500;
    while (!aborting.signal.aborted) {
      try {
        const answer = await request("/dashboard/live", { signal: aborting.signal });
        this.#tell("state", "live");
        wait = 500;
        await this.#read(answer.body.getReader());
      } catch (error) {
        if (aborting.signal.aborted || (error instanceof Problem && error.status < 500)) return;
      }
      this.#tell("state", "reconnecting");
      await new Promise((resolve) => setTimeout(resolve, wait));
      wait = Math.min(wait * 2, LONGEST_WAIT);
    }
  }

  stop() {
    this.#aborting?.abort();
  }

  async #read(reader) {
    for await (const { event, data } of frames(reader)) if (event) this.#tell(event, JSON.parse(data));
  }

  #tell(kind, detail) {
    this.dispatchEvent(new CustomEvent(kind, { detail }));
  }
}

/** The fields of each server-sent event, comments as none. */
async function* frames(reader) {
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    const whole = text.split("\n\n");
    text = whole.pop();
    for (const frame of whole) {
      const field = (line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)];
      yield Object.fromEntries(frame.split("\n").map(field));
    }
  }
}

/** Tell what a session's stream holds until it has ended; a connection that is lost is taken up again. */
export async function follow(path, tell, signal) {
  let after = null;
  while (!signal.aborted) {
    try {
      const headers = after ? { "Last-Event-ID": after } : {};
      const answer = await request(path, { headers, signal });
      for await (const { id, event, data } of frames(answer.body.getReader())) {
        after = id ?? after;
        if (!event) continue;
        const told = JSON.parse(data);
        tell(told);
        if (told.session?.result) return;
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Problem && error.status < 500) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN));
  }
}

/** Call at once, then at most once in `milliseconds`, the last call never lost; quiet after `signal`. */
export function throttled(action, milliseconds, signal) {
  let waiting = null;
  let last = 0;
  return () => {
    if (waiting !== null || signal.aborted) return;
    waiting = setTimeout(
      () => {
        waiting = null;
        last = Date.now();
        if (!signal.aborted) action();
      },
      Math.max(last + milliseconds - Date.now(), 0),
    );
  };
}
