// Curves over an axis with intervals, marks and a readout; and points of groups on one axis.

const round = (value) => value.toFixed(1);
function ticks(low, high, most = 4) {
  const raw = (high - low) / most || 1, size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((times) => times * size).find((one) => one >= raw * 0.999),
    first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, i) => (first + i) * step);
}

// Places from the top down, moved so that names at the right end do not overlap.
function apart(wanted, low, high, space = 13) {
  const order = wanted.map((at, i) => [at, i]).sort((a, b) => a[0] - b[0]), places = [];
  let free = low;
  for (const [at, i] of order) free = (places[i] = Math.max(at, free)) + space;
  let least = high;
  for (const [, i] of order.reverse()) least = (places[i] = Math.min(places[i], least)) - space;
  return places;
}

// The row of the frame that the selection is in, as a curve of the measure on the map.
function ofRow(block) {
  const frame = frameOf(), measure = measureOf(state.map), [row] = selected(frame);
  const values = frame.grid[row].map((i) => (i < 0 ? null : measure.values[i]));
  const marks = (current().blocks.find((one) => one.marks)?.marks ?? []).filter(([own]) => own === row)
    .map(([, column]) => Number(frame.columns[column]));
  return { ...block, title: `${frame.rows[row]}: ${measure.label}`, note: measure.unit, x: frame.columns.map(Number),
    marks, logs: measure.logs,
    series: [{ name: measure.label, tone: "var(--above)", values }] };
}

function axes(block, width, height, xs, values) {
  const bad = (value) => !number(value) || (block.logs && value <= 0), level = (value) =>
    (block.logs ? Math.log10(value) : value);
  const known = values.filter((value) => !bad(value)).map(level), list = block.names ? 150 : 0;
  let [low, high] = [Math.min(...known, block.least ?? Infinity), Math.max(...known, block.most ?? -Infinity)];
  if (!(high > low)) [low, high] = [(known[0] ?? 0) - 1, (known[0] ?? 0) + 1];
  const across = (x) => (state.log === "yes" && block.steps ? Math.log10(1 + x) : block.sizes ? Math.log10(x) : x);
  const [left, right, top, bottom] = [50, list ? Math.min(list, width / 4) : 14, 10, height - 24];
  const ends = [...xs, ...(block.xs ?? [])].map(across), [first, last] = [Math.min(...ends), Math.max(...ends)],
    room = block.dots ? 0.03 * (last - first) : 0;
  const x = (value) => left + ((across(value) - first + room) / (last - first + 2 * room || 1)) * (
    width - left - right);
  const y = (value) => (bad(value) ? null : bottom - ((level(value) - low) / (high - low)) * (bottom - top));
  const lines = ticks(low, high).map((value) => {
    const at = bottom - ((value - low) / (high - low)) * (bottom - top);
    return [draw("path", { class: value === 0 && !block.logs ? "axis zero" : "axis",
      d: `M${left} ${round(at)}H${round(width - right)}` }),
      draw("text", { x: left - 6, y: round(at + 4), "text-anchor": "end" }, text(block.logs ? 10 ** value : value,
        block.form === "signed3" ? "figure" : block.form))];
  });
  const decades = block.sizes ? Array.from({ length: 16 }, (_, i) => 10 ** i)
    .filter((value) => value >= Math.min(...xs) && value <= Math.max(...xs)) : [];
  const marked = decades.length > 1 ? decades : block.xs ?? [Math.min(...xs), Math.max(...xs)];
  const name = (value) => (block.sizes ? FORMS.size(value) : FORMS.grouped(value).replace("-", "−"));
  const numbers = marked.map((value, i) => draw("text", { x: round(x(value)), y: height - 6, "text-anchor": block.xs
    || decades.length > 1 ? "middle" : i ? "end" : "start" },
    `${!block.xs && !block.sizes && block.unit ? `${block.unit} ` : ""}${name(value)}`));
  return { x, y, left, right, top, bottom, drawn: [lines, numbers] };
}

