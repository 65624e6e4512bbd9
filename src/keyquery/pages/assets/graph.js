// Pictures that come with the page: the triangle of heads, whose bubbles select, and graphs, whose nodes light up.

const pictures = [...document.querySelectorAll("#figures > svg")];

COMPONENTS.triangle = {
  uses: ["tab"],
  draw: (block) => el("div", { class: "static small" }, pictures[block.picture]),
  mark: (node) => {
    const frame = frameOf(), measure = measureOf(state.map), svg = node.querySelector("svg"),
      named = Boolean(measure.names), paint = named && painter(measure);
    svg.classList.toggle("by-name", named);
    for (const dot of svg.querySelectorAll(".head")) {
      const i = frame.index.get(dot.dataset.head), parts = measureOf("parts");
      if (i !== undefined && !dot.querySelector("title")) {
        dot.append(draw("title", {},
          `${itemName(frame, i)}: ${frame.notes?.[i] ?? ""}; ${parts ? listed(parts, parts.values[i] ?? []) : ""}`));
      }
      const tone = named && i !== undefined ? paint(i) : null;
      dot.classList.toggle("chosen", dot.dataset.head === state.at);
      dot.classList.toggle("painted", named);
      if (named) dot.style.setProperty("--paint", tone && tone[0] !== "var(--middle)" ? tone[0] : "var(--line)");
      dot.onclick = () => choose({ at: dot.dataset.head });
    }
    if (named) svg.append(...[...svg.querySelectorAll(".head")].sort((one, other) => rank(frame, measure,
      other) - rank(frame, measure, one)));
  },
};
const rank = (frame, measure, dot) => measure.values[frame.index.get(dot.dataset.head)] ?? Infinity;
   // what is most specific on top

let kept = null;  // the node whose edges are shown
function light(node) {
  for (const graph of document.querySelectorAll("#page svg.graph[role]")) {
    const near = new Set(node === null ? [] : [node]);
    for (const edge of graph.querySelectorAll(".edge")) {
      const { i, j } = edge.dataset, on = node !== null && (i === node || j === node);
      edge.classList.toggle("on", on);
      if (on) near.add(i).add(j);
    }
    for (const dot of graph.querySelectorAll(".node")) dot.classList.toggle("on", near.has(dot.dataset.node));
    graph.classList.toggle("picked", node !== null);
  }
  for (const word of document.querySelectorAll(".word")) word.setAttribute("aria-pressed",
    String(word.dataset.node === kept));
}

// A text or list of names, its nodes as buttons, and graphs over them; a click or the pointer shows a node's edges.
COMPONENTS.graph = {
  draw: (block) => {
    const over = (event) => event.target.closest?.("[data-node]")?.dataset.node ?? null;
    const words = block.words.map(([name, node, kind]) => (node === null ? el("span", { class: "muted" }, `${name} `)
      : el("button", { class: `word ${kind ?? ""}`, type: "button", "data-node": node, "aria-pressed": false,
        title: `${block.noun} ${node}` }, name)));
    const legend = block.legend.map(([kind, name]) => el("span", {},
      pictures.find((svg) => svg.dataset.kind === kind)?.cloneNode(true) ?? null, name));
    const box = el("div", {}, el("p", { class: "words" }, words), el("div", { class: "legend" }, legend),
      el("div", { class: block.pictures.length > 1 ? "rings static" : "static" },
      block.pictures.map((i) => pictures[i])));
    box.addEventListener("click", (event) => light((kept = over(event) === kept ? null : over(event))));
    box.addEventListener("mouseover", (event) => light(over(event) ?? kept));
    box.addEventListener("mouseleave", () => light(kept));
    return framed(block, null, box);
  },
};
