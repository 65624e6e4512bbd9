// Elements, numbers, CSV, the state in the URL, and the page: blocks drawn by components from the page's JSON.
// Texts enter the page as text nodes only, and nothing is fetched.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);

// Elements

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) node.style.setProperty(name, value);
    else if (name.startsWith("aria-")) node.setAttribute(name, String(value));
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const put = (id, ...children) => document.getElementById(id).replaceChildren(...children.flat().filter(Boolean));

// A chart drawn at the width that it has, so that its text keeps its size on a phone.
function sized(chart) {
  const box = el("div", { class: "chart" });
  let width = 0;
  new ResizeObserver(() => {
    if (box.clientWidth === width || box.clientWidth === 0) return;
    width = box.clientWidth;
    box.replaceChildren(chart(width));
  }).observe(box);
  return box;
}

// Numbers and words as they are shown

const minus = (text) => text.replace("-", "−");
const fixed = (value, digits) => {
  const text = value.toFixed(digits);
  return minus(Number(text) === 0 ? text.replace("-", "") : text);
};
const signed = (value, digits = 2) => (value > 0 && Number(value.toFixed(digits)) > 0 ? "+" : "") + fixed(value,
  digits);
const FORMS = {
  figure: (value) => minus(String(Number(value.toPrecision(3)))),
  figure2: (value) => minus(String(Number(value.toPrecision(2)))),
  change: (value) => (value > 0 ? "+" : "") + minus(String(Number(value.toPrecision(2)))),
  signed: (value) => signed(value),
  signed3: (value) => signed(value, 3),
  fixed: (value) => fixed(value, 2),
  percent: (value) => `${fixed(100 * value, 0)} %`,
  percent1: (value) => `${fixed(100 * value, 1)} %`,
  points: (value) => signed(100 * value, 1),
  grouped: (value) => String(value).replace(/\B(?=(\d{3})+$)/g, " "),
  size: (value) => {
    const [unit, letter] = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]
      .find(([one]) => value >= 0.9995 * one) ?? [1, ""];
    return FORMS.figure(value / unit) + letter;
  },
};
const text = (value, form = "figure") => {
  if (value === null || value === undefined) return "–";
  return typeof value === "number" ? FORMS[form](value) : String(value);
};
// The pages of models lie in a folder beside this page, which a page in a notebook's frame does not have.
const linked = (href, ...content) => (href && location.protocol !== "about:" ? el("a", { href }, ...content) : content);
const number = (value) => typeof value === "number" && Number.isFinite(value);
// A value with its interval and null level, as far as they are known: 0.90 (0.88 to 0.92), null 0.05
function full(value, form, low, high, level) {
  const bare = (one) => text(one, form).replace(" %", "");
  const between = number(low) && number(high) ? ` (${bare(low)} to ${bare(high)})` : "";
  return `${text(value, form)}${between}${number(level) ? `, null ${text(level, form)}` : ""}`;
}
const word = (token) => token.replace(/^[Ġ▁ ]/, "·").replace(/[\nĊ]/g, "↵");  // spaces and breaks made visible
const short = (token, most = 9) => (word(token).length > most ? word(token).slice(0, most - 1) + "…" : word(token));
const chips = (tokens) => tokens.map((token) => el("span", { class: "token", title: token }, word(token)));

// Numbers of three digits in 16 bits: a sign and 1 + 900·(exponent + 18) + (digits − 100); 0 is zero, 65535 none.
function unpack(packed) {
  if (typeof packed !== "string") return packed;
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  return Array.from({ length: bytes.length / 2 }, (_, i) => {
    const code = bytes[2 * i] | (bytes[2 * i + 1] << 8), size = (code & 32767) - 1;
    if (code === 65535) return null;
    if (size < 0) return 0;
    return (code & 32768 ? -1 : 1) * Number(`${100 + (size % 900)}e${Math.floor(size / 900) - 20}`);
  });
}

// CSV

