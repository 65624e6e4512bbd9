// A table of all heads and metrics: click a column's name to sort, a row to select its head.

let drawn = "";  // the state of the last drawing: a selection alone does not redraw thousands of rows

const described = (one) => [labelled(one), ...(one.properties ?? [])].join(", ");

function sorted(columns) {
  const by = columns.find((one) => one.key === state.sort), heads = [...model().heads];
  if (!by && state.sort !== "label") return state.down ? heads.reverse() : heads;
  const value = by ? by.of : described, missing = (one) => (value(one) ?? null) === null;
  const words = new Intl.Collator("en", { numeric: true }).compare, way = state.down ? -1 : 1;
  const order = (one, other) => way * (by ? value(one) - value(other) : words(value(one), value(other)));
  // Heads without a value come last in both directions; ties keep their order.
  return heads.sort((one, other) => missing(one) - missing(other) || (missing(one) ? 0 : order(one, other)));
}

function sorter(key, label, kind) {
  const now = state.sort === key;
  // Metrics are first sorted in descending order, words and heads in ascending order.
  const press = () => choose({ sort: key, down: now ? !state.down : kind !== "words" });
  const th = heading("", kind);
  if (now) th.setAttribute("aria-sort", state.down ? "descending" : "ascending");
  th.append(el("button", { type: "button", "data-focus": `sort ${key}`, onclick: press }, label));
  return th;
}

function table() {
  const box = document.getElementById("table"), columns = box.open ? measures() : [];
  const now = JSON.stringify([box.open, state.model, state.sort, state.down]);
  if (now !== drawn) {
    drawn = now;
    const before = box.querySelector(".wide")?.scrollLeft ?? 0;
    box.replaceChildren(box.querySelector("summary"), ...(box.open ? heads(columns) : []));
    const wide = box.querySelector(".wide"), by = wide?.querySelector("[aria-sort]");  // scrolled into view
    const most = by && by.offsetLeft - 60, least = by && by.offsetLeft + by.offsetWidth - wide.clientWidth;
    if (by) wide.scrollLeft = Math.min(Math.max(before, least), most);
  }
  for (const line of box.querySelectorAll("tr[data-head]")) {
    line.setAttribute("aria-selected", line.dataset.head === `${state.layer}.${state.head}`);
  }
}

function heads(columns) {
  const body = sorted(columns).map((one) => {
    const place = `${one.layer}.${one.head}`, go = { type: "button", "data-focus": `row ${place}` };
    return el("tr", { "data-head": place, onclick: () => choose({ layer: one.layer, head: one.head }) },
      el("th", { scope: "row" }, el("button", go, place)), el("td", { class: "words", title: one.reason ?? null }, described(one)),
      columns.map((each) =>
        el("td", { title: each.ends(one) ? valueText(each, one) : null }, each.word ? each.word(one) : figure(each.name, each.of(one)))));
  });
  const top = el("tr", {}, sorter("", "head", "words"), sorter("label", "label", "words"),
    columns.map((each) => sorter(each.key, each.label, "")));
  const rows = () => [["layer", "head", "label", "evidence", "properties", ...columns.map((each) => each.key.replace(".", "_"))],
    ...sorted(columns).map((one) => [one.layer, one.head, one.label, one.evidence,
      (one.properties ?? []).join(" "), ...columns.map((each) => (each.word ?? each.of)(one))])];
  return [copyButton("all heads", rows),
    el("p", { class: "muted" }, "Click a column’s name to sort, a row to show its head above."),
    el("div", { class: "wide" }, el("table", { "aria-label": `every head of ${model().name}` },
      el("thead", {}, top), el("tbody", {}, body)))];
}
