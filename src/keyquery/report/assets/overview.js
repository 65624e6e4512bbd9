// All heads: the summary, the map of layers by heads, the triangles, and the table.

const PARTS = ["reciprocal", "directional", "popularity", "position"];
const DO = {
  reciprocal: "compare", directional: "point", popularity: "follow the crowd", position: "mind the place",
};
const MORE = { reciprocal: "compare more than they point", directional: "point more than they compare" };
const VIEWS = { raw: "raw", folded: "folded", on_data: "on data" };
const state = { model: 0, layer: 0, head: 0, view: "raw" };

const model = () => DATA.models[state.model];
const find = (layer, head) => model().heads.find((one) => one.layer === layer && one.head === head);
const layerRow = (layer) => model().layers.find((one) => one.layer === layer);
const ofLayer = (layer) => model().heads.filter((one) => one.layer === layer);
const labelOf = (layer) => model().labels[layer] ?? "";  // of models of several stacks: encoder 0, cross 3
const layerName = (layer) => labelOf(layer) ? `layer ${layer} (${labelOf(layer)})` : `layer ${layer}`;
const hasData = () => model().heads.some((one) => one.on_data);
const views = () => Object.keys(VIEWS).filter((view) => view !== "on_data" || hasData());
function number(one, view, name) {
  const at = model().columns[view].indexOf(name);
  return one[view] && at >= 0 ? one[view][at] : null;
}

// On data, shares of the variance of the scores; else of the energy of the weights.
function shares(one) {
  if (one.on_data) return PARTS.map((part) => number(one, "on_data", part));
  const compares = (1 + number(one, "raw", "symmetry")) / 2;
  return [compares, 1 - compares, 0, 0];
}
const split = (heads) => heads.filter((one) => one.on_data || !hasData());  // cross-attention has none on data
function meanShares(heads) {
  const all = split(heads).map(shares);
  return PARTS.map((_, i) => all.reduce((sum, values) => sum + values[i], 0) / (all.length || 1));
}

function header() {
  put("name", model().name);
  put("facts", model().facts);
  document.title = `${model().name}: heads`;
  const buttons = DATA.models.map((one, i) => el("button", {
    type: "button", "aria-pressed": i === state.model, "data-focus": `model ${i}`, onclick: () => choose({ model: i }),
  }, one.name));
  put("models", buttons.length > 1 ? buttons : []);
  document.getElementById("panels").classList.toggle("several", buttons.length > 1);
}

function summary() {
  const heads = split(model().heads), counts = [0, 0, 0, 0];
  for (const values of heads.map(shares)) counts[values.indexOf(Math.max(...values))] += 1;
  const told = PARTS.map((part, i) => {
    if (counts[i] === 0 && i >= (hasData() ? 3 : 2)) return null;
    const words = hasData() ? `mostly ${DO[part]}` : MORE[part];
    return el("span", { class: `tag ${part}` }, el("b", {}, String(counts[i])), words);
  });
  const rows = () => [["layer", "head", ...PARTS], ...heads.map((one) => [one.layer, one.head, ...shares(one)])];
  put("summary", told, el("span", { class: "muted" }, `of ${heads.length} heads`), copyButton("the triangle", rows));
}

function stack(values, kind, label) {
  const told = PARTS.map((part, i) => `${part} ${percent(values[i])}`).filter((_, i) => values[i] > 0).join(", ");
  const spans = PARTS.map((part, i) => el("span", { class: part, "--share": values[i] }));
  return el("div", { class: kind, role: "img", "aria-label": `${label}: ${told}`, title: told }, spans);
}

function cell(layer, head) {
  const one = find(layer, head);
  const value = one ? number(one, state.view, "symmetry") : null;
  if (value === null) return el("span", { class: "cell empty", role: "gridcell", "aria-label": "no figure" });
  const chosen = layer === state.layer && head === state.head;
  const crowd = state.view === "on_data" && one.verdict === "popularity";
  const told = `symmetry ${signed(value)}, ${one.verdict}`;
  return el("span", {
    class: crowd ? "cell crowd" : "cell",
    role: "gridcell",
    tabindex: chosen ? 0 : -1,
    title: `${layer}.${head}${labelOf(layer) && ` (${labelOf(layer)})`}: ${told}`,
    "data-head": `${layer}.${head}`,
    "data-focus": "cell",
    "aria-selected": chosen,
    "aria-label": `${layerName(layer)}, head ${head}: ${told}`,
    "--tone": `var(--${value > 0 ? "reciprocal" : "directional"})`,
    "--amount": `${(100 * Math.sqrt(Math.abs(value))).toFixed(0)}%`,  // so that small figures show too
    onclick: () => choose({ layer, head }),
  });
}

