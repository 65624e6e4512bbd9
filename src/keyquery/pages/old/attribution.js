// One head: tokens, the table of query-side by key-side sources, paths along the attention of earlier heads.

const NAMES = Object.keys(DATA.views);
const state = { view: NAMES.includes("relative") ? "relative" : NAMES[0] };
const shown = (value) => (state.view === "share" ? percent(value) : signed(value));
const token = (position) => `${position} “${word(DATA.tokens[position])}”`;

function tokenStrip() {
  put("tokens", DATA.tokens.map((text, position) => el("span", {
    class: position === DATA.key ? "key" : position === DATA.query ? "query" : "",
    title: `${position}${position === DATA.query ? ", query" : ""}${position === DATA.key ? ", key" : ""}`,
  }, word(text))));
}

function table() {
  const { query, key, values, null: levels } = DATA.views[state.view];
  const level = (side, i) => (levels[side] ? [el("td", { class: "muted", title: DATA.units.null }, levels[side][i] === undefined ? "" : shown(levels[side][i]))] : []);
  const most = Math.max(...values.flat().map(Math.abs)) || 1;
  const cell = (value, a, b) => {
    const amount = Math.sqrt(Math.abs(value) / most);
    return el("td", {
      class: amount > 0.62 ? "strong" : "", title: `${query[a]} × ${key[b]}`, "--amount": `${(100 * amount).toFixed(0)}%`,
      "--tone": `var(--${value > 0 ? "symmetric" : "skew"})`,
    }, shown(value));
  };
  const sum = (numbers) => numbers.reduce((total, value) => total + value, 0);
  const lines = values.map((line, a) => row(el("th", { scope: "row" }, query[a]),
    [line.map((value, b) => cell(value, a, b)), el("td", { class: "sum" }, shown(sum(line))), ...level("query", a)]));
  const columns = key.map((_, b) => sum(values.map((line) => line[b])));
  const foot = row(el("th", { scope: "row", class: "sum" }, "sum"),
    [...columns.map((value) => el("td", { class: "sum" }, shown(value))), el("td", { class: "sum" }, shown(sum(columns)))]);
  const nulls = levels.key ? [row(el("th", { scope: "row", class: "muted" }, "null"), key.flatMap((_, b) => level("key", b)))] : [];
  const buttons = NAMES.map((view) => el("button", {
    type: "button", "aria-pressed": view === state.view, title: DATA.units[view] ?? null,
    onclick: () => { state.view = view; table(); },
  }, title(view)));
  const rows = () => [["query side", ...key], ...values.map((line, a) => [query[a], ...line])];
  put("map",
    el("div", { class: "bar" }, el("h3", {}, "Sources: query side (rows) by key side (columns)"),
      NAMES.length > 1 ? el("div", { class: "switch", role: "group", "aria-label": "view" }, buttons) : null,
      copyButton("table", rows)),
    el("p", { class: "muted of" }, DATA.units[state.view] ?? ""),
    el("div", { class: "wide" }, el("table", { class: "entries" },
      el("thead", {}, row(el("th", {}, ""), [...key.map((name) => el("th", { scope: "col" }, name)), el("th", { class: "sum" }, "sum"), ...(levels.query ? [el("th", { class: "muted" }, "null")] : [])])),
      el("tbody", {}, lines, foot, nulls))));
}

function paths() {
  if (!DATA.paths.length) return;
  put("paths", el("h3", {}, "What heads moved here"), el("p", { class: "muted of" }, DATA.depth_2), DATA.paths.map((path) => {
    const here = path.side === "query" ? DATA.query : DATA.key;
    return el("div", { class: "path" },
      el("b", {}, path.source), ` wrote into the ${path.side} ${token(here)}: `, el("b", {}, signed(path.contribution)),
      el("span", { class: "muted" }, ` (relative ${signed(path.relative)})`),
      el("ul", {}, path.steps.map((step) => el("li", {}, `from ${token(step.position)}, attention ${percent(step.weight)}: `,
        el("b", {}, signed(step.contribution)),
        el("span", { class: "muted" }, ` (${step.origins.map((one) => `${one.source} ${signed(one.contribution)}`).join(", ")}, rest ${signed(step.rest)})`))),
        el("li", { class: "muted" }, `rest ${signed(path.rest)}`)));
  }));
}

function pairs() {
  const names = ["query", "key", "above the mean key", "attention", "most from"];
  const lines = DATA.pairs.map((pair) => el("tr", {},
    el("td", { class: "words" }, token(pair.query)), el("td", { class: "words" }, token(pair.key)),
    el("td", {}, signed(pair.relative)), el("td", {}, percent(pair.weight)),
    el("td", {}, `${pair.key_source} (${signed(pair.from_source)})`)));
  put("pairs", el("h3", {}, "Pairs of this text with the largest scores"), el("div", { class: "wide" }, el("table", {},
    el("thead", {}, el("tr", {}, names.map((name, i) => heading(name, i < 2 ? "words" : "")))), el("tbody", {}, lines))));
}

put("name", `${DATA.name}, head ${DATA.head}`);
put("facts", `${DATA.tokens.length} tokens · norms frozen at their recorded values`);
put("sentence", DATA.sentence + ".");
tokenStrip();
table();
paths();
pairs();
put("notes", DATA.notes.map((note) => el("p", {}, `${note}.`)));
