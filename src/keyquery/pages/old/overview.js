// All heads: the summary, the triangles, and scalar metrics.

const PARTS = ["symmetric", "skew", "popularity", "query_only", "position"];
// Parts of bars: cross-attention has a pairwise part instead of symmetric and skew.
const bars = () => (model().columns.on_data?.includes("pairwise") ? [...PARTS, "pairwise"] : PARTS);
const MARKS = { variance: "*", weights: "°" };  // evidence of a label; one from ablation has no mark
const KNOWN = {
  ablation: "by ablation", variance: "from variance only, not tested by ablation", weights: "from the weights only",
};
const CHANGES = "differs in the first half of each window";
const VIEWS = { raw: "raw", folded: "folded", on_data: "on data" };
const FIRST = "parts";  // the default of the map: the bar of each head instead of a metric
const state = { model: 0, layer: 0, head: 0, view: "raw", figure: FIRST, sort: "", down: false };

const model = () => DATA.models[state.model];
const find = (layer, head) => model().heads.find((one) => one.layer === layer && one.head === head);
const layerRow = (layer) => model().layers.find((one) => one.layer === layer);
const ofLayer = (layer) => model().heads.filter((one) => one.layer === layer);
const labelOf = (layer) => model().labels[layer] ?? "";  // for models of several stacks: encoder 0, cross 3
const layerName = (layer) => labelOf(layer) ? `layer ${layer} (${labelOf(layer)})` : `layer ${layer}`;
const hasData = () => model().heads.some((one) => one.on_data);
const views = () => Object.keys(VIEWS).filter((view) => view !== "on_data" || hasData());
function number(one, view, name) {
  const at = model().columns[view].indexOf(name);
  return one[view] && at >= 0 ? one[view][at] : null;
}

// All scalar metrics of a head, each under a unique key: those of each view, the change of the loss with a part
// ablated, and those of a corpus. `ends` are the bounds of its interval, if it has one.
function measures() {
  const { heads, columns } = model();
  const named = (part) => [...new Set(heads.flatMap((one) => Object.keys(one[part] ?? {})))];
  const all = [
    ...views().flatMap((view) => columns[view].map((name) => ({
      key: `${view}.${name}`, group: VIEWS[view], name, label: `${VIEWS[view]} ${title(name)}`,
      of: (one) => number(one, view, name), ends: (one) => interval(one, view, name),
    }))),
    ...named("off").map((part) => ({
      key: `off.${part}`, group: "change of the loss", name: "change", label: `loss, ${title(part)} ablated`,
      of: (one) => one.off?.[part]?.[0] ?? null, ends: (one) => one.off?.[part]?.slice(1),
    })),
    ...named("corpus").map((name) => ({
      key: `corpus.${name}`, group: "compared with the corpus", name: "change", label: `corpus ${title(name)}`,
      of: (one) => one.corpus?.[name] ?? null, ends: () => null,
    })),
    ...roleMeasures(heads),
  ];
  return all.filter((one) => heads.some((each) => Number.isFinite(one.of(each))));
}
function interval(one, view, name) {
  return one.intervals?.[view]?.[model().columns[view].indexOf(name)] ?? null;
}
function valueText(measure, one) {
  if (measure.word) return measure.word(one);
  const [low, high] = measure.ends(one) ?? [];
  const between = Number.isFinite(low) && Number.isFinite(high)
    ? ` (${figure(measure.name, low)} to ${figure(measure.name, high)})` : "";
  return `${figure(measure.name, measure.of(one))}${between}`;
}

// On data, shares of the score variance; else ‖S‖² and ‖A‖² of the weights. Negative estimates are drawn as 0, and
// shares that sum to more than 1 (parts that covary negatively) are normalised.
function shares(one) {
  const symmetric = (1 + number(one, "raw", "symmetry")) / 2;
  const values = one.on_data ? bars().map((part) => number(one, "on_data", part))
    : [symmetric, 1 - symmetric, 0, 0, 0, 0].slice(0, bars().length);
  const clipped = values.map((value) => Math.max(value, 0));
  const total = Math.max(1, clipped.reduce((a, b) => a + b, 0));
  return clipped.map((value) => value / total);
}
const labelled = (one) => one.label + (MARKS[one.evidence] ?? "") + (one.changes?.includes("label") ? "~" : "");
const partsShown = () => (hasData() ? bars() : PARTS.slice(0, 2));
const split = (heads) => heads.filter((one) => one.on_data || !hasData());  // some heads may have none on data
function meanShares(heads) {
  const all = split(heads).map(shares);
  return bars().map((_, i) => all.reduce((sum, values) => sum + values[i], 0) / (all.length || 1));
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

// The summary, as in the terminal and in the JSON: the number of heads per label.
function summary() {
  const tags = Object.entries(model().summary).map(([label, count]) =>
    el("span", { class: `tag ${label}` }, el("b", {}, String(count)), label));
  const heads = split(model().heads);
  const rows = () => [["layer", "head", "label", "evidence", ...bars()],
    ...heads.map((one) => [one.layer, one.head, one.label, one.evidence, ...shares(one)])];
  const known = [...new Set(model().heads.map((one) => one.evidence))].map((how) => KNOWN[how]).filter(Boolean);
  put("summary", tags, el("span", { class: "muted" }, `labels of ${model().heads.length} heads, ${known.join("; ")}`),
    copyButton("labels and shares", rows));
}

const listed = (values) => bars().map((part, i) => `${part} ${percent(values[i])}`)
  .filter((_, i) => values[i] >= 0.005).join(", ");
function stack(values, kind, label) {
  const words = listed(values);
  const spans = bars().map((part, i) => el("span", { class: part, "--share": values[i] }));
  return el("div", { class: kind, role: "img", "aria-label": `${label}: ${words}`, title: words }, spans);
}

function triangles() {
  const measure = shown(), painted = measure?.group === ROLES, scale = painted && scaleOf(measure);
  document.querySelectorAll("#triangles > svg").forEach((triangle, i) => {
    triangle.classList.toggle("resting", i !== state.model);
    triangle.classList.toggle("by-role", painted);
    const heads = new Map(DATA.models[i].heads.map((one) => [`${one.layer}.${one.head}`, one]));
    const rank = (dot) => measure.rank?.(heads.get(dot.dataset.head)) ?? measure.of(heads.get(dot.dataset.head));
    const dots = [...triangle.querySelectorAll(".head")];
    if (painted) triangle.append(...dots.sort((dot, other) => rank(dot) - rank(other)));  // what matters most on top
    for (const dot of dots) {
      const [layer, head] = dot.dataset.head.split(".").map(Number);
      dot.classList.toggle("chosen", i === state.model && layer === state.layer && head === state.head);
      dot.classList.toggle("painted", painted);
      if (painted) dot.style.setProperty("--paint", paint(measure, scale, heads.get(dot.dataset.head)));
      dot.onclick = () => choose({ model: i, layer, head });
    }
  });
}
function paint(measure, scale, one) {  // the colour of a head in the triangle
  if (measure.paint) return measure.paint(one)[0];
  const value = measure.of(one);
  return value === null ? "var(--line)" : `color-mix(in oklab, ${tone(scale, value)} ${100 * scale.amount(value)}%, var(--line))`;
}