function mapRow(layer, columns) {
  const pressed = layer === state.layer && state.head === null;
  const number = el("button", {
    class: "number", type: "button", "aria-label": layerName(layer), title: labelOf(layer), "aria-pressed": pressed,
    "data-focus": `layer ${layer}`, onclick: () => choose({ layer, head: null }),
  }, String(layer));
  const cells = Array.from({ length: columns }, (_, head) => cell(layer, head));
  const bar = stack(meanShares(ofLayer(layer)), "stack", layerName(layer));
  return el("div", { class: "row", role: "row" }, number, el("div", { class: "cells" }, cells), bar);
}

function map() {
  const { heads, layers } = model();
  const columns = 1 + Math.max(...heads.map((one) => one.head));
  const buttons = views().map((view) => el("button", {
    type: "button", "aria-pressed": view === state.view, "data-focus": view, onclick: () => choose({ view }),
  }, VIEWS[view]));
  const tall = `${Math.max(9, Math.min(40, Math.floor(400 / layers.length)))}px`;
  const numbers = columns > 16 ? el("span", {}, `heads 0 to ${columns - 1}`)
    : el("span", { class: "cells" }, Array.from({ length: columns }, (_, head) => el("span", {}, String(head))));
  const means = () => [["layer", ...PARTS], ...layers.map(({ layer }) => [layer, ...meanShares(ofLayer(layer))])];
  const bars = el("span", {}, hasData() ? "shares, by layer " : "energy, by layer ", copyButton("the layers", means));
  const grid = el("div", {
    class: "grid", role: "grid", "aria-label": "symmetry of every head", "--tall": tall, onkeydown: walk,
  }, layers.map(({ layer }) => mapRow(layer, columns)));
  const scale = el("div", { class: "scale" },
    el("span", {}, "points", el("span", { class: "ramp" }), "compares"),
    state.view === "on_data" ? el("span", { class: "crowded" }, "verdict popularity") : null,
    el("span", {}, "click, or arrow keys; a layer’s number shows the layer"));
  const rows = () => [["layer", "head", "view", "symmetry"],
    ...heads.map((one) => [one.layer, one.head, state.view, number(one, state.view, "symmetry")])];
  put("map",
    el("div", { class: "bar" }, el("h3", {}, "Symmetry, layers by heads"),
      el("div", { class: "switch", role: "group", "aria-label": "view" }, buttons), copyButton("symmetry", rows)),
    el("div", { class: "row top" }, el("span"), numbers, bars), grid, scale);
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
function walk(event) {
  const step = STEPS[event.key];
  if (!step) return;
  event.preventDefault();
  const layers = model().layers.map((one) => one.layer);
  const layer = layers[layers.indexOf(state.layer) + step[0]] ?? state.layer;
  const last = Math.max(...ofLayer(layer).map((one) => one.head));
  choose({ layer, head: Math.min(Math.max((state.head ?? 0) + step[1], 0), last) });
}

function triangles() {
  document.querySelectorAll("#triangles > svg").forEach((triangle, i) => {
    triangle.classList.toggle("resting", i !== state.model);
    for (const dot of triangle.querySelectorAll(".dot")) {
      const [layer, head] = dot.dataset.head.split(".").map(Number);
      dot.classList.toggle("chosen", i === state.model && layer === state.layer && head === state.head);
      dot.onclick = () => choose({ model: i, layer, head });
    }
  });
}

function table() {
  const box = document.getElementById("table");
  box.replaceChildren(box.querySelector("summary"));
  if (!box.open) return;
  const columns = views().flatMap((view) => model().columns[view].map((name) => [view, name]));
  const off = PARTS.filter((part) => model().heads.some((one) => one.off?.[part]));
  const beside = Object.keys(model().heads.find((one) => one.corpus)?.corpus ?? {});
  const names = [...off.map((part) => heading(`loss, ${part} off`)),
    ...beside.map((name) => heading(`corpus ${title(name)}`)),
    ...columns.map(([view, name]) => heading(`${VIEWS[view]} ${title(name)}`))];
  const lost = (one) => off.map((part) => one.off?.[part]?.[0] ?? null);
  const body = model().heads.map((one) => row(el("th", { scope: "row" }, `${one.layer}.${one.head}`),
    [el("td", { class: "words" }, one.verdict),
      ...lost(one).map((value) => el("td", {}, figure("change", value))),
      ...beside.map((name) => el("td", {}, figure("change", one.corpus?.[name] ?? null))),
      ...columns.map(([view, name]) => el("td", {}, figure(name, number(one, view, name))))]));
  const rows = () => [["layer", "head", "verdict", ...off.map((part) => `${part}_off`),
    ...beside.map((name) => `corpus_${name}`), ...columns.map((column) => column.join("_"))],
    ...model().heads.map((one) => [one.layer, one.head, one.verdict, ...lost(one),
      ...beside.map((name) => one.corpus?.[name] ?? null), ...columns.map((at) => number(one, ...at))])];
  box.append(copyButton("all heads", rows), el("div", { class: "wide" }, el("table", {},
    el("caption", { class: "muted" }, `Every head of ${model().name}`),
    el("thead", {}, row(heading("head"), [heading("verdict", "words"), ...names])), el("tbody", {}, body))));
}
