// One head: its parts, metrics, spectra and directions, and its attention on the text. And one layer.

const SPECTRA = [
  ["S", "symmetric part: eigenvalues", "symmetric"],
  ["A", "skew part: singular values", "skew"],
  ["M", "full QK matrix: singular values", "whole"],
];

function head() {
  const one = find(state.layer, state.head), at = layerRow(one.layer);
  const about = [`${at.name}.${one.head}`, `rank ${one.rank}`, `scale ${figure3(one.scale)}`,
    one.kind === "cross" ? "cross-attention" : null, at.causal ? "causal" : null, ...(at.notes ?? [])];
  const curves = offsets(one);
  const window = one.changes?.includes("label") ? el("span", { class: "window", title: `label: ${CHANGES}` }, "~") : null;
  put("chosen",
    el("div", { class: "headline" }, el("h2", {}, `L${layerName(one.layer).slice(1)}, head ${one.head}`),
      el("b", { class: one.label }, one.label), window, el("span", {}, one.reason),
      (one.properties ?? []).map((property) => el("span", { class: "property" }, property)),
      (one.roles?.named ?? []).map((role) => el("span", { class: "property by-tone", "--tone": roleTone(role) }, roleName(role)))),
    el("p", { class: "muted" }, about.filter(Boolean).join(" · ")),
    el("div", { class: "figures" },
      el("div", { class: "left" }, partsOfScores(one), lossWithout(one), overLengths(one), corpusOf(one), roleChart(one), curves ?? spectra(one)),
      numbers(one),
      attention(one), curves ? spectra(one) : null, directions(one)));
}

// A row per part: its name, its marks on a scale from `low` to `high`, and its value as text.
const WHOLE = { zero: "head to 0", mean: "head to mean" };  // ablations of whole heads
const [FROM, TO, LINE] = [96, 272, 22];
function lines(rows, low, high, label) {
  const x = (value) => FROM + ((TO - FROM) * (value - low)) / (high - low || 1), tall = LINE * rows.length + 6;
  const drawn = rows.map(({ name, kind, words, attributes, marks }, i) => {
    const y = 14 + LINE * i;
    return [draw("text", { x: 0, y: y + 4, class: kind }, name), marks(x, y),
      draw("text", { x: TO + 14, y: y + 4, ...attributes }, words)];
  });
  const zero = draw("line", { x1: x(0), x2: x(0), y1: 0, y2: tall, class: "zero" });
  return draw("svg", { viewBox: `0 0 480 ${tall}`, role: "img", "aria-label": label }, zero, drawn);
}
const whisker = (x, y, ends, kind) =>
  ends ? draw("line", { x1: x(ends[0]), x2: x(ends[1]), y1: y, y2: y, class: `range ${kind}` }) : null;

// Shares of a head with 95 % intervals; the interaction is the remainder to 100 %, and may be negative.
function partsOfScores(one) {
  const all = shares(one), own = bars().filter((name) => number(one, "on_data", name) !== null);
  const names = one.on_data ? [...own, "interaction"] : PARTS.slice(0, 2);
  const sink = number(one, "on_data", "sink");
  if (sink >= 0.01) names.splice(names.indexOf("position") + 1, 0, "sink");
  const value = (name) => (one.on_data ? number(one, "on_data", name) : all[PARTS.indexOf(name)]);
  const ends = (name) => (one.on_data ? interval(one, "on_data", name) : null);
  const low = Math.min(0, ...names.flatMap((name) => ends(name) ?? [value(name)]));
  const high = Math.max(1, ...names.flatMap((name) => ends(name) ?? [value(name)]));
  const whole = (number) => percent(number).replace(" %", "");
  const rows = names.map((name) => {
    const kind = name === "sink" ? "position" : bars().includes(name) ? name : "whole", between = ends(name);
    const words = percent(value(name)) + (between ? ` (${whole(between[0])} to ${whole(between[1])})` : "");
    return {
      name: name === "sink" ? "– first key" : name, kind, words, attributes: { "data-share": name },
      marks: (x, y) => {
        const start = name === "interaction" ? Math.min(0, value(name)) : 0, size = Math.abs(x(value(name)) - x(0));
        const shown = name === "interaction" || value(name) > 0 ? size : 0, tall = name === "sink" ? 5 : 12;
        return [draw("rect", { class: kind, x: x(start), y: y - tall / 2, width: shown, height: tall }),
          whisker(x, y, between, "ink")];
      },
    };
  });
  const csvRows = () => [["part", "share", "low", "high"],
    ...names.map((name) => [name, value(name), ...(ends(name) ?? [null, null])])];
  const between = (one.between ?? []).slice(0, 3).map(([pair, size]) => `${pair} ${percent(size)}`).join(", ");
  const note = model().of + (one.intervals ? ", 95 % intervals" : "");
  return framed("Parts of the scores", note, csvRows, "half", lines(rows, low, high, "shares"),
    between ? el("p", { class: "muted" }, `largest interactions: ${between}`) : null);
}

