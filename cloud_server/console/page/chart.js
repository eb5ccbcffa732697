// Line charts by uPlot in the page's colours, drawn again when size or colours change.

import {h} from "./dom.js";

/** A colour of the style sheet as a canvas knows it. */
function colour(name) {
  const probe = h("i");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

const HEIGHT = 240;

/**
 * A figure with a chart. lines: {label, values, colour, dash, width, fill} with a value or null at each x.
 * target: {label, value} of a dashed horizontal line. format: a value as text. x: rising numbers.
 */
function chart(title, {x, lines, target, format, label = "round", range, band}) {
  const place = h("div.plot", {role: "img", "aria-label": described(title, x, lines, target, format, label)});
  const legend = h("ul.legend", {"aria-hidden": "true"});
  const figure = h("figure", {}, h("figcaption", {}, title), legend, place);
  if (!x.length) {
    place.replaceWith(h("p.empty", {}, "Nothing to draw yet."));
    return {figure, end: () => {}};
  }
  let plot = null;
  const width = () => Math.max(200, place.clientWidth);
  const shown = target ? [...lines, {label: target.label, values: x.map(() => target.value), colour: "soft", dash: [6, 6]}]
    : lines;

  function draw() {
    plot?.destroy();
    const ink = colour("soft");
    const font = "12px system-ui, sans-serif";
    const axis = {stroke: ink, font, grid: {stroke: colour("rule"), width: 1}, ticks: {show: false}};
    plot = new uPlot({
      width: width(), height: HEIGHT, padding: [10, 12, 0, 4],
      legend: {show: false}, cursor: {points: {size: 6}, drag: {x: true, y: false}},
      scales: {x: {time: false}, y: range ? {range} : {}},
      axes: [{...axis, size: 30, grid: {show: false}, values: (_, ticks) => ticks.map((tick) => Number.isInteger(tick) ? tick : "")},
        {...axis, size: 62, values: (_, ticks) => ticks.map(format)}],
      series: [{label}, ...shown.map((line) => ({
        label: line.label, stroke: colour(line.colour), width: line.width ?? 2, dash: line.dash, spanGaps: true,
        points: {show: line.values.filter((value) => value !== null).length < 3 && !line.dash},
      }))],
      bands: band ? [{series: band, fill: colour("wash")}] : [],
      hooks: {setCursor: [(at) => write(at.cursor.idx)]},
    }, [x, ...shown.map((line) => line.values)], place);
    write(null);
  }

  function write(at) {
    legend.replaceChildren(...shown.filter((line) => !line.quiet).map((line) => {
      const known = line.values.filter((value) => value !== null);
      const value = at === null || at === undefined ? known.at(-1) : line.values[at];
      const swatch = h("span.swatch");
      swatch.style.borderColor = `var(--${line.colour})`;
      if (line.dash) swatch.style.borderTopStyle = "dashed";
      return h("li", {}, swatch, `${line.label} `, h("b", {}, value === null || value === undefined ? "—" : format(value)));
    }), at === null || at === undefined ? "" : h("li", {}, `${label} ${x[at]}`));
  }

  const sized = new ResizeObserver(() => plot ? plot.setSize({width: width(), height: HEIGHT}) : draw());
  sized.observe(place);
  addEventListener("themed", draw);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", draw);
  return {figure, end: () => {
    sized.disconnect();
    removeEventListener("themed", draw);
    dark.removeEventListener("change", draw);
    plot?.destroy();
  }};
}

function described(title, x, lines, target, format, label) {
  const ends = lines.filter((line) => !line.quiet).map((line) => {
    const known = line.values.map((value, k) => [x[k], value]).filter(([, value]) => value !== null);
    if (!known.length) return `${line.label}: no values`;
    const [first, last] = [known[0], known.at(-1)];
    return `${line.label}: ${format(first[1])} at ${label} ${first[0]}, ${format(last[1])} at ${label} ${last[0]}`;
  });
  return [title, ...ends, target ? `${target.label}: ${format(target.value)}` : ""].filter(Boolean).join("; ");
}

/** Charts in a row: set(list of what `chart` takes) makes those anew whose values have changed. */
export function gallery() {
  const place = h("div.charts");
  let charts = [];
  return {place, set: (wanted) => {
    const before = new Map(charts.map((one) => [one.drawn, one]));
    charts = wanted.map(([title, options]) => {
      const drawn = JSON.stringify([title, options]);
      const same = before.get(drawn);
      before.delete(drawn);
      return same ?? {drawn, ...chart(title, options)};
    });
    before.forEach((one) => one.end());
    if (charts.some((one, k) => place.children[k] !== one.figure) || place.children.length !== charts.length) {
      place.replaceChildren(...charts.map((one) => one.figure));
    }
  }};
}
