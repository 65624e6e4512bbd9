// The map of a frame, such as layers by heads: any measure as colours with a legend; arrow keys move the selection.

// From values to a tone and an amount, the same on all tabs. Measures with negative values have two tones that meet at
// 0; others one, from 0, or from the minimum if it exceeds half of the maximum; logarithmic if the range is wide.
function scaleOf(measure) {
  const values = DATA.tabs.flatMap((tab) => tab.frame?.measures.filter((one) => one.key === measure.key) ?? [])
    .flatMap((one) => unpack(one.values)).filter(number);
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  [low, high] = [measure.least ?? low, measure.most ?? high];
  if (!values.length) [low, high] = [0, 1];
  const tones = measure.tones ?? ["var(--below)", "var(--above)"], last = tones[tones.length - 1];
  if (low < 0) {
    const most = Math.max(-low, high) || 1;  // square roots, so that small values are visible
    return { low: -most, high: most, two: true, tones, at: (value) => [value < 0 ? tones[0] : last,
      Math.sqrt(Math.min(1, Math.abs(value) / most))] };
  }
  const logs = measure.logs ?? (low > 0 && high / low >= 100);
  if (logs) {
    const least = low > 0 ? low : Math.min(...values.filter((value) => value > 0)), span = Math.log(high / least) || 1;
    return { low: least, high, logs: true, tones: [last], at: (value) =>
      (value > 0 ? [last, Math.log(value / least) / span] : null) };
  }
  const from = measure.least ?? (low > high / 2 && high > low ? low : 0);
  return { low: from, high, tones: [last], at: (value) =>
    [last, high > from ? Math.min(Math.max((value - from) / (high - from), 0), 1) : 0.5] };
}

// A list of one's tone and amount, or null where there is nothing to show.
const painter = (measure) => {
  if (measure.names) return (i) => (measure.values[i] === null ? null
    : [measure.tones[measure.values[i]] ?? "var(--middle)", 1]);
  const scale = scaleOf(measure);
  return (i) => (number(measure.values[i]) ? scale.at(measure.values[i]) : null);
};
const doubtful = (measure, i) => Boolean(measure.hatch) && measure.low?.[i] <= 0 && measure.high?.[i] >= 0;

function walk(event, frame, row, column, go) {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!step) return;
  event.preventDefault();
  const within = (value, count) => Math.min(Math.max(value, 0), count - 1);
  const to = within(row + step[0], frame.rows.length);
  let across = within(column + step[1], frame.columns.length);
  if (step[0]) while (across > 0 && frame.grid && frame.grid[to][across] < 0) across -= 1;  // a layer of fewer heads
  if (!frame.grid || frame.grid[to][across] >= 0) go(to, across);
}

const selected = (frame) => frame.places[frame.index.get(state.at)] ?? [frame.rows.indexOf(state.at), 0];