async function copy(button, rows) {
  const quoted = (value) => (/[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
  const csv = rows().map((row) => row.map((value) => quoted(String(value ?? ""))).join(",")).join("\n") + "\n";
  try {
    await navigator.clipboard.writeText(csv);
  } catch {  // no permission, as in a frame: use the legacy method
    const area = document.body.appendChild(el("textarea"));
    area.value = csv;
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "copied";
  setTimeout(() => (button.textContent = "copy CSV"), 1500);
}

function copyButton(name, rows) {
  const button = el("button", { class: "copy", type: "button", "aria-label": `copy CSV: ${name}` }, "copy CSV");
  button.addEventListener("click", () => copy(button, rows));
  return button;
}

function framed(block, rows, ...content) {
  const caption = [block.title ? el("h3", {}, block.title) : null, el("span", { class: "muted" }, block.note ?? ""),
    rows ? copyButton(block.title ?? "", rows) : null];
  return el("figure", { class: `block ${block.size ?? ""}`, "data-block": block.name ?? null },
    el("figcaption", {}, caption), ...content);
}

const pressable = (label, pressed, change, more = {}) => el("button", {
  type: "button", "aria-pressed": pressed, "data-focus": `${Object.keys(change)} ${label}`, onclick: () =>
    choose(change), ...more,
}, label);
const switchOf = (label, buttons) => el("div", { class: "switch", role: "group", "aria-label": label }, buttons);
const swatch = (tone, ...content) => el("span", { class: "tag", "--tone": tone }, ...content);

// The state: the selection `at`, and settings. The URL holds what differs from the defaults: #3.1?map=sink&sort=-role

const state = {};
const current = () => DATA.tabs[state.tab] ?? DATA.tabs[0];
const defaults = () => ({ tab: 0, at: "", map: "", sort: "", ...DATA.state, ...current().state });

function address() {
  const rest = new URLSearchParams(), usual = defaults();
  for (const [key, value] of Object.entries(state)) if (!["at", "open"].includes(key) && value !== usual[key]) rest.set(
    key, value);
  return `#${encodeURIComponent(state.at).replaceAll("%2F", "/")}${String(rest) && `?${rest}`}`;
}

function follow() {
  const [at, rest] = location.hash.slice(1).split(/\?(.*)/s),
    asked = Object.fromEntries(new URLSearchParams(rest ?? ""));
  for (const key of Object.keys(state)) if (key !== "open") delete state[key];
  state.tab = DATA.tabs[Number(asked.tab)] ? Number(asked.tab) : 0;
  const usual = defaults();
  Object.assign(state, { ...usual, tab: state.tab });
  for (const key of Object.keys(asked)) if (key in usual && key !== "tab") state[key] = asked[key];
  try {
    if (at) state.at = decodeURIComponent(at);
  } catch {
    // not an address of this page
  }
  settle();
}

function settle() {  // what does not exist on this tab falls back to its default
  const { frame, state: usual } = current();
  if (!frame) return;
  if (!frameOf().index.has(state.at) && !current().rows?.[state.at]) state.at = usual?.at ?? frameOf().keys[0] ?? "";
  if (!measureOf(state.map)) state.map = usual?.map ?? frame.measures[0].key;
}

let stepping = false;  // whether the last selection was by arrow key: a whole walk is one history entry
function choose(change, step = false) {
  const held = document.activeElement?.dataset?.focus, other = "tab" in change && change.tab !== state.tab;
  if (other) Object.assign(state, { ...defaults(), ...DATA.tabs[change.tab].state, at: state.at });
  Object.assign(state, change);
  settle();
  render();
  const again = held && document.querySelector(`[data-focus="${CSS.escape(held)}"]:not([tabindex="-1"])`);
  again?.focus({ preventScroll: true });
  try {
    if (address() !== location.hash) history[step && stepping ? "replaceState" : "pushState"](null, "", address());
  } catch {
    // a page inside a notebook has no URL
  }
  stepping = step;
}

// The frame of a tab: items in rows and columns, such as heads in layers, and their measures

const frames = new Map();
function frameOf(tab = current()) {
  if (!frames.has(tab)) {
    const { rows, columns, cells, join = "." } = tab.frame;
    const places = cells ?? rows.flatMap((_, row) => columns.map((_, column) => [row, column]));
    const keys = places.map(([row, column]) => `${rows[row]}${join}${columns[column]}`);
    const grid = rows.map(() => columns.map(() => -1));
    places.forEach(([row, column], i) => (grid[row][column] = i));
    frames.set(tab, { ...tab.frame, places, keys, grid, index: new Map(keys.map((key, i) => [key, i])) });
  }
  return frames.get(tab);
}
function measureOf(key, tab = current()) {
  const measure = tab.frame?.measures.find((one) => one.key === key);
  if (measure) for (const name of ["values", "low", "high", "null"]) if (measure[name]) measure[name] =
    unpack(measure[name]);
  return measure;
}
const measures = () => current().frame.measures.map((one) => measureOf(one.key));
const valueText = (one, i) => one.words?.[i] ?? full(one.values[i], one.form, one.low?.[i], one.high?.[i],
  one.null?.[i]);
const rowName = (frame, row) => frame.labels?.[row] || `${frame.nouns?.[0] ?? "layer"} ${frame.rows[row]}`;
const itemName = (frame, i) =>
  `${rowName(frame, frame.places[i][0])}, ${frame.nouns?.[1] ?? "head"} ${frame.columns[frame.places[i][1]]}`;

// The page: its blocks, each redrawn when the state that it uses has changed

// By type: `draw` of a block, its `usual` fields, what it `uses` of the state, and `mark`, which follows the selection
// without a redraw.
const COMPONENTS = {};
const merged = (given) => {
  const block = { ...COMPONENTS[given.type].usual, ...given };
  return block.by ? { ...block, ...(block.views[block.by.map((key) => state[key]).join("/")] ?? { hidden: true }) }
    : block;
};
const drawn = (block) => {
  const one = merged(block);
  return one.hidden ? [] : [COMPONENTS[one.type].draw(one)].flat();
};
let built = null, parts = [];

function build() {
  built = current();
  parts = built.blocks.map((block) =>
    ({ block, node: el("section", { class: `of-${block.type} ${block.place ?? ""}`,
    "aria-label": block.title ?? block.type }) }));
  put("page", parts.map((part) => part.node));
}

function render() {
  if (built !== current()) build();
  put("kind", DATA.kind);
  put("name", DATA.name);
  put("facts", built.facts ?? DATA.facts);
  put("notes", [...(built.notes ?? []), ...(DATA.notes ?? [])].map((note) => el("p", {}, note)));
  const tabs = DATA.tabs.map((tab, i) => pressable(tab.name, i === state.tab, { tab: i }));
  const options = Object.entries(DATA.switches ?? {}).map(([key, names]) =>
    switchOf(key, Object.entries(names).map(([value, name]) => pressable(name, state[key] === value,
      { [key]: value }))));
  put("switches", tabs.length > 1 ? switchOf("shown", tabs) : null, options);
  for (const part of parts) {
    const component = COMPONENTS[part.block.type];
    const used = [...(component.uses ?? []), ...(part.block.by ?? []), ...(part.block.uses ?? [])]
      .map((key) => state[key]);
    if (part.drawn !== JSON.stringify(used)) {
      part.drawn = JSON.stringify(used);
      part.node.replaceChildren(...drawn(part.block).filter(Boolean));
      part.node.hidden = !part.node.childNodes.length;
    }
    component.mark?.(part.node, part.block);
  }
}

COMPONENTS.summary = {  // sentences, the first in larger type, and counts by name
  draw: ({ sentences = [], tags = [], note }) => [
    sentences.map((sentence, i) => el("p", { class: i ? "" : "lead" }, sentence)),
    tags.length ? el("p", { class: "tags" }, tags.map(({ value, name, tone, title }) =>
      el("span", { class: tone ? "tag" : "", "--tone": tone ?? "inherit", title, "data-tag": name },
        el("b", {}, text(value)), name)),
    note ? el("span", { class: "muted" }, note) : null) : note ? el("p", { class: "muted" }, note) : null,
  ].flat(),
};
COMPONENTS.list = { draw: (block) => framed(block, null, block.items.length
  ? el("ul", {}, block.items.map((item) => el("li", {}, item))) : el("p", {}, block.none)) };

function begin() {
  window.addEventListener("hashchange", () => {
    stepping = false;
    follow();
    render();
  });
  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(query).addEventListener("change", () => {  // canvases hold the colours that they were painted with
      for (const part of parts) part.drawn = null;
      render();
    });
  }
  follow();
  render();
}
