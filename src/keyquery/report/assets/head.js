// One head: what it does, its figures, spectra and directions, and its attention on the text. And one layer.

const DOES = {
  reciprocal: "compares", directional: "points", popularity: "follows the crowd", position: "minds the place",
};
const SPECTRA = [
  ["S", "what is alike: eigenvalues", "reciprocal"],
  ["A", "what points: singular values", "directional"],
  ["M", "the whole: singular values", "whole"],
];

function head() {
  const one = find(state.layer, state.head), at = layerRow(one.layer);
  const about = [`${at.name}.${one.head}`, `rank ${one.rank}`, `scale ${figure3(one.scale)}`,
    one.kind === "cross" ? "cross-attention" : null, at.causal ? "looks back only" : null, ...(at.notes ?? [])];
  const curves = offsets(one);
  put("chosen",
    el("div", { class: "verdict" }, el("h2", {}, `L${layerName(one.layer).slice(1)}, head ${one.head}`),
      el("b", {}, one.verdict), el("span", {}, one.reason)),
    el("p", { class: "muted" }, about.filter(Boolean).join(" · ")),
    el("div", { class: "figures" },
      el("div", { class: "left" }, whatItDoes(one), whatIsLost(one), whatIsCounted(one), curves ?? spectra(one)),
      numbers(one),
      attention(one), curves ? spectra(one) : null, directions(one)));
}

function whatItDoes(one) {
  const values = shares(one), parts = PARTS.filter((_, i) => i < 2 || (one.on_data && (i < 3 || values[i] > 0)));
  const labels = parts.map((part, i) => el("span", { class: `tag ${part}` }, `${part} `,
    el("b", { "data-share": part }, percent(values[i])), el("span", { class: "muted" }, ` ${DOES[part]}`)));
  const note = one.on_data ? "of the variance of its scores on data"
    : "of the energy of its weights; popularity shows on data";
  const rows = () => [["part", "share"], ...parts.map((part, i) => [part, values[i]])];
  return framed("What it does", note, rows, "half",
    stack(values, "shares", "shares"), el("div", { class: "labels" }, labels));
}

// What the loss becomes when a part of this head is turned off: the mean change and its interval, a line a part.
function whatIsLost(one) {
  if (!one.off) return null;
  const parts = PARTS.filter((part) => one.off[part]), [left, right] = [100, 270];
  const ends = parts.flatMap((part) => one.off[part]).filter((value) => value !== null);
  const low = Math.min(0, ...ends), wide = Math.max(0, ...ends) - low || 1;
  const x = (value) => left + ((right - left) * (value - low)) / wide;
  const figure2 = (value) => minus(String(Number(value.toPrecision(2))));
  const change = (value) => (value > 0 ? "+" : "") + figure2(value);
  const lines = parts.map((part, i) => {
    const [mean, from, to] = one.off[part], y = 14 + 22 * i, sure = from > 0 || to < 0;
    const told = from === null ? change(mean) : `${change(mean)} (${figure2(from)} to ${figure2(to)})`;
    return [
      draw("text", { x: 0, y: y + 4, class: part }, part),
      from === null ? null : draw("line", { x1: x(from), x2: x(to), y1: y, y2: y, class: `range ${part}` }),
      draw("circle", { cx: x(mean), cy: y, r: 4, class: sure ? part : "unsure" }),
      draw("text", { x: 284, y: y + 4, "data-off": part }, told)];
  });
  const tall = 22 * parts.length + 6;
  const zero = draw("line", { x1: x(0), x2: x(0), y1: 0, y2: tall, class: "zero" });
  const rows = () => [["part", "change", "low", "high"], ...parts.map((part) => [part, ...one.off[part]])];
  return framed("What the model loses", "change of its loss with one part of this head off, 95 % interval", rows, "half",
    draw("svg", { viewBox: `0 0 480 ${tall}`, role: "img", "aria-label": "change of the loss" }, zero, lines));
}

