// Devices flashed in waves: what has been asked for, and each device's progress, live.

import {confirmed} from "./dialogs.js";
import {date, h, plural, table, text} from "./dom.js";
import * as store from "./store.js";

const SAID = {waiting: "waits", going: "under way", done: "done", failed: "failed"};

/** Asks for waves; shows those that are under way instead. */
export async function asked() {
  if (store.get("flash")?.going) location.hash = "#/flash";
  else confirmed("flash", await store.ask("flash"), () => { location.hash = "#/flash"; });
}

export function show(main) {
  const standing = h("p.words", {role: "status"});
  const facts = h("p.note.plain");
  const stop = h("button.danger", {type: "button", click: () => confirmed("stop-flash")}, "Stop…");
  const again = h("button", {type: "button", click: asked}, "Flash devices…");
  const list = h("div");
  main.append(h("h1", {}, "Flash in waves"), standing, h("div.toolbar", {}, stop, again), list, facts);

  function update(changed) {
    if (changed && ![...changed].some((key) => key === "flash" || key.startsWith("w/"))) return;
    const run = store.get("flash");
    stop.hidden = !run?.going || run.stopped;
    again.hidden = Boolean(run?.going);
    if (!run) return text(standing, "Nothing has been flashed since the console began.");
    const devices = store.flashed();
    const count = (state) => devices.filter((one) => one.state === state).length;
    const wave = Math.max(1, ...devices.filter((one) => one.state !== "waiting").map((one) => one.wave));
    text(standing, run.going
      ? `Wave ${wave} of ${run.count}${run.stopped ? ", stopping" : ""}: ${count("done")} of ${run.devices} devices done, `
        + `${count("going")} under way, ${count("failed")} failed.`
      : `${run.outcome === "done" ? "Done" : "Not all done"}: ${run.text}.`);
    standing.classList.toggle("bad", !run.going && run.outcome !== "done");
    text(facts, `Begun ${date(run.began_at)}${run.ended_at ? `, ended ${date(run.ended_at)}` : ""}; waves ${run.waves}; `
      + `halts when more than ${plural(run.most_failures, "device")} failed. The audit log has who asked for it.`);
    draw(devices, changed);
  }

  const cells = (one) => [one.name, String(one.wave), h(one.state === "failed" ? "b.bad" : "span", {}, SAID[one.state]),
    `${one.stage} ${one.far}`.trim()];

  /** The table anew when a run begins or ends; else only the rows that changed. */
  function draw(devices, changed) {
    const rows = list.querySelectorAll("tbody tr");
    if (rows.length === devices.length && changed && !changed.has("flash")) {
      for (const key of [...changed].filter((one) => one.startsWith("w/"))) {
        const number = Number(key.slice(2));
        cells(devices[number]).forEach((cell, k) => rows[number].children[k].replaceChildren(cell));
      }
      return;
    }
    const place = list.firstElementChild?.scrollLeft ?? 0;
    list.replaceChildren(table("Devices by wave", [["device", "left"], "wave", ["state", "left"], ["step", "left"]],
      devices.map(cells)));
    list.firstElementChild.scrollLeft = place;
  }

  update();
  return store.subscribe(update);
}