// Change of the loss when a part of this head is ablated: the mean and its interval, a row per part.
function lossWithout(one) {
  if (!one.off) return null;
  const place = (part) => (PARTS.includes(part) ? PARTS.indexOf(part) : PARTS.length);  // whole heads come last
  const parts = Object.keys(one.off).sort((a, b) => place(a) - place(b));
  const numbers = parts.flatMap((part) => one.off[part]).filter((value) => value !== null);
  const figure2 = (value) => minus(String(Number(value.toPrecision(2))));
  const change = (value) => (value > 0 ? "+" : "") + figure2(value);
  const rows = parts.map((part) => {
    const [mean, from, to] = one.off[part], sure = from > 0 || to < 0, kind = PARTS.includes(part) ? part : "whole";
    return {
      name: WHOLE[part] ?? part, kind, attributes: { "data-off": part },
      words: from === null ? change(mean) : `${change(mean)} (${figure2(from)} to ${figure2(to)})`,
      marks: (x, y) => [whisker(x, y, from === null ? null : [from, to], kind),
        draw("circle", { cx: x(mean), cy: y, r: 4, class: sure ? kind : "unsure" })],
    };
  });
  const csvRows = () => [["part", "change", "low", "high"], ...parts.map((part) => [part, ...one.off[part]])];
  return framed("Ablation", "change of the loss in nats per token with one part of this head ablated, 95 % interval", csvRows, "half",
    lines(rows, Math.min(0, ...numbers), Math.max(0, ...numbers), "change of the loss"));
}