function cells(block, frame, measure) {
  const paint = measure.parts ? null : painter(measure), wide = frame.columns.length;
  const cell = (i) => {
    const tone = i < 0 ? null : measure.parts ? measure.values[i] && ["var(--middle)", 0] : paint(i);
    if (i < 0) return el("span", { class: "cell empty", role: "gridcell", "aria-label": "none" });
    const key = frame.keys[i];
    if (!tone) {
      return el("span", {
        class: "cell empty", role: "gridcell", tabindex: -1, title: `${key}: no value`, "data-at": key,
          "data-focus": "cell",
        "aria-label": `${itemName(frame, i)}: no value`, onclick: () => choose({ at: key }),
      });
    }
    const words = measure.parts ? listed(measure, measure.values[i]) : valueText(measure, i);
    const label = `${measure.label} ${words}${frame.notes?.[i] ? `; ${frame.notes[i]}` : ""}`;
    const kinds = ["cell", measure.parts ? "split" : null, doubtful(measure, i) ? "hatch" : null,
      block.dots?.includes(key) ? "dotted" : null];
    return el("span", {
      class: kinds.filter(Boolean).join(" "), role: "gridcell", tabindex: -1, title: `${key}: ${label}`, "data-at": key,
        "data-focus": "cell",
      "aria-label": `${itemName(frame, i)}: ${label}`, "--tone": tone[0], "--amount": `${(100 * tone[1]).toFixed(0)}%`,
        onclick: () => choose({ at: key }),
    }, measure.parts ? measure.values[i].map((share, k) => el("i", { "--tone": measure.tones[k], "--share": share }))
      : block.written
      ? el("span", { class: tone[1] > 0.62 ? "strong" : "" }, text(measure.values[i], measure.form)) : []);
  };
  const name = (row) => (current().rows?.[frame.rows[row]]
    ? el("button", { class: "number", type: "button", "data-row": frame.rows[row],
      "data-focus": `row ${frame.rows[row]}`, "aria-label": rowName(frame, row), onclick: () =>
      choose({ at: frame.rows[row] }) }, frame.rows[row])
    : el("span", { class: "number", title: rowName(frame, row) }, frame.rows[row]));
  const side = sideOf(block, frame);
  const rows = frame.rows.map((_, row) => el("div", { class: "row", role: "row" }, name(row),
    el("div", { class: "cells" }, frame.grid[row].map(cell)), side ? sideBar(side, row, frame) : null));
  const top = wide > 16 && !block.written
    ? el("span", {}, `${frame.nouns?.[1] ?? "head"}s 0 to ${frame.columns[wide - 1]}`)
    : el("div", { class: "cells" }, frame.columns.map((column) => el("span", {}, column)));
  const grid = el("div", {
    class: `grid${side ? " sided" : ""}${block.written ? " written" : ""}`, role: "grid",
      "aria-label": `${measure.label} of every ${frame.nouns?.[1] ?? "head"}`,
    "--tall": `${Math.max(9, Math.min(40, Math.floor(400 / frame.rows.length)))}px`, "--wide": wide,
    onkeydown: (event) => walk(event, frame,
      ...(frame.places[frame.index.get(event.target.dataset.at)] ?? selected(frame)), (row, column) =>
      choose({ at: frame.keys[frame.grid[row][column]] }, true)),
  }, el("div", { class: "row top" }, el("span", { class: "axis-name" }, frame.nouns?.[0] ?? "layer"), top,
    side ? el("span", {}, side.name) : null), rows);
  return block.written ? el("div", { class: "wide" }, grid) : grid;
}

const listed = (measure, shares) => measure.parts.map((part, k) => [part, shares[k]])
  .filter(([, share]) => share >= 0.005)
  .map(([part, share]) => `${part} ${FORMS.percent(share)}`).join(", ");

// What is beside the rows: as given, by a setting, or the means of a measure of parts over each row, stacked.
function sideOf({ side }, frame) {
  if (!side?.means) return side?.by ? side.views[state[side.by]] : side;
  const { parts, tones, values } = measureOf(side.means);
  const rows = frame.grid.map((cells) => cells.map((i) => values[i]).filter(Boolean));
  return { name: "mean per layer", stacked: true, series: parts.map((name, k) => ({ name, tone: tones[k],
    values: rows.map((all) => all.reduce((sum, shares) => sum + shares[k], 0) / (all.length || 1)) })) };
}

// Beside a row: shares stacked in one bar, or thin bars from 0 to 1 with a tick at a null level.
function sideBar(side, row, frame) {
  const form = side.form ?? "percent";
  const said = ({ name, values, level }) => `${name} ${full(values[row], form, null, null, level?.[row])}`;
  const words = `${rowName(frame, row)}: ${side.series.map(said).join("; ")}`;
  const bars = side.series.map(({ tone, values, level }) => [
    el("i", { "--tone": tone, "--share": Math.max(values[row] ?? 0, 0) / (side.most ?? 1) }),
      level ? el("s", { "--share": level[row] / (side.most ?? 1) }) : null]);
  return el("div", { class: side.stacked ? "side stack" : "side", role: "img", "aria-label": words, title: words },
    side.stacked ? bars : bars.map((bar) => el("div", {}, bar)));
}

