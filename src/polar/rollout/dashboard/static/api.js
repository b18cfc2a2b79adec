// The control plane's REST API, with the token that this tab was given.

const KEY = "polar-token";
const PREFIX = "/api/v1";

export class Problem extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const token = () => sessionStorage.getItem(KEY);

export function keepToken(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

/** A link may carry a token after `#`, which is never sent to any server; it is taken out of the address.
 * True where there was one. */
export function takeTokenFromAddress() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!given) return false;
  keepToken(given);
  history.replaceState(null, "", location.pathname + location.search);
  return true;
}

export async function request(path, { method = "GET", query = {}, headers: more = {}, body, signal } = {}) {
  const asked = Object.entries(query).filter(
    ([, value]) => value !== null && value !== undefined && value !== "",
  );
  const search = asked.length ? `?${new URLSearchParams(asked)}` : "";
  const headers = { ...more, Authorization: `Bearer ${token() ?? ""}` };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(PREFIX + path + search, {
    method,
    headers,
    signal,
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!answer.ok) {
    const problem = await answer.json().catch(() => ({}));
    throw new Problem(answer.status, problem.error ?? `the server answered ${answer.status}`);
  }
  return answer;
}

export const get = async (path, query, signal) => (await request(path, { query, signal })).json();
export const post = async (path, body = {}) => (await request(path, { method: "POST", body })).json();
export const part = encodeURIComponent;
