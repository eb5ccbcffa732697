// Learning: accuracy and loss over the rounds, and every device from the worst to the best.

import {h, share} from "./dom.js";
import {gallery} from "./chart.js";
import * as store from "./store.js";

const COLOURS = ["second", "third", "good"];
const compared = [];

export function show(main) {
  const charts = gallery();
  const curves = new Map();
  const names = h("datalist", {id: "names"});
  const field = h("input", {type: "search", list: "names", id: "compare", placeholder: "Compare a device",
    "aria-label": "Compare a device", change: () => add(field.value)});
  const chosen = h("ul.chips");
  main.append(h("h1", {}, "Learning"), h("div.toolbar", {}, field, names, chosen), charts.place);

  async function load(name) {
    try {
      const found = await store.ask(`devices/${encodeURIComponent(name)}`);
      curves.set(name, new Map(found.evaluations.map((row) => [row.round, row.after?.accuracy ?? null])));
    } catch {
      curves.set(name, new Map());
    }
  }

  async function add(name) {
    if (!store.get(`d/${name}`) || compared.includes(name)) return;
    compared.push(name);
    if (compared.length > COLOURS.length) compared.shift();
    field.value = "";
    await load(name);
    update();
  }

  function update(changed) {
    if (changed && ![...changed].some((key) => key.startsWith("r/") || key === "fleet")) return;
    const devices = store.devices();
    names.replaceChildren(...devices.slice(0, 500).map((d) => h("option", {value: d.name})));
    chosen.replaceChildren(...compared.map((name, k) => {
      const chip = h("li", {}, h("button", {type: "button", "aria-label": `Stop comparing ${name}`, click: () => {
        compared.splice(compared.indexOf(name), 1);
        update();
      }}, `${name} ×`));
      chip.style.setProperty("--chip", `var(--${COLOURS[k]})`);
      return chip;
    }));
    charts.set([accuracy(), ...loss(), ranking(devices)]);
  }

  function accuracy() {
    const scored = store.rounds().filter((r) => r.accuracy);
    const of = (value) => scored.map((r) => value(r) ?? null);
    const goal = store.fleet()?.limits?.target_accuracy;
    return ["Accuracy, mean over the devices that train", {
      x: scored.map((r) => r.round), format: share, band: [1, 2],
      target: goal === undefined ? undefined : {label: "target", value: goal},
      lines: [
        {label: "best", values: of((r) => r.accuracy.best), colour: "rule", width: 1, quiet: true},
        {label: "worst", values: of((r) => r.accuracy.worst), colour: "rule", width: 1, quiet: true},
        {label: "personalized", values: of((r) => r.accuracy.mean), colour: "accent", width: 2.5},
        {label: "not personalized", values: of((r) => r.before), colour: "soft"},
        ...compared.map((name, k) => ({label: name, colour: COLOURS[k],
          values: of((r) => curves.get(name)?.get(r.round))})),
      ],
    }];
  }

  function loss() {
    const known = store.rounds().filter((r) => r.loss !== undefined);
    return known.length ? [["Training loss", {x: known.map((r) => r.round), format: (value) => value.toFixed(3),
      lines: [{label: "loss", values: known.map((r) => r.loss), colour: "accent"}]}]] : [];
  }

  function ranking(devices) {
    const known = devices.filter((d) => d.after !== undefined).sort((a, b) => a.after - b.after);
    const goal = store.fleet()?.limits?.target_accuracy;
    return ["Every device, from the worst to the best", {
      x: known.map((_, k) => k + 1), label: "device", format: share,
      target: goal === undefined ? undefined : {label: "target", value: goal},
      lines: [{label: "not personalized", values: known.map((d) => d.before ?? null), colour: "soft", width: 1},
        {label: "personalized", values: known.map((d) => d.after), colour: "accent"}],
    }];
  }

  Promise.all(compared.map(load)).then(() => update());
  const end = store.subscribe(update);
  return () => { end(); charts.set([]); };
}
