// A table that is sorted by a click on a column's name; the table of a frame also selects its items.

const compare = new Intl.Collator("en", { numeric: true }).compare;
const sortValue = (column, i) => column.order?.[i] ?? (column.words ? column.words[i] : column.values[i]) ?? null;

// Rows in the order of `sort`, such as "-role"; those without a value come last either way, ties keep their order.
function sorted(columns, rows, sort) {
  const down = sort.startsWith("-"), column = columns.find((one) => one.key === sort.replace(/^-/, ""));
  if (!column) return down ? [...rows].reverse() : rows;
  const value = new Map(rows.map((i) => [i, sortValue(column, i)])), way = down ? -1 : 1;
  const order = (one, other) => (typeof one === "string" ? compare(one, other) : one - other);
  return [...rows].sort((i, j) => (value.get(i) === null) - (value.get(j) === null)
    || (value.get(i) === null ? 0 : way * order(value.get(i), value.get(j))));
}

function heading(column, sort, press) {
  const key = sort.replace(/^-/, ""), wordy = (column.words && !column.right) || column.values.some((value) =>
    typeof value === "string");
  const next = key === column.key ? (sort.startsWith("-") ? column.key : `-${column.key}`) : wordy ? column.key
    : `-${column.key}`;
  const th = el("th", { scope: "col", class: wordy ? "words" : "", title: column.unit ?? null },
    el("button", { type: "button", "data-sort": column.key, "data-focus": `sort ${column.key}`, onclick: () =>
      press(next) }, column.label));
  if (key === column.key) th.setAttribute("aria-sort", sort.startsWith("-") ? "descending" : "ascending");
  return th;
}

// `names` head the rows; `keys`, if given, make a row select an item of the frame.
function grid(columns, rows, sort, press, { keys, hrefs, label, most = Infinity } = {}) {
  const ordered = sorted(columns, rows, sort), shown = ordered.slice(0, most);
  const body = shown.map((i) => el("tr", keys ? { "data-item": keys[i], onclick: () => choose({ at: keys[i] }) } : {},
    columns.map((column, place) => {
      const words = column.words?.[i] ?? text(column.values[i], column.form), note = column.notes?.[i] ?? (column.low
        ? valueText(column, i) : null);
      const inner = keys && !place ? el("button", { type: "button", "data-focus": `row ${keys[i]}` }, words)
        : place ? words : linked(hrefs?.[i], words);
      const level = column.interval && column.low ? el("span", { class: "muted" },
        full(null, column.form, column.low[i], column.high[i], column.null?.[i]).slice(1)) : null;
      return el(place ? "td" : "th", { scope: place ? null : "row", class: (column.words && !column.right)
        || typeof column.values[i] === "string" ? "words" : "", title: note, "data-cell": column.key },
        column.tones?.[i] ? swatch(column.tones[i], inner) : inner, level);
    })));
  return el("div", { class: "wide" }, el("table", { "aria-label": label ?? null },
    el("thead", {}, el("tr", {}, columns.map((column) => heading(column, sort, press)))), el("tbody", {}, body)),
  ordered.length > shown.length ? el("p", { class: "muted" }, `the first ${shown.length} of ${ordered.length} rows`)
    : null);
}

const cellValue = (column, i) => column.words?.[i] ?? column.values[i] ?? null;
const asCsv = (columns, rows) =>
  [columns.flatMap((one) => [one.label, ...(one.low ? [`${one.label} low`, `${one.label} high`] : [])]),
  ...rows.map((i) => columns.flatMap((one) => [cellValue(one, i), ...(one.low ? [one.low[i], one.high[i]] : [])]))];

