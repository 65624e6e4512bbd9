// Charts of a survey over training steps, sizes and architectures. Each dot links to its model's page.

const SHOWN = {
  symmetry: "heads", symmetry_folded: "heads, folded", symmetry_together: "whole layers",
  column_directionality: "column directionality", rank_used: "rank used",
};
const CALLED = {
  symmetry: "symmetry of heads", symmetry_folded: "symmetry of heads, folded", symmetry_together: "symmetry of whole layers",
  column_directionality: "column directionality of whole layers", rank_used: "effective rank over head width",
};
const BY_LAYER = { symmetry: "by_layer", symmetry_together: "together_by_layer" };
const state = { figure: "symmetry", run: null, log: false, sort: "name", down: false, words: "", all: false };
const tone = (number) => `var(--class${number % 10})`;
const families = [...new Set(DATA.models.map((one) => one.family))].sort();
const toneOf = (one) => tone(families.indexOf(one.family));
const steps = (run) => DATA.models.filter((one) => one.run === run).sort((a, b) => a.step - b.step);
const grouped = (value) => String(value).replace(/\B(?=(\d{3})+$)/g, " ");
const UNITS = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];
function size(value) {
  const [unit, letter] = UNITS.find(([least]) => value >= 0.9995 * least) ?? [1, ""];
  return figure3(value / unit) + letter;
}
const shown = (value) => (state.figure === "rank_used" ? percent(value) : signed3(value));
function signed3(value) {
  const text = value.toFixed(3);
  return Number(text) === 0 ? "0.000" : (value > 0 ? "+" : "−") + text.replace("-", "");
}

// A page in a notebook's frame has no folder of models next to it.
const beside = location.protocol !== "about:";
const pageOf = (one) => (beside ? `models/${encodeURIComponent(one.file)}.html` : null);
const linked = (one, ...content) => (beside ? el("a", { href: pageOf(one) }, ...content) : el("span", {}, ...content));

// Dimensions of all charts; `CHART.wide` is the width of a chart on half a page.

const CHART = { wide: 560, tall: 250, left: 46, right: 12, top: 10, bottom: 26 };

function bounds(values) {
  if (state.figure === "rank_used") return [0, Math.max(0.1, ...values) * 1.05];
  const low = Math.min(0, ...values), high = Math.max(0, ...values), room = 0.06 * (high - low) || 0.1;
  return [low < 0 ? low - room : low, high + room];
}
const upward = ([low, high], tall) => (value) =>
  CHART.top + (1 - (value - low) / (high - low || 1)) * (tall - CHART.top - CHART.bottom);

function levels(range, up) {
  return ticks(...range).flatMap((value) => [
    draw("path", { class: value === 0 ? "axis zero" : "axis", d: `M${CHART.left} ${round(up(value))}H${CHART.wide - CHART.right}` }),
    draw("text", { x: CHART.left - 6, y: round(up(value) + 4), "text-anchor": "end" }, figure3(value)),
  ]);
}

function dot(one, x, y, colour = toneOf(one)) {
  const words = `${one.name}: ${shown(one[state.figure])}`;
  const circle = draw("circle", { class: "dot", cx: round(x), cy: round(y), r: 4, "--tone": colour, "data-model": one.name },
    draw("title", {}, words));
  return beside ? draw("a", { href: pageOf(one), "aria-label": words }, circle) : circle;
}

function svg(tall, label, ...content) {
  return draw("svg", { viewBox: `0 0 ${CHART.wide} ${tall}`, role: "group", "aria-label": label }, ...content);
}

// By training step

const line = (points, kind, colour, words) => draw("path", { class: `line ${kind}`, "--tone": colour,
  d: `M${points.map(([x, y]) => `${round(x)} ${round(y)}`).join("L")}` }, draw("title", {}, words));

function training() {
  if (!DATA.runs.length) return null;
  const courses = DATA.runs.map((run) => [run, steps(run)]);
  const picked = courses.find(([run]) => run === state.run)?.[1];
  const layers = picked && BY_LAYER[state.figure];
  const inside = picked ? picked.flatMap((one) => [one[state.figure], ...(layers ? one[layers] : [])])
    : courses.flatMap(([, some]) => some.map((one) => one[state.figure]));
  const all = (picked ?? courses.flatMap(([, some]) => some)).map((one) => one.step);
  const across = (step) => (state.log ? Math.log10(1 + step) : step);
  const ends = [Math.min(...all), Math.max(...all)], [first, last] = ends.map(across);
  const toX = (step) => CHART.left + (across(step) - first) / (last - first || 1) * (CHART.wide - CHART.left - CHART.right);
  const range = bounds(inside), up = upward(range, CHART.tall);
  const numbers = ends.map((step, i) =>
    draw("text", { x: round(toX(step)), y: CHART.tall - 6, "text-anchor": i ? "end" : "start" }, `step ${grouped(step)}`));
  const course = (some, colour, words) => line(some.map((one) => [toX(one.step), up(one[state.figure])]), "", colour, words);
  const drawn = picked ? depths(picked, layers, toX, up) : [];
  for (const [at, [run, some]] of courses.entries()) {
    if (picked && run !== state.run) continue;
    const colour = picked ? "var(--ink)" : tone(at);
    drawn.push(course(some, colour, run), ...some.map((one) => dot(one, toX(one.step), up(one[state.figure]), colour)));
  }
  const pick = (run) => () => change({ run: state.run === run ? null : run }, `[data-run="${CSS.escape(run)}"]`);
  const legend = el("div", { class: "legend", role: "group", "aria-label": "runs" }, courses.map(([run], at) =>
    el("button", { type: "button", "data-run": run, "aria-pressed": run === state.run, title: `${run}: its layers`, "--tone": tone(at), onclick: pick(run) }, run)));
  const scale = el("button", { class: "copy", type: "button", id: "log", "aria-pressed": state.log, onclick: () => change({ log: !state.log }, "#log") },
    state.log ? "linear steps" : "logarithmic steps");
  const rows = () => [["run", "step", "model", state.figure], ...courses.flatMap(([run, some]) =>
    some.map((one) => [run, one.step, one.name, one[state.figure]]))];
  const note = picked ? `${CALLED[state.figure]} of ${state.run}` : `${CALLED[state.figure]}; click a run for its layers`;
  const chart = framed("By training step", note, rows, half(), svg(CHART.tall, "by training step", levels(range, up), numbers, drawn), legend);
  chart.querySelector(".copy").before(scale);
  if (layers) chart.querySelector("figcaption .muted").append("; first layer ", el("span", { class: "depth" }), " last");
  return chart;
}

