// Wiring: a map of sources by heads, and for one cell its interval, its null and examples. Fragment: #18.6/key/16.0

const SIDES = ["query", "key"];
const FIGURES = ["share", "low", "high", "null"];
const state = { side: "key", head: 0, source: 0 };
const decoded = new Map();
function cells(head, side) {  // figures of one head by source; decoded on first use
  const name = `${head}/${side}`;
  if (!decoded.has(name)) {
    const packed = DATA.heads[head][side];
    const lists = Object.fromEntries(FIGURES.map((figure) => [figure, unpack(packed[figure])]));
    decoded.set(name, DATA.layers[DATA.heads[head].layer].map((source, i) => ({
      source, ...Object.fromEntries(FIGURES.map((figure) => [figure, lists[figure][i]])),
      clear: lists.low[i] > lists.null[i],
    })));
  }
  return decoded.get(name);
}
const one = (head, side, source) => cells(head, side).find((cell) => cell.source === source);

// The map: a column per head, a row per source; only cells above their null are coloured.

const canvas = el("canvas", { tabindex: 0, role: "img", "data-focus": "map" });
function colour(name) {
  const probe = document.body.appendChild(el("i", { "--probe": `var(--${name})` }));
  probe.style.color = "var(--probe)";
  const [red, green, blue] = getComputedStyle(probe).color.match(/[\d.]+/g).map(Number);
  probe.remove();
  return [red, green, blue];
}

function paint() {
  const tall = Math.max(2, Math.min(16, Math.floor(620 / DATA.sources.length)));
  const wide = Math.max(2, Math.min(40, Math.floor(1100 / DATA.heads.length)));
  canvas.width = wide * DATA.heads.length;
  canvas.height = tall * DATA.sources.length;
  canvas.style.height = `${canvas.height}px`;
  const context = canvas.getContext("2d"), [middle, plus, less] = ["middle", "symmetric", "skew"].map(colour);
  context.fillStyle = `rgb(${middle})`;
  context.fillRect(0, 0, canvas.width, canvas.height);
  DATA.heads.forEach((_, head) => cells(head, state.side).forEach((cell) => {
    if (!cell.clear) return;
    const amount = Math.sqrt(Math.min(1, Math.abs(cell.share))), tone = cell.share > 0 ? plus : less;
    context.fillStyle = `rgb(${middle.map((from, i) => Math.round(from + amount * (tone[i] - from)))})`;
    context.fillRect(head * wide, cell.source * tall, wide, tall);
  }));
  context.strokeStyle = `rgb(${colour("ink")})`;
  context.lineWidth = 1.5;
  context.strokeRect(state.head * wide - 1.5, state.source * tall - 1.5, wide + 3, tall + 3);
}

function spread(names, most) {  // evenly thinned labels, with the share of the axis at their middle
  const step = Math.ceil(names.length / most);
  return names.flatMap((name, i) => (i % step ? [] : [[name, (i + 0.5) / names.length]]));
}

function map() {
  const buttons = SIDES.map((side) => el("button", {
    type: "button", "aria-pressed": side === state.side, "data-focus": side, onclick: () => choose({ side }),
  }, `${side} side`));
  const pick = (label, names, at, then) => {
    const list = el("select", { "aria-label": label }, names.map((name, i) => el("option", { value: i }, name)));
    list.value = at;
    list.addEventListener("change", () => then(Number(list.value)));
    return el("label", { class: "muted" }, `${label} `, list);
  };
  const all = () => [["head", "side", "source", ...FIGURES], ...DATA.heads.flatMap((head, i) => cells(i, state.side).map((cell) =>
    [head.name, state.side, DATA.sources[cell.source], ...FIGURES.map((figure) => cell[figure])]))];
  canvas.setAttribute("aria-label", `shares of the score variance of ${DATA.heads.length} heads by source, ${state.side} side`);
  put("map",
    el("div", { class: "bar" }, el("h3", {}, "Sources by heads"), el("div", { class: "switch", role: "group", "aria-label": "side" }, buttons),
      pick("head", DATA.heads.map((head) => head.name), state.head, (head) => choose({ head, source: largest(head) })),
      pick("source", DATA.sources, state.source, (source) => choose({ source })), copyButton("wiring", all)),
    el("div", { class: "plane" },
      el("div", { class: "names", "aria-hidden": "true" }, spread(DATA.sources, 30).map(([name, at]) => fill(el("span", {}, name), { "--at": at }, []))),
      canvas, el("span"),
      el("div", { class: "columns", "aria-hidden": "true" }, spread(DATA.heads.map((head) => head.name), 14).map(([name, at]) => fill(el("span", {}, name), { "--at": at }, [])))),
    el("p", { class: "muted of" }, "Coloured: share of the score variance above the shuffled null. Click a cell, or use arrow keys."));
  for (const span of document.querySelectorAll(".names span")) span.style.top = `${100 * span.style.getPropertyValue("--at")}%`;
  for (const span of document.querySelectorAll(".columns span")) span.style.left = `${100 * span.style.getPropertyValue("--at")}%`;
  paint();
}

