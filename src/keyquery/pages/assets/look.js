// A look: the parts of a head's scores, costs, metrics, attention, spectra and directions. What has a measure is drawn
// from there.

const PARTS = ["symmetric", "skew", "popularity", "query_only", "position"], WITH_CHARTS = ["interaction", "sink"];
const partTones = (names) => names.map((name) => (PARTS.includes(name) ? `var(--${name})` : undefined));

// The parts of the selected head, of this tab or of another, with the intervals of their own measures.
COMPONENTS.shares = {
  draw: (block) => {
    const tab = DATA.tabs[block.tab] ?? current(), { parts, tones, unit, values } = measureOf("parts", tab);
    const i = frameOf(tab).index.get(state.at), names = [...parts, ...WITH_CHARTS];
    const single = names.map((name) => measureOf(`on_data.${name}`, tab)), data = single.some(Boolean);
    const rows = data ? single.map((one) => one && [one.values[i] ?? null, one.low?.[i], one.high?.[i]])
      : (values[i] ?? []).map((value) => [value]);
    return COMPONENTS.bars.draw({ title: "Parts of the scores", ...block, name: "parts", size: "half", rows, names, tones,
      form: "percent", most: 1, prefix: "largest interactions: ", note: data ? `${unit}; 95 % intervals` : unit });
  },
};

COMPONENTS.costs = {
  draw: () => {
    const off = measures().filter((one) => one.key.startsWith("off."));
    const names = off.map((one) => one.label.replace("loss, ", "").replace(" ablated", ""));
    const note = "change of the loss in nats per token with one part of this head ablated, 95 % interval";
    return COMPONENTS.bars.draw({ name: "ablation", title: "Ablation", note, size: "half", form: "change", dots: true,
      hollow: "zero", names, tones: partTones(names), measures: off.map((one) => one.key) });
  },
};

COMPONENTS.corpus = {
  draw: () => {
    const names = ["symmetric", "skew", "explained"], of = ["symmetric_cosine", "skew_cosine", "explained"];
    const note = "cosines with the PPMI of the corpus, and share of the scores that both explain; tick: null level";
    return COMPONENTS.bars.draw({ name: "corpus", title: "Co-occurrence", note, size: "half", dots: true,
      hollow: "null", names, tones: partTones(names), measures: of.map((name) => `corpus.${name}`) });
  },
};

COMPONENTS.offsets = {
  draw: ({ x, values }) => COMPONENTS.curve.draw({ name: "offsets", title: "Symmetry by offset", size: "half", x, values,
    note: "symmetry of M(Δ) under RoPE, swapping contents only, or tokens with their positions (exchange)",
    series: [["contents", "symmetric"], ["exchange", "skew"]].map(([name, part]) => ({ name, tone: `var(--${part})` })),
    names: true, unit: "offset", form: "signed", least: -1, most: 1 }),
};

// The metrics of the selected item in several views, such as raw and on data, from the measures of the frame.
COMPONENTS.numbers = {
  usual: { name: "metrics", title: "Metrics", size: "half", views: { raw: "raw", folded: "folded", on_data: "on data" },
    note: "weights (raw), with biases and norms (folded), contents on data with 95 % intervals" },
  draw: (block) => {
    const i = frameOf().index.get(state.at), views = Object.entries(block.views);
    const without = [...measureOf("parts").parts, ...WITH_CHARTS];
    const known = measures().filter((one) => number(one.values[i]));
    const names = [...new Set(known.map((one) => one.key.split(".")).filter(([view]) => view in block.views)
      .map(([, name]) => name))]
      .filter((name) => !without.includes(name));
    const of = (view, name) => known.find((one) => one.key === `${view}.${name}`);
    const shown = views.filter(([view]) => names.some((name) => of(view, name)));
    const cell = (one) => (one ? full(one.values[i], one.form, one.low?.[i], one.high?.[i]) : "");
    const columns = [{ key: "metric", label: "metric", values: names.map((name) => name.replaceAll("_", " ")) },
      ...shown.map(([view, label]) =>
        ({ key: view, label, values: names.map((name) => of(view, name)?.values[i] ?? null),
        words: names.map((name) => cell(of(view, name))),
        order: names.map((name) => of(view, name)?.values[i] ?? null), right: true,
          notes: names.map((name) => of(view, name)?.unit) }))];
    return COMPONENTS.table.draw({ ...block, columns });
  },
};

