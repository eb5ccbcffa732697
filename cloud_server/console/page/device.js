// One device: what it is, how it learns, what it costs, its certificate, and an answer from it.

import {ABSENT, ago, bytes, card, date, facts, h, joules, number, plural, seconds, share, sum, table, text} from "./dom.js";
import {gallery} from "./chart.js";
import {confirmed} from "./dialogs.js";
import {kind, state} from "./fleet.js";
import * as store from "./store.js";

export function show(main, name) {
  const [dot, phase] = [h("span.dot"), h("span.phase")];
  const cards = h("section.cards", {"aria-label": `${name} in figures`});
  const notes = h("div.notes");
  const charts = gallery();
  const rest = h("div");
  const revoke = h("button.danger", {type: "button", click: () => confirmed("revoke", name)}, "Revoke…");
  const token = h("button", {type: "button", click: () => confirmed("token", name)}, "New token…");
  main.append(h("p.walk", {}, h("a", {href: "#/fleet"}, "← all devices")), h("div.title", {}, h("h1", {}, name), dot, phase,
    h("span.buttons", {}, token, revoke)), cards, notes, charts.place, rest, trial(name));
  let before = "";

  async function update() {
    const d = store.get(`d/${name}`);
    const now = JSON.stringify(d ?? null);
    if (now === before) return;
    before = now;
    if (d) {
      dot.className = `dot ${kind(d)}`;
      text(phase, state(d));
      revoke.disabled = d.status !== "enrolled" || d.pending === "revoke";
      figures(cards, d);
      notes.replaceChildren(...[d.cannot && `Cannot take part: ${d.cannot}`, d.rests,
        d.moved && `Drift: its samples have moved away from those that it was personalized on, noticed after ${d.moved} answers.`,
        d.quarantined && `Quarantined, no round asks it: ${d.quarantined}`,
        d.trouble && `Round ${d.trouble.round}, ${d.trouble.what}: ${d.trouble.text}`]
        .filter(Boolean).map((words) => h("p.note", {}, words)));
    }
    try {
      const found = await store.ask(`devices/${encodeURIComponent(name)}`);
      charts.set(curves(found));
      rest.replaceChildren(...details(found));
    } catch (error) {
      rest.replaceChildren(h("p.note", {}, error.message));
    }
  }

  update();
  const end = store.subscribe(update);
  return () => { end(); charts.set([]); };
}

function figures(cards, d) {
  const spread = d.joules?.low === undefined ? "" : `, ${joules(d.joules.low)} to ${joules(d.joules.high)}`;
  cards.replaceChildren(
    card("Accuracy", d.after === undefined && d.before === undefined ? ABSENT : `${share(d.before)} → ${share(d.after)}`,
      d.after === undefined ? "not evaluated" : "before → after"),
    card("Rounds counted", String(d.counted), d.new ? "joined only to be evaluated" : ""),
    card("Payload", bytes(sum(d.payload)), d.payload ? `up ${bytes(d.payload[0])}, down ${bytes(d.payload[1])}` : "not counted"),
    card("Energy", joules(d.joules?.value), d.joules ? `${d.joules.source.split(":")[0]}${spread}` : "not measured"),
    card("Last seen", ago(d.last_seen), date(d.last_seen)),
  );
}

function curves(found) {
  const made = [];
  const scored = found.evaluations;
  const at = (stage) => scored.map((row) => row[stage]?.accuracy ?? null);
  const goal = store.fleet()?.limits?.target_accuracy;
  if (at("before").concat(at("after")).some((value) => value !== null)) {
    made.push(["Accuracy on its own test samples", {x: scored.map((row) => row.round), format: share,
      target: goal === undefined ? undefined : {label: "target", value: goal},
      lines: [["after", "personalized", "accent"], ["fine_tuned", "fine-tuned", "third"], ["before", "not personalized", "soft"]]
        .map(([stage, label, colour]) => ({label, colour, values: at(stage)}))
        .filter((line) => line.values.some((value) => value !== null))}]);
  }
  const cost = found.rounds;
  const moved = cost.map((row) => row.up === undefined ? null : row.up + row.down);
  if (moved.some((value) => value !== null)) {
    made.push(["Payload by round", {x: cost.map((row) => row.round), format: bytes,
      lines: [{label: "up and down", values: moved, colour: "accent"}]}]);
  }
  const energy = cost.map((row) => row.joules ?? null);
  if (energy.some((value) => value !== null)) {
    made.push(["Joules of work by round", {x: cost.map((row) => row.round), format: joules,
      lines: [{label: "joules", values: energy, colour: "second"}]}]);
  }
  return made;
}