function legend(block, frame, measure, how) {
  const side = sideOf(block, frame);
  const beside = side && !side.stacked ? side.series.map(({ name, tone }) => swatch(tone, name)) : [];
  const marks = [measure.hatch ? el("span", {}, el("i", { class: "cell hatch sample" }), "95 % interval includes 0")
    : null,
    block.dots?.length ? el("span", {}, el("i", { class: "cell dotted sample" }), block.dotted) : null,
      ...(block.marks ? [el("span", {}, block.marked)] : [])];
  const unit = el("span", {}, measure.unit ?? "");
  if (measure.parts) return el("div", { class: "scale" }, measure.parts.map((part, k) => swatch(measure.tones[k],
    part)), unit, marks, el("span", {}, how));
  if (measure.names) {
    const count = measure.names.map((_, k) => measure.values.filter((value) => value === k).length);
    return el("div", { class: "scale" }, measure.names.map((name, k) => (count[k] && measure.tones[k]
      ? swatch(measure.tones[k], `${name} ${count[k]}`) : null)), unit, marks, beside, el("span", {}, how));
  }
  const scale = scaleOf(measure), [left, right] = measure.ends ?? [];
  const end = (value, words) => el("span", {}, [text(value, measure.form), words].filter(Boolean).join(" "));
  const ramp = el("span", { class: scale.two ? "ramp two" : "ramp", "--from": scale.tones[0],
    "--to": scale.tones[scale.tones.length - 1] });
  return el("div", { class: "scale" },
    el("span", { class: "ends-of", role: "img",
    "aria-label": `from ${text(scale.low, measure.form)} to ${text(scale.high, measure.form)}` },
    end(scale.low, left), ramp, end(scale.high, right), scale.logs ? ", logarithmic" : null), unit, marks, beside,
      el("span", {}, how));
}

function picker(all, measure) {
  const option = (one) => el("option", { value: one.key, selected: one === measure && "selected" }, one.label);
  const groups = [...new Set(all.map((one) => one.group ?? ""))].map((group) => {
    const own = all.filter((one) => (one.group ?? "") === group).map(option);
    return group ? el("optgroup", { label: group }, own) : own;
  });
  return el("select", { "aria-label": "metric shown on the map", "data-focus": "map", onchange: (event) =>
    choose({ map: event.target.value }) }, groups);
}

// Choose the row, or the column, of the selection by name.
function axisPicker(frame, axis) {
  const names = axis ? frame.columns : frame.rows, list = el("select", {
    "data-focus": `axis ${axis}`, "data-axis": axis, onchange: (event) => {
      const at = [...selected(frame)];
      at[axis] = Number(event.target.value);
      choose({ at: frame.keys[frame.grid[at[0]][at[1]]] });
    },
  }, names.map((name, i) => el("option", { value: i }, name)));
  return el("label", { class: "muted" }, `${frame.nouns[axis]} `, list);
}

