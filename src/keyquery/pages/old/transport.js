// The point cloud at one recorded step on its path from start to end, and the metrics at that step.

const { sketch, steps, unit, curves } = DATA;
const LAST = steps.length - 1;
const COUNT = sketch.classes.length;
const OVER = { coupling: "optimal coupling", way: "trajectory", none: "none" };
const state = { at: 0, over: "coupling", hidden: new Set(), playing: false };
const tone = (number) => `var(--class${number % 10})`;
const still = matchMedia("(prefers-reduced-motion: reduce)");

// Coordinates: all frames fit into the drawing, on one scale.

const WIDE = 640;
const ends = [0, 1].map((axis) => {
  const values = [...sketch.frames, sketch.targets].flatMap((flat) => flat.filter((_, i) => i % 2 === axis));
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
});
const spans = ends.map(([low, high]) => high - low);
const scale = 600 / (Math.max(spans[0], 1.25 * spans[1]) || 1);
const TALL = Math.min(Math.max(spans[1] * scale + 40, 240), 520);
const toX = (x) => WIDE / 2 + (x - (ends[0][0] + ends[0][1]) / 2) * scale;
const toY = (y) => TALL / 2 - (y - (ends[1][0] + ends[1][1]) / 2) * scale;
const place = (flat, i) => [toX(flat[2 * i]), toY(flat[2 * i + 1])];

function placeAt(at, i) {
  const before = Math.floor(at);
  const [x, y] = place(sketch.frames[before], i);
  if (before === at) return [x, y];
  const [further, deeper] = place(sketch.frames[before + 1], i);
  return [x + (further - x) * (at - before), y + (deeper - y) * (at - before)];
}

const points = Array.from({ length: COUNT }, (_, i) => {
  const [x, y] = place(sketch.frames[0], i);
  const [goalX, goalY] = place(sketch.targets, i);
  return {
    then: draw("circle", { class: "then", cx: round(x), cy: round(y), r: 2.5 }),
    own: draw("path", { class: "own" }),
    best: draw("line", { class: "best", x1: round(x), y1: round(y), x2: round(goalX), y2: round(goalY) }),
    goal: draw("circle", { class: "goal", cx: round(goalX), cy: round(goalY), r: 4.2 }),
    dot: draw("circle", { class: "dot", r: 3.4 }),
  };
});

function cloud() {
  const groups = DATA.classes.map((name, number) => {
    const mine = points.filter((_, i) => sketch.classes[i] === number);
    const layers = ["best", "own", "then", "goal", "dot"].map((part) => mine.map((point) => point[part]));
    return draw("g", { "data-class": number, "--tone": tone(number) }, layers);
  });
  const what = "Points at the start (small rings), now (dots), and their targets under optimal transport (large rings)";
  put("cloud", draw("svg", { viewBox: `0 0 ${WIDE} ${Math.round(TALL)}`, role: "img", "aria-label": what }, groups));
}

function move() {
  const before = Math.floor(state.at);
  points.forEach((point, i) => {
    const [x, y] = placeAt(state.at, i).map(round);
    point.dot.setAttribute("cx", x);
    point.dot.setAttribute("cy", y);
    if (state.over !== "way") return;
    const way = Array.from({ length: before + 1 }, (_, k) => place(sketch.frames[k], i).map(round).join(" "));
    point.own.setAttribute("d", `M${[...way, `${x} ${y}`].join("L")}`);
  });
}

// Metrics over steps

const CHART = { wide: 420, tall: 170, left: 38, right: 10, top: 8, bottom: 24 };
const acrossChart = (step) => {
  const share = (step - steps[0]) / (steps[LAST] - steps[0] || 1);
  return CHART.left + share * (CHART.wide - CHART.left - CHART.right);
};
const marks = [];

