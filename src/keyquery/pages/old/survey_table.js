// A table of all models that can be sorted and filtered; the selected metric; models that could not be read.

const COLUMNS = [
  ["name", "model", "words", (one) => one.name],
  ["family", "architecture", "words", (one) => one.family ?? ""],
  ["attention", "attention", "words", (one) => one.attention],
  ["step", "step", "", (one) => (one.step === null ? "–" : grouped(one.step))],
  ["parameters", "size", "", (one) => size(one.parameters)],
  ["layers", "layers", "", (one) => String(one.layers)],
  ["heads", "heads", "", (one) => grouped(one.heads)],
  ["width", "width", "", (one) => grouped(one.width)],
  ["symmetry", "symmetry", "", (one) => signed3(one.symmetry)],
  ["symmetry_low", "quartiles", "", (one) => `${signed(one.symmetry_low)} … ${signed(one.symmetry_high)}`],
  ["symmetry_folded", "folded", "", (one) => signed3(one.symmetry_folded)],
  ["symmetry_together", "whole layers", "", (one) => signed3(one.symmetry_together)],
  ["column_directionality", "column directionality", "", (one) => signed3(one.column_directionality)],
  ["rank_used", "rank used", "", (one) => percent(one.rank_used)],
  ["labels", "labels", "words", (one) => one.labels],
].filter(([name]) => name !== "step" || DATA.models.some((one) => one.step !== null));  // omits an empty column
const MOST = 300;  // rows that are shown by default

const natural = new Intl.Collator("en", { numeric: true }).compare;  // step 200 before step 1000
function order(a, b) {
  const [one, other] = [a[state.sort], b[state.sort]];
  if (one === null || other === null) return (one === null) - (other === null);  // models without a step come last
  const sign = typeof one === "string" ? natural(one, other) : one - other;
  return (state.down ? -sign : sign) || natural(a.name, b.name);
}

function matching() {
  const words = state.words.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (one) => [one.name, one.family, one.attention, one.run, one.labels].join(" ").toLowerCase();
  return DATA.models.filter((one) => words.every((word) => text(one).includes(word))).sort(order);
}

function tableHead() {
  return COLUMNS.map(([name, title_, kind]) => {
    const sorted = state.sort === name ? (state.down ? "descending" : "ascending") : null;
    const press = () => change({ sort: name, down: state.sort === name ? !state.down : kind !== "words" }, `[data-sort="${name}"]`);
    const th = el("th", { scope: "col", class: kind, title: DATA.units[name] ?? null },
      el("button", { type: "button", "data-sort": name, onclick: press }, title_));
    if (sorted) th.setAttribute("aria-sort", sorted);
    return th;
  });
}

function table() {
  const matches = matching(), drawn = state.all ? matches : matches.slice(0, MOST);
  const body = drawn.map((one) => el("tr", {}, COLUMNS.map(([name, , kind, text]) => name === "name"
    ? el("th", { scope: "row", title: [one.name, ...one.notes].join("\n") }, linked(one, one.name))
    : el("td", { class: kind }, text(one)))));
  const names = COLUMNS.flatMap(([name]) => (name === "symmetry_low" ? [name, "symmetry_high"] : [name]));
  const rows = () => [["run", ...names], ...matching().map((one) => [one.run, ...names.map((name) => one[name])])];
  const more = matches.length > drawn.length
    ? el("button", { class: "more", type: "button", onclick: () => change({ all: true }) }, `show all ${matches.length}`) : null;
  put("rows", el("table", {}, el("thead", {}, el("tr", {}, tableHead())), el("tbody", {}, body)), more);
  put("count", matches.length === DATA.models.length ? "" : `${matches.length} of ${DATA.models.length}`, copyButton("models", rows));
  const names_ = new Set(matches.map((one) => one.name)), some = matches.length < DATA.models.length;
  for (const circle of document.querySelectorAll("#charts circle.dot")) circle.classList.toggle("faint", some && !names_.has(circle.dataset.model));
}

function switches() {
  const pick = (name) => () => change({ figure: name }, `[data-figure="${name}"]`);
  put("figures", Object.entries(SHOWN).map(([name, words]) => el("button", {
    type: "button", "data-figure": name, "aria-pressed": state.figure === name, onclick: pick(name),
  }, words)));
  put("meaning", `${CALLED[state.figure]}: ${DATA.units[state.figure]}`);
}

function render() {
  switches();
  put("charts", training(), sizes(), kinds());
  table();
}

function change(what, held) {
  Object.assign(state, what);
  render();
  if (held) document.querySelector(held)?.focus();
}

put("conclusions", DATA.conclusions.map((words) => el("li", {}, words)));
if (DATA.broken.length) {
  put("broken", el("h2", {}, "Could not be read"),
    el("dl", {}, DATA.broken.map(([name, why]) => [el("dt", {}, name), el("dd", { class: "muted" }, why)])));
}
put("notes", el("p", {}, `All heads: heads.parquet. All models: models/*.json. keyquery ${DATA.versions}`));
document.getElementById("filter").addEventListener("input", (event) => {
  Object.assign(state, { words: event.target.value, all: false });
  table();
});
if (DATA.models.length) render();
