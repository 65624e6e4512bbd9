// Every head and figure as a table: a column's name sorts by it, a row chooses its head.

let drawn = "";  // what the rows were drawn for: a choice alone does not draw thousands of them anew

const described = (one) => [labelled(one), ...(one.properties ?? [])].join(", ");

function sorted(columns) {
  const by = columns.find((one) => one.key === state.sort), heads = [...model().heads];
  if (!by && state.sort !== "label") return state.down ? heads.reverse() : heads;
  const value = by ? by.of : described, missing = (one) => (value(one) ?? null) === null;
  const words = new Intl.Collator("en", { numeric: true }).compare, way = state.down ? -1 : 1;
  const order = (one, other) => way * (by ? value(one) - value(other) : words(value(one), value(other)));
  // Heads without the figure stand at the end, both ways; equal ones stay in their order.
  return heads.sort((one, other) => missing(one) - missing(other) || (missing(one) ? 0 : order(one, other)));
}

function sorter(key, label, kind) {
  const now = state.sort === key;
  // A figure is first sorted from the most on, words and heads from the first.
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
    const wide = box.querySelector(".wide"), by = wide?.querySelector("[aria-sort]");  // it stays, or comes, in sight
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
        el("td", { title: each.ends(one) ? told(each, one) : null }, figure(each.name, each.of(one)))));
  });
  const top = el("tr", {}, sorter("", "head", "words"), sorter("label", "label", "words"),
    columns.map((each) => sorter(each.key, each.label, "")));
  const rows = () => [["layer", "head", "label", "evidence", "properties", ...columns.map((each) => each.key.replace(".", "_"))],
    ...sorted(columns).map((one) => [one.layer, one.head, one.label, one.evidence,
      (one.properties ?? []).join(" "), ...columns.map((each) => each.of(one))])];
  return [copyButton("all heads", rows),
    el("p", { class: "muted" }, "A column’s name sorts by it; a row shows its head above."),
    el("div", { class: "wide" }, el("table", { "aria-label": `every head of ${model().name}` },
      el("thead", {}, top), el("tbody", {}, body)))];
}
