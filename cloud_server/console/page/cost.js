// Cost: bytes and joules against the budget, over the rounds, and by device and phase.

import {ABSENT, bytes, card, h, joules, share, sum, table, text} from "./dom.js";
import {gallery} from "./chart.js";
import * as store from "./store.js";

const KINDS = ["model", "update", "serve", "graph"];
const PHASES = ["train", "adapt", "serve", "radio", "other", "idle"];
const SORTS = {
  bytes: ["bytes", (d) => sum(d.payload)],
  joules: ["joules", (d) => d.joules?.value],
  name: ["name", null],
};
let sort = "bytes";
let most = 200;

export function show(main) {
  const cards = h("section.cards", {"aria-label": "Against the budget"});
  const charts = gallery();
  const list = h("div");
  const source = h("p.note.plain");
  const select = h("select", {id: "cost-sort", change: (event) => { sort = event.target.value; update(); }},
    Object.entries(SORTS).map(([key, [words]]) => h("option", {value: key, selected: key === sort}, words)));
  const more = h("button", {type: "button", click: () => { most += 800; update(); }}, "Show more devices");
  main.append(h("h1", {}, "Cost"), cards, charts.place, h("h2", {}, "By device"),
    h("div.toolbar", {}, h("label.choice", {for: "cost-sort"}, h("span", {}, "Sort by")), select), list, more, source);

  function update(changed) {
    const fleet = store.fleet();
    if (!fleet || (changed && !changed.has("fleet"))) return;
    budget(cards, fleet);
    const closed = store.rounds().filter((r) => r.status === "closed");
    charts.set(sums(closed, fleet));
    const [, key] = SORTS[sort];
    const all = store.devices().filter((d) => d.payload || d.joules);
    all.sort((a, b) => (key ? (key(b) ?? -1) - (key(a) ?? -1) : 0) || a.name.localeCompare(b.name));
    const kinds = KINDS.filter((kind) => all.some((d) => d.kinds?.[kind]));
    const phases = PHASES.filter((phase) => all.some((d) => d.joules?.phases[phase] !== undefined));
    list.replaceChildren(table("Costs by device", [["device", "left"], "payload", ...kinds, "wire", "joules",
      ...phases.map((phase) => `J ${phase}`)], all.slice(0, most).map((d) => [
      h("a", {href: `#/devices/${encodeURIComponent(d.name)}`}, d.name), bytes(sum(d.payload)),
      ...kinds.map((kind) => bytes(sum(d.kinds?.[kind]))), bytes(sum(d.wire)),
      joules(d.joules?.value), ...phases.map((phase) => joules(d.joules?.phases[phase]))])));
    more.hidden = all.length <= most;
    const energy = fleet.totals.energy_j;
    const absent = Object.keys(fleet.totals.absent_energy ?? {});
    text(source, energy ? `Joules are of work, without idle; ${energy.source}`
      + `${energy.missing ? `; ${energy.missing} reports are missing` : ""}${absent.length ? `; not in it: ${absent.join(", ")}` : ""}.`
      : "No device has reported joules: a dash is a figure that nobody measured.");
  }

  update();
  const end = store.subscribe(update);
  return () => { end(); charts.set([]); };
}

function budget(cards, fleet) {
  const money = (value) => `${value.toFixed(2)} ${fleet.currency ?? ""}`;
  const names = [["bytes", "Bytes", bytes], ["joules", "Joules of work", joules], ["money", "Money", money]];
  cards.replaceChildren(...names.map(([key, title, format]) => {
    const [used, limit] = [fleet.used?.[key], fleet.limits?.[key]];
    if (used === undefined && limit === undefined) return key === "money" ? null : card(title, ABSENT, "not measured");
    const part = used !== undefined && limit ? used / limit : undefined;
    const made = card(title, used === undefined ? ABSENT : format(used),
      limit ? `${part === undefined ? "" : `${(100 * part).toFixed(0)} % `}of the budget of ${format(limit)}` : "no budget");
    if (part !== undefined) {
      const bar = h("span.fill", {"aria-hidden": "true"}, h("i"));
      bar.firstElementChild.style.transform = `scaleX(${Math.min(1, part)})`;
      bar.classList.toggle("over", part >= 0.9);
      made.append(bar);
    }
    return made;
  }).filter(Boolean));
  const goal = fleet.limits?.target_accuracy;
  if (goal !== undefined) cards.append(card("Target accuracy", share(goal), "the run ends when it is reached"));
}

function sums(closed, fleet) {
  const running = (value) => {
    let total = 0;
    return closed.map((r) => value(r) === undefined ? null : total += value(r));
  };
  const x = closed.map((r) => r.round);
  const made = [];
  const goal = (key) => fleet.limits?.[key] === undefined ? undefined : {label: "budget", value: fleet.limits[key]};
  const of = (key) => running((r) => sum(r[key]));
  const lines = [["wire", "on the wire", "accent"], ["mqtt", "MQTT", "third"], ["payload", "payload", "soft"]]
    .map(([key, label, colour]) => ({label, colour, values: of(key)})).filter((line) => line.values.some((v) => v !== null));
  if (lines.length) made.push(["Bytes so far", {x, format: bytes, target: goal("bytes"), lines}]);
  const energy = running((r) => r.joules?.value);
  if (energy.some((value) => value !== null)) {
    made.push(["Joules so far", {x, format: joules, target: goal("joules"), lines: [
      {label: "work", colour: "accent", values: energy},
      ...["train", "radio", "adapt", "serve"].map((phase, k) => ({label: phase, width: 1.5,
        colour: ["second", "third", "good", "soft"][k], values: running((r) => r.joules?.phases?.[phase])}))
        .filter((line) => line.values.some((value) => value)),
    ]}]);
  }
  return made;
}
