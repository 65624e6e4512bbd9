// Draws the page from its data. Texts enter as text nodes only; nothing is fetched.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const PARTS = ["reciprocal", "directional", "popularity", "position"];
const DOES = { reciprocal: "compares", directional: "points", popularity: "follows the crowd", position: "minds the place" };
const DO = { reciprocal: "compare", directional: "point", popularity: "follow the crowd", position: "mind the place" };
const MORE = { reciprocal: "compare more than they point", directional: "point more than they compare" };
const VIEWS = { raw: "raw", folded: "folded", on_data: "on data" };
const state = { model: 0, layer: 0, head: 0, view: "raw" };

// Elements

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) node.style.setProperty(name, value);
    else if (name.startsWith("aria-")) node.setAttribute(name, String(value));
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const put = (id, ...children) => document.getElementById(id).replaceChildren(...children.flat());

// Numbers and texts

const minus = (text) => text.replace("-", "−");
const figure3 = (value) => minus(String(Number(value.toPrecision(3))));
const percent = (value) => `${(100 * value).toFixed(0)} %`;
function signed(value) {
  const text = value.toFixed(2);
  return Number(text) === 0 ? "0.00" : (value > 0 ? "+" : "−") + text.replace("-", "");
}
// Spaces that begin a token, as tokenizers write them, and line ends are made visible.
const word = (text) => text.replace(/^[Ġ▁ ]/, "·").replace(/[\nĊ]/g, "↵");
const short = (text, most = 9) => (word(text).length > most ? word(text).slice(0, most - 1) + "…" : word(text));

// Three significant digits in 16 bits: sign, then 1 + 900·(exponent + 18) + (digits − 100); 0 is zero.
function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return Array.from({ length: bytes.length / 2 }, (_, i) => {
    const code = bytes[2 * i] | (bytes[2 * i + 1] << 8);
    const size = (code & 32767) - 1;
    if (size < 0) return 0;
    return (code & 32768 ? -1 : 1) * Number(`${100 + (size % 900)}e${Math.floor(size / 900) - 20}`);
  });
}

// Readings

const model = () => DATA.models[state.model];
const find = (layer, head, at = model()) => at.heads.find((one) => one.layer === layer && one.head === head);
const layerRow = (layer, at = model()) => at.layers.find((row) => row.layer === layer);
const ofLayer = (layer) => model().heads.filter((one) => one.layer === layer);
function number(head, view, name) {
  const figures = head[view];
  return figures ? figures[model().columns[view].indexOf(name)] : null;
}
const hasData = () => model().heads.some((head) => head.on_data);
function shares(head) {
  if (head.on_data) return PARTS.map((part) => number(head, "on_data", part));
  const compares = (1 + number(head, "raw", "symmetry")) / 2;
  return [compares, 1 - compares, 0, 0];
}
function meanShares(heads) {
  const seen = heads.filter((head) => head.on_data || !hasData());
  return PARTS.map((_, i) => seen.reduce((sum, head) => sum + shares(head)[i], 0) / (seen.length || 1));
}

// Copying

