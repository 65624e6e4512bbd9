// All heads: the summary, the map of layers by heads, the triangles, and the table.

const PARTS = ["symmetric", "skew", "popularity", "query_only", "position"];
const MARKS = { variance: "*", weights: "°" };  // how a label is known; one from ablation has no mark
const KNOWN = {
  ablation: "by ablation", variance: "from variance only, not tested by ablation", weights: "from the weights alone",
};
const CHANGES = "another within the first half of each window";
const VIEWS = { raw: "raw", folded: "folded", on_data: "on data" };
const state = { model: 0, layer: 0, head: 0, view: "parts" };  // a view of VIEWS is its symmetry

const model = () => DATA.models[state.model];
const find = (layer, head) => model().heads.find((one) => one.layer === layer && one.head === head);
const layerRow = (layer) => model().layers.find((one) => one.layer === layer);
const ofLayer = (layer) => model().heads.filter((one) => one.layer === layer);
const hasData = () => model().heads.some((one) => one.on_data);
const views = () => Object.keys(VIEWS).filter((view) => view !== "on_data" || hasData());
function number(one, view, name) {
  const at = model().columns[view].indexOf(name);
  return one[view] && at >= 0 ? one[view][at] : null;
}

// On data, shares of the variance of the scores; else ‖S‖² and ‖A‖² of the weights. An estimate below 0 is drawn as 0,
// and shares of more than 1 in all (parts that covary negatively) in proportion.
function shares(one) {
  const symmetric = (1 + number(one, "raw", "symmetry")) / 2;
  const values = one.on_data ? PARTS.map((part) => number(one, "on_data", part)) : [symmetric, 1 - symmetric, 0, 0, 0];
  const clipped = values.map((value) => Math.max(value, 0));
  const total = Math.max(1, clipped.reduce((a, b) => a + b, 0));
  return clipped.map((value) => value / total);
}
const labelled = (one) => one.label + (MARKS[one.evidence] ?? "") + (one.changes?.includes("label") ? "~" : "");
const partsShown = () => PARTS.slice(0, hasData() ? 5 : 2);
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

// One summary, the same in the terminal and in the JSON: how many heads have each label.
function summary() {
  const told = Object.entries(model().summary).map(([label, count]) =>
    el("span", { class: `tag ${label}` }, el("b", {}, String(count)), label));
  const heads = split(model().heads);
  const rows = () => [["layer", "head", "label", "evidence", ...PARTS],
    ...heads.map((one) => [one.layer, one.head, one.label, one.evidence, ...shares(one)])];
  const known = [...new Set(model().heads.map((one) => one.evidence))].map((how) => KNOWN[how]).filter(Boolean);
  put("summary", told, el("span", { class: "muted" }, `labels of ${model().heads.length} heads, ${known.join("; ")}`),
    copyButton("labels and shares", rows));
}

function stack(values, kind, label) {
  const told = PARTS.map((part, i) => `${part} ${percent(values[i])}`).filter((_, i) => values[i] > 0).join(", ");
  const spans = PARTS.map((part, i) => el("span", { class: part, "--share": values[i] }));
  return el("div", { class: kind, role: "img", "aria-label": `${label}: ${told}`, title: told }, spans);
}

function cell(layer, head) {
  const one = find(layer, head), parts = state.view === "parts";
  const value = !one ? null : parts ? split([one])[0] ?? null : number(one, state.view, "symmetry");
  if (value === null) return el("span", { class: "cell empty", role: "gridcell", "aria-label": "no figure" });
  const chosen = layer === state.layer && head === state.head;
  const told = `${labelled(one)}; ` + (parts
    ? PARTS.map((part, i) => [part, shares(one)[i]]).filter(([, share]) => share >= 0.005)
      .map(([part, share]) => `${part} ${percent(share)}`).join(", ")
    : `symmetry ${VIEWS[state.view]} ${signed(value)}`);
  return el("span", {
    class: parts ? "cell split" : "cell",
    role: "gridcell",
    tabindex: chosen ? 0 : -1,
    title: `${layer}.${head}: ${told}`,
    "data-head": `${layer}.${head}`,
    "data-focus": "cell",
    "aria-selected": chosen,
    "aria-label": `layer ${layer}, head ${head}: ${told}`,
    "--tone": `var(--${value > 0 ? "symmetric" : "skew"})`,
    "--amount": parts ? "0%" : `${(100 * Math.sqrt(Math.abs(value))).toFixed(0)}%`,  // so that small figures show too
    onclick: () => choose({ layer, head }),
  }, parts ? PARTS.map((part, i) => el("span", { class: part, "--share": shares(one)[i] })) : []);
}