// Shares and symmetry over the window length, each with its interval.
function overLengths(one) {
  if (!one.lengths || !one.on_data) return null;
  const names = [...PARTS, "interaction", "symmetry"];
  const own = [model().longest, ...names.map((name) =>
    [number(one, "on_data", name), interval(one, "on_data", name)])];
  const rows = [...one.lengths.filter(([length]) => length !== own[0]), own].sort((a, b) => a[0] - b[0]);
  const logs = rows.map(([length]) => Math.log2(length)), span = logs[logs.length - 1] - logs[0] || 1;
  const chart = (shown, low, high, left, right) => {
    const x = (i) => left + ((right - left) * (logs[i] - logs[0])) / span, y = (value) => 116 - (104 * (value - low)) / (high - low);
    const grid = [low, (low + high) / 2, high].map((value) => [
      draw("path", { class: "axis", d: `M${left} ${y(value)}H${right}` }),
      draw("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, low < 0 ? minus(String(value)) : percent(value))]);
    const at = rows.map(([length], i) => draw("text", { x: x(i), y: 136, "text-anchor": "middle" }, String(length)));
    const curves = shown.map((name) => {
      const values = rows.map((one) => one[1 + names.indexOf(name)]), kind = PARTS.includes(name) ? name : "ink";
      const path = values.map(([value], i) => `${i ? "L" : "M"}${round(x(i))} ${round(y(value))}`).join("");
      return [draw("path", { class: `curve ${kind}`, d: path }), values.map(([, ends], i) => ends
        ? draw("line", { class: `range ${kind}`, x1: x(i), x2: x(i), y1: y(ends[0]), y2: y(ends[1]) }) : null)];
    });
    const ends = shown.map((name) => [name, y(rows[rows.length - 1][1 + names.indexOf(name)][0]) + 4]);
    let free = 122;  // place names at the right end from the bottom up, without overlap
    const apart = ends.sort((a, b) => b[1] - a[1]).map(([name, wanted]) => {
      const place = Math.min(wanted, free);
      free = place - 12;
      return draw("text", { class: name, x: right + 6, y: place }, name);
    });
    return [grid, at, curves, apart];
  };
  const csvRows = () => [["length", ...names], ...rows.map(([length, ...figures]) => [length, ...figures.map(([value]) => value)])];
  return framed("By window length", "shares, and symmetry on data, by window length in tokens; 95 % intervals", csvRows, "half",
    draw("svg", { viewBox: "0 0 560 142", role: "img", class: "lengths", "aria-label": "shares by window length" },
      chart(PARTS, 0, 1, 40, 250), chart(["symmetry"], -1, 1, 370, 490)));
}

// Similarity of this head to the co-occurrence of a corpus: cosines, and their null levels as bars.
function corpusOf(one) {
  if (!one.corpus) return null;
  const metrics = one.corpus, names = { symmetric_cosine: "symmetric", skew_cosine: "skew" };
  const least = (name) => Math.max(metrics[`${name}_chance`], metrics[`${name}_random`]);
  const wide = Math.max(0.1, ...Object.keys(names).flatMap((name) => [Math.abs(metrics[name]), least(name)]));
  const rows = Object.entries(names).map(([name, part]) => ({
    name: part, kind: part, attributes: { "data-corpus": name },
    words: `${signed(metrics[name])} (chance ${least(name).toFixed(2)})`,
    marks: (x, y) => [whisker(x, y, [-least(name), least(name)], "position"),
      draw("circle", { cx: x(metrics[name]), cy: y, r: 4, class: Math.abs(metrics[name]) > least(name) ? part : "unsure" })],
  }));
  const note = `both explain ${(100 * metrics.explained).toFixed(1)} % of its scores ` +
    `(chance ${(100 * least("explained")).toFixed(1)} %)`;
  return framed("Co-occurrence", "cosines with the PPMI of the corpus; the bar is the null level",
    () => [["metric", "value"], ...Object.entries(metrics)], "half", lines(rows, -wide, wide, "compared with the corpus"),
    el("p", { class: "muted", "data-corpus": "explained" }, note));
}

function numbers(one) {
  const seen = views().filter((view) => one[view]);
  const names = [...new Set(seen.flatMap((view) => model().columns[view]))].filter((name) => ![...bars(), "interaction", "sink"].includes(name)
    && seen.some((view) => number(one, view, name) !== null));
  const sure = (view, name) => {
    const ends = interval(one, view, name);
    return ends ? el("span", { class: "muted" }, ` ${figure(name, ends[0])} to ${figure(name, ends[1])}`) : null;
  };
  const window = (view, name) => (view === "on_data" && one.changes?.includes(name)
    ? el("span", { class: "window", title: `${name}: ${CHANGES}: ${signed(one.half)}` }, "~") : null);
  const body = names.map((name) => row(measure(name), seen.map((view) => el("td", {},
    el("span", { "data-figure": `${view}.${name}` }, figure(name, number(one, view, name))), window(view, name),
    sure(view, name)))));
  const about = { raw: "of the weights", folded: "of the LayerNorm-folded weights, with biases",
    on_data: "of the contents of queries and keys, on data" };
  const top = row(heading(""), seen.map((view) => el("th", { scope: "col", title: about[view] }, VIEWS[view])));
  const rows = () => [["metric", ...seen],
    ...names.map((name) => [name, ...seen.map((view) => number(one, view, name))])];
  return framed("Metrics", "three views: weights (raw), with biases and norms (folded), on data with 95 % intervals", rows, "half",
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
  const apart = y(contents[last]) > y(exchange[last]) ? 6 : -6;  // keeps the names of the curves from overlapping
  const curves = [["contents", contents, apart], ["exchange", exchange, -apart]].map(([name, values, by]) => [
    draw("path", { class: `curve ${name}`, d: path(values) }),
    draw("text", { class: name, x: 506, y: y(values[last]) + 4 + by }, name)]);
  const rows = () => [["offset", "contents", "exchange"], ...offset.map((at, i) => [at, contents[i], exchange[i]])];
  const note = "symmetry of M(Δ) under RoPE, when swapping contents only, or tokens with their positions (exchange)";
  return framed("Symmetry by offset", note, rows, "half", draw("svg", {
    viewBox: "0 0 570 152", role: "img", "aria-label": "symmetry by offset",
  }, lines, ticks, curves));
}

function directions(one) {
  if (!one.objects) return null;
  const line = (value, ...content) =>
    el("div", {}, el("span", { class: "value" }, figure3(value)), el("div", {}, ...content));
  const against = () => el("span", { class: "muted" }, "opposite ");
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
    framed("Symmetric directions", "eigenvectors of S, with the tokens at both ends", objectRows, "half",
      el("div", { class: "pairs" }, objects)),
    framed("Skew planes", "planes of A: query token → key token", relationRows, "half",
      el("div", { class: "pairs" }, relations))];
}

// Attention on the text and the parts of its scores: all pairs, or the n(n + 1)/2 visible to a causal head.
function matrix([step, text], n, causal) {
  const values = unpackBytes(text).map((count) => step * count);
  const at = (i, j) => (causal ? (j > i ? 0 : values[(i * (i + 1)) / 2 + j]) : values[i * n + j]);
  return Array.from({ length: n }, (_, i) => Array.from({ length: n }, (_, j) => at(i, j)));
}

function attention(one) {
  if (!one.maps) return null;
  const texts = model().tokens, n = texts.length, causal = layerRow(one.layer).causal;
  const seen = (i, j) => i >= 0 && j >= 0 && i < n && j < n && (!causal || j <= i);
  const names = ["attention", ...PARTS];
  const shown = Object.fromEntries(names.map((name, k) => [name, matrix(one.maps[k], n, causal)]));
  const most = Math.max(...PARTS.flatMap((part) => shown[part].flat().map(Math.abs)), 1e-30);
  // As many digits as the quantisation step has.
  const digits = names.map((_, k) => Math.max(0, -Math.floor(Math.log10(one.maps[k][0]))));
  const written = (value, k) => minus(String(Number(value.toFixed(digits[k])) + 0));
  const readout = el("p", { class: "readout", "aria-live": "polite" });
  const spots = [], at = { i: Math.min(1, n - 1), j: 0 };
  const point = (i, j) => {
    if (!seen(i, j)) return;
    Object.assign(at, { i, j });
    for (const spot of spots) fill(spot, { x: EDGE + CELL * j, y: EDGE + CELL * i }, []);
    const values = names.map((name, k) => el("span", { class: name === "attention" ? "" : `tag ${name}` }, `${name} `,
      el("b", { "data-part": name }, (name === "attention" ? percent : written)(shown[name][i][j], k))));
    readout.replaceChildren(el("span", {}, tokens([texts[i]]), "attends to ", tokens([texts[j]])), ...values);
  };
  const pictures = names.map((name) => el("div", {},
    el("h3", { class: name === "attention" ? "" : `tag ${name}` }, name),
    heat(name, shown[name], texts, seen, name === "attention" ? 1 : most, point, at, spots)));
  point(at.i, at.j);
  const rows = () => [["query", "key", ...names], ...texts.flatMap((query, i) => texts.flatMap((key, j) =>
    seen(i, j) ? [[query, key, ...names.map((name) => shown[name][i][j])]] : []))];
  const note = ["rows are queries, columns are keys; coloured: positive, " +
      "small and grey: negative, one scale for all parts",
    "the mean of each row is subtracted from each part (softmax is invariant to it)", ...model().caveats,
    model().cut ? `the first ${n} of ${model().cut} tokens${causal ? "" : ", attention renormalised over them"}` : null];
  return framed("Attention on the text, and its parts", note.filter(Boolean).join("; "), rows, "",
    el("div", { class: "maps" }, pictures), readout);
}

const EDGE = 62, CELL = 10;  // of a map: the margin for words, and the cell of a pair of tokens
function heat(name, values, texts, seen, most, point, at, spots) {
  const n = texts.length, size = EDGE + CELL * n;
  const cells = values.flatMap((line, i) => line.map((value, j) => {
    if (!seen(i, j) || Math.abs(value) / most < 0.01) return null;
    const kind = name === "attention" ? "ink" : value > 0 ? name : "minus";
    const wide = value > 0 ? 9.5 : 4.5, inset = (9.5 - wide) / 2;  // size shows the sign without colour
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
    "aria-label": `${name}, query by key; arrow keys move between cells`,
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
  const about = [at.name, at.causal ? "causal" : null, ...(at.notes ?? [])].filter(Boolean).join(" · ");
  const body = names.map((name) =>
    row(measure(name), [el("td", { "data-figure": `layer.${name}` }, signed(at.raw[name]))]));
  const own = framed("All heads together", "the summed QK matrix of the layer, M = Σ M_h, raw",
    () => [["metric", "raw"], ...names.map((name) => [name, at.raw[name]])], "third",
    el("table", {}, el("tbody", {}, body)));
  const lines = heads.map((one) => {
    const go = { class: "number", type: "button", onclick: () => choose({ head: one.head }) };
    return row(el("th", { scope: "row" }, el("button", go, `head ${one.head}`)), [
      el("td", { class: "words" }, stack(shares(one), "stack", `head ${one.head}`)),
      el("td", {}, signed(number(one, "raw", "symmetry"))), el("td", { class: "words" }, labelled(one))]);
  });
  const top = row(heading(""),
    [heading("parts", "words"), heading("symmetry, raw"), heading("label", "words")]);
  const rows = () => [["head", ...bars(), "symmetry_raw", "label"],
    ...heads.map((one) => [one.head, ...shares(one), number(one, "raw", "symmetry"), one.label])];
  const all = framed("Heads", model().of, rows, "rest",
    el("div", { class: "wide heads" }, el("table", {}, el("thead", {}, top), el("tbody", {}, lines))));
  put("chosen",
    el("div", { class: "headline" }, el("h2", {}, `L${layerName(at.layer).slice(1)}`), el("span", { class: "muted" }, about)),
    el("div", { class: "figures" }, own, all));
}