function csv(rows) {
  const cell = (value) => (/[",\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value ?? ""));
  return rows.map((row) => row.map(cell).join(",")).join("\n") + "\n";
}
async function copy(button, rows) {
  const text = csv(rows());
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // no permission, as in a frame: the old way
    const area = document.body.appendChild(el("textarea"));
    area.value = text;
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "copied";
  setTimeout(() => (button.textContent = "copy CSV"), 1500);
}
function copyButton(title, rows) {
  const button = el("button", { class: "copy", type: "button", "aria-label": `copy CSV: ${title}` }, "copy CSV");
  button.addEventListener("click", () => copy(button, rows));
  return button;
}
function framed(title, note, rows, size, ...content) {
  const caption = el("figcaption", {}, el("h3", {}, title), el("span", { class: "muted" }, note), copyButton(title, rows));
  return el("figure", { class: size }, caption, ...content);
}

// All heads

function header() {
  const at = model();
  put("name", at.name);
  put("facts", at.facts);
  document.title = `${at.name}: heads`;
  const buttons = DATA.models.map((one, i) =>
    el("button", { type: "button", "aria-pressed": i === state.model, onclick: () => choose({ model: i }) }, one.name));
  put("models", DATA.models.length > 1 ? buttons : []);
  document.getElementById("panels").classList.toggle("several", DATA.models.length > 1);
}

function summary() {
  const heads = model().heads.filter((head) => head.on_data || !hasData());
  const counts = [0, 0, 0, 0];
  for (const head of heads) counts[shares(head).indexOf(Math.max(...shares(head)))] += 1;
  const shown = PARTS.map((part, i) => [part, counts[i]]).filter(([part, count], i) => count > 0 || i < (hasData() ? 3 : 2));
  const words = ([part, count]) => el("span", { class: `tag ${part}` }, el("b", {}, String(count)), hasData() ? `mostly ${DO[part]}` : MORE[part]);
  put("summary", shown.map(words), el("span", { class: "muted" }, `of ${heads.length} heads`));
}

function stack(values, kind, label) {
  const told = PARTS.map((part, i) => `${part} ${percent(values[i])}`).filter((_, i) => values[i] > 0).join(", ");
  const spans = PARTS.map((part, i) => el("span", { class: part, "--w": values[i] }));
  spans.forEach((span, i) => (span.style.flex = `${values[i]} 0 0`));
  return el("div", { class: kind, role: "img", "aria-label": `${label}: ${told}`, title: told }, spans);
}

function cell(layer, head) {
  const one = find(layer, head);
  const value = one ? number(one, state.view, "symmetry") : null;
  if (value === null) return el("span", { class: "cell empty", role: "gridcell", "aria-label": "no figure in this view" });
  const crowd = state.view === "on_data" && one.verdict === "popularity";
  const chosen = layer === state.layer && head === state.head;
  return el("span", {
    class: crowd ? "cell crowd" : "cell", role: "gridcell", "data-head": `${layer}.${head}`, tabindex: chosen ? 0 : -1,
    "aria-selected": chosen, "aria-label": `layer ${layer}, head ${head}: symmetry ${signed(value)}, ${one.verdict}`,
    title: `${layer}.${head}  symmetry ${signed(value)}  ${one.verdict}`,
    "--tone": `var(--${value > 0 ? "reciprocal" : "directional"})`, "--amount": `${(100 * Math.sqrt(Math.abs(value))).toFixed(0)}%`,
    onclick: () => choose({ layer, head }),
  });
}

function map() {
  const at = model();
  const columns = 1 + Math.max(...at.heads.map((head) => head.head));
  const views = Object.entries(VIEWS).filter(([view]) => view !== "on_data" || hasData());
  const buttons = views.map(([view, name]) =>
    el("button", { type: "button", "aria-pressed": view === state.view, onclick: () => choose({ view }) }, name));
  const tall = `${Math.max(9, Math.min(40, Math.floor(400 / at.layers.length)))}px`;
  const rows = at.layers.map(({ layer }) => el("div", { class: "row", role: "row" },
    el("button", {
      class: "number", type: "button", "aria-label": `layer ${layer}`, "aria-pressed": layer === state.layer && state.head === null,
      onclick: () => choose({ layer, head: null }),
    }, String(layer)),
    el("div", { class: "cells" }, Array.from({ length: columns }, (_, head) => cell(layer, head))),
    stack(meanShares(ofLayer(layer)), "stack", `layer ${layer}`)));
  const heads = columns > 16 ? el("span", {}, `heads 0 to ${columns - 1}`)
    : el("span", { class: "cells" }, Array.from({ length: columns }, (_, head) => el("span", {}, String(head))));
  const top = el("div", { class: "row top" }, el("span"), heads,
    el("span", {}, hasData() ? "shares, by layer" : "energy, by layer"));
  const grid = el("div", { class: "grid", role: "grid", "aria-label": "symmetry of every head", "--tall": tall, onkeydown: move }, rows);
  const marks = state.view === "on_data" ? el("span", { class: "crowded" }, "verdict popularity") : null;
  const scale = el("div", { class: "scale" }, el("span", {}, "points", el("span", { class: "ramp" }), "compares"), marks,
    el("span", {}, "click, or arrow keys; a layer’s number shows the layer"));
  const table = () => [["layer", "head", "view", "symmetry"],
    ...at.heads.map((head) => [head.layer, head.head, VIEWS[state.view], number(head, state.view, "symmetry")])];
  put("map", el("div", { class: "bar" }, el("h3", {}, "Symmetry, layers by heads"),
    el("div", { class: "switch", role: "group", "aria-label": "view" }, buttons), copyButton("symmetry", table)), top, grid, scale);
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
function move(event) {
  const step = STEPS[event.key];
  if (!step) return;
  event.preventDefault();
  const layers = model().layers.map((row) => row.layer);
  const layer = layers[layers.indexOf(state.layer) + step[0]] ?? state.layer;
  const most = Math.max(...ofLayer(layer).map((one) => one.head));
  const head = Math.min(Math.max((state.head ?? 0) + step[1], 0), most);
  choose({ layer, head });
  document.querySelector('.cell[aria-selected="true"]')?.focus();
}

function triangles() {
  document.querySelectorAll("#triangles > svg").forEach((triangle, i) => {
    triangle.classList.toggle("resting", i !== state.model);
    for (const dot of triangle.querySelectorAll(".dot")) {
      const [layer, head] = dot.dataset.head.split(".").map(Number);
      const chosen = i === state.model && layer === state.layer && head === state.head;
      dot.classList.toggle("chosen", chosen);
      dot.onclick = () => choose({ model: i, layer, head });
    }
  });
}

// One head

function head() {
  const one = find(state.layer, state.head);
  const title = el("div", { class: "verdict" }, el("h2", {}, `Layer ${one.layer}, head ${one.head}`),
    el("b", {}, one.verdict), el("span", {}, one.reason));
  const row = layerRow(one.layer);
  const about = [`${row.name}.${one.head}`, `rank ${one.rank}`, `scale ${figure3(one.scale)}`, one.kind === "cross" ? "cross-attention" : null,
    row.causal ? "looks back only" : null, ...(row.notes ?? [])];
  const curves = offsets(one);
  const left = el("div", { class: "left" }, shareFigure(one), curves ?? spectra(one));
  const figures = [attention(one), curves ? spectra(one) : null, ...directions(one)];
  put("chosen", title, el("p", { class: "muted" }, about.filter(Boolean).join(" · ")),
    el("div", { class: "figures" }, left, numbers(one), figures.filter(Boolean)));
}

function shareFigure(one) {
  const values = shares(one);
  const note = one.on_data ? "of the variance of its scores on data" : "of the energy of its weights; popularity shows on data";
  const shown = PARTS.map((part, i) => [part, values[i]]).filter(([part, value], i) => (one.on_data ? value > 0 || i < 3 : i < 2));
  const labels = shown.map(([part, value]) =>
    el("span", { class: `tag ${part}` }, `${part} `, el("b", { "data-share": part }, percent(value)), el("span", { class: "muted" }, ` ${DOES[part]}`)));
  const rows = () => [["part", "share"], ...shown];
  return framed("What it does", note, rows, "half", stack(values, "shares", "shares"), el("div", { class: "labels" }, labels));
}

function numbers(one) {
  const names = [...new Set(Object.keys(VIEWS).flatMap((view) => (one[view] ? model().columns[view] : [])))]
    .filter((name) => !PARTS.includes(name));
  const views = Object.keys(VIEWS).filter((view) => one[view]);
  const value = (name, view) => (model().columns[view].includes(name) ? number(one, view, name) : null);
  const show = (name, view) => {
    const found = value(name, view);
    return found === null ? "" : /^(symmetry|directionality)/.test(name) ? signed(found) : figure3(found);
  };
  const body = names.map((name) => el("tr", {}, el("th", { scope: "row", title: DATA.units[name] ?? null }, name.replaceAll("_", " ")),
    views.map((view) => el("td", { "data-figure": `${view}.${name}` }, show(name, view)))));
  const top = el("tr", {}, el("th", {}, ""), views.map((view) => el("th", { scope: "col" }, VIEWS[view])));
  const rows = () => [["figure", ...views], ...names.map((name) => [name, ...views.map((view) => value(name, view))])];
  return framed("Figures", "three views, never mixed", rows, "half",
    el("div", { class: "wide" }, el("table", {}, el("thead", {}, top), el("tbody", {}, body))));
}

const SPECTRA = [["S", "what is alike: eigenvalues", "reciprocal"], ["A", "what points: singular values", "directional"],
  ["M", "the whole: singular values", "whole"]];
function spectra(one) {
  const view = state.view === "folded" ? "folded" : "raw";
  const series = one.spectra[view].map(unpack);
  const span = ([high, low]) => Math.max(high, 0) - Math.min(low, 0);
  const unit = 100 / Math.max(...series.map((values) => span([Math.max(...values), Math.min(...values)])), 1e-30);  // one scale for all
  return el("div", { class: "trio" }, SPECTRA.map(([name, note, part], i) => {
    const values = series[i], high = Math.max(...values), low = Math.min(...values);
    const zero = low < 0 ? high * unit : 100;
    const bars = values.map((value, k) => draw("rect", { class: part, x: k, y: Math.min(zero, zero - value * unit).toFixed(2), width: 0.9, height: Math.abs(value * unit).toFixed(2) }));
    const axis = draw("path", { class: "axis", d: `M0 ${zero}H${values.length}`, "vector-effect": "non-scaling-stroke" });
    const picture = draw("svg", { class: "spectrum", viewBox: `0 0 ${values.length} 100`, preserveAspectRatio: "none", role: "img",
      "aria-label": `${values.length} values of ${name}, from ${figure3(high)} to ${figure3(low)}` }, axis, bars);
    const rows = () => [["index", name], ...values.map((value, k) => [k, value])];
    const ends = el("div", { class: "ends muted" }, el("span", {}, figure3(values[0])), el("span", {}, figure3(values[values.length - 1])));
    return framed(`Spectrum of ${name}`, `${note}, ${VIEWS[view]}`, rows, "", picture, ends);
  }));
}

function offsets(one) {
  if (!one.offsets) return null;
  const { offset, contents, exchange } = one.offsets;
  const x = (i) => 26 + (i * 474) / Math.max(offset.length - 1, 1), y = (value) => 70 - 60 * value;
  const line = (values) => values.map((value, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const grid = [-1, 0, 1].map((value) => [draw("path", { class: "axis", d: `M26 ${y(value)}H500` }), draw("text", { x: 20, y: y(value) + 4, "text-anchor": "end" }, minus(String(value)))]);
  const ticks = offset.map((at, i) => draw("text", { x: x(i), y: 146, "text-anchor": "middle" }, minus(String(at))));
  const last = offset.length - 1, apart = y(contents[last]) > y(exchange[last]) ? 6 : -6;
  const curves = [["contents", contents, apart], ["exchange", exchange, -apart]].map(([name, values, by]) =>
    [draw("path", { class: `curve ${name}`, d: line(values) }), draw("text", { class: name, x: 506, y: y(values[last]) + 4 + by }, name)]);
  const picture = draw("svg", { viewBox: "0 0 570 152", role: "img", "aria-label": "symmetry by offset" }, grid.flat(), ticks, curves.flat());
  const rows = () => [["offset", "contents", "exchange"], ...offset.map((at, i) => [at, contents[i], exchange[i]])];
  return framed("Symmetry over offsets", "how far back the key stands: contents change places, or tokens with their positions", rows, "half", picture);
}

const tokens = (texts) => texts.map((text) => el("span", { class: "token", title: text }, word(text)));
function directions(one) {
  if (!one.objects) return [];
  const objects = one.objects.map(({ value, tokens: ends, opposite }) => el("div", {}, el("span", { class: "value" }, figure3(value)),
    el("div", {}, el("div", {}, tokens(ends)), el("div", {}, el("span", { class: "muted" }, "against "), tokens(opposite)))));
  const relations = one.relations.map(({ value, pairs }) => el("div", {}, el("span", { class: "value" }, figure3(value)),
    el("div", {}, pairs.map(([from, to]) => el("span", { class: "pair" }, tokens([from]), el("span", { class: "muted" }, "→ "), tokens([to]))))));
  const objectRows = () => [["value", "tokens", "opposite"], ...one.objects.map((o) => [o.value, o.tokens.join(" "), o.opposite.join(" ")])];
  const relationRows = () => [["value", "query", "key"], ...one.relations.flatMap((r) => r.pairs.map((pair) => [r.value, ...pair]))];
  return [framed("What is alike", "eigenvectors of S, by the tokens at both ends", objectRows, "half", el("div", { class: "pairs" }, objects)),
    framed("What points at what", "planes of A: query token → key token", relationRows, "half", el("div", { class: "pairs" }, relations))];
}

// Attention on the text

function matrix(text, n) {
  const values = unpack(text);
  if (values.length === n) return Array.from({ length: n }, () => values);
  const lower = values.length < n * n;
  const start = (i) => (lower ? (i * (i + 1)) / 2 : i * n);
  return Array.from({ length: n }, (_, i) => Array.from({ length: n }, (_, j) => (lower && j > i ? 0 : values[start(i) + j])));
}
function parts(one) {
  const n = model().tokens.length, causal = layerRow(one.layer).causal;
  const pairs = matrix(one.maps[0], n), crowd = matrix(one.maps[1], n), place = one.maps[2] ? matrix(one.maps[2], n) : null;
  const by = (rule) => pairs.map((row, i) => row.map((_, j) => rule(i, j)));
  const seen = (i, j) => !causal || j <= i;
  const score = by((i, j) => (seen(i, j) ? pairs[i][j] + crowd[i][j] + (place ? place[i][j] : 0) : -Infinity));
  const attention = score.map((row) => {
    const most = Math.max(...row), raised = row.map((value) => Math.exp(value - most));
    const sum = raised.reduce((a, b) => a + b, 0);
    return raised.map((value) => value / sum);
  });
  const maps = { attention, reciprocal: by((i, j) => (pairs[i][j] + pairs[j][i]) / 2), directional: by((i, j) => (pairs[i][j] - pairs[j][i]) / 2), popularity: crowd };
  return { maps: place ? { ...maps, position: place } : maps, seen, n };
}

function attention(one) {
  if (!one.maps) return null;
  const { maps, seen, n } = parts(one);
  const texts = model().tokens, names = Object.keys(maps);
  const spread = (name) => maps[name].map((row, i) => {  // softmax does not see what is the same for all keys of a query
    const visible = row.filter((_, j) => seen(i, j)), mean = visible.reduce((a, b) => a + b, 0) / visible.length;
    return row.map((value) => value - mean);
  });
  const shown = Object.fromEntries(names.map((name) => [name, name === "position" ? spread(name) : maps[name]]));
  const most = Math.max(...names.slice(1).flatMap((name) => shown[name].flatMap((row, i) => row.filter((_, j) => seen(i, j)).map(Math.abs))), 1e-30);
  const readout = el("p", { class: "readout", "aria-live": "polite" });
  const spots = [];
  const point = (i, j) => {
    if (!seen(i, j)) return;
    spots.forEach((spot) => fill(spot, { x: 62 + 10 * j, y: 62 + 10 * i, visibility: "visible" }, []));
    const figures = names.map((name) => el("span", { class: name === "attention" ? "" : `tag ${name}` }, ` ${name} `,
      el("b", { "data-part": name }, name === "attention" ? percent(maps[name][i][j]) : figure3(maps[name][i][j]))));
    readout.replaceChildren(el("span", {}, tokens([texts[i]]), "looks at ", tokens([texts[j]])), ...figures);
  };
  const pictures = names.map((name) => el("div", {}, el("h3", { class: name === "attention" ? "" : `tag ${name}` }, name), heat(name, shown[name], texts, seen, name === "attention" ? 1 : most, point, spots)));
  point(Math.min(1, n - 1), 0);
  const rows = () => [["query", "key", ...names], ...maps.attention.flatMap((row, i) => row.flatMap((_, j) => (seen(i, j) ? [[texts[i], texts[j], ...names.map((name) => maps[name][i][j])]] : [])))];
  const note = `each row a query, each column a key; colour for plus, grey for minus, one scale for all parts${maps.position ? " (position less its row’s mean)" : ""}${model().cut ? `; the first ${n} of ${model().cut} tokens` : ""}`;
  return framed("Attention on the text, and what makes it", note, rows, "", el("div", { class: names.length > 4 ? "maps five" : "maps" }, pictures), readout);
}

function heat(name, values, texts, seen, most, point, spots) {
  const n = texts.length, size = 62 + 10 * n;
  const cells = values.flatMap((row, i) => row.map((value, j) => {
    if (!seen(i, j) || Math.abs(value) / most < 0.01) return null;
    const kind = name === "attention" ? "ink" : value > 0 ? name : "minus";
    return draw("rect", { class: kind, x: 62 + 10 * j, y: 62 + 10 * i, width: 9.5, height: 9.5, "fill-opacity": Math.sqrt(Math.abs(value) / most).toFixed(2) });
  }));
  const side = texts.map((text, i) => draw("text", { x: 58, y: 70 + 10 * i, "text-anchor": "end" }, short(text)));
  const top = texts.map((text, j) => draw("text", { transform: `translate(${70 + 10 * j} 58) rotate(-90)` }, short(text)));
  const spot = draw("rect", { class: "spot", width: 9.5, height: 9.5, visibility: "hidden" });
  spots.push(spot);
  const at = { i: Math.min(1, n - 1), j: 0 };
  const picture = draw("svg", { viewBox: `0 0 ${size} ${size}`, tabindex: 0, role: "img", "aria-label": `${name}, query by key; arrow keys read its cells` },
    draw("rect", { class: "ground", x: 62, y: 62, width: 10 * n, height: 10 * n }), cells.filter(Boolean), side, top, spot);
  const to = (i, j) => { if (i >= 0 && j >= 0 && i < n && j < n && seen(i, j)) { Object.assign(at, { i, j }); point(i, j); } };
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect(), unit = size / box.width;
    to(Math.floor(((event.clientY - box.top) * unit - 62) / 10), Math.floor(((event.clientX - box.left) * unit - 62) / 10));
  });
  picture.addEventListener("keydown", (event) => {
    const step = STEPS[event.key];
    if (step) { event.preventDefault(); to(at.i + step[0], at.j + step[1]); }
  });
  return picture;
}

// One layer

function layer() {
  const row = layerRow(state.layer), heads = ofLayer(state.layer);
  const title = el("div", { class: "verdict" }, el("h2", {}, `Layer ${row.layer}`), el("span", { class: "muted" }, [row.name, row.causal ? "looks back only" : null, ...(row.notes ?? [])].filter(Boolean).join(" · ")));
  const names = Object.keys(row.raw);
  const body = names.map((name) => el("tr", {}, el("th", { scope: "row", title: DATA.units[name] ?? null }, name.replaceAll("_", " ")), el("td", { "data-figure": `layer.${name}` }, signed(row.raw[name]))));
  const own = framed("All heads together", "the one M of the layer, M = Σ M_h, raw", () => [["figure", "raw"], ...names.map((name) => [name, row.raw[name]])], "third", el("table", {}, el("tbody", {}, body)));
  const bars = heads.map((one) => el("tr", {},
    el("th", { scope: "row" }, el("button", { class: "number", type: "button", onclick: () => choose({ head: one.head }) }, `head ${one.head}`)),
    el("td", { class: "words" }, stack(shares(one), "stack", `head ${one.head}`)), el("td", {}, signed(number(one, "raw", "symmetry"))), el("td", { class: "words" }, one.verdict)));
  const rows = () => [["head", ...PARTS, "symmetry_raw", "verdict"], ...heads.map((one) => [one.head, ...shares(one), number(one, "raw", "symmetry"), one.verdict])];
  const top = el("tr", {}, ["", "what it does", "symmetry, raw", "verdict"].map((name, i) => el("th", { scope: "col", class: i % 2 ? "words" : "" }, name)));
  const all = framed("Its heads", hasData() ? "shares on data" : "shares of energy", rows, "rest", el("div", { class: "wide heads" }, el("table", {}, el("thead", {}, top), el("tbody", {}, bars))));
  put("chosen", title, el("div", { class: "figures" }, own, all));
}

// The table, and what was left out

function table() {
  const box = document.getElementById("table");
  box.replaceChildren(box.querySelector("summary"));
  if (!box.open) return;
  const views = Object.keys(VIEWS).filter((view) => view !== "on_data" || hasData());
  const columns = views.flatMap((view) => model().columns[view].map((name) => [view, name]));
  const names = columns.map(([view, name]) => `${VIEWS[view]} ${name.replaceAll("_", " ")}`);
  const show = (name, value) => (value === null ? "" : /^(symmetry|directionality)/.test(name) ? signed(value) : figure3(value));
  const rows = model().heads.map((one) => el("tr", {}, el("th", { scope: "row" }, `${one.layer}.${one.head}`), el("td", { class: "words" }, one.verdict),
    columns.map(([view, name]) => el("td", {}, show(name, number(one, view, name))))));
  const top = el("tr", {}, ["head", "verdict", ...names].map((name) => el("th", { scope: "col" }, name)));
  const plain = () => [["layer", "head", "verdict", ...columns.map(([view, name]) => `${view}_${name}`)],
    ...model().heads.map((one) => [one.layer, one.head, one.verdict, ...columns.map(([view, name]) => number(one, view, name))])];
  box.append(copyButton("all heads", plain), el("div", { class: "wide" }, el("table", {}, el("caption", { class: "muted" }, `Every head of ${model().name}`), el("thead", {}, top), el("tbody", {}, rows))));
}

// The state, and the address that names it

function render() {
  header(); summary(); map(); triangles();
  if (state.head === null) layer(); else head();
  table();
  put("notes", model().notes.map((note) => el("p", {}, note)));
}
function address() {
  const place = state.head === null ? `${state.layer}` : `${state.layer}.${state.head}`;
  return DATA.models.length > 1 ? `#m${state.model}:${place}` : `#${place}`;
}
function settle() {  // a change of model, layer or view may leave the state without its head
  if (!hasData() && state.view === "on_data") state.view = "raw";
  if (!layerRow(state.layer)) state.layer = model().layers[0].layer;
  if (state.head !== null && !find(state.layer, state.head)) state.head = ofLayer(state.layer)[0].head;
}
function choose(change) {
  Object.assign(state, change);
  settle();
  render();
  try { history.replaceState(null, "", address()); } catch { /* a page inside a notebook has no address */ }
}
function follow() {
  const found = /^#(?:m(\d+):)?(\d+)(?:\.(\d+))?$/.exec(location.hash);
  if (!found) return;
  const at = Number(found[1] ?? state.model);
  if (at < DATA.models.length) state.model = at;
  if (layerRow(Number(found[2]))) Object.assign(state, { layer: Number(found[2]), head: found[3] === undefined ? null : Number(found[3]) });
}
window.addEventListener("hashchange", () => { follow(); settle(); render(); });
document.getElementById("table").addEventListener("toggle", table);
state.layer = model().layers[0].layer;
state.view = hasData() ? "on_data" : "raw";
follow();
settle();
render();