COMPONENTS.map = {
  uses: ["map"],
  draw: (block) => {
    const frame = frameOf(), measure = measureOf(state.map), all = measures();
    const buttons = (block.quick ?? []).map((key) => pressable(measureOf(key).short ?? measureOf(key).label,
      key === measure.key, { map: key }));
    const columns = (one) => one.parts ?? [one.key, ...["low", "high", "null"].filter((name) => one[name])];
    const figures = (one, i) => (one.parts ? one.values[i] ?? [] : [one.words?.[i] ?? one.values[i],
      ...["low", "high", "null"].filter((name) => one[name]).map((name) => one[name][i])]);
    const rows = () => [[...(frame.nouns ?? ["layer", "head"]), ...columns(measure)],
      ...frame.places.map(([row, column], i) => [frame.rows[row], frame.columns[column], ...figures(measure, i)])];
    const large = block.plane || frame.keys.length > 6000;
    const how = current().rows ? "click or use arrow keys; a layer’s number shows all of it"
      : "click or use arrow keys";
    return [
      el("div", { class: "bar" }, el("h3", {}, block.title ?? "Layers by heads"), all.length > 1
        ? el("label", {}, picker(all, measure)) : null,
        buttons.length ? switchOf("quick choice", buttons) : null, copyButton("the map", rows)),
      block.pickers ? el("div", { class: "bar" }, axisPicker(frame, 0), axisPicker(frame, 1)) : null,
      large ? planeOf(block, frame, measure) : cells(block, frame, measure), legend(block, frame, measure, how),
      el("p", { class: "readout", "aria-live": "polite" }),
    ];
  },
  mark: (node, block) => {
    const frame = frameOf(), measure = measureOf(state.map), i = frame.index.get(state.at);
    const known = node.querySelector('[data-at][tabindex="0"]'),
      next = node.querySelector(`[data-at="${CSS.escape(state.at)}"]`) ;
    for (const old of node.querySelectorAll("[aria-selected]")) old.removeAttribute("aria-selected");
    for (const button of node.querySelectorAll("[data-row]")) button.setAttribute("aria-pressed",
      button.dataset.row === state.at);
    known?.setAttribute("tabindex", -1);
    (next ?? node.querySelector("[data-at]"))?.setAttribute("tabindex", 0);
    next?.setAttribute("aria-selected", true);
    for (const list of node.querySelectorAll("[data-axis]")) list.value = selected(frame)[list.dataset.axis];
    node.querySelector("canvas")?.dispatchEvent(new Event("select"));
    const value = i === undefined ? "" : measure.parts ? listed(measure, measure.values[i] ?? []) : valueText(measure,
      i);
    const words = i === undefined ? ""
      : `${block.plane ? frame.keys[i] : itemName(frame, i)}: ${measure.label} ${value}`;
    node.querySelector(".readout")?.replaceChildren(words);
  },
};

// A map as one picture, for thousands of cells: `paint` gives a tone and an amount, `pick` takes a row and a column.

const inks = new Map();
function ink(tone, amount) {  // colours as the canvas takes them, in 64 steps
  const step = Math.round(63 * amount) / 63, key = `${tone} ${step}`;
  if (!inks.has(key)) {
    const probe = document.body.appendChild(el("i", { class: "probe", "--tone": tone,
      "--amount": `${(100 * step).toFixed(1)}%` }));
    inks.set(key, getComputedStyle(probe).backgroundColor);
    probe.remove();
  }
  return inks.get(key);
}

// Names along an edge, thinned evenly, with their place as a share of the edge.
const thinned = (names, most) => names.flatMap((name, i) => (i % Math.ceil(names.length / Math.max(most, 1)) ? []
  : [[name, (i + 0.5) / names.length]]));