function details(found) {
  const said = found.capabilities;
  const after = found.evaluations.at(-1)?.after;
  const list = (value) => Array.isArray(value) ? value.join(", ") : value;
  const parts = [h("h2", {}, "What it is"), facts([
    ["board", said.board ?? ABSENT], ["agent", found.version], ["memory", said.ram ? `${said.ram} MiB` : null],
    ["trains", said.train === undefined ? null : said.train ? "yes" : "no"], ["engines", said.train ? list(said.engines) : null], ["codecs", list(said.codecs)],
    ["personalization", after?.method],
    ["calibration error", after?.calibration_error === undefined ? null : share(after.calibration_error)],
    ["joined", found.first_seen && date(found.first_seen)],
    ["revoked", found.revoked_at && date(found.revoked_at)],
    ["CPU time", found.usage.cpu_s === undefined ? null : seconds(found.usage.cpu_s)],
    ["peak memory", found.usage.peak_mib === undefined ? null : `${found.usage.peak_mib.toFixed(0)} MiB`],
    ["joules without", found.absent_energy.join(", ")],
  ]), h("h2", {}, "Certificate"), found.certificate ? facts([
    ["serial", found.certificate.serial.slice(0, 16)], ["issued", date(found.certificate.issued_at)],
    ["valid until", date(found.certificate.expires_at)],
    ["open token", found.token && `until ${date(found.token.expires_at)}`],
  ]) : h("p.note.plain", {}, found.token ? `None yet; a token is good until ${date(found.token.expires_at)}.`
    : "None: this device uses a broker that asks for none.")];
  const last = found.evaluations.at(-1) ?? {};
  const of = (stage, measure) => Object.entries(last[stage]?.measures?.[measure] ?? {});
  const measured = ["before", "after"].flatMap((stage) => of(stage, "mae")
    .map(([output, mae]) => [stage, output, mae.toPrecision(4), last[stage].measures.r2?.[output]?.toFixed(3) ?? ABSENT]));
  const labelled = ["before", "after"].flatMap((stage) => [
    ...of(stage, "micro_f1").map(([, f1]) => [stage, "all labels together", f1.toFixed(3)]),
    ...of(stage, "f1").map(([label, f1]) => [stage, label, f1.toFixed(3)])]);
  const alarmed = ["before", "after"].flatMap((stage) => of(stage, "alarms").map(([samples, share]) => [stage, samples,
    share.toFixed(4), samples === "anomaly" ? last[stage].measures.auroc?.all?.toFixed(3) ?? ABSENT : ABSENT]));
  if (alarmed.length) {
    parts.push(h("h2", {}, "Its alarms on test samples"), table("Share of samples with an alarm, by stage", [["stage",
      "left"], ["samples", "left"], "alarms", "AUROC"], alarmed));
  }
  if (labelled.length) {
    parts.push(h("h2", {}, "Its answers on test samples"), table("F1 by stage and label", [["stage", "left"],
      ["label", "left"], "F1"], labelled));
  }
  if (measured.length) {
    parts.push(h("h2", {}, "Its errors on test samples"), table("Errors by stage and output", [["stage", "left"],
      ["output", "left"], "MAE", "R²"], measured));
  }
  const counts = found.evaluations.at(-1)?.confusion;
  const classes = store.fleet()?.classes ?? [];
  if (counts && counts.length === classes.length && counts.length <= 12) {
    parts.push(h("h2", {}, "Its answers on test samples"), table("True classes and answers", [["true class", "left"],
      ...classes.map((name) => `answered ${name}`)], counts.map((row, k) => [classes[k], ...row.map((count, j) =>
      h(k === j ? "b" : "span", {}, String(count)))])));
  }
  if (found.updates.length) {
    parts.push(h("h2", {}, "Its last updates"), table("Updates, newest first", ["round", ["became", "left"], "samples", "loss",
      "bytes", ["when", "left"], ["why", "left"]], [...found.updates].reverse().slice(0, 50).map((u) => [
      h("a", {href: `#/rounds/${u.round}`}, String(u.round)), h(`span.became.${u.status}`, {}, u.status),
      u.samples === undefined ? ABSENT : String(u.samples), number(u.loss, 4), bytes(u.bytes), date(u.at), u.reason ?? ""])));
  }
  return parts;
}