// How alike this head is to the co-occurrence of a corpus: its cosines on a line, and what chance stays within.
function whatIsCounted(one) {
  if (!one.corpus) return null;
  const given = one.corpus, [left, right] = [100, 270];
  const least = (name) => Math.max(given[`${name}_chance`], given[`${name}_random`]);
  const names = { compares: "reciprocal", points: "directional" };
  const wide = Math.max(0.1, ...Object.keys(names).flatMap((name) => [Math.abs(given[name]), least(name)]));
  const x = (value) => (left + right) / 2 + ((right - left) / 2) * (value / wide);
  const lines = Object.entries(names).map(([name, part], i) => {
    const y = 14 + 22 * i, sure = Math.abs(given[name]) > least(name);
    return [
      draw("text", { x: 0, y: y + 4, class: part }, name),
      draw("line", { x1: x(-least(name)), x2: x(least(name)), y1: y, y2: y, class: "range position" }),
      draw("circle", { cx: x(given[name]), cy: y, r: 4, class: sure ? part : "unsure" }),
      draw("text", { x: 284, y: y + 4, "data-corpus": name }, `${signed(given[name])} (chance ${least(name).toFixed(2)})`)];
  });
  const told = `both explain ${(100 * given.explained).toFixed(1)} % of its scores ` +
    `(chance ${(100 * least("explained")).toFixed(1)} %)`;
  const zero = draw("line", { x1: x(0), x2: x(0), y1: 0, y2: 50, class: "zero" });
  const rows = () => [["figure", "value"], ...Object.entries(given)];
  return framed("How much of it is co-occurrence", "cosines with the PPMI of the corpus; the bar is chance", rows, "half",
    draw("svg", { viewBox: "0 0 480 50", role: "img", "aria-label": "beside the corpus" }, zero, lines),
    el("p", { class: "muted", "data-corpus": "explained" }, told));
}

function numbers(one) {
  const seen = views().filter((view) => one[view]);
  const names = [...new Set(seen.flatMap((view) => model().columns[view]))].filter((name) => !PARTS.includes(name));
  const body = names.map((name) => row(measure(name), seen.map((view) =>
    el("td", { "data-figure": `${view}.${name}` }, figure(name, number(one, view, name))))));
  const top = row(heading(""), seen.map((view) => heading(VIEWS[view])));
  const rows = () => [["figure", ...seen],
    ...names.map((name) => [name, ...seen.map((view) => number(one, view, name))])];
  return framed("Figures", "three views, never mixed", rows, "half",
    el("div", { class: "wide" }, el("table", {}, el("thead", {}, top), el("tbody", {}, body))));
}

function spectra(one) {
  const view = state.view === "folded" ? "folded" : "raw";
  const series = one.spectra[view].map(unpack);
  const span = (values) => Math.max(...values, 0) - Math.min(...values, 0);
  const unit = 100 / Math.max(...series.map(span), 1e-30);  // one scale for all three
  return el("div", { class: "trio" }, SPECTRA.map(([name, note, part], i) => {
    const values = series[i], low = Math.min(...values), zero = low < 0 ? Math.max(...values, 0) * unit : 100;
    const bars = values.map((value, x) => draw("rect", {
      class: part, x, width: 0.9, y: Math.min(zero, zero - value * unit).toFixed(2),
      height: Math.abs(value * unit).toFixed(2),
    }));
    const ends = [values[0], values[values.length - 1]].map(figure3);
    const picture = draw("svg", {
      class: "spectrum", viewBox: `0 0 ${values.length} 100`, preserveAspectRatio: "none", role: "img",
      "aria-label": `${values.length} values of ${name}, from ${ends[0]} to ${ends[1]}`,
    }, draw("path", { class: "axis", d: `M0 ${zero}H${values.length}`, "vector-effect": "non-scaling-stroke" }), bars);
    const rows = () => [["index", name], ...values.map((value, k) => [k, value])];
    return framed(`Spectrum of ${name}`, `${note}, ${VIEWS[view]}`, rows, "",
      picture, el("div", { class: "ends muted" }, ends.map((end) => el("span", {}, end))));
  }));
}