function plane({ rows, columns, paint, pick, at, label, title, over, cell, most = Infinity, edge = 108,
  under = false }) {
  const canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": label, "data-focus": `plane ${label}` });
  const box = el("div", { class: "plane", "--edge": `${edge}px` });
  let size = [1, 1];
  const repaint = () => {
    const context = canvas.getContext("2d"), [wide, tall] = size, sharp = window.devicePixelRatio || 1;
    inks.clear();
    [canvas.width, canvas.height] = [wide * columns.length * sharp, tall * rows.length * sharp];
    context.scale(sharp, sharp);
    context.fillStyle = ink("var(--middle)", 0);
    context.fillRect(0, 0, wide * columns.length, tall * rows.length);
    rows.forEach((_, row) => columns.forEach((_, column) => {
      const tone = paint(row, column);
      if (!tone) return;
      const inset = tone[2] ? 0.28 : 0;  // a small square: negative
      context.fillStyle = ink(tone[0], tone[1]);
      context.fillRect((column + inset) * wide, (row + inset) * tall, (1 - 2 * inset) * wide + 0.5 * !inset,
        (1 - 2 * inset) * tall + 0.5 * !inset);
    }));
    over?.(context, wide, tall, ink("var(--ink)", 1));
    const [row, column] = at();
    if (row < 0 || column < 0) return;
    context.strokeStyle = ink("var(--ink)", 1);
    context.lineWidth = 1.5;
    context.strokeRect(column * wide - 1, row * tall - 1, wide + 2, tall + 2);
  };
  const where = (event) => {
    const { left, top, width, height } = canvas.getBoundingClientRect();
    const within = (share, count) => Math.min(Math.max(Math.floor(share * count), 0), count - 1);
    return [within((event.clientY - top) / height, rows.length), within((event.clientX - left) / width,
      columns.length)];
  };
  canvas.addEventListener("click", (event) => pick(...where(event), false));
  canvas.addEventListener("select", repaint);
  canvas.addEventListener("pointermove", (event) => {
    canvas.title = title?.(...where(event)) ?? "";
    if (under) pick(...where(event), false);
  });
  canvas.addEventListener("keydown", (event) => walk(event, { rows, columns }, ...at(), (row, column) =>
    pick(row, column, true)));
  new ResizeObserver(() => {
    const room = Math.min(box.clientWidth - edge - 8, most);
    const next = [Math.max(room / columns.length, 0.5), cell ? Math.min(room / columns.length, cell)
      : Math.max(2, Math.min(22, 620 / rows.length))];
    if (room <= 0 || String(next) === String(size)) return;
    size = cell ? [next[1], next[1]] : next;
    Object.assign(canvas.style, { width: `${size[0] * columns.length}px`, height: `${size[1] * rows.length}px` });
    const names = (values, kind, most) => el("div", { class: kind, "aria-hidden": "true" }, thinned(values, most)
      .map(([name, share]) => el("span", { "--at": share, title: name }, name)));
    const upright = columns.some((name) => name.length > 5);
    box.replaceChildren(names(rows, "names", Math.floor(size[1] * rows.length / 12)), canvas, el("span"),
      names(columns, upright ? "columns upright" : "columns",
        Math.floor(size[0] * columns.length / (upright ? 14 : 44))));
    box.querySelector(".columns").style.width = canvas.style.width;
    repaint();
  }).observe(box);
  return Object.assign(box, { repaint });
}

function planeOf(block, frame, measure) {
  const paint = painter(measure);
  const known = (row, column) => frame.grid[row][column];
  return plane({
    rows: frame.rows, columns: frame.columns, label: `${measure.label}, ${block.title}`, cell: block.cell,
      edge: block.edge, most: block.most,
    paint: (row, column) => (known(row, column) < 0
      || (measure.above && !(measure.low[known(row, column)] > measure.null[known(row, column)])) ? null
      : paint(known(row, column))),
    at: () => selected(frame), title: (row, column) => (known(row, column) < 0 ? ""
      : `${frame.keys[known(row, column)]}: ${valueText(measure, known(row, column))}`),
    pick: (row, column, step) => known(row, column) >= 0 && choose({ at: frame.keys[known(row, column)] }, step),
    over: (context, wide, tall, colour) => {
      Object.assign(context, { strokeStyle: colour, lineWidth: 1.5 });
      context.beginPath();
      const crosses = block.marks ?? [], path = measure.path ?? [];
      path.forEach((row, column) => context[column ? "lineTo" : "moveTo"]((column + 0.5) * wide, (row + 0.5) * tall));
      for (const [row, column] of crosses) {
        for (const sign of [-1, 1]) {
          context.moveTo((column + 0.5) * wide - 4, (row + 0.5) * tall - 4 * sign);
          context.lineTo((column + 0.5) * wide + 4, (row + 0.5) * tall + 4 * sign);
        }
      }
      context.stroke();
    },
  });
}