function chart(series, low, high, more = [], thin = false) {
  const up = (value) => CHART.top + (1 - (value - low) / (high - low || 1)) * (CHART.tall - CHART.top - CHART.bottom);
  const lines = ticks(low, high).flatMap((value) => [
    draw("path", { class: "axis", d: `M${CHART.left} ${round(up(value))}H${CHART.wide - CHART.right}` }),
    draw("text", { x: CHART.left - 6, y: round(up(value) + 4), "text-anchor": "end" }, figure3(value)),
  ]);
  const numbers = [steps[0], steps[LAST]].map((step, i) =>
    draw("text", { x: round(acrossChart(step)), y: CHART.tall - 6, "text-anchor": i ? "end" : "start" }, `${unit} ${step}`));
  const drawn = series.map(({ values, colour, title }) => {
    const known = values.map((value, i) => value === null ? "" : `${round(acrossChart(steps[i]))} ${round(up(value))}`);
    const d = known.some(Boolean) ? `M${known.filter(Boolean).join("L")}` : null;
    const path = draw("path", { class: thin ? "thin" : "", "--tone": colour, d });
    if (title) path.append(draw("title", {}, title));
    return path;
  });
  const cursor = draw("line", { class: "cursor", y1: CHART.top, y2: CHART.tall - CHART.bottom });
  const dots = thin ? [] : series.map(({ colour }) => draw("circle", { class: "mark", r: 3.6, "--tone": colour }));
  marks.push((at) => {
    const before = Math.floor(at);
    const x = acrossChart(steps[before] + ((steps[before + 1] ?? steps[before]) - steps[before]) * (at - before));
    cursor.setAttribute("x1", round(x));
    cursor.setAttribute("x2", round(x));
    dots.forEach((dot, i) => {
      const value = series[i].values[before];
      dot.setAttribute("visibility", value === null ? "hidden" : "visible");
      dot.setAttribute("cx", round(acrossChart(steps[before])));
      dot.setAttribute("cy", round(up(value ?? low)));
    });
  });
  const svg = draw("svg", { viewBox: `0 0 ${CHART.wide} ${CHART.tall}`, role: "img" },
    lines, numbers, more.map((make) => make(up)), cursor, drawn, dots);
  svg.addEventListener("click", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * CHART.wide;
    const far = (i) => Math.abs(acrossChart(steps[i]) - x);
    go(steps.reduce((best, _, i) => (far(i) < far(best) ? i : best), 0));
  });
  return svg;
}

const NAMES = {
  distance: "distance T", wasserstein: "optimal W₂", monge_gap: "gap T − W₂", path_length: "path", bures: "Gaussian W₂",
};
const called = (name) => NAMES[name] ?? name;
const key = (name, colour) => el("span", { class: "key", "--tone": colour }, el("b", {}, called(name)));

function plotted(name, colours, high) {
  const names = Object.keys(colours);
  const series = names.map((each) => ({ values: curves[each], colour: colours[each] }));
  const rows = () => [[unit, ...names], ...steps.map((step, i) => [step, ...names.map((each) => curves[each][i])])];
  const figure = framed(name, "", rows, "", chart(series, 0, high));
  figure.querySelector(".muted").append(...names.flatMap((each) => [key(each, colours[each]), " "]));
  return figure;
}

function headCurves() {
  if (!DATA.heads.length) return [];
  const most = Math.max(0.25, ...DATA.heads.flatMap((head) => head.symmetry.map(Math.abs))) * 1.05;
  const series = DATA.heads.map((head) => {
    const since = head.since === null ? "" : `, skew since ${unit} ${head.since}`;
    return { values: head.symmetry, colour: head.colour, title: `head ${head.name}: ${signed(head.symmetry[LAST])}${since}` };
  });
  const limit = (up) => draw("path", { class: "limit", d: `M${CHART.left} ${round(up(-0.1))}H${CHART.wide - CHART.right}` });
  const words = ["head", unit, "symmetric_energy", "skew_energy", "symmetry"];
  const rows = () => [words, ...DATA.heads.flatMap((head) =>
    steps.map((step, i) => [head.name, step, head.symmetric_energy[i], head.skew_energy[i], head.symmetry[i]]))];
  const figure = framed("Symmetry per head", "", rows, "", chart(series, -most, most, [limit], true));
  const shades = ["first layer", el("span", { class: "depth" }), "last; below the dashed line a head counts as skew"];
  figure.querySelector(".muted").append(...shades);
  return [figure];
}

// The selection and the current step