const largest = (head) => cells(head, state.side).reduce((best, cell) => (cell.share > best.share ? cell : best)).source;
const within = (value, count) => Math.min(Math.max(value, 0), count - 1);
canvas.addEventListener("click", (event) => {
  const box = canvas.getBoundingClientRect();
  const head = within(Math.floor(DATA.heads.length * (event.clientX - box.left) / box.width), DATA.heads.length);
  const source = within(Math.floor(DATA.sources.length * (event.clientY - box.top) / box.height), DATA.sources.length);
  choose({ head, source });
});
canvas.addEventListener("keydown", (event) => {
  const step = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[event.key];
  if (!step) return;
  event.preventDefault();
  choose({ head: within(state.head + step[0], DATA.heads.length), source: within(state.source + step[1], DATA.sources.length) });
  canvas.focus();
});

// The chosen head: its largest sources on both sides, and examples of the chosen cell

function sideTable(side) {
  const rows = [...cells(state.head, side)].sort((a, b) => b.share - a.share).slice(0, 10).map((cell) => el("tr", {
    class: cell.clear ? "" : "unclear", "aria-selected": side === state.side && cell.source === state.source,
  }, el("td", {}, el("button", { type: "button", onclick: () => choose({ side, source: cell.source }) }, DATA.sources[cell.source])),
    el("td", {}, percent(cell.share)), el("td", {}, `${percent(cell.low)} to ${percent(cell.high)}`), el("td", {}, percent(cell.null))));
  return el("div", {}, el("h3", {}, side === "query" ? "Queries from" : "Keys from"), el("table", {},
    el("thead", {}, el("tr", {}, ["source", "share", "95 % interval", "null"].map((name) => heading(name)))), el("tbody", {}, rows)));
}

function example(pair) {
  const text = DATA.texts[pair.sequence], from = Math.min(pair.query, pair.key), to = Math.max(pair.query, pair.key);
  const near = (i) => Math.abs(i - pair.query) <= 6 || Math.abs(i - pair.key) <= 6;
  const spans = text.flatMap((each, i) => {
    if (i < from - 6 || i > to + 6) return [];
    if (!near(i)) return near(i - 1) ? [" … "] : [];
    return [el("span", { class: i === pair.key ? "key" : i === pair.query ? "query" : "", title: String(i) }, each)];
  });
  return el("p", { class: "example" }, el("b", {}, signed(pair.relative)), ` from ${pair.query} to ${pair.key}: `, spans);
}

function chosen() {
  const head = DATA.heads[state.head], cell = one(state.head, state.side, state.source), source = DATA.sources[state.source];
  const shown = DATA.examples.find((each) => each.head === head.name && each.side === state.side && each.source === source);
  const what = !cell ? `${source} does not come before head ${head.name}.`
    : `${source} is ${percent(cell.share)} of the score variance of ${head.name} on the ${state.side} side, 95 % interval `
      + `${percent(cell.low)} to ${percent(cell.high)}; shuffled, at most ${percent(cell.null)}.`;
  put("chosen", el("h2", {}, `Head ${head.name}, ${state.side} side, ${source}`), el("p", {}, what),
    shown ? el("div", {}, el("h3", {}, "Where it adds most, relative to the mean visible key: ",
      el("span", { class: "chip q" }, "query"), " ", el("span", { class: "chip k" }, "key")), shown.pairs.map(example))
      : el("p", { class: "muted" }, "Examples are kept for the three largest sources of each head and side above their null."),
    el("div", { class: "sides" }, SIDES.map(sideTable)));
}

function choose(change) {
  Object.assign(state, change);
  history.replaceState(null, "", `#${DATA.heads[state.head].name}/${state.side}/${DATA.sources[state.source]}`);
  map();
  chosen();
}

function start() {
  const [name, side, source] = decodeURIComponent(location.hash.slice(1)).split("/");
  const head = DATA.heads.findIndex((each) => each.name === name), at = DATA.sources.indexOf(source);
  if (SIDES.includes(side)) state.side = side;
  const fed = (index) => Math.max(0, ...cells(index, state.side).filter((cell) => cell.clear && /\.\d+$/.test(DATA.sources[cell.source])).map((cell) => cell.share));
  state.head = head >= 0 ? head : DATA.heads.reduce((best, _, i) => (fed(i) > fed(best) ? i : best), 0);
  state.source = at >= 0 ? at : largest(state.head);
  map();
  chosen();
}

put("name", DATA.name);
put("facts", DATA.facts);
put("notes", DATA.notes.map((note) => el("p", {}, `${note}.`)));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
start();
