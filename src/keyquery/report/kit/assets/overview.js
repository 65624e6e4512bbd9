// All heads: the summary and the triangles; what of them is one number.

const PARTS = ["symmetric", "skew", "popularity", "query_only", "position"];
const MARKS = { variance: "*", weights: "°" };  // how a label is known; one from ablation has no mark
const KNOWN = {
  ablation: "by ablation", variance: "from variance only, not tested by ablation", weights: "from the weights alone",
};
const CHANGES = "another within the first half of each window";
const VIEWS = { raw: "raw", folded: "folded", on_data: "on data" };
const FIRST = "parts";  // what the map shows at first: no figure, but the bar of each head
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

// Whatever is one number per head, under a key of its own: the figures of each view as the reading has them, the change
// of the loss with a part off, and what a corpus explains. `ends` are those of its interval, where it has one.
function measures() {
  const { heads, columns } = model();
  const named = (part) => [...new Set(heads.flatMap((one) => Object.keys(one[part] ?? {})))];
  const all = [
    ...views().flatMap((view) => columns[view].map((name) => ({
      key: `${view}.${name}`, group: VIEWS[view], name, label: `${VIEWS[view]} ${title(name)}`,
      of: (one) => number(one, view, name), ends: (one) => interval(one, view, name),
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
function interval(one, view, name) {
  return one.intervals?.[view]?.[model().columns[view].indexOf(name)] ?? null;
}
function told(measure, one) {
  const [low, high] = measure.ends(one) ?? [];
  const between = Number.isFinite(low) && Number.isFinite(high)
    ? ` (${figure(measure.name, low)} to ${figure(measure.name, high)})` : "";
  return `${figure(measure.name, measure.of(one))}${between}`;
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

const listed = (values) => PARTS.map((part, i) => `${part} ${percent(values[i])}`)
  .filter((_, i) => values[i] >= 0.005).join(", ");
function stack(values, kind, label) {
  const told = listed(values);
  const spans = PARTS.map((part, i) => el("span", { class: part, "--share": values[i] }));
  return el("div", { class: kind, role: "img", "aria-label": `${label}: ${told}`, title: told }, spans);
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