function now() {
  const at = Math.floor(state.at);
  document.getElementById("when").value = at;
  document.getElementById("now").textContent = `${unit} ${steps[at]}`;
  const metrics = ["distance", "wasserstein", "optimality", "efficiency"].map((name) => {
    const value = curves[name][at];
    return `${called(name)} ${value === null ? "–" : figure3(value)}`;
  });
  const seen = `Projection on two directions with ${percent(sketch.shares[0] + sketch.shares[1])} of the variance`;
  const some = `${COUNT} of ${DATA.figures[0].points} points`;
  document.getElementById("shown").textContent = `From the start to this step: ${metrics.join(", ")}. ${seen}; ${some}.`;
  move();
  for (const mark of marks) mark(state.at);
}

function go(at) {
  state.playing = false;
  state.at = at;
  document.getElementById("play").textContent = "play";
  now();
}

function play() {
  if (state.playing) return go(Math.floor(state.at));
  const from = state.at >= LAST ? 0 : state.at;
  const pace = Math.min(Math.max(7000 / (LAST || 1), 120), 700);
  let begun = null;
  state.playing = true;
  document.getElementById("play").textContent = "pause";
  const frame = (time) => {
    if (!state.playing) return;
    begun ??= time;
    const at = from + (time - begun) / pace;
    if (at >= LAST) return go(LAST);
    state.at = still.matches ? Math.floor(at) : at;
    now();
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
}

function choices() {
  const svg = document.querySelector("#cloud svg");
  for (const name of Object.keys(OVER)) svg.classList.toggle(name, state.over === name);
  for (const group of svg.querySelectorAll("g")) group.classList.toggle("off", state.hidden.has(Number(group.dataset.class)));
  const pick = (name) => () => {
    state.over = name;
    choices();
    now();
    document.querySelector(`[data-over="${name}"]`).focus();
  };
  put("over", Object.entries(OVER).map(([name, words]) =>
    el("button", { type: "button", "data-over": name, "aria-pressed": state.over === name, onclick: pick(name) }, words)));
  if (DATA.classes.length < 2) return;
  const turn = (number) => () => {
    if (!state.hidden.delete(number)) state.hidden.add(number);
    choices();
    document.querySelector(`button[data-class="${number}"]`).focus();
  };
  put("classes", DATA.classes.map((name, number) => el("button", {
    type: "button", "data-class": number, "--tone": tone(number), "aria-pressed": !state.hidden.has(number),
    title: name, onclick: turn(number),
  }, name)));
}

function whole() {
  const all = DATA.figures[0];
  const shown = {
    distance: "distance", wasserstein: "minimum (W₂)", random: "random matching", optimality: "optimality",
    efficiency: "efficiency",
  };
  put("summary", Object.entries(shown).map(([name, words]) => el("span", { title: DATA.units[name], "data-figure": name },
    el("b", {}, all[name] === null ? "–" : figure3(all[name])), words)));
}

function table() {
  const names = Object.keys(DATA.figures[0]).filter((name) => name !== "class" && name !== "exact");
  const heads = [heading("class"), names.map((name) => el("th", { scope: "col", title: DATA.units[name] ?? null }, called(name)))];
  const cell = (name, value) => value === null ? "–" : name === "matched" ? percent(value) : figure3(value);
  const body = DATA.figures.map((each) =>
    row(el("th", { scope: "row" }, String(each.class)), names.map((name) => el("td", {}, cell(name, each[name])))));
  const rows = () => [["class", ...names], ...DATA.figures.map((each) => [each.class, ...names.map((name) => each[name])])];
  const table = el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, body));
  document.getElementById("table").append(copyButton("each class", rows), el("div", { class: "wide" }, table));
}

whole();
cloud();
const far = Math.max(...curves.distance, ...curves.wasserstein) * 1.05 || 1;
put("curves",
  plotted("Distance", { distance: "var(--ink)", wasserstein: "var(--symmetric)" }, far),
  plotted("Optimality and efficiency", { optimality: "var(--symmetric)", efficiency: "var(--skew)" }, 1),
  headCurves());
table();
put("notes", DATA.notes.map((note) => el("p", {}, note)));
document.getElementById("when").max = LAST;
document.getElementById("when").addEventListener("input", (event) => go(Number(event.target.value)));
document.getElementById("play").addEventListener("click", play);
choices();
go(LAST);
