// What the server has told: key -> value (see fleet_view.py), and who wants to know of changes.

const values = new Map();
const listeners = new Set();
let waiting = null;

export const get = (key) => values.get(key);
export const fleet = () => values.get("fleet");

function below(prefix) {
  return [...values].filter(([key]) => key.startsWith(prefix)).map(([, value]) => value);
}

export const devices = () => below("d/");
export const rounds = () => below("r/").sort((a, b) => a.round - b.round);
export const flashed = () => [...values].filter(([key]) => key.startsWith("w/"))
  .sort(([a], [b]) => Number(a.slice(2)) - Number(b.slice(2))).map(([, value]) => value);
export const events = () => below("l/").sort((a, b) => b.at - a.at);

/** Calls listener(changed keys) at most once a frame; returns what ends it. */
export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function told(keys) {
  if (waiting) return keys.forEach((key) => waiting.add(key));
  waiting = new Set(keys);
  requestAnimationFrame(() => {
    const changed = waiting;
    waiting = null;
    listeners.forEach((listener) => listener(changed));
  });
}

function take(message) {
  const changed = [...message.gone, ...Object.keys(message.set)];
  if (message.all) {
    changed.push(...values.keys());
    values.clear();
  }
  message.gone.forEach((key) => values.delete(key));
  for (const [key, value] of Object.entries(message.set)) values.set(key, value);
  told(changed);
}

/** Listens while the page is shown; state("on" | "off") as the connection comes and goes. */
export function listen(state) {
  let source;
  const open = () => {
    source = new EventSource("events");
    source.onopen = () => state("on");
    source.onmessage = (event) => {
      window.received = (window.received ?? 0) + event.data.length; // read by benchmarks/console/measure.py
      take(JSON.parse(event.data));
    };
    source.onerror = () => {
      state("off");
      if (source.readyState === EventSource.CLOSED) setTimeout(open, 3000);
    };
  };
  addEventListener("pagehide", () => source.close()); // a browser that keeps the page would keep the connection too
  addEventListener("pageshow", (event) => event.persisted && open());
  open();
}

/** The JSON of an address; throws an Error with the server's words. */
export async function ask(address, body) {
  const options = body === undefined ? {} : {
    method: "POST", headers: {"content-type": "application/json"}, body: JSON.stringify(body),
  };
  let answer;
  try {
    answer = await fetch(address, options);
  } catch {
    throw new Error("the console does not answer: is 'metafleet console' still running?");
  }
  const given = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(given.error ?? `HTTP ${answer.status}`);
  return given;
}
