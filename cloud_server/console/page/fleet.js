// The fleet: how it stands, and every device as a tile. A tile is made once; only its changed texts are written.

import {ABSENT, ago, bytes, card, h, joules, plural, share, sum, text, updown} from "./dom.js";
import {confirmed} from "./dialogs.js";
import * as flash from "./flash.js";
import * as store from "./store.js";

const FILTERS = {
  all: ["all devices", () => true],
  on: ["on", (d) => d.state === "on" && d.status === "enrolled"],
  off: ["off", (d) => d.state !== "on" && d.status === "enrolled"],
  trouble: ["with trouble", (d) => Boolean(d.trouble || d.cannot)],
  waiting: ["not on yet, or pending", (d) => d.status === "invited" || Boolean(d.pending) || !d.phase],
  revoked: ["revoked", (d) => d.status === "revoked"],
};
const last = -Infinity;
const ORDERS = {
  name: ["name", null],
  worst: ["lowest accuracy", (d) => -(d.after ?? Infinity)],
  gain: ["most gained", (d) => d.after !== undefined && d.before !== undefined ? d.after - d.before : last],
  bytes: ["most bytes", (d) => sum(d.payload) ?? last],
  joules: ["most joules", (d) => d.joules?.value ?? last],
  seen: ["seen last", (d) => d.last_seen ?? last],
  trouble: ["latest trouble", (d) => d.cannot ? Infinity : d.trouble?.round ?? last],
};
const kept = {search: "", filter: "all", order: "name"};
const compare = new Intl.Collator(undefined, {numeric: true}).compare;

export function show(main) {
  const cards = h("section.cards", {"aria-label": "The fleet"});
  const notes = h("div.notes");
  const count = h("p.count", {role: "status"});
  const list = h("ul.tiles", {"aria-label": "Devices"});
  const tiles = new Map();
  let order = "";
  const chosen = (name, options, label) => h("label.choice", {}, h("span", {}, label), h("select", {
    change: (event) => { kept[name] = event.target.value; arrange(); },
  }, Object.entries(options).map(([key, [words]]) =>
    h("option", {value: key, selected: kept[name] === key}, words))));
  const search = h("input", {
    type: "search", id: "search", placeholder: "Search devices", "aria-label": "Search devices", value: kept.search,
    input: (event) => { kept.search = event.target.value; arrange(); },
  });
  main.append(h("h1.unseen", {}, "Fleet"), cards, notes,
    h("div.toolbar", {role: "search"}, search, chosen("filter", FILTERS, "Show"), chosen("order", ORDERS, "Sort by"),
      h("button", {type: "button", click: () => confirmed("token")}, "Add a device…"),
      h("button", {type: "button", id: "flash", click: flash.asked}, "Flash devices…"), count), list);

  function arrange() {
    const words = kept.search.trim().toLowerCase();
    const [, passes] = FILTERS[kept.filter];
    const [, key] = ORDERS[kept.order];
    const all = store.devices();
    const shown = all.filter((d) => passes(d) && (!words || said(d).toLowerCase().includes(words)));
    shown.sort((a, b) => (key && key(b) - key(a)) || compare(a.name, b.name));
    text(count, shown.length === all.length ? plural(all.length, "device") : `${shown.length} of ${all.length} devices`);
    const names = shown.map((d) => d.name);
    if (names.join() === order) return;
    order = names.join();
    const held = document.activeElement;
    list.replaceChildren(...names.map((name) => tiles.get(name).item));
    if (list.contains(held)) held.focus({preventScroll: true});
    if (!names.length) list.append(h("li.empty", {}, all.length ? "No device fits." : "No device has joined yet."));
  }

  function update(changed) {
    const keys = changed ? [...changed].filter((key) => key.startsWith("d/")) : null;
    for (const key of keys ?? store.devices().map((d) => `d/${d.name}`)) {
      const device = store.get(key);
      const name = key.slice(2);
      if (!device) tiles.delete(name);
      else if (tiles.has(name)) tiles.get(name).write(device);
      else tiles.set(name, tile(device));
    }
    if (!changed || changed.has("fleet")) summary(cards, notes);
    if (!keys || keys.length) arrange();
  }

  update(null);
  const end = store.subscribe(update);
  const clock = setInterval(() => store.devices().forEach((d) => tiles.get(d.name)?.tick(d)), 30_000);
  return () => { end(); clearInterval(clock); };
}

const said = (d) => `${d.name} ${state(d)} ${hardware(d)} ${d.version ?? ""} ${d.cannot ?? ""} ${d.trouble?.text ?? ""}`;

const hardware = (d) => [d.board ?? ABSENT, d.engine].filter(Boolean).join(", ");

export function state(d) {
  if (d.status === "revoked") return "revoked";
  if (d.pending) return `${d.pending} pending`;
  if (d.status === "invited") return "invited, not on yet";
  if (d.quarantined) return "quarantined";
  if (d.rests) return "rests until tomorrow";
  if (d.state !== "on") return d.phase ? "off" : "not on yet";
  return d.phase ?? "on";
}

