// The log: what happened, newest first.

import {date, h, plural, text} from "./dom.js";
import * as store from "./store.js";

const KINDS = {all: "everything", warning: "warnings", round: "rounds", device: "devices", action: "actions"};
const kept = {kind: "all", search: ""};

export function show(main) {
  const list = h("ol.log", {"aria-label": "Events, newest first"});
  const count = h("p.count", {role: "status"});
  const search = h("input", {type: "search", "aria-label": "Search the log", placeholder: "Search the log",
    value: kept.search, input: (event) => { kept.search = event.target.value; update(); }});
  const select = h("select", {change: (event) => { kept.kind = event.target.value; update(); }},
    Object.entries(KINDS).map(([key, words]) => h("option", {value: key, selected: key === kept.kind}, words)));
  main.append(h("h1", {}, "Log"), h("div.toolbar", {role: "search"}, search,
    h("label.choice", {}, h("span", {}, "Show"), select), count), list,
  h("p.note.plain", {}, "From the ledger and from the audit log (audit.ndjson). The aggregator's own lines are "
    + "on its standard error, where its service keeps them."));

  function update(changed) {
    if (changed && ![...changed].some((key) => key.startsWith("l/"))) return;
    const words = kept.search.trim().toLowerCase();
    const shown = store.events().filter((event) => (kept.kind === "all" || event.kind === kept.kind)
      && (!words || event.text.toLowerCase().includes(words)));
    text(count, plural(shown.length, "event"));
    list.replaceChildren(...shown.map((event) => {
      const to = event.round !== undefined ? `#/rounds/${event.round}`
        : event.device ? `#/devices/${encodeURIComponent(event.device)}` : null;
      return h(`li.${event.kind}`, {}, h("time", {datetime: new Date(event.at * 1000).toISOString()}, date(event.at)),
        h("span", {}, to ? h("a", {href: to}, event.text) : event.text));
    }));
  }

  update();
  return store.subscribe(update);
}
