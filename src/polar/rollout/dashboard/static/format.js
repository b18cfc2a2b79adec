// Numbers and times as people read them.

const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (value) => whole.format(value);
export const compact = (value) => (value < 10_000 ? whole.format(Math.round(value)) : short.format(value));

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return whole.format(value);
  return Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3
    ? value.toExponential(2)
    : String(+value.toFixed(digits));
}

export function signed(value) {
  if (value === null || value === undefined) return "–";
  return (value > 0 ? "+" : value < 0 ? "−" : "") + Math.abs(value).toFixed(2);
}

export const percent = (part, all) => (all ? `${Math.round((100 * part) / all)} %` : "–");

export function seconds(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

export function ago(unix) {
  const passed = Math.max(Date.now() / 1000 - unix, 0);
  if (passed < 5) return "now";
  if (passed < 60) return `${Math.floor(passed)} s ago`;
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  if (passed < 86_400) return `${Math.floor(passed / 3600)} h ago`;
  return new Date(unix * 1000).toLocaleDateString("en", { day: "numeric", month: "short", year: "numeric" });
}

export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString("en-GB");
export const moment = (unix) => new Date(unix * 1000).toLocaleString("en-GB");

export function bytes(value) {
  if (value < 1024) return `${value} B`;
  return value < 1024 ** 2 ? `${(value / 1024).toFixed(1)} KB` : `${(value / 1024 ** 2).toFixed(1)} MB`;
}
