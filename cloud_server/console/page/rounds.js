// The rounds: a strip of all, a table of the last ones, and one explained in plain words.

import {ABSENT, bytes, date, h, joules, number, plural, seconds, share, sum, table, text} from "./dom.js";
import * as store from "./store.js";

const STRIP = 160;
const PAGE = 60;

export function show(main, rest) {
  return /^\d+$/.test(rest) ? one(main, Number(rest)) : all(main);
}

function all(main) {
  let most = PAGE;
  const strip = h("div.strip", {"aria-hidden": "true"});
  const list = h("div");
  const more = h("button", {type: "button", click: () => { most += PAGE * 4; update(); }}, "Show earlier rounds");
  main.append(h("h1", {}, "Rounds"), strip, key(), list, more);

  function update(changed) {
    if (changed && ![...changed].some((name) => name.startsWith("r/"))) return;
    const rounds = store.rounds();
    strip.replaceChildren(...rounds.slice(-STRIP).map(bar));
    const shown = rounds.slice(-most).reverse();
    const heads = ["round", ["opened", "left"], ["state", "left"], "took", "asked", "counted", "refused", "late",
      "no answer", "loss", "accuracy", "payload", "joules"];
    const place = list.firstElementChild?.scrollLeft ?? 0;
    list.replaceChildren(shown.length ? table("Rounds, newest first", heads, shown.map(row))
      : h("p.empty", {}, "No round has been opened yet."));
    list.firstElementChild.scrollLeft = place;
    more.hidden = rounds.length <= most;
  }

  update();
  return store.subscribe(update);
}

const silent = (r) => r.status === "open" ? undefined : Math.max(0, r.asked - r.counted - r.refused - r.late);
const link = (r) => h("a", {href: `#/rounds/${r.round}`}, String(r.round));

function row(r) {
  return [link(r), date(r.opened_at), r.status, seconds(r.seconds), String(r.asked), String(r.counted),
    h(r.refused ? "b.bad" : "span", {}, String(r.refused)), String(r.late), number(silent(r)), number(r.loss, 4),
    share(r.accuracy?.mean), bytes(sum(r.payload)), joules(r.joules?.value)];
}

function bar(r) {
  const parts = [["counted", r.counted], ["late", r.late], ["refused", r.refused],
    [r.status === "open" ? "awaited" : "silent", Math.max(0, r.asked - r.counted - r.refused - r.late)]];
  const made = h(`a.${r.status}`, {href: `#/rounds/${r.round}`, tabindex: "-1", title: `round ${r.round}, ${r.status}: `
    + `${r.counted} of ${plural(r.asked, "device")} counted`}, parts.map(([name, count]) => {
    const part = h(`i.${name}`);
    part.hidden = !count;
    part.style.flexGrow = count;
    return part;
  }));
  return made;
}

function key() {
  return h("ul.legend", {"aria-hidden": "true"}, [["counted", "counted"], ["late", "late"], ["refused", "refused"],
    ["silent", "no answer"], ["awaited", "still awaited"]].map(([name, words]) =>
    h("li", {}, h(`span.patch.${name}`), words)));
}

function one(main, number_) {
  const words = h("div.words");
  const devices = h("div");
  const neighbours = h("p.walk");
  let asked = "";
  main.append(h("h1", {}, `Round ${number_}`), neighbours, words, h("h2", {}, "Devices"), devices);

  async function update() {
    const r = store.get(`r/${number_}`);
    const now = JSON.stringify(r ?? null);
    if (asked === now) return;
    asked = now;
    const step = (to, said) => store.get(`r/${to}`) ? h("a", {href: `#/rounds/${to}`}, said) : null;
    neighbours.replaceChildren(...[step(number_ - 1, `← round ${number_ - 1}`), h("a", {href: "#/rounds"}, "all rounds"),
      step(number_ + 1, `round ${number_ + 1} →`)].filter(Boolean));
    try {
      const found = await store.ask(`rounds/${number_}`);
      words.replaceChildren(...found.sentences.map((sentence) => h("p", {}, sentence)));
      devices.replaceChildren(table("What became of each device", [["device", "left"], ["became", "left"], "after",
        "samples", "loss", "bytes", ["why", "left"]], found.devices.map((d) => [
        h("a", {href: `#/devices/${encodeURIComponent(d.device)}`}, d.device),
        h(`span.became.${d.status}`, {}, d.status === "silent" ? "no answer" : d.status),
        seconds(d.after_s), d.samples === undefined ? ABSENT : String(d.samples), number(d.loss, 4), bytes(d.bytes),
        d.reason ?? ""])));
    } catch (error) {
      words.replaceChildren(h("p.note", {}, error.message));
      text(devices, "");
    }
  }

  update();
  return store.subscribe(update);
}