export function kind(d) {
  if (d.status === "revoked") return "gone";
  if (d.cannot) return "bad";
  if (d.pending || d.status === "invited" || d.rests || d.quarantined) return "waits";
  return d.state === "on" ? "on" : "off";
}

function tile(device) {
  const [dot, phase, board, scores, moved, energy, seen, trouble] =
    ["span.dot", "span.phase", "span.board", "span.scores", "dd", "dd", "dd", "p.trouble"].map((one) => h(one));
  const [before, after] = [h("i.before"), h("i.after")];
  const item = h("li.tile", {}, h("a", {href: `#/devices/${encodeURIComponent(device.name)}`},
    h("span.head", {}, dot, h("strong", {}, device.name), phase), board,
    h("span.accuracy", {}, h("span.unseen", {}, "accuracy before and after personalization "), scores),
    h("span.meter", {"aria-hidden": "true"}, after, before)),
  h("dl", {}, h("div", {}, h("dt", {}, "bytes"), moved), h("div", {}, h("dt", {}, "joules"), energy),
    h("div", {}, h("dt", {}, "seen"), seen)), trouble);
  const tick = (d) => text(seen, ago(d.last_seen));
  const write = (d) => {
    dot.className = `dot ${kind(d)}`;
    text(phase, d.new && d.state === "on" ? "serves (new)" : state(d));
    text(board, hardware(d));
    text(scores, d.after === undefined && d.before === undefined ? ABSENT : `${share(d.before)} → ${share(d.after)}`);
    after.style.transform = `scaleX(${d.after ?? 0})`;
    before.style.left = `${100 * (d.before ?? 0)}%`;
    before.hidden = d.before === undefined;
    text(moved, updown(d.payload));
    text(energy, joules(d.joules?.value));
    tick(d);
    const words = d.cannot ? `cannot: ${d.cannot}` : d.quarantined ? `quarantined: ${d.quarantined}` : d.rests ? d.rests
      : d.moved ? "drift: its samples have moved away from those that it was personalized on" : d.trouble ? `round ${d.trouble.round}, ${d.trouble.what}: ${d.trouble.text}` : "";
    text(trouble, words);
    trouble.hidden = !words;
    item.classList.toggle("dim", d.status === "revoked");
  };
  write(device);
  return {item, write, tick};
}

function summary(cards, notes) {
  const now = store.fleet();
  const closed = store.rounds().filter((r) => r.status === "closed");
  const scored = closed.filter((r) => r.accuracy).at(-1);
  const totals = now.totals ?? {};
  const energy = totals.energy_j;
  cards.replaceChildren(
    card("Round", `${now.rounds_closed} of ${now.rounds}`, standing(now)),
    card("Devices on", `${now.on_count} of ${now.enrolled}`, now.off_count ? `${now.off_count} took part and are off` : ""),
    card("Accuracy", scored ? `${share(scored.before)} → ${share(scored.accuracy.mean)}` : ABSENT,
      scored ? `worst ${share(scored.accuracy.worst)}, after round ${scored.round}` : "not evaluated yet"),
    card("Payload", totals.payload_bytes ? bytes(totals.payload_bytes.up + totals.payload_bytes.down) : ABSENT,
      totals.payload_bytes ? `up ${bytes(totals.payload_bytes.up)}, down ${bytes(totals.payload_bytes.down)}` : ""),
    card("Energy", joules(energy?.value), energy
      ? `${energy.source.split(":")[0]}${energy.low === undefined ? "" : `, ${joules(energy.low)} to ${joules(energy.high)}`}`
      : "not measured"),
  );
  const said = [now.stalled && `Stalled: ${now.stalled}`, now.ended, ...(now.warnings ?? []),
    now.not_on_yet?.length ? `Enrolled or invited, and not on yet: ${now.not_on_yet.slice(0, 10).join(", ")}` : ""];
  notes.replaceChildren(...said.filter(Boolean).map((words) => h("p.note", {}, words)), ...programs(now.update));
}

/** How far an update is that devices fetch themselves, with what may be asked of it. */
function programs(update) {
  if (!update || update.st === "ended") return [];
  const counts = ["done", "going", "waiting", "failed"].filter((st) => update[st])
    .map((st) => `${update[st]} ${st === "going" ? "under way" : st}`);
  const may = (action, words) => h("button", {type: "button", id: action, click: () => confirmed(action)}, words);
  return [h("p.note", {}, `Update to ${update.version} is ${update.st}${update.why ? `: ${update.why}` : ""}; ${counts.join(", ")}. `,
    update.st === "running" ? [] : may("resume-update", "Go on…"), " ",
    update.st === "aborted" ? [] : may("abort-update", "End it…"))];
}

function standing(now) {
  if (now.finished) return "all rounds are done";
  if (now.ended) return "ended early";
  if (!now.running) return "the aggregator is not running";
  if (now.paused) return now.open_round ? `paused after round ${now.open_round}` : "paused";
  return now.open_round ? `round ${now.open_round} is open` : "waits for devices";
}
