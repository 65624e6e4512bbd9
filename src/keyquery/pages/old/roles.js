// Roles: layers by heads, by role or by the score of one, and the scores of one head. The URL fragment is #layer.head.

const state = { layer: 0, head: 0, figure: "role" };
const layers = [...new Set(DATA.heads.map((one) => one.layer))], columns = 1 + Math.max(...DATA.heads.map((one) => one.head));
const find = (layer, head) => DATA.heads.find((one) => one.layer === layer && one.head === head);
const layerName = (layer) => (DATA.labels[layer] ? `layer ${layer} (${DATA.labels[layer]})` : `layer ${layer}`);
const measures = roleMeasures(DATA.heads);
const shown = () => measures.find((one) => one.key === state.figure) ?? measures[0];
const text = (measure, one) => (measure.word ? measure.word(one) : measure.of(one) === null ? "–" : figure3(measure.of(one)));

function cell(layer, head, measure, scale) {
  const one = find(layer, head), value = one ? measure.of(one) : null;
  if (value === null) return el("span", { class: "cell empty", role: "gridcell", "aria-label": "no value" });
  const [tone, amount] = measure.paint ? measure.paint(one)
    : [value < 0 ? "var(--below)" : "var(--above)", scale.amount(value)];
  const chosen = layer === state.layer && head === state.head, words = `${measure.label} ${text(measure, one)}`;
  return el("span", {
    class: "cell", role: "gridcell", tabindex: chosen ? 0 : -1, title: `${layer}.${head}: ${words}`,
    "data-head": `${layer}.${head}`, "data-focus": "cell", "aria-selected": chosen,
    "aria-label": `${layerName(layer)}, head ${head}: ${words}`, "--tone": tone,
    "--amount": `${(100 * amount).toFixed(0)}%`, onclick: () => choose({ layer, head }),
  });
}

function map() {
  const measure = shown(), scale = roleScale(DATA.heads.map(measure.of).filter(Number.isFinite));
  const picker = el("select", {
    "aria-label": "role shown on the map", "data-focus": "figure", onchange: (event) => choose({ figure: event.target.value }),
  }, measures.map((one) => el("option", { value: one.key, selected: one === measure && "selected" }, one.label)));
  const rows = layers.map((layer) => el("div", { class: "row", role: "row" },
    el("span", { class: "number", title: layerName(layer) }, String(layer)),
    el("div", { class: "cells" }, Array.from({ length: columns }, (_, head) => cell(layer, head, measure, scale)))));
  const numbers = columns > 16 ? el("span", {}, `heads 0 to ${columns - 1}`)
    : el("span", { class: "cells" }, Array.from({ length: columns }, (_, head) => el("span", {}, String(head))));
  const all = () => [["layer", "head", measure.key], ...DATA.heads.map((one) => [one.layer, one.head, (measure.word ?? measure.of)(one)])];
  const ramp = [el("span", { class: "ends-of" }, figure3(scale.low), el("span", { class: scale.two ? "ramp two" : "ramp" }), "1")];
  put("map",
    el("div", { class: "bar" }, el("label", {}, el("h3", {}, "Layers by heads:"), picker), copyButton("the map", all)),
    el("div", { class: "row top" }, el("span"), numbers),
    el("div", {
      class: "grid", role: "grid", "aria-label": `${measure.label} of every head`, onkeydown: walk,
      "--tall": `${Math.max(9, Math.min(40, Math.floor(400 / layers.length)))}px`,
    }, rows),
    el("div", { class: "scale" }, measure.paint ? roleTags(DATA.heads) : ramp, el("span", {}, measure.unit),
      el("span", {}, "click or use arrow keys")));
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
function walk(event) {
  const step = STEPS[event.key];
  if (!step) return;
  event.preventDefault();
  const layer = layers[layers.indexOf(state.layer) + step[0]] ?? state.layer, head = state.head + step[1];
  if (find(layer, head)) choose({ layer, head });
}

function chosen() {
  const one = find(state.layer, state.head);
  put("chosen",
    el("div", { class: "headline" }, el("h2", {}, `L${layerName(one.layer).slice(1)}, head ${one.head}`),
      one.roles.named.map((role) => el("span", { class: "property by-tone", "--tone": roleTone(role) }, roleName(role)))),
    el("p", { class: "muted" }, one.kind === "cross" ? `${one.name} · cross-attention` : one.name),
    el("div", { class: "figures" }, roleChart(one)));
}

function table() {
  const box = document.getElementById("table");
  const body = !box.open ? [] : DATA.heads.map((one) =>
    el("tr", { "data-head": `${one.layer}.${one.head}`, onclick: () => choose({ layer: one.layer, head: one.head }) },
      el("th", { scope: "row" }, `${one.layer}.${one.head}`),
      measures.map((each) => el("td", { class: each.word ? "words" : "" }, text(each, one)))));
  const top = el("tr", {}, heading("head"), measures.map((each) => heading(each.label, each.word ? "words" : "")));
  const rows = () => [["layer", "head", ...measures.map((each) => each.key)],
    ...DATA.heads.map((one) => [one.layer, one.head, ...measures.map((each) => (each.word ?? each.of)(one))])];
  box.replaceChildren(box.querySelector("summary"), ...(box.open ? [copyButton("all heads", rows),
    el("div", { class: "wide" }, el("table", {}, el("thead", {}, top), el("tbody", {}, body)))] : []));
}

function render() {
  map();
  chosen();
}

function choose(change) {
  const held = document.activeElement?.dataset.focus;
  Object.assign(state, change);
  render();
  document.querySelector(held && `[data-focus="${CSS.escape(held)}"]:not([tabindex="-1"])`)?.focus({ preventScroll: true });
  try {
    history.replaceState(null, "", `#${state.layer}.${state.head}`);
  } catch {
    // a page inside a notebook has no URL
  }
}

function follow() {
  const [, layer, head] = /^#(\d+)\.(\d+)$/.exec(location.hash) ?? [];
  const one = find(Number(layer), Number(head)) ?? DATA.heads.find((each) => each.roles.role) ?? DATA.heads[0];
  Object.assign(state, { layer: one.layer, head: one.head });
}

put("name", DATA.name);
put("facts", DATA.facts);
put("summary", DATA.counts.map(([role, count]) =>
  el("span", { class: "tag by-tone", "--tone": roleTone(role) }, el("b", {}, String(count)), roleName(role))),
el("span", { class: "muted" }, `roles of ${DATA.heads.length} heads; a head may have several`));
put("notes", DATA.notes.map((note) => el("p", {}, note)));
document.getElementById("table").addEventListener("toggle", table);
window.addEventListener("hashchange", () => {
  follow();
  render();
});
follow();
render();
