// Texts: tokens in a strip, and attention across modalities.

// A text, or windows of it, with the query and the key marked: texts is a list of {before, tokens, marks, from}.
COMPONENTS.strip = {
  draw: (block) => framed(block, null, block.texts.map(({ before, tokens, marks = {}, from = 0 }) =>
    el("p", { class: "strip" }, before ? el("b", {}, `${before} `) : null, tokens.map((token, i) =>
      (token === null ? " … " : el("span",
        { class: marks[i] ?? "", title: `${from + i}${marks[i] ? `, ${marks[i].replace("-token", "")}` : ""}` },
        word(token))))))),
};

// Attention between modalities, such as from words to patches of an image: what each token gives or receives.
COMPONENTS.modalities = {
  uses: ["at", "way", "token", "popular"],
  draw: (block) => {
    const { tokens, labels, picture } = current().text,
      way = block.maps.findIndex((map) => `${map.from} ${map.to}` === state.way);
    const map = block.maps[Math.max(way, 0)], of = (name) => labels.flatMap((label, place) => (label === name ? [place]
      : []));
    const [keys, queries] = [of(map.from), of(map.to)], flat = unpack(map.map), popularity = map.popularity;
    const raw = queries.map((_, i) => flat.slice(i * keys.length, (i + 1) * keys.length));
    const values = state.popular === "no" && popularity ? raw.map((line) => specific(line, popularity)) : raw;
    const [asked, place] = state.token.split("/").map(Number);
    const [side, at] = state.token && place < [keys, queries][asked]?.length ? [asked, place] : [null, null];
    const columns = keys.map((_, j) => values.map((line) => line[j])), sum = (line) => line.reduce((total, value) =>
      total + value, 0);
    const sums = [side === 1 ? values[at] ?? [] : columns.map((line) => sum(line) / line.length), side === 0
      ? columns[at] ?? [] : values.map(sum)];
    const lights = sums.map((line, own) => line.map((value, i) => (own === side ? Number(i === at)
      : value / (Math.max(...line) || 1))));
    const pick = (own, i) => choose({ token: state.token === `${own}/${i}` ? "" : `${own}/${i}` });
    const panel = (name, own, places) => el("div", { class: "panel" },
      el("h3", {}, `${name} (${own ? "queries" : "keys"})`), name === picture?.modality
      ? patches(picture, lights[own], own, own === side ? at : null, pick)
      : el("div", {}, places.map((place, i) => el("button", {
        type: "button", class: lights[own][i] > 0.6 ? "lit bright" : "lit", "aria-pressed": own === side && i === at,
          "data-token": place, "data-light": (lights[own][i] ?? 0).toFixed(3),
        "data-focus": `token ${place}`, title: `token ${place}`,
          "--amount": `${(100 * (lights[own][i] ?? 0)).toFixed(0)}%`, onclick: () => pick(own, i),
      }, word(tokens[place])))));
    const name = (place) => `“${word(tokens[place])}”`, listed = (line, places) =>
      line.map((value, i) => [value, name(places[i])]).sort((a, b) => b[0] - a[0]).slice(0, 3)
      .map(([value, which]) => `${which} ${FORMS.percent1(value)}`).join(", ");
    const share = FORMS.percent1(sum(values.map(sum)) / values.length);
    const words = !values.flat().some((value) => value > 0)
      ? "No attention in this direction: the mask does not allow it."
      : side === null ? `On average, a token of ${map.to} puts ${share} of its attention on ${map.from}.`
        : side === 1 ? `${name(queries[at])} attends to ${listed(values[at], keys)}`
          : `${name(keys[at])} is attended to by ${listed(columns[at], queries)}`;
    const panels = [panel(map.from, 0, keys), panel(map.to, 1, queries)];
    const rows = () => [["to", "from", "attention"],
      ...values.flatMap((line, i) => line.map((value, j) => [tokens[queries[i]], tokens[keys[j]], value]))];
    return framed({ ...block, title: `${map.to} attends to ${map.from}`, note: "click a token to see its attention" },
      rows,
      el("div", { class: "bar" }, switchOf("direction", block.maps.map((one) => pressable(`${one.from} → ${one.to}`,
        one === map, { way: `${one.from} ${one.to}`, token: "" }))),
        popularity ? switchOf("popularity", [["attention", ""], ["without popularity", "no"]].map(([label, popular]) =>
          pressable(label, state.popular === popular, { popular },
          { title: popular ? "without what every query gives to a key: attention sinks" : "as in the model" })))
            : null),
      el("div", { class: "panels" }, map.to === picture?.modality ? panels.reverse() : panels),
        el("p", { class: "readout", "aria-live": "polite" }, words));
  },
};

// A row of attention with the key-only term of the scores taken out: A·exp(−p), with the same sum.
function specific(line, popularity) {
  const rest = line.map((value, i) => value * Math.exp(-popularity[i])), sum = (values) =>
    values.reduce((total, value) => total + value, 0), whole = sum(rest);
  return rest.map((value) => (whole > 0 ? (value * sum(line)) / whole : 0));
}

function patches({ data, size: [tall, wide], grid: [rows, columns], places }, light, own, spot, pick) {
  const [high, broad] = [tall / rows, wide / columns], box = ([row, column]) =>
    ({ x: column * broad, y: row * high, width: broad, height: high });
  const veils = places.map((place, i) => draw("rect", { class: "veil", ...box(place),
    "fill-opacity": (0.78 * (1 - (light[i] ?? 0))).toFixed(3), "data-patch": i,
    "data-light": (light[i] ?? 0).toFixed(3), onclick: () => pick(own, i) }));
  return draw("svg", {
    class: "seen", viewBox: `0 0 ${wide} ${tall}`, role: "img", tabindex: 0, "data-focus": "image",
      "aria-label": "the image as seen by the model; brighter patches receive more attention; arrow keys select one",
    onkeydown: (event) => {
      const [row, column] = spot === null ? [0, 0] : places[spot];
      walk(event, { rows: Array(rows).fill(), columns: Array(columns).fill() }, row, column, (to, across) => {
        const i = places.findIndex((place) => place[0] === to && place[1] === across);
        if (i >= 0 && i !== spot) pick(own, i);
      });
    },
  }, draw("image", { href: `data:image/jpeg;base64,${data}`, x: 0, y: 0, width: wide, height: tall,
    preserveAspectRatio: "none" }), veils, spot === null ? null
    : draw("rect", { class: "spot", ...box(places[spot]) }));
}
