// Flow: layers by heads, and for one head its attention across modalities. The URL fragment names the head: #3.5.

const NAMES = Object.keys(DATA.views);
const state = { view: NAMES[0], layer: 0, head: 0, way: null, side: null, at: null, popular: true };
const BETWEEN = DATA.modalities.includes("class") ? "between class token and patches" : "cross-modal";
const layers = DATA.views.flow.length, heads = DATA.views.flow[0].length;
const record = (layer, head) => DATA.records[DATA.records.length === layers * heads ? layer * heads + head : -1];
const kept = (layer, head) => DATA.maps.find((one) => one.layer === layer && one.head === head);
const share = (value) => (value === null ? "–" : (100 * value).toFixed(1).replace("-", "−") + " %");
const above = (value) => (value === null ? "–" : (value < 0 ? "−" : "+") + Math.abs(100 * value).toFixed(1));
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const places = Object.fromEntries(DATA.modalities.map((name) =>
  [name, DATA.labels.flatMap((label, place) => (label === name ? [place] : []))]));

function summary() {
  const [raw, chance] = [0, 1].map((i) => mean(DATA.layers.map((one) => one[i])));
  const last = DATA.layers[DATA.layers.length - 1];
  put("summary",
    el("span", { "data-figure": "raw" }, el("b", {}, share(raw)), `of attention is ${BETWEEN}, `,
      `${above(raw - chance)} points relative to chance`),
    el("span", { "data-figure": "rollout" }, el("b", {}, share(last[2])), "in the rollout over all layers, ",
      `${above(last[2] - last[3])} points relative to chance`));
}

function cell(layer, head, most) {
  const value = DATA.views[state.view][layer][head], chosen = layer === state.layer && head === state.head;
  const words = `${state.view} ${state.view === "reciprocity" ? (value === null ? "–" : signed(value)) : above(value)}`;
  const kinds = ["cell", kept(layer, head) ? "kept" : null, value === null ? "none" : null];
  return el("span", {
    class: kinds.filter(Boolean).join(" "), role: "gridcell", tabindex: chosen ? 0 : -1,
    title: `${layer}.${head}: ${words}`, "data-head": `${layer}.${head}`, "data-focus": "cell", "aria-selected": chosen,
    "aria-label": `layer ${layer}, head ${head}: ${words}`,
    "--tone": `var(--${value > 0 ? "symmetric" : "skew"})`,
    "--amount": `${(100 * Math.sqrt(Math.abs(value ?? 0) / most)).toFixed(0)}%`,  // square roots, so that small values are visible
    onclick: () => choose({ layer, head }),
  });
}

