// Trends of a survey, from its models: over steps, with the layers of a run that is chosen, by size, by architecture.

const grouped = (rows, name) => rows.reduce((groups, row) => groups.set(name(row), [...(groups.get(name(row)) ?? []),
  row]), new Map());
const classTone = (i) => `var(--class${i % 10})`;
const points = (rows) => ({ values: rows.map((row) => row[state.metric]), items: rows.map((row) => row.name),
  hrefs: rows.map((row) => row.href) });
const lineOf = (name, tone, rows, over) => ({ name, tone, x: rows.map((row) => row[over]), ...points(rows) });

function overSteps({ called, layers }, { models, runs, depths }) {
  const lines = runs.map((run, i) => {
    const rows = models.filter((row) => row.run === run).sort((one, other) => one.step - other.step);
    return { ...lineOf(run, classTone(i), rows, "step"), rows };
  });
  const keys = lines.map(({ name, tone }) => ({ name, tone, run: name }));
  const shown = lines.find(({ name }) => name === state.run);
  if (!shown) return { note: `${called}; click a run for its layers`, keys, series: lines };
  const of = (row) => row[layers] ?? [], count = Math.min(...shown.rows.map((row) => of(row).length));
  const series = Array.from({ length: count }, (_, layer) => {
    const values = shown.rows.map((row) => of(row)[layer]);
    return { name: `layer ${layer}`, title: `layer ${layer}: ${signed(values.at(-1))} at the end`, x: shown.x, values,
      thin: true, tone: depths[Math.round((layer / Math.max(count - 1, 1)) * (depths.length - 1))] };
  });
  return { note: `${called} of ${shown.name}; its layers from light (first) to dark (last)`, keys, series: [...series, { ...shown, tone: "var(--ink)" }] };
}

// A run counts once, by its last checkpoint, over sizes and architectures.
function bySize({ called }, { models }, tones) {
  const families = grouped(models.filter((row) => row.last), (row) => row.family);
  return { note: `${called} by number of parameters`, keys: [...tones].map(([name, tone]) => ({ name, tone })),
    series: [...families].map(([name, rows]) => lineOf(name, tones.get(name), rows, "parameters")) };
}

function byArchitecture({ called }, { models }, tones) {
  const groups = grouped(models.filter((row) => row.last), (row) => `${row.family}, ${row.attention}`);
  const median = ({ values }) => {
    const order = [...values].sort((a, b) => a - b), half = order.length / 2;
    return (order[Math.ceil(half) - 1] + order[Math.floor(half)]) / 2;
  };
  const rows = [...groups].map(([name, members]) => ({ name, tone: tones.get(members[0].family), ...points(members) }));
  return { note: `${called}; the line is the median`, rows: rows.sort((one, other) => median(other) - median(one)) };
}

COMPONENTS.trend = {
  uses: ["metric", "run", "log"],
  draw: ({ over, title }) => {
    const tab = current(), metric = tab.metrics[state.metric];
    if (!metric) return [];
    const facts = { title, dots: true, least: 0, most: 0, form: metric.form };
    const families = [...new Set(tab.models.map((row) => row.family))].sort();
    const tones = new Map(families.map((family, i) => [family, classTone(i)]));
    if (over === "architecture") return COMPONENTS.groups.draw({ ...facts, ...byArchitecture(metric, tab, tones) });
    const chart = over === "step" ? { ...overSteps(metric, tab), steps: true, unit: "step" }
      : { ...bySize(metric, tab, tones), sizes: true, joined: false, unit: "parameters" };
    return COMPONENTS.curve.draw({ ...facts, ...chart });
  },
};