// The attention on a text and the parts of its scores, query by key: 8-bit multiples of a step, of visible pairs only.
function matrix([step, packed], n, causal) {
  const values = Array.from(atob(packed), (letter) => step * ((letter.charCodeAt(0) << 24) >> 24));
  const at = (i, j) => (causal ? (j > i ? 0 : values[(i * (i + 1)) / 2 + j]) : values[i * n + j]);
  return Array.from({ length: n }, (_, i) => Array.from({ length: n }, (_, j) => at(i, j)));
}

COMPONENTS.attention = {
  usual: { name: "attention", title: "Attention on the text, and its parts" },
  draw: (block) => {
    const texts = current().tokens, n = texts.length, { causal, maps } = block;
    const names = ["attention", ...PARTS], tones = ["var(--ink)", ...partTones(PARTS)];
    const note = ["rows are queries, columns are keys; coloured: positive, small and grey: negative, one scale for all"
      + " parts", "the mean of each row is subtracted from each part (softmax is invariant to it)", ...current().attention]
      .join("; ");
    const seen = (i, j) => !causal || j <= i, shown = names.map((_, k) => matrix(maps[k], n, causal));
    const most = Math.max(...shown.slice(1).flat(2).map(Math.abs), 1e-30);
    const written = (value, k) =>
      minus(String(Number(value.toFixed(Math.max(0, -Math.floor(Math.log10(maps[k][0]))))) + 0));
    const readout = el("p", { class: "readout", "aria-live": "polite" }), at = { i: Math.min(1, n - 1), j: 0 };
    const point = (i, j) => {
      if (!seen(i, j)) return;
      Object.assign(at, { i, j });
      for (const picture of pictures) picture.repaint();
      readout.replaceChildren(el("span", {}, chips([texts[i]]), "attends to ", chips([texts[j]])),
        ...names.map((name, k) =>
        el("span", {}, k ? swatch(tones[k], `${name} `) : `${name} `, el("b", { "data-part": name },
          k ? written(shown[k][i][j], k) : FORMS.percent(shown[0][i][j])))));
    };
    const pictures = names.map((name, k) => plane({
      rows: texts.map((token) => short(token)), columns: texts.map((token) => short(token)),
        label: `${name}, query by key`, edge: 64, cell: 15, most: 360, under: true,
      paint: (i, j) => {
        const value = shown[k][i][j], amount = Math.sqrt(Math.min(1, Math.abs(value) / (k ? most : 1)));
        return seen(i, j) && amount > 0.1 ? [value > 0 ? tones[k] : "var(--muted)", amount, value < 0] : null;
      },
      at: () => [at.i, at.j], pick: point,
    }));
    point(at.i, at.j);
    const rows = () => [["query", "key", ...names],
      ...texts.flatMap((query, i) => texts.flatMap((key, j) =>
      (seen(i, j) ? [[query, key, ...shown.map((map) => map[i][j])]] : [])))];
    return framed({ ...block, note }, rows, el("div", { class: "maps" },
      pictures.map((picture, k) => el("div", {}, el("h3", {}, k ? swatch(tones[k], names[k]) : names[k]), picture))),
      readout);
  },
};

