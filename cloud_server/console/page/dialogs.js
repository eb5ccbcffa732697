// Dialogs: the token, and what asks before it is done.

import {h, plural} from "./dom.js";
import {ask, fleet} from "./store.js";

const WORDS = {
  pause: () => ({
    title: "Pause the fleet?", does: "Pause",
    about: "No further round opens until you resume. The open round is still completed, and devices go on answering.",
  }),
  resume: () => ({title: "Resume the fleet?", does: "Resume", about: "Rounds open again."}),
  revoke: (device) => ({
    title: `Revoke ${device}?`, does: "Revoke", danger: true,
    about: `${device} leaves the fleet, and its certificates and tokens end. Methods with duals restart them from `
      + "zero on every device. It can come back only with a new token.",
  }),
  token: (device) => ({
    title: device ? `A new token for ${device}?` : "Add a device?", does: "Make a token",
    about: "A one-time file with which this device gets a certificate. It is written on the operator's machine and "
      + "is not sent to this browser. "
      + (device ? "The device's certificate of now ends when the token is used." : ""),
    fields: [...(device ? [] : [["device", "Its name", h("input", {id: "device-name", required: true,
      pattern: "[A-Za-z0-9_\\-]{1,64}", autocomplete: "off", title: "1 to 64 letters, digits, '-' or '_'"})]]),
    ["hours", "Valid for, in hours", h("input", {type: "number", id: "hours", min: 1, max: 168, value: 24})]],
  }),
  flash: (offer) => ({
    title: `Flash ${plural(offer.devices.length, "device")} in waves?`, does: "Flash", impossible: offer.missing,
    about: `The devices of ${offer.inventory} get this machine's version of the agent over SSH. A wave begins when the one `
      + "before is back. A device that does not come back rolls back by itself, and counts as failed. Ending the console "
      + "stops it.",
    fields: [["waves", "Devices in each wave; the last number repeats", h("input", {id: "waves", required: true,
      pattern: "[0-9]+(, *[0-9]+)*", value: offer.waves, autocomplete: "off", title: "numbers of devices: 1,5,20"})],
    ["most_failures", "Halt when more than this many have failed", h("input", {type: "number", id: "most-failures", min: 0,
      max: 10000, required: true, value: 0})]],
  }),
  "resume-update": () => ({
    title: "Go on with the update?", does: "Go on",
    about: "It starts again from the first wave, for every device that does not run the new program.",
  }),
  "abort-update": () => ({
    title: "End the update?", does: "End it", danger: true,
    about: "No further wave begins. Devices that have not installed the program fetch nothing more.",
  }),
  "stop-flash": () => ({
    title: "Stop flashing?", does: "Stop", danger: true,
    about: "No further device begins. Those under way end at their next step, and roll back if they are not back by then.",
  }),
};

function opened(...children) {
  const dialog = h("dialog", {"aria-labelledby": "dialog-title"}, ...children);
  document.body.append(dialog);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.showModal();
  return dialog;
}

/** Asks, does it, and says in the dialog what came of it. about: what the words need: a device's name, an offer. */
export function confirmed(action, about = "", done = () => {}) {
  const words = WORDS[action](about);
  const {fields = [], impossible = []} = words;
  const said = h("p.outcome", {role: "status"});
  const cancel = h("button", {type: "button", click: () => dialog.close()}, "Cancel");
  const go = h(words.danger ? "button.danger" : "button.strong", {type: "submit"}, words.does);
  const given = () => Object.fromEntries(fields.map(([key, , input]) =>
    [key, input.type === "number" ? input.valueAsNumber : input.value.trim()]));
  const form = h("form", {submit: async (event) => {
    event.preventDefault();
    go.disabled = true;
    try {
      const {text} = await ask(`actions/${action}`, {...(typeof about === "string" ? {device: about} : {}), ...given()});
      said.textContent = text;
      said.className = "outcome good";
      go.remove();
      cancel.textContent = "Close";
      cancel.focus();
      done();
    } catch (error) {
      said.textContent = error.message;
      said.className = "outcome bad";
      go.disabled = false;
    }
  }}, h("h2", {id: "dialog-title"}, words.title), h("p", {}, words.about),
  impossible.length ? impossible.map((why) => h("p.note", {}, why)) : fields.map(([, label, input]) =>
    h("p.field", {}, h("label", {for: input.id}, label), input)),
  said, h("div.buttons", {}, cancel, impossible.length ? null : go));
  const dialog = opened(form);
  (fields[0]?.[0] === "device" ? fields[0][2] : cancel).focus();
  if (!fleet()?.running && !action.endsWith("flash")) {
    said.textContent = "The aggregator is not running: it carries this out when it starts.";
  }
}

/** Returns when this browser may use the console. A token in the address (#token=…) is used once and taken out of it. */
export async function login() {
  const given = location.hash.match(/^#token=(.+)$/)?.[1];
  if (given) {
    history.replaceState(null, "", location.pathname);
    await ask("login", {token: decodeURIComponent(given)}).catch(() => {});
  }
  for (;;) {
    const session = await ask("session").catch(() => null);
    if (session?.open) return;
    if (session) await asked();
    else await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

function asked() {
  return new Promise((resolve) => {
    const field = h("input", {type: "password", id: "token", autocomplete: "current-password", required: true});
    const said = h("p.outcome", {role: "status"});
    const dialog = opened(h("form", {submit: async (event) => {
      event.preventDefault();
      try {
        await ask("login", {token: field.value.trim()});
        dialog.close();
        resolve();
      } catch (error) {
        said.textContent = error.message;
        said.className = "outcome bad";
      }
    }}, h("h2", {id: "dialog-title"}, "This console needs its token"),
    h("p", {}, "It is in console.token in the fleet's folder, on the operator's machine."),
    h("p.field", {}, h("label", {for: "token"}, "Token"), field), said,
    h("div.buttons", {}, h("button.strong", {type: "submit"}, "Open"))));
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    field.focus();
  });
}
