// Differences between the first model and another: the change of each head's QK matrix M, layers by heads.

const MOVED = ["layer", "head", "change", "symmetric", "skew", "folded"];
const small = (value) => (value === null ? "–" : figure3(value));

// The model that is compared with the first: the selected one, or the second if the first is selected.
const against = () => Math.max(state.model, 1);

function movedCell(row, most) {
  const [layer, head, change, symmetric, skew] = row;
  const words = `${layerName(layer)}, head ${head}: ${small(change)} of ‖M‖, symmetric ${small(symmetric)}, skew ${small(skew)}`;
  return el("span", {
    class: "cell", role: "gridcell", tabindex: -1, title: words, "aria-label": words, "data-moved": `${layer}.${head}`,
    "--tone": "var(--ink)", "--amount": `${(100 * (most ? (change ?? 0) / most : 0)).toFixed(0)}%`,
    onclick: () => choose({ model: against(), layer, head }),
  });
}

function movedMap(rows) {
  const most = Math.max(...rows.map((row) => row[2] ?? 0));
  const layers = [...new Set(rows.map((row) => row[0]))];
  const tall = `${Math.max(9, Math.min(28, Math.floor(300 / layers.length)))}px`;
  const lines = layers.map((layer) => {
    const own = rows.filter((row) => row[0] === layer);
    return el("div", { class: "row", role: "row" },
      el("span", { class: "number", title: labelOf(layer) }, String(layer)),
      el("div", { class: "cells" }, own.map((row) => movedCell(row, most))),
      el("span", { class: "muted" }, small(Math.max(...own.map((row) => row[2] ?? 0)))));
  });
  return el("div", { class: "grid", role: "grid", "aria-label": "change of every head", "--tall": tall }, lines);
}

function movedTable(rows) {
  const ranked = rows.filter((row) => row[2] || row[5]).sort((one, other) => (other[2] ?? 0) - (one[2] ?? 0)).slice(0, 12);
  return el("div", { class: "wide" }, el("table", {},
    el("caption", { class: "muted" }, "Heads that changed most, in units of ‖M‖"),
    el("thead", {}, row(heading("head"), MOVED.slice(2).map((name) => heading(name)))),
    el("tbody", {}, ranked.map((one) => row(el("th", { scope: "row" }, `${one[0]}.${one[1]}`),
      one.slice(2).map((value) => el("td", {}, small(value))))))));
}

function changes() {
  const box = document.getElementById("changes"), change = DATA.changes[against() - 1];
  box.hidden = !change;
  if (!change) return;
  const { same, changed, missing, new: added } = change.tensors;
  const counts = [`${same} of ${same + changed} tensors read are identical`,
    missing ? `${missing} only in the first` : null, added ? `${added} only in the second` : null];
  const moved = change.rows?.some((row) => row[2] || row[5]);
  const none = change.rows ? "No head differs: all query and key weights are identical."
    : `The change of heads was not measured: ${change.why}.`;
  put("changes",
    el("div", { class: "bar" }, el("h3", {}, `Change of M, ‖ΔM‖/‖M‖: ${change.of} compared with ${change.from}`),
      moved ? copyButton("the change", () => [MOVED, ...change.rows]) : null),
    el("p", { class: "muted" }, [counts.filter(Boolean).join(", "), ...change.notes].join(". ") + "."),
    moved ? movedMap(change.rows) : el("p", {}, none), moved ? movedTable(change.rows) : null);
}