function map() {
  const values = DATA.views[state.view], most = Math.max(...values.flat().map((value) => Math.abs(value ?? 0))) || 1;
  const buttons = NAMES.map((view) => el("button", {
    type: "button", "aria-pressed": view === state.view, "data-focus": view, onclick: () => choose({ view }),
  }, view));
  const rows = values.map((line, layer) => {
    const [raw, chance, deep, far] = DATA.layers[layer];
    const words = `layer ${layer}: mean ${share(raw)}, chance ${share(chance)}; rollout ${share(deep)}, chance ${share(far)}`;
    return el("div", { class: "row", role: "row" }, el("span", { class: "number" }, String(layer)),
      el("div", { class: "cells" }, line.map((_, head) => cell(layer, head, most))),
      el("div", { class: "depth", role: "img", "aria-label": words, title: words },
        el("i", { "--share": raw }), el("s", { "--share": chance }), el("b", { "--share": deep }),
        el("s", { class: "far", "--share": far })));
  });
  const tall = `${Math.max(9, Math.min(40, Math.floor(400 / layers)))}px`;
  const numbers = heads > 16 ? el("span", {}, `heads 0 to ${heads - 1}`)
    : el("span", { class: "cells" }, Array.from({ length: heads }, (_, head) => el("span", {}, String(head))));
  const ends = state.view === "reciprocity" ? ["one-way", "reciprocal"] : ["below chance", "above chance"];
  const scale = state.view === "reciprocity" ? signed(most) : `${above(most)} points`;
  const all = () => [["layer", "head", ...NAMES], ...values.flatMap((line, layer) => line.map((_, head) =>
    [layer, head, ...NAMES.map((name) => DATA.views[name][layer][head])]))];
  put("map",
    el("div", { class: "bar" }, el("h3", {}, "Layers by heads"),
      el("div", { class: "switch", role: "group", "aria-label": "view" }, buttons), copyButton("flow", all)),
    el("div", { class: "row top" }, el("span"), numbers, el("span", {}, "per layer, 0 to 100 %")),
    el("div", { class: "grid", role: "grid", "aria-label": "flow of every head", "--tall": tall, onkeydown: walk }, rows),
    el("div", { class: "scale" }, el("span", {}, ends[0], el("span", { class: "ramp" }), `${ends[1]} (${scale})`),
      el("span", { class: "key mean" }, "mean over heads"), el("span", { class: "key deep" }, "rollout"),
      el("span", { class: "key tick" }, "chance"), el("span", {}, "click or use arrow keys")));
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
const within = (value, count) => Math.min(Math.max(value, 0), count - 1);
function walk(event) {
  const step = STEPS[event.key];
  if (!step) return;
  event.preventDefault();
  choose({ layer: within(state.layer + step[0], layers), head: within(state.head + step[1], heads) });
}

// One head: rows of a block are queries (`to`), columns are keys (`from`).

function chosen() {
  const one = kept(state.layer, state.head), facts = record(state.layer, state.head);
  const metrics = Object.entries(facts ?? {}).filter(([name]) => !["layer", "text", "head"].includes(name));
  const figures = metrics.map(([name, value]) => el("span", { class: "muted", title: DATA.units[name] ?? null },
    `${title(name)} `, el("b", { "data-figure": name },
      /above/.test(name) ? above(value) : /symmetry|reciprocity/.test(name) ? (value === null ? "–" : signed(value)) : share(value))));
  const head = el("div", { class: "headline" }, el("h2", {}, `Layer ${state.layer}, head ${state.head}`));
  if (!one) {
    put("chosen", head, el("div", { class: "numbers" }, figures),
      el("p", { class: "muted" }, "The attention map of this head is not included in this page."));
    return;
  }
  const ways = one.blocks.map((block) => `${block.from} → ${block.to}`);
  const way = ways.includes(state.way) ? state.way : ways[first(one)];
  const block = one.blocks[ways.indexOf(way)], flat = unpack(block.map), wide = places[block.from].length;
  const popularity = one.popularity ? places[block.from].map((place) => one.popularity[place]) : [null];
  const known = popularity.every((value) => value !== null);
  const rows2d = places[block.to].map((_, i) => flat.slice(i * wide, (i + 1) * wide));
  const values = state.popular || !known ? rows2d : rows2d.map((line) => specific(line, popularity));
  // Deselect a token that does not exist in this direction.
  if (state.side !== null && !(state.at < [wide, values.length][state.side])) Object.assign(state, { side: null, at: null });
  const buttons = ways.map((name) => el("button", {
    type: "button", "aria-pressed": name === way, "data-focus": name,
    onclick: () => choose({ way: name, side: null, at: null }),
  }, name));
  const kinds = [["attention", true], ["without popularity", false]].map(([name, popular]) => el("button", {
    type: "button", "aria-pressed": popular === state.popular, "data-focus": name, onclick: () => choose({ popular }),
    title: popular ? "as in the model" : "without what every query gives to a key: attention sinks",
  }, name));
  const light = lights(values, block), out = el("div", { class: "readout", "aria-live": "polite" }, readout(values, block));
  const panels = [block.from, block.to].map((name, side) => panel(name, light[side], block, side));
  if (block.to === DATA.picture?.modality) panels.reverse();
  const rows = () => [["to", "from", "attention"], ...values.flatMap((line, i) => line.map((value, j) =>
    [DATA.tokens[places[block.to][i]], DATA.tokens[places[block.from][j]], value]))];
  put("chosen", head, el("div", { class: "numbers" }, figures),
    el("div", { class: "bar" }, el("div", { class: "switch", role: "group", "aria-label": "direction" }, buttons),
      known ? el("div", { class: "switch", role: "group", "aria-label": "popularity" }, kinds) : null,
      el("span", { class: "muted" }, `${block.to} attends to ${block.from}; click a token to see its attention`),
      copyButton("this map", rows)),
    el("div", { class: "both" }, panels), out);
}

// A row of attention with the key-only term of the scores taken out: A·exp(−p), with the same sum.
function specific(line, popularity) {
  const rest = line.map((value, i) => value * Math.exp(-popularity[i]));
  const sum = (values) => values.reduce((total, value) => total + value, 0), whole = sum(rest);
  return rest.map((value) => (whole > 0 ? value * sum(line) / whole : 0));
}

// The first block with attention, preferably to image patches.
function first(one) {
  const able = one.blocks.map((block) => unpack(block.map).some((value) => value > 0));
  const seen = one.blocks.findIndex((block, i) => able[i] && block.from === DATA.picture?.modality);
  return seen >= 0 ? seen : Math.max(0, able.indexOf(true));
}

// Brightness of each token of `from` and of `to`, from 0 to 1: for the selected token, else for all.
function lights(values, block) {
  const columns = values[0].map((_, j) => values.map((line) => line[j]));
  const sums = [columns.map((line) => mean(line)), values.map((line) => line.reduce((sum, value) => sum + value, 0))];
  if (state.side === 0) sums[1] = columns[state.at];
  if (state.side === 1) sums[0] = values[state.at];
  return sums.map((line, side) => {
    const most = Math.max(...line);
    return line.map((value, i) => (state.side === side ? Number(i === state.at) : most > 0 ? value / most : 0));
  });
}

function readout(values, block) {
  const names = (name) => places[name].map((place) => `“${word(DATA.tokens[place])}”`);
  const flat = values.flat();
  if (!flat.some((value) => value > 0)) return "No attention in this direction: the mask does not allow it.";
  if (state.side === null) {
    const total = flat.reduce((sum, value) => sum + value, 0) / values.length;
    return `On average, a token of ${block.to} puts ${share(total)} of its attention on ${block.from}.`;
  }
  const line = state.side === 1 ? values[state.at] : values.map((each) => each[state.at]);
  const mine = names(state.side === 1 ? block.to : block.from)[state.at];
  const others = names(state.side === 1 ? block.from : block.to);
  const best = line.map((value, i) => [value, others[i]]).sort((a, b) => b[0] - a[0]).slice(0, 3);
  const listed = best.map(([value, name]) => `${name} ${share(value)}`).join(", ");
  return state.side === 1 ? `${mine} attends to ${listed}` : `${mine} is attended to by ${listed}`;
}

const pick = (side, at) => choose(state.side === side && state.at === at ? { side: null, at: null } : { side, at });

function panel(name, light, block, side) {
  const head = el("h3", {}, side === 0 ? `${name} (keys)` : `${name} (queries)`);
  return el("div", { class: "panel" }, head, name === DATA.picture?.modality ? patches(light, side) : chips(name, light, side));
}

function chips(name, light, side) {
  const buttons = places[name].map((place, i) => el("button", {
    type: "button", class: light[i] > 0.6 ? "lit bright" : "lit", "aria-pressed": state.side === side && state.at === i,
    "data-token": place, "data-focus": `token ${place}`, "data-light": light[i].toFixed(3), title: `token ${place}`,
    "--amount": `${(100 * light[i]).toFixed(0)}%`, onclick: () => pick(side, i),
  }, word(DATA.tokens[place])));
  return el("div", { class: buttons.length > 60 ? "many" : "" }, buttons);
}

function patches(light, side) {
  const { data, size: [tall, wide], grid: [rows, columns] } = DATA.picture;
  const high = tall / rows, broad = wide / columns, all = DATA.picture.places;
  const box = ([row, column]) => ({ x: column * broad, y: row * high, width: broad, height: high });
  const veils = all.map((place, i) => draw("rect", {
    class: "veil", ...box(place), "fill-opacity": (0.78 * (1 - light[i])).toFixed(3), "data-patch": i,
    "data-light": light[i].toFixed(3), onclick: () => pick(side, i),
  }, draw("title", {}, DATA.tokens[places[DATA.picture.modality][i]])));
  const spot = state.side === side ? [draw("rect", { class: "spot", ...box(all[state.at]) })] : [];
  return draw("svg", {
    class: "seen", viewBox: `0 0 ${wide} ${tall}`, role: "img", tabindex: 0, "data-focus": "image",
    "aria-label": "the image as seen by the model; brighter patches receive more attention; arrow keys select one",
    onkeydown: (event) => {
      const step = STEPS[event.key];
      if (!step) return;
      event.preventDefault();
      const [row, column] = state.side === side ? all[state.at] : [0, 0];
      const to = [within(row + step[0], rows), within(column + step[1], columns)];
      const at = all.findIndex((place) => place[0] === to[0] && place[1] === to[1]);
      if (at >= 0) choose({ side, at });
    },
  }, draw("image", { href: `data:image/jpeg;base64,${data}`, x: 0, y: 0, width: wide, height: tall,
    preserveAspectRatio: "none" }), veils, spot);
}

function table() {
  const box = document.getElementById("table");
  box.replaceChildren(box.querySelector("summary"));
  if (!box.open) return;
  const names = Object.keys(DATA.records[0]), rows = () => [names, ...DATA.records.map((one) => names.map((name) => one[name]))];
  box.append(copyButton("all heads", rows), el("div", { class: "wide" }, el("table", {},
    el("thead", {}, row(null, names.map((name) => heading(title(name))))),
    el("tbody", {}, DATA.records.map((one) => row(null,
      names.map((name) => el("td", {}, one[name] === null ? "" : figure3(one[name])))))))));
}

function render() {
  summary();
  map();
  chosen();
}

function choose(change) {
  const held = document.activeElement?.dataset.focus;
  if ("layer" in change) change = { side: null, at: null, ...change };
  Object.assign(state, change);
  render();
  // Restore the keyboard focus after redrawing: the same button, or the cell that is now selected.
  if (held) document.querySelector(`[data-focus="${CSS.escape(held)}"]:not([tabindex="-1"])`)?.focus();
  try {
    history.replaceState(null, "", `#${state.layer}.${state.head}`);
  } catch {
    // a page inside a notebook has no URL
  }
}

function follow() {
  const match = /^#(\d+)\.(\d+)$/.exec(location.hash);
  const [layer, head] = match ? match.slice(1).map(Number) : DATA.maps.length ? [DATA.maps[0].layer, DATA.maps[0].head] : [0, 0];
  if (layer < layers && head < heads) Object.assign(state, { layer, head, side: null, at: null });
}

put("name", DATA.name);
put("facts", DATA.facts);
put("notes", DATA.notes.map((note) => el("p", {}, note)));
window.addEventListener("hashchange", () => {
  follow();
  render();
});
document.getElementById("table").addEventListener("toggle", table);
follow();
render();
