// The map of layers by heads: the parts of each head, or any metric as colours with a scale.

const ENDS = { symmetry: ["skew", "symmetric"] };  // meaning of a scale's two ends
const SECOND = "symmetry";  // the metric to show if a view lacks the requested one

// The metric that is shown, or null for the parts; a metric of a view is taken from the selected view.
function shown() {
  if (state.figure === FIRST) return null;
  const all = measures(), by = (key) => all.find((one) => one.key === key);
  return by(state.figure) ?? by(`${state.view}.${state.figure}`) ?? by(`${state.view}.${SECOND}`) ?? all[0];
}

// From values to colours, the same for all models. If there are negative values: two colours that meet at 0, up to ±1
// for bounded metrics. Else one colour: from 0, or from the minimum if it exceeds half of the maximum; logarithmic if
// the range is wide.
function scaleOf(measure) {
  const bounded = /^(symmetry|column_directionality)/.test(measure.name), kept = state.model, values = [];
  DATA.models.forEach((one, i) => {
    state.model = i;
    const same = measures().find((other) => other.key === measure.key);
    if (same) values.push(...one.heads.map(same.of).filter(Number.isFinite));
  });
  state.model = kept;
  if (measure.group === ROLES) return roleScale(values);
  const [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  if (bounded || low < 0) {
    const most = bounded ? 1 : Math.max(-low, high);
    // Square roots, so that small values are visible.
    return { low: -most, high: most, two: true, amount: (value) => Math.sqrt(Math.abs(value) / most) };
  }
  if (low > 0 && high / low >= 100) {
    return { low, high, logs: true, amount: (value) => Math.log(value / low) / Math.log(high / low) };
  }
  const from = low > high / 2 ? low : 0;
  return { low: from, high, amount: (value) => (high > from ? (value - from) / (high - from) : 0.5) };
}

const tone = (scale, value) => (scale.two && value < 0 ? "var(--below)" : "var(--above)");

function cell(layer, head, measure, scale) {
  const one = find(layer, head), parts = measure === null && one ? split([one]).map(shares)[0] : null;
  const value = one && measure ? measure.of(one) : null;
  if (!parts && !Number.isFinite(value)) {
    return el("span", { class: "cell empty", role: "gridcell", "aria-label": "no value" });
  }
  const chosen = layer === state.layer && head === state.head;
  const [ink, amount] = parts ? ["var(--middle)", 0]
    : measure.paint ? measure.paint(one) : [tone(scale, value), scale.amount(value)];
  const words = (parts ? listed(parts) : measure.group === ROLES ? `${measure.label} ${valueText(measure, one)}`
    : `${title(measure.key.slice(measure.key.indexOf(".") + 1))} ${valueText(measure, one)}`) + `; ${labelled(one)}`;
  return el("span", {
    class: parts ? "cell split" : "cell",
    role: "gridcell",
    tabindex: chosen ? 0 : -1,
    title: `${layer}.${head}: ${words}`,
    "data-head": `${layer}.${head}`,
    "data-focus": "cell",
    "aria-selected": chosen,
    "aria-label": `${layerName(layer)}, head ${head}: ${words}`,
    "--tone": ink,
    "--amount": `${(100 * amount).toFixed(0)}%`,
    onclick: () => choose({ layer, head }),
  }, parts ? bars().map((part, i) => el("span", { class: part, "--share": parts[i] })) : []);
}

function mapRow(layer, columns, measure, scale) {
  const pressed = layer === state.layer && state.head === null;
  const number = el("button", {
    class: "number", type: "button", "aria-label": layerName(layer), "aria-pressed": pressed,
    "data-focus": `layer ${layer}`, onclick: () => choose({ layer, head: null }),
  }, String(layer));
  const cells = Array.from({ length: columns }, (_, head) => cell(layer, head, measure, scale));
  const bar = stack(meanShares(ofLayer(layer)), "stack", `layer ${layer}`);
  return el("div", { class: "row", role: "row" }, number, el("div", { class: "cells" }, cells), bar);
}

function picker(measure) {
  const all = measures(), option = (one) =>
    el("option", { value: one.key, selected: one.key === (measure?.key ?? FIRST) && "selected" }, one.label);
  const groups = [...new Set(all.map((one) => one.group))].map((group) =>
    el("optgroup", { label: group }, all.filter((one) => one.group === group).map(option)));
  return el("select", {
    "aria-label": "metric shown on the map", "data-focus": "figure",
    onchange: (event) => {
      const [view, ...name] = event.target.value.split(".");
      choose(view in VIEWS ? { view, figure: name.join(".") } : { figure: event.target.value });
    },
  }, option({ key: FIRST, label: "parts" }), groups);
}

function legend(measure, scale) {
  const how = el("span", {}, "click or use arrow keys; click a layer’s number for the layer");
  if (!measure) {
    return el("div", { class: "scale" }, el("span", {}, model().of),
      partsShown().map((part) => el("span", { class: `tag ${part}` }, part)), how);
  }
  if (measure.paint) {
    return el("div", { class: "scale" }, el("span", {}, measure.unit), roleTags(model().heads), how);
  }
  const [left, right] = ENDS[measure.name] ?? [];
  const end = (value, words) => el("span", {}, [figure(measure.name, value), words].filter(Boolean).join(" "));
  const ramp = el("span", { class: scale.two ? "ramp two" : "ramp" });
  const span = `from ${figure(measure.name, scale.low)} to ${figure(measure.name, scale.high)}`;
  return el("div", { class: "scale" },
    el("span", { class: "ends-of", role: "img", "aria-label": span },
      end(scale.low, left), ramp, end(scale.high, right), scale.logs ? ", logarithmic" : null),
    el("span", {}, measure.unit ?? DATA.units[measure.name] ?? ""),
    how);
}

function map() {
  const { heads, layers } = model(), measure = shown(), scale = measure && scaleOf(measure);
  const columns = 1 + Math.max(...heads.map((one) => one.head));
  const buttons = views().map((view) => el("button", {
    type: "button", "aria-pressed": Boolean(measure?.key.startsWith(`${view}.`)), "data-focus": view,
    onclick: () => choose({ view, figure: measure?.key.startsWith(`${state.view}.`) ? state.figure : SECOND }),
  }, VIEWS[view]));
  const parts = el("button", {
    type: "button", "aria-pressed": measure === null, "data-focus": FIRST, onclick: () => choose({ figure: FIRST }),
  }, FIRST);
  const roles = el("button", {
    type: "button", "aria-pressed": measure?.key === "role", "data-focus": "role", onclick: () => choose({ figure: "role" }),
  }, "role");
  const tall = `${Math.max(9, Math.min(40, Math.floor(400 / layers.length)))}px`;
  const numbers = columns > 16 ? el("span", {}, `heads 0 to ${columns - 1}`)
    : el("span", { class: "cells" }, Array.from({ length: columns }, (_, head) => el("span", {}, String(head))));
  const means = () => [["layer", ...bars()], ...layers.map(({ layer }) => [layer, ...meanShares(ofLayer(layer))])];
  const layerMeans = el("span", {}, "mean per layer ", copyButton("the layers", means));
  const grid = el("div", {
    class: "grid", role: "grid", "aria-label": `${measure?.label ?? "parts"} of every head`, "--tall": tall, onkeydown: walk,
  }, layers.map(({ layer }) => mapRow(layer, columns, measure, scale)));
  const rows = () => (measure
    ? [["layer", "head", measure.key], ...heads.map((one) => [one.layer, one.head, (measure.word ?? measure.of)(one)])]
    : [["layer", "head", ...bars()], ...split(heads).map((one) => [one.layer, one.head, ...shares(one)])]);
  put("map",
    el("div", { class: "bar" }, el("label", {}, el("h3", {}, "Layers by heads:"), picker(measure)),
      el("div", { class: "switch", role: "group", "aria-label": "view" }, parts, heads.some((one) => one.roles) ? roles : null,
        measure ? null : el("span", { class: "muted" }, "symmetry:"), buttons), copyButton("the map", rows)),
    el("div", { class: "row top" }, el("span"), numbers, layerMeans), grid, legend(measure, scale));
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
function walk(event) {
  const step = STEPS[event.key];
  if (!step) return;
  event.preventDefault();
  const layers = model().layers.map((one) => one.layer);
  const layer = layers[layers.indexOf(state.layer) + step[0]] ?? state.layer;
  const last = Math.max(...ofLayer(layer).map((one) => one.head));
  choose({ layer, head: Math.min(Math.max((state.head ?? 0) + step[1], 0), last) }, true);
}
