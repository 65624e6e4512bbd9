// The selected item: its name, marks and sentences, and blocks whose data is given per item; and rows of bars or dots.

COMPONENTS.detail = {
  uses: ["at", "view", "way", "token", "popular"],  // also what its blocks use
  draw: (block) => {
    const frame = frameOf(), i = frame.index.get(state.at), row = i === undefined ? current().rows?.[state.at] : null;
    const item = row ?? (i === undefined ? null : block.items?.[i]);
    if (!item) return [];
    const name = row ? rowName(frame, frame.rows.indexOf(state.at)) : block.named ? frame.keys[i] : itemName(frame, i);
    const about = [i === undefined ? null : current().rows?.[frame.rows[frame.places[i][0]]]?.about, item.about]
      .filter(Boolean).join(" · ");
    const marks = (item.chips ?? []).map(([label, tone, title]) => el("span", { class: tone ? "chip toned" : "chip",
      "--tone": tone ?? "inherit", title: title ?? block.hints?.[label[0]] ?? null }, label));
    const blocks = (item.blocks ?? []).map((own, k) => own && { ...(!own.type && block.blocks?.[own.of ?? k]), ...own })
      .filter(Boolean);
    return [
      el("div", { class: "headline" }, el("h2", {}, name[0].toUpperCase() + name.slice(1)), marks),
        about ? el("p", { class: "muted" }, about) : null,
      (item.sentences ?? []).map((sentence) => el("p", {}, sentence)), el("div", { class: "blocks" },
        blocks.map(drawn)),
    ].flat();
  },
};

// The values of the selected item, from the measures of the frame.
const valuesOf = (keys) => {
  const i = frameOf().index.get(state.at);
  return keys.map((key) => measureOf(key)).map((one) => (number(one.values[i]) ? [one.values[i], one.low?.[i],
    one.high?.[i], one.null?.[i]] : null));
};

// A row per name: a bar or a dot with its interval on a common axis, the null level as a tick, and the value as text.
// Rows are [value, low, high, null, others]. Hollow: not in `filled`, or not beyond `hollow`, "zero" or "null".
COMPONENTS.bars = {
  draw: (block) => {
    const rows = (block.rows ?? valuesOf(block.measures)).map((row, k) => row && { name: block.names[k],
      tone: block.tones?.[k] ?? "var(--muted)", k, value: row[0], low: row[1], high: row[2], level: row[3],
      others: row[4] ?? [] })
      .filter((row) => row && row.value !== null);
    const ends = rows.flatMap((row) => [row.value, row.low, row.high, row.level]).filter(number);
    const low = Math.min(block.least ?? 0, ...ends), high = Math.max(block.most ?? 0, ...ends, low + 1e-12),
      share = (value) => (value - low) / (high - low);
    const lines = rows.map((row) => {
      const hollow = block.filled ? !block.filled.includes(row.k) : block.hollow === "null"
        ? Math.abs(row.value) <= row.level : block.hollow === "zero" && row.low <= 0 && row.high >= 0;
      const from = Math.min(share(row.value), share(0)), to = Math.max(share(row.value), share(0));
      return [
        el("span", { class: hollow ? "name" : "name sure", "--tone": row.tone }, row.name),
        el("span", { class: "track", "--tone": row.tone }, low < 0 ? el("u", { "--at": share(0) }) : null,
          block.dots ? null : el("i", { "--from": from, "--to": to }), number(row.level)
            ? el("s", { "--at": share(row.level) }) : null,
          number(row.low) ? el("b", { "--from": share(row.low), "--to": share(row.high) }) : null,
          row.others.map(([name, value]) => el("em", { class: "small", "--at": share(value),
            title: `${name}: ${text(value, block.form)}` })),
          block.dots ? el("em", { class: hollow ? "hollow" : "", "--at": share(row.value) }) : null),
        el("span", { "data-bar": row.name }, full(row.value, block.form, row.low, row.high, row.level),
          block.ons?.[row.k] ? `, ${block.ons[row.k]}` : ""),
      ];
    });
    const csv = () => [["name", "value", "low", "high", "null"], ...rows.map((row) => [row.name, row.value, row.low,
      row.high, row.level])];
    return framed(block, csv, el("div", { class: "bars", role: "group", "aria-label": block.title }, lines),
      block.under ? el("p", { class: "muted" }, `${block.prefix ?? ""}${block.under}`) : null);
  },
};

// The scores of the selected head by role: on the data that decides, which comes first, and on others as small dots.
COMPONENTS.roles = {
  draw: (block) => {
    const i = frameOf().index.get(state.at), { names, tones, words } = measureOf("role"), ons = [];
    const rows = names.slice(0, -1).map((name) => {
      const data = (one) => one.label.slice(name.length + 2);
      const [first, ...rest] = measures().filter((one) => one.label.startsWith(`${name}, `) && number(one.values[i]));
      ons.push(first && data(first));
      return first ? [...valuesOf([first.key])[0], rest.map((one) => [data(one), one.values[i]])] : null;
    });
    const note = "scores with 95 % intervals over sequences; tick: null level; filled: named; small: on other data";
    return COMPONENTS.bars.draw({ ...block, name: "roles", title: "Roles", note, names, tones, rows, ons, dots: true,
      form: "fixed", least: rows[names.indexOf("alignment")] ? -1 : 0, most: 1,
      filled: names.map((_, k) => k).filter((k) => words[i].split(", ").includes(names[k])) });
  },
};
