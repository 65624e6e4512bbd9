// All heads: the summary and the triangles; what of them is one number.

const PARTS = ["reciprocal", "directional", "popularity", "position"];
const DO = {
  reciprocal: "compare", directional: "point", popularity: "follow the crowd", position: "mind the place",
};
const MORE = { reciprocal: "compare more than they point", directional: "point more than they compare" };
const VIEWS = { raw: "raw", folded: "folded", on_data: "on data" };
const FIRST = "symmetry";  // what the map shows at first
const state = { model: 0, layer: 0, head: 0, view: "raw", figure: FIRST, sort: "", down: false };

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

// Whatever is one number a head, under a key of its own: the figures of each view as the reading has them, the change
// of the loss with a part off, and what a corpus explains. `ends` are those of its interval, where it has one.
function measures() {
  const { heads, columns } = model();
  const named = (part) => [...new Set(heads.flatMap((one) => Object.keys(one[part] ?? {})))];
  const all = [
    ...views().flatMap((view) => columns[view].map((name) => ({
      key: `${view}.${name}`, group: VIEWS[view], name, label: `${VIEWS[view]} ${title(name)}`,
      of: (one) => number(one, view, name), ends: (one) => one.intervals?.[view]?.[name],
    }))),
    ...named("off").map((part) => ({
      key: `off.${part}`, group: "change of the loss", name: "change", label: `loss, ${title(part)} off`,
      of: (one) => one.off?.[part]?.[0] ?? null, ends: (one) => one.off?.[part]?.slice(1),
    })),
    ...named("corpus").map((name) => ({
      key: `corpus.${name}`, group: "beside the corpus", name: "change", label: `corpus ${title(name)}`,
      of: (one) => one.corpus?.[name] ?? null, ends: () => null,
    })),
  ];
  return all.filter((one) => heads.some((each) => Number.isFinite(one.of(each))));
}
function told(measure, one) {
  const [low, high] = measure.ends(one) ?? [];
  const between = Number.isFinite(low) && Number.isFinite(high)
    ? ` (${figure(measure.name, low)} to ${figure(measure.name, high)})` : "";
  return `${figure(measure.name, measure.of(one))}${between}`;
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