// Values in order, as bars from zero: a spectrum. Several have one scale.
COMPONENTS.spectra = {
  usual: { title: "Spectra", by: ["view"], switch: ["view", { raw: "raw", folded: "folded" }], parts: [
    { name: "Spectrum of S", note: "symmetric part: eigenvalues", tone: "var(--symmetric)" },
    { name: "Spectrum of A", note: "skew part: singular values", tone: "var(--skew)" },
    { name: "Spectrum of M", note: "full QK matrix: singular values", tone: "var(--muted)" },
  ] },
  draw: (block) => {
    const series = block.parts.map((one, k) => ({ ...one, values: unpack(block.values[k]) }));
    const span = Math.max(...series.map(({ values }) => Math.max(...values, 0) - Math.min(...values, 0)), 1e-30);
    const [key, options] = block.switch;
    const buttons = switchOf("view", Object.entries(options).map(([value, label]) => pressable(label,
      state[key] === value, { [key]: value })));
    return [el("div", { class: "bar" }, el("h3", {}, block.title), buttons), el("div", { class: "trio" },
      series.map(({ name, note, tone, values }) => {
      const unit = 100 / span, zero = Math.min(...values) < 0 ? Math.max(...values, 0) * unit : 100;
      const bars = values.map((value, i) =>
        draw("rect", { x: i, width: 0.9, y: Math.min(zero, zero - value * unit).toFixed(2),
        height: Math.abs(value * unit).toFixed(2) }));
      const ends = [values[0], values[values.length - 1]].map((value) => text(value));
      const picture = draw("svg", { class: "spectrum", viewBox: `0 0 ${values.length} 100`, preserveAspectRatio: "none",
        role: "img", "--tone": tone,
        "aria-label": `${values.length} values of ${name}, from ${ends[0]} to ${ends[1]}` }, bars);
      return framed({ title: name, note, size: "" }, () => [["index", name], ...values.map((value, i) => [i, value])],
        picture, el("div", { class: "ends muted" }, ends.map((end) => el("span", {}, end))));
    }))];
  },
};

// Directions as tokens: rows of [value, tokens, opposite] or, of planes, of [value, pairs of tokens].
COMPONENTS.directions = {
  usual: { size: "half" },
  draw: (block) => {
    const [title, note] = block.relations ? ["Skew planes", "planes of A: query token → key token"]
      : ["Symmetric directions", "eigenvectors of S, with the tokens at both ends"];
    const pair = ([from, to]) => el("span", { class: "pair" }, chips([from]), el("span", { class: "muted" }, "→ "),
      chips([to]));
    const rows = block.rows.map(([value, first, opposite]) => [el("span", { class: "value" }, text(value)),
      block.relations ? el("div", {}, first.map(pair)) : el("div", {}, el("div", {}, chips(first)),
        el("div", {}, el("span", { class: "muted" }, "opposite "), chips(opposite)))]);
    const csv = () => (block.relations ? [["value", "query", "key"], ...block.rows.flatMap(([value, pairs]) =>
      pairs.map((two) => [value, ...two]))]
      : [["value", "tokens", "opposite"], ...block.rows.map(([value, ends, opposite]) => [value, ends.join(" "),
        opposite.join(" ")])]);
    return framed({ ...block, title, note }, csv, el("div", { class: "pairs" }, rows));
  },
};
COMPONENTS.planes = { draw: (block) => COMPONENTS.directions.draw({ size: "half", ...block, relations: true }) };

// The heads of the selected layer, with a column per part; and the metrics of the layer as one head.
COMPONENTS.members = {
  usual: { title: "Heads", size: "rest" },
  draw: (block) => {
    const frame = frameOf(), items = frame.grid[frame.rows.indexOf(state.at)].filter((i) => i >= 0);
    const shown = ["parts", "raw.symmetry"].map((key) => measureOf(key));
    const columns = shown.flatMap((one) => (one.parts ?? [null]).map((part, k) => ({
      key: part ?? one.key, label: part ?? one.label, form: part ? "percent" : one.form,
      values: items.map((i) => (part ? one.values[i]?.[k] ?? null : one.values[i])),
    })));
    const first = { key: "item", label: frame.nouns?.[1] ?? "head", values: items.map((i) => frame.keys[i]) };
    const label = frame.notes ? [{ key: "label", label: "label", values: items.map((i) => frame.notes[i]) }] : [];
    return COMPONENTS.table.draw({ ...block, note: shown[0].unit, columns: [first, ...label, ...columns],
      keys: first.values });
  },
};

COMPONENTS.together = {
  draw: ({ raw }) => COMPONENTS.table.draw({ title: "All heads together", size: "third",
    note: "the summed QK matrix of the layer, M = Σ M_h, raw", columns: [
      { key: "metric", label: "metric", values: Object.keys(raw).map((name) => name.replaceAll("_", " ")) },
      { key: "raw", label: "raw", values: Object.values(raw), form: "signed" },
    ] }),
};