function depths(picked, layers, toX, up) {
  if (!layers) return [];
  const count = Math.min(...picked.map((one) => one[layers].length));
  return Array.from({ length: count }, (_, layer) => line(picked.map((one) => [toX(one.step), up(one[layers][layer])]), "layer",
    DATA.depths[Math.round(layer / (count - 1 || 1) * 15)], `layer ${layer}: ${signed(picked.at(-1)[layers][layer])} at the end`));
}

// By size and architecture: a run counts once, by its last checkpoint.

const last = DATA.models.filter((one) => one.last);
const half = () => (DATA.runs.length || new Set(last.map((one) => one.parameters)).size > 1 ? "half" : "");

function sizes() {
  const counts = last.map((one) => Math.log10(one.parameters));
  const low = Math.min(...counts), high = Math.max(...counts);
  if (!(high > low)) return null;
  const room = 0.04 * (high - low), wide = CHART.wide - CHART.left - CHART.right;
  const toX = (value) => CHART.left + (Math.log10(value) - low + room) / (high - low + 2 * room) * wide;
  const range = bounds(last.map((one) => one[state.figure])), up = upward(range, CHART.tall);
  const tens = Array.from({ length: 16 }, (_, i) => 10 ** i).filter((value) => Math.log10(value) >= low && Math.log10(value) <= high);
  const numbered = tens.length > 1 ? tens : [10 ** low, 10 ** high];
  const numbers = numbered.map((value) => draw("text", { x: round(toX(value)), y: CHART.tall - 6, "text-anchor": "middle" }, size(value)));
  const dots = last.map((one) => dot(one, toX(one.parameters), up(one[state.figure])));
  const rows = () => [["model", "family", "parameters", state.figure], ...last.map((one) => [one.name, one.family, one.parameters, one[state.figure]])];
  return framed("By size", `${CALLED[state.figure]} by number of parameters`, rows, half(),
    svg(CHART.tall, "by size", levels(range, up), numbers, dots), familyNames());
}

function familyNames() {
  const known = families.filter((name) => last.some((one) => one.family === name));
  return el("div", { class: "legend" }, known.map((name) => el("span", { class: "key", "--tone": tone(families.indexOf(name)) }, String(name))));
}

function kinds() {
  const groups = new Map();
  for (const one of last) {
    const name = `${one.family}, ${one.attention}`;
    groups.set(name, [...(groups.get(name) ?? []), one]);
  }
  const middle = (some) => {
    const values = some.map((one) => one[state.figure]).sort((a, b) => a - b), at = values.length / 2;
    return (values[Math.ceil(at) - 1] + values[Math.floor(at)]) / 2;
  };
  const sorted = [...groups].sort(([a, one], [b, other]) => middle(other) - middle(one) || (a < b ? -1 : 1));
  const [low, high] = bounds(last.map((one) => one[state.figure]));
  const left = 190, tall = 22 * sorted.length + 34;
  const toX = (value) => left + (value - low) / (high - low || 1) * (CHART.wide - left - CHART.right);
  const lines = ticks(low, high).flatMap((value) => [
    draw("path", { class: value === 0 ? "axis zero" : "axis", d: `M${round(toX(value))} 4V${tall - 24}` }),
    draw("text", { x: round(toX(value)), y: tall - 8, "text-anchor": "middle" }, figure3(value)),
  ]);
  const drawn = sorted.flatMap(([name, some], at) => {
    const y = 16 + 22 * at, x = toX(middle(some));
    const words = draw("text", { class: "ink", x: left - 10, y: y + 4, "text-anchor": "end" }, short(name, 25), draw("title", {}, `${name}: ${some.length}`));
    return [words, some.length > 1 ? draw("line", { class: "median", x1: round(x), x2: round(x), y1: y - 8, y2: y + 8 }) : null,
      ...some.map((one) => dot(one, toX(one[state.figure]), y))];
  });
  const rows = () => [["family", "attention", "model", state.figure], ...last.map((one) => [one.family, one.attention, one.name, one[state.figure]])];
  return framed("By architecture", `${CALLED[state.figure]}; the line is the median`, rows, "half", svg(tall, "by architecture", lines, drawn));
}