// An answer ----------------------------------------------------------------------------------------------------------

function trial(name) {
  const {shape = [], classes = []} = store.fleet() ?? {};
  const size = shape.reduce((a, b) => a * b, 1);
  const file = h("input", {type: "file", id: "sample-file", accept: ".npy,.npz,.csv,.ndjson,.jsonl,image/*"});
  const values = h("textarea", {id: "sample-values", rows: 3, placeholder: `${plural(size, "number")}, separated by spaces or commas`});
  const go = h("button.strong", {type: "submit"}, "Ask the device");
  const out = h("div", {role: "status", "aria-live": "polite"});
  return h("section.trial", {"aria-labelledby": "trial"}, h("h2", {id: "trial"}, "Try an answer"),
    h("p.soft", {}, `A sample has the shape ${shape.join(" × ")}. The question goes to the device over the broker, and the `
      + "device answers with its own model."),
    h("form", {submit: async (event) => {
      event.preventDefault();
      go.disabled = true;
      out.replaceChildren(h("p.soft", {}, "Waiting for the device…"));
      try {
        const body = file.files[0] ? {name: file.files[0].name, file: await base64(file.files[0])}
          : {values: values.value.split(/[\s,;[\]]+/).filter(Boolean).map(Number)};
        out.replaceChildren(answered(await store.ask(`devices/${encodeURIComponent(name)}/answer`, body), classes));
      } catch (error) {
        out.replaceChildren(h("p.outcome.bad", {}, error.message));
      }
      go.disabled = false;
    }}, h("p.field", {}, h("label", {for: "sample-file"}, "A file: array, table or image"), file),
    h("p.field", {}, h("label", {for: "sample-values"}, "or numbers"), values), go), out);
}

async function base64(file) {
  if (file.size > 5e6) throw new Error("the file has more than 5 MB");
  const data = new Uint8Array(await file.arrayBuffer());
  let binary = "";
  for (let k = 0; k < data.length; k += 8192) binary += String.fromCharCode(...data.subarray(k, k + 8192));
  return btoa(binary);
}

function answered(found, names) {
  const several = found.label_sets?.length > 0, numbers = found.outputs?.length > 0 && !several;
  const classes = numbers || several ? found.outputs : found.classes?.length ? found.classes : names;
  const rows = several ? found.label_sets.map((labels, k) => [String(k), h("b", {}, labels.join(", ") || "none"),
    ...found.probabilities[k].map((p) => share(p))]) : numbers ? found.values.map((row, k) => [String(k), found.alarms?.[k] ? h("b", {}, "ALARM") : "", ...row.map((value) => value.toPrecision(6))])
    : found.labels.map((label, k) => [String(k), h("b", {}, `${label}${found.unknown?.[k] ? " (unknown)" : ""}`),
    ...found.probabilities[k].map((p) => share(p))]);
  return h("div", {}, table("The device's answers", ["sample", ["answer", "left"], ...classes], rows),
    h("p.soft", {}, `Model of round ${found.round}, personalization: ${found.personalization}.`));
}
