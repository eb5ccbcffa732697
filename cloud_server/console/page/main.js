// Starts the page: session, connection, header, and the view that the address names.

import {confirmed, login} from "./dialogs.js";
import {h, text} from "./dom.js";
import * as store from "./store.js";
import * as cost from "./cost.js";
import * as device from "./device.js";
import * as flash from "./flash.js";
import * as fleet from "./fleet.js";
import * as learning from "./learning.js";
import * as log from "./log.js";
import * as rounds from "./rounds.js";

const VIEWS = {fleet, rounds, learning, cost, log, flash, devices: device};
const THEMES = ["", "light", "dark"];
const SAID = {"": "as the system", light: "light", dark: "dark"};
const main = document.getElementById("main");
let leave = () => {};

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function show() {
  const [, name = "", rest = ""] = location.hash.match(/^#\/(\w+)\/?(.*)$/) ?? [];
  const view = VIEWS[name] ?? fleet;
  leave();
  main.replaceChildren();
  leave = view.show(main, decoded(rest)) ?? (() => {});
  const at = ["devices", "flash"].includes(name) || !VIEWS[name] ? "fleet" : name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#/${at}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${main.querySelector("h1")?.textContent ?? "Fleet"} · ${store.fleet()?.fleet ?? "Metafleet"}`;
}

function moved() {
  show();
  main.focus({preventScroll: true});
  scrollTo(0, 0);
}

function header() {
  const now = store.fleet();
  const trouble = store.get("trouble");
  banner(trouble ? `The ledger cannot be read: ${trouble}` : "");
  if (!now) return;
  text(document.getElementById("fleet-name"), now.fleet);
  const dot = document.getElementById("running");
  dot.className = `dot ${now.running ? (now.paused ? "waits" : "on") : "off"}`;
  dot.title = now.running ? (now.paused ? "paused" : "the aggregator runs") : "the aggregator is not running";
  const progress = document.getElementById("progress");
  progress.setAttribute("aria-valuemax", now.rounds);
  progress.setAttribute("aria-valuenow", now.rounds_closed);
  progress.firstElementChild.style.width = `${100 * Math.min(1, now.rounds_closed / now.rounds)}%`;
  const button = document.getElementById("pause");
  button.hidden = now.finished && !now.paused;
  text(button, now.paused ? "Resume" : "Pause");
}

function banner(words) {
  const element = document.getElementById("banner");
  element.hidden = !words;
  text(element, words);
}

function theme(chosen) {
  document.documentElement.dataset.theme = chosen;
  document.getElementById("theme").setAttribute("aria-label", `Colours: ${SAID[chosen]}`);
  document.getElementById("theme").title = `Colours: ${SAID[chosen]}`;
  dispatchEvent(new Event("themed"));
}

async function start() {
  theme(THEMES.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "");
  document.getElementById("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
    localStorage.setItem("theme", next);
    theme(next);
  });
  document.getElementById("pause").addEventListener("click", () => {
    const paused = store.fleet().paused;
    confirmed(paused ? "resume" : "pause");
  });
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
  });
  await login();
  if (!location.hash.startsWith("#/")) history.replaceState(null, "", "#/fleet");
  addEventListener("hashchange", moved);
  const first = store.subscribe(() => {
    header();
    if (!store.fleet()) return;
    first();
    show();
    store.subscribe(header);
  });
  main.replaceChildren(h("p.empty", {}, "Reading the ledger…"));
  store.listen((state) => banner(state === "on" ? "" : "The connection to the console is lost; trying again…"));
}

start();