// A small table with columns of its own, sorted in place. `top` limits its rows, `filter` adds a field.
COMPONENTS.table = {
  draw: (block) => {
    const columns = block.columns.map((column) => ({ ...column, values: unpack(column.values ?? column.words) }));
    let sort = block.sort ?? "", words = "", top = block.top ?? Infinity;
    const rows = () => columns[0].values.map((_, i) => i).filter((i) => words.toLowerCase().split(/\s+/)
      .every((part) => !part || columns.some((column) => String(cellValue(column, i)).toLowerCase().includes(part))));
    const box = el("div");
    const redraw = () => {
      box.replaceChildren(grid(columns, rows(), sort, (next) => {
        sort = next;
        redraw();
        box.querySelector(`[data-sort="${CSS.escape(next.replace(/^-/, ""))}"]`)?.focus();
      }, { ...block, most: top, label: block.title }));
      if (rows().length > top) box.querySelector("p").replaceChildren(el("button", { class: "more", type: "button",
        onclick: () => { top = Infinity; redraw(); } }, `show all ${rows().length}`));
    };
    const dim = () => {  // points of the same items, in charts
      const kept = new Set(rows().map((i) => cellValue(columns[0], i)));
      for (const dot of document.querySelectorAll("circle.dot[data-item]")) dot.classList.toggle("faint",
        !kept.has(dot.dataset.item));
    };
    redraw();
    const field = block.filter ? el("input", { type: "search", placeholder: block.filter,
      "aria-label": "filter by words", oninput: (event) => { words = event.target.value; redraw(); dim(); } }) : null;
    return framed(block, () => asCsv(columns, rows()), field, box);
  },
};

// All items of the frame by all of its measures, drawn once it is opened.
COMPONENTS.items = {
  uses: ["sort", "open"],
  draw: (block) => {
    const frame = frameOf(), all = measures().filter((one) => !one.parts)
      .map((one) => ({ ...one, words: one.words ?? (one.names ? one.values.map((value) => one.names[value] ?? "none")
      : null) }));
    const columns = [{ key: "item", label: frame.nouns?.[1] ?? "head", values: frame.keys, words: frame.keys },
      ...(block.columns ?? []), ...all];
    const rows = frame.keys.map((_, i) => i);
    const content = () => [copyButton(`all ${frame.nouns?.[1] ?? "head"}s`,
      () => asCsv(columns, sorted(columns, rows, state.sort))),
      el("p", { class: "muted" }, "Click a column’s name to sort, a row to select it."),
      grid(columns, rows, state.sort, (sort) => choose({ sort }), { keys: frame.keys, label: block.title,
        most: 3000 })];
    const open = Boolean(state.open || state.sort), box = el("details", { id: "table", open: open && "open" },
      el("summary", {}, block.title ?? `All ${frame.nouns?.[1] ?? "head"}s as a table`), open ? content() : null);
    box.addEventListener("toggle", () => {
      state.open = box.open ? "yes" : "";
      if (box.open && box.childNodes.length === 1) {
        box.append(...content());
        COMPONENTS.items.mark(box);
      }
    });
    return box;
  },
  mark: (node) => {
    for (const row of node.querySelectorAll("tr[data-item]")) row.setAttribute("aria-selected",
      row.dataset.item === state.at);
    const wide = node.querySelector(".wide"), by = wide?.querySelector("[aria-sort]");  // kept in sight
    if (by) {
      const [least, most] = [by.offsetLeft + by.offsetWidth - wide.clientWidth, by.offsetLeft - 60];
      wide.scrollLeft = Math.min(Math.max(wide.scrollLeft, least), most);
    }
  },
};

// The rows of the selected column of the frame by one measure, the largest first, such as the sources of a head.
COMPONENTS.sources = {
  uses: ["at"],
  draw: (block) => {
    const frame = frameOf(), [, column] = selected(frame), measure = measureOf(block.measure);
    const items = frame.rows.map((_, row) => frame.grid[row][column]).filter((i) => number(measure.values[i]))
      .sort((i, j) => measure.values[j] - measure.values[i]);
    const of = (name) => items.map((i) => measure[name][i]);
    const between = items.map((i) => `${text(measure.low[i], measure.form)} to ${text(measure.high[i], measure.form)}`);
    const columns = [
      { key: frame.nouns[0], label: frame.nouns[0], values: items.map((i) => frame.rows[frame.places[i][0]]) },
      { key: "share", label: "share", values: of("values"), form: measure.form },
      { key: "95 % interval", label: "95 % interval", values: between, order: of("low") },
      { key: "null", label: "null", values: of("null"), form: measure.form },
    ];
    const keys = items.map((i) => frame.keys[i]);
    return COMPONENTS.table.draw({ ...block, type: "table", note: `head ${frame.columns[column]}`, columns, keys,
      top: 10 });
  },
  mark: (node) => COMPONENTS.items.mark(node),
};
