// Small helpers for elements and for figures as text. A figure that is not known is a dash, never 0.

export const ABSENT = "—";

/** An element: h("p.note", {title: "…"}, "text", child, …). Functions in the properties become listeners. */
export function h(kind, properties = {}, ...children) {
  const [tag, ...classes] = kind.split(".");
  const made = document.createElement(tag || "div");
  if (classes.length) made.className = classes.join(" ");
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") made.addEventListener(name, value);
    else if (name === "value" || name === "htmlFor") made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** Sets text only where it differs, so that nothing is laid out again for nothing. */
export function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

function scaled(value, units, step = 1000) {
  let k = 0;
  while (Math.abs(value) >= 999.5 && k < units.length - 1) [value, k] = [value / step, k + 1];
  const digits = k === 0 && Number.isInteger(value) ? 0 : value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return `${value.toFixed(digits)} ${units[k]}`;
}

const known = (value) => value !== undefined && value !== null;
export const bytes = (value) => known(value) ? scaled(value, ["B", "kB", "MB", "GB", "TB"]) : ABSENT;
export const joules = (value) =>
  !known(value) ? ABSENT : value > 0 && value < 0.0995 ? scaled(value * 1000, ["mJ"]) : scaled(value, ["J", "kJ", "MJ"]);
export const share = (value) => known(value) ? value.toFixed(3) : ABSENT;
export const number = (value, digits = 0) => known(value) ? value.toFixed(digits) : ABSENT;
export const updown = (pair) => known(pair) ? `↑ ${bytes(pair[0])}  ↓ ${bytes(pair[1])}` : ABSENT;
export const sum = (pair) => known(pair) ? pair[0] + pair[1] : undefined;

export function seconds(value) {
  if (!known(value)) return ABSENT;
  if (value < 59.95) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  const [minutes, hours] = [Math.floor(whole / 60), Math.floor(whole / 3600)];
  return hours ? `${hours} h ${String(minutes % 60).padStart(2, "0")} min`
    : `${minutes} min ${String(whole % 60).padStart(2, "0")} s`;
}

export function ago(unix) {
  if (!known(unix)) return ABSENT;
  const s = Math.max(0, Date.now() / 1000 - unix);
  if (s < 45) return "just now";
  if (s < 5400) return `${Math.max(1, Math.round(s / 60))} min ago`;
  return s < 129600 ? `${Math.round(s / 3600)} h ago` : `${Math.round(s / 86400)} days ago`;
}

const STAMP = new Intl.DateTimeFormat(undefined, {dateStyle: "medium", timeStyle: "medium"});
export const date = (unix) => known(unix) ? STAMP.format(new Date(unix * 1000)) : ABSENT;
export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

/** A table: heads are texts, or [text, "left"]; rows are lists of texts or elements. */
export function table(label, heads, rows) {
  const column = (head) => Array.isArray(head) ? head : [head, "right"];
  return h("div.table", {tabindex: "0", role: "region", "aria-label": label},
    h("table", {}, h("thead", {}, h("tr", {}, heads.map((head) => {
      const [name, side] = column(head);
      return h(`th.${side}`, {scope: "col"}, name);
    }))), h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, k) =>
      h(`td.${column(heads[k])[1]}`, {}, cell)))))));
}

/** Facts as a list of names and values; those that are not known are left out. */
export function facts(pairs) {
  return h("dl.facts", {}, pairs.filter(([, value]) => known(value) && value !== "").map(([name, value]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

export const card = (name, figure, under) =>
  h("div.card", {}, h("h2", {}, name), h("p.figure", {}, figure), h("p.under", {}, under ?? ""));