COMPONENTS.curve = {
  draw: (given) => {
    const block = given.row ? ofRow(given) : given, series = block.series.map((one, k) =>
      ({ ...one, values: unpack(one.values ?? block.values[k]) }));
    const line = (one) => one.x ?? block.x;
    const readout = el("p", { class: "readout", "aria-live": "polite" });
    const chart = (width) => {
      const height = block.tall ?? 210, all = series.flatMap((one) => [...one.values, ...(one.low ?? []),
        ...(one.high ?? [])]);
      const { x, y, left, right, top, bottom, drawn: axis } = axes(block, width, height, series.flatMap(line), all);
      const shapes = series.map((one) => {
        const points = line(one).map((at, i) => [x(at), y(one.values[i]), i]).filter(([, at]) => at !== null),
          words = one.title ?? one.name;
        const whiskers = one.low ? points.map(([at, , i]) => draw("line", { class: "range", x1: round(at),
          x2: round(at), y1: round(y(one.low[i]) ?? bottom), y2: round(y(one.high[i]) ?? top) })) : [];
        const dots = block.dots || points.length === 1 ? points.map(([at, up, i]) => {
          const dot = draw("circle", { class: "dot", cx: round(at), cy: round(up), r: 4,
            "data-item": one.items?.[i] ?? null },
            draw("title", {}, `${one.items?.[i] ?? words}: ${text(one.values[i], block.form)}`));
          return one.hrefs?.[i] && location.protocol !== "about:"
            ? draw("a", { href: one.hrefs[i], "aria-label": `${one.items[i]}: ${text(one.values[i], block.form)}` },
            dot) : dot;
        }) : [];
        const path = block.joined === false ? null : draw("path", { class: one.thin ? "line thin" : "line",
          d: `M${points.map(([at, up]) => `${round(at)} ${round(up)}`).join("L") || "0 0"}` },
          draw("title", {}, words));
        return draw("g", { "--tone": one.tone }, whiskers, path, dots);
      });
      const limits = (block.limits ?? [])
        .map((value) => draw("path", { class: "limit", d: `M${left} ${round(y(value))}H${round(width - right)}` }));
      const marks = (block.marks ?? []).map((at) => draw("line", { class: "mark", x1: round(x(at)), x2: round(x(at)),
        y1: top, y2: bottom }));
      const ends = block.names ? apart(series.map((one) => (y(one.values.findLast(number)) ?? bottom) + 4), top + 4,
        bottom) : [];
      const names = ends.map((at, k) => draw("text", { class: "named", "--tone": series[k].tone, x: width - right + 6,
        y: round(at) }, short(series[k].name, 20)));
      const cursor = draw("line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
      const picture = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
        "aria-label": block.title }, axis, limits, marks, shapes, names, cursor);
      const nearest = (event) => {
        const at = event.clientX - picture.getBoundingClientRect().left;
        return block.x.reduce((best, value) => (Math.abs(x(value) - at) < Math.abs(x(best) - at) ? value : best),
          block.x[0]);
      };
      if (block.x && series.length <= 8) picture.addEventListener("pointermove", (event) => {
        const at = nearest(event), i = block.x.indexOf(at);
        fill(cursor, { x1: round(x(at)), x2: round(x(at)), visibility: "visible" }, []);
        readout.replaceChildren(`${block.unit ?? ""} ${FORMS.grouped(at)}: `,
          ...series.map((one) => swatch(one.tone,
          `${one.name} ${full(one.values[i], block.form, one.low?.[i], one.high?.[i])} `)));
      });
      if (block.jump) picture.addEventListener("click", (event) => block.jump(nearest(event)));
      block.ready?.((at) => fill(cursor, { x1: round(x(at)), x2: round(x(at)), visibility: "visible" }, []));
      return picture;
    };
    const rows = () => [[block.unit ?? "x", "name", "value", "low", "high"],
      ...series.flatMap((one) => line(one).map((at, i) => [at, one.items?.[i] ?? one.name, one.values[i], one.low?.[i],
      one.high?.[i]]))];
    const keys = block.keys ? el("div", { class: "legend", role: "group", "aria-label": "legend" },
      block.keys.map(({ name, tone, run }) => (run === undefined ? swatch(tone, name)
      : pressable(name, state.run === run, { run: state.run === run ? "" : run }, { "--tone": tone, class: "key",
        "data-run": run })))) : null;
    const log = block.steps ? pressable(state.log === "yes" ? "linear steps" : "logarithmic steps", state.log === "yes",
      { log: state.log === "yes" ? "" : "yes" }, { class: "copy", id: "log" }) : null;
    return framed(block, rows, sized(chart), keys, log, block.x && series.length <= 8 ? readout : null);
  },
  uses: ["map", "at"],
};

// Groups in rows and their values as points on one axis, with a line at the median.
COMPONENTS.groups = {
  draw: (block) => {
    const chart = (width) => {
      const left = Math.min(190, width * 0.4), tall = 22 * block.rows.length + 34,
        values = block.rows.flatMap((row) => row.values);
      const [low, high] = [Math.min(0, ...values), Math.max(0, ...values, 1e-9)], x = (value) =>
        left + 8 + ((value - low) / (high - low || 1)) * (width - left - 22);
      const lines = ticks(low, high).map((value) =>
        [draw("path", { class: value === 0 ? "axis zero" : "axis", d: `M${round(x(value))} 4V${tall - 24}` }),
        draw("text", { x: round(x(value)), y: tall - 8, "text-anchor": "middle" }, text(value))]);
      const rows = block.rows.map((row, i) => {
        const y = 16 + 22 * i, order = [...row.values].sort((a, b) => a - b), half = order.length / 2,
          middle = (order[Math.ceil(half) - 1] + order[Math.floor(half)]) / 2;
        const dots = row.values.map((value, k) => {
          const words = `${row.items[k]}: ${text(value, block.form)}`,
            dot = draw("circle", { class: "dot", cx: round(x(value)), cy: y, r: 4, "data-item": row.items[k] },
            draw("title", {}, words));
          return row.hrefs?.[k] && location.protocol !== "about:"
            ? draw("a", { href: row.hrefs[k], "aria-label": words }, dot) : dot;
        });
        return draw("g", { "--tone": row.tone }, draw("text", { class: "ink", x: left, y: y + 4, "text-anchor": "end" },
          short(row.name, Math.floor(left / 7)), draw("title", {}, `${row.name}: ${order.length}`)),
          order.length > 1 ? draw("line", { class: "median", x1: round(x(middle)), x2: round(x(middle)), y1: y - 8,
            y2: y + 8 }) : null, dots);
      });
      return draw("svg", { viewBox: `0 0 ${width} ${tall}`, width, height: tall, role: "group",
        "aria-label": block.title }, lines, rows);
    };
    return framed(block, () => [["group", "item", "value"],
      ...block.rows.flatMap((row) => row.values.map((value, i) => [row.name, row.items[i], value]))], sized(chart));
  },
};