function offsets(one) {
  if (!one.offsets) return null;
  const { offset, contents, exchange } = one.offsets, last = offset.length - 1;
  const x = (i) => 26 + (i * 474) / Math.max(last, 1), y = (value) => 70 - 60 * value;
  const path = (values) =>
    values.map((value, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const lines = [-1, 0, 1].map((value) => [draw("path", { class: "axis", d: `M26 ${y(value)}H500` }),
    draw("text", { x: 20, y: y(value) + 4, "text-anchor": "end" }, minus(String(value)))]);
  const ticks = offset.map((at, i) => draw("text", { x: x(i), y: 146, "text-anchor": "middle" }, minus(String(at))));
  const apart = y(contents[last]) > y(exchange[last]) ? 6 : -6;  // so that the names of two curves do not meet
  const curves = [["contents", contents, apart], ["exchange", exchange, -apart]].map(([name, values, by]) => [
    draw("path", { class: `curve ${name}`, d: path(values) }),
    draw("text", { class: name, x: 506, y: y(values[last]) + 4 + by }, name)]);
  const rows = () => [["offset", "contents", "exchange"], ...offset.map((at, i) => [at, contents[i], exchange[i]])];
  const note = "how far back the key stands: contents change places, or tokens with their positions";
  return framed("Symmetry over offsets", note, rows, "half", draw("svg", {
    viewBox: "0 0 570 152", role: "img", "aria-label": "symmetry by offset",
  }, lines, ticks, curves));
}

function directions(one) {
  if (!one.objects) return null;
  const line = (value, ...content) =>
    el("div", {}, el("span", { class: "value" }, figure3(value)), el("div", {}, ...content));
  const against = () => el("span", { class: "muted" }, "against ");
  const objects = one.objects.map(([value, ends, opposite]) =>
    line(value, el("div", {}, tokens(ends)), el("div", {}, against(), tokens(opposite))));
  const pair = ([from, to]) =>
    el("span", { class: "pair" }, tokens([from]), el("span", { class: "muted" }, "→ "), tokens([to]));
  const relations = one.relations.map(([value, pairs]) => line(value, pairs.map(pair)));
  const objectRows = () => [["value", "tokens", "opposite"],
    ...one.objects.map(([value, ends, opposite]) => [value, ends.join(" "), opposite.join(" ")])];
  const relationRows = () => [["value", "query", "key"],
    ...one.relations.flatMap(([value, pairs]) => pairs.map((two) => [value, ...two]))];
  return [
    framed("What is alike", "eigenvectors of S, by the tokens at both ends", objectRows, "half",
      el("div", { class: "pairs" }, objects)),
    framed("What points at what", "planes of A: query token → key token", relationRows, "half",
      el("div", { class: "pairs" }, relations))];
}

// Attention on the text: n numbers are the same for every query, n² all pairs, n(n + 1)/2 those that look back.
function matrix(text, n) {
  const values = unpack(text), lower = values.length < n * n;
  if (values.length === n) return Array.from({ length: n }, () => values);
  const at = (i, j) => (lower ? (j > i ? 0 : values[(i * (i + 1)) / 2 + j]) : values[i * n + j]);
  return Array.from({ length: n }, (_, i) => Array.from({ length: n }, (_, j) => at(i, j)));
}

function softmax(values) {
  const most = Math.max(...values), raised = values.map((value) => Math.exp(value - most));
  const sum = raised.reduce((a, b) => a + b, 0);
  return raised.map((value) => value / sum);
}

function partsOf(one, n, seen) {
  const [pairs, popularity, position] = one.maps.map((text) => (text ? matrix(text, n) : null));
  const by = (rule) => pairs.map((values, i) => values.map((_, j) => rule(i, j)));
  const score = (i, j) => pairs[i][j] + popularity[i][j] + (position ? position[i][j] : 0);
  return {
    attention: by((i, j) => (seen(i, j) ? score(i, j) : -Infinity)).map(softmax),
    reciprocal: by((i, j) => (pairs[i][j] + pairs[j][i]) / 2),
    directional: by((i, j) => (pairs[i][j] - pairs[j][i]) / 2),
    popularity,
    ...(position ? { position } : {}),
  };
}

function attention(one) {
  if (!one.maps) return null;
  const texts = model().tokens, n = texts.length, causal = layerRow(one.layer).causal;
  const seen = (i, j) => i >= 0 && j >= 0 && i < n && j < n && (!causal || j <= i);
  const parts = partsOf(one, n, seen), names = Object.keys(parts);
  const visible = (values, i) => values.filter((_, j) => seen(i, j));
  const centred = (values, i) => {  // softmax does not see what is the same for all keys of a query
    const mean = visible(values, i).reduce((a, b) => a + b, 0) / visible(values, i).length;
    return values.map((value) => value - mean);
  };
  const shown = Object.fromEntries(
    names.map((name) => [name, name === "attention" ? parts[name] : parts[name].map(centred)]));
  const sizes = names.slice(1).flatMap((name) => shown[name].flatMap((values, i) => visible(values, i).map(Math.abs)));
  const most = Math.max(...sizes, 1e-30);
  const readout = el("p", { class: "readout", "aria-live": "polite" });
  const spots = [], at = { i: Math.min(1, n - 1), j: 0 };
  const point = (i, j) => {
    if (!seen(i, j)) return;
    Object.assign(at, { i, j });
    for (const spot of spots) fill(spot, { x: EDGE + CELL * j, y: EDGE + CELL * i }, []);
    const told = names.map((name) => el("span", { class: name === "attention" ? "" : `tag ${name}` }, `${name} `,
      el("b", { "data-part": name }, (name === "attention" ? percent : figure3)(shown[name][i][j]))));
    readout.replaceChildren(el("span", {}, tokens([texts[i]]), "looks at ", tokens([texts[j]])), ...told);
  };
  const pictures = names.map((name) => el("div", {},
    el("h3", { class: name === "attention" ? "" : `tag ${name}` }, name),
    heat(name, shown[name], texts, seen, name === "attention" ? 1 : most, point, at, spots)));
  point(at.i, at.j);
  const rows = () => [["query", "key", ...names], ...texts.flatMap((query, i) => texts.flatMap((key, j) =>
    seen(i, j) ? [[query, key, ...names.map((name) => shown[name][i][j])]] : []))];
  const note = ["each row a query, each column a key; colour for plus, " +
      "small and grey for minus, one scale for all parts",
    "each part less its row’s mean, which softmax does not see", ...model().caveats,
    model().cut ? `the first ${n} of ${model().cut} tokens${causal ? "" : ", as if there were no others"}` : null];
  return framed("Attention on the text, and what makes it", note.filter(Boolean).join("; "), rows, "",
    el("div", { class: names.length > 4 ? "maps five" : "maps" }, pictures), readout);
}

const EDGE = 62, CELL = 10;  // of a map: room for words, and a pair of tokens
function heat(name, values, texts, seen, most, point, at, spots) {
  const n = texts.length, size = EDGE + CELL * n;
  const cells = values.flatMap((line, i) => line.map((value, j) => {
    if (!seen(i, j) || Math.abs(value) / most < 0.01) return null;
    const kind = name === "attention" ? "ink" : value > 0 ? name : "minus";
    const wide = value > 0 ? 9.5 : 4.5, inset = (9.5 - wide) / 2;  // size tells the sign where colour cannot
    return draw("rect", {
      class: kind, x: EDGE + CELL * j + inset, y: EDGE + CELL * i + inset, width: wide, height: wide,
      "fill-opacity": Math.sqrt(Math.abs(value) / most).toFixed(2),
    });
  }));
  const side = texts.map((text, i) => draw("text", { x: 58, y: 70 + CELL * i, "text-anchor": "end" }, short(text)));
  const top = texts.map((text, j) =>
    draw("text", { transform: `translate(${70 + CELL * j} 58) rotate(-90)` }, short(text)));
  const spot = draw("rect", { class: "spot", width: 9.5, height: 9.5 });
  spots.push(spot);
  const picture = draw("svg", {
    viewBox: `0 0 ${size} ${size}`, tabindex: 0, role: "img", "--most": `${Math.round(1.45 * size)}px`,
    "aria-label": `${name}, query by key; arrow keys read its cells`,
    onkeydown: (event) => {
      const step = STEPS[event.key];
      if (!step) return;
      event.preventDefault();
      point(at.i + step[0], at.j + step[1]);
    },
    onpointermove: (event) => {
      const box = picture.getBoundingClientRect();
      const place = (offset) => Math.floor(((offset * size) / box.width - EDGE) / CELL);
      point(place(event.clientY - box.top), place(event.clientX - box.left));
    },
  }, draw("rect", { class: "ground", x: EDGE, y: EDGE, width: CELL * n, height: CELL * n }), cells, side, top, spot);
  return picture;
}

function layer() {
  const at = layerRow(state.layer), heads = ofLayer(state.layer), names = Object.keys(at.raw);
  const about = [at.name, at.causal ? "looks back only" : null, ...(at.notes ?? [])].filter(Boolean).join(" · ");
  const body = names.map((name) =>
    row(measure(name), [el("td", { "data-figure": `layer.${name}` }, signed(at.raw[name]))]));
  const own = framed("All heads together", "the one M of the layer, M = Σ M_h, raw",
    () => [["figure", "raw"], ...names.map((name) => [name, at.raw[name]])], "third",
    el("table", {}, el("tbody", {}, body)));
  const lines = heads.map((one) => {
    const go = { class: "number", type: "button", onclick: () => choose({ head: one.head }) };
    return row(el("th", { scope: "row" }, el("button", go, `head ${one.head}`)), [
      el("td", { class: "words" }, stack(shares(one), "stack", `head ${one.head}`)),
      el("td", {}, signed(number(one, "raw", "symmetry"))), el("td", { class: "words" }, one.verdict)]);
  });
  const top = row(heading(""),
    [heading("what it does", "words"), heading("symmetry, raw"), heading("verdict", "words")]);
  const rows = () => [["head", ...PARTS, "symmetry_raw", "verdict"],
    ...heads.map((one) => [one.head, ...shares(one), number(one, "raw", "symmetry"), one.verdict])];
  const all = framed("Its heads", hasData() ? "shares on data" : "shares of energy", rows, "rest",
    el("div", { class: "wide heads" }, el("table", {}, el("thead", {}, top), el("tbody", {}, lines))));
  put("chosen",
    el("div", { class: "verdict" }, el("h2", {}, `L${layerName(at.layer).slice(1)}`), el("span", { class: "muted" }, about)),
    el("div", { class: "figures" }, own, all));
}