function mapRow(layer, columns) {
  const pressed = layer === state.layer && state.head === null;
  const number = el("button", {
    class: "number", type: "button", "aria-label": `layer ${layer}`, "aria-pressed": pressed,
    "data-focus": `layer ${layer}`, onclick: () => choose({ layer, head: null }),
  }, String(layer));
  const cells = Array.from({ length: columns }, (_, head) => cell(layer, head));
  const bar = stack(meanShares(ofLayer(layer)), "stack", `layer ${layer}`);
  return el("div", { class: "row", role: "row" }, number, el("div", { class: "cells" }, cells), bar);
}

function map() {
  const { heads, layers } = model();
  const columns = 1 + Math.max(...heads.map((one) => one.head));
  const button = (view) => el("button", {
    type: "button", "aria-pressed": view === state.view, "data-focus": view, onclick: () => choose({ view }),
  }, VIEWS[view] ?? view);
  const buttons = [button("parts"), el("span", { class: "muted" }, "symmetry:"), ...views().map(button)];
  const tall = `${Math.max(9, Math.min(40, Math.floor(400 / layers.length)))}px`;
  const numbers = columns > 16 ? el("span", {}, `heads 0 to ${columns - 1}`)
    : el("span", { class: "cells" }, Array.from({ length: columns }, (_, head) => el("span", {}, String(head))));
  const means = () => [["layer", ...PARTS], ...layers.map(({ layer }) => [layer, ...meanShares(ofLayer(layer))])];
  const bars = el("span", {}, "mean by layer ", copyButton("the layers", means));
  const grid = el("div", {
    class: "grid", role: "grid", "aria-label": "every head, layers by heads", "--tall": tall, onkeydown: walk,
  }, layers.map(({ layer }) => mapRow(layer, columns)));
  const parts = state.view === "parts";
  const scale = el("div", { class: "scale" },
    parts ? partsShown().map((part) => el("span", { class: `tag ${part}` }, part))
      : el("span", {}, "skew −1", el("span", { class: "ramp" }), "+1 symmetric"),
    el("span", {}, "click, or arrow keys; a layer’s number shows the layer"));
  const rows = () => (parts ? [["layer", "head", ...PARTS], ...split(heads).map((one) => [one.layer, one.head, ...shares(one)])]
    : [["layer", "head", "view", "symmetry"],
      ...heads.map((one) => [one.layer, one.head, state.view, number(one, state.view, "symmetry")])]);
  const name = parts ? "Parts of every head" : `Symmetry of every head, ${VIEWS[state.view]}`;
  put("map",
    el("div", { class: "bar" }, el("h3", {}, name),
      el("div", { class: "switch", role: "group", "aria-label": "view" }, buttons), copyButton("the map", rows)),
    el("p", { class: "muted of" }, parts ? model().of : "tr(M²)/‖M‖²"),
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
    for (const dot of triangle.querySelectorAll(".head")) {
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
    [el("td", { class: "words" }, [labelled(one), ...(one.properties ?? [])].join(", ")),
      ...lost(one).map((value) => el("td", {}, figure("change", value))),
      ...beside.map((name) => el("td", {}, figure("change", one.corpus?.[name] ?? null))),
      ...columns.map(([view, name]) => el("td", {}, figure(name, number(one, view, name))))]));
  const rows = () => [["layer", "head", "label", "evidence", "properties", ...off.map((part) => `${part}_off`),
    ...beside.map((name) => `corpus_${name}`), ...columns.map((column) => column.join("_"))],
    ...model().heads.map((one) => [one.layer, one.head, one.label, one.evidence, (one.properties ?? []).join(" "), ...lost(one),
      ...beside.map((name) => one.corpus?.[name] ?? null), ...columns.map((at) => number(one, ...at))])];
  box.append(copyButton("all heads", rows), el("div", { class: "wide" }, el("table", {},
    el("caption", { class: "muted" }, `Every head of ${model().name}`),
    el("thead", {}, row(heading("head"), [heading("label", "words"), ...names])), el("tbody", {}, body))));
}
