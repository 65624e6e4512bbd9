"use strict";
// Highlights the edges of one token in every graph; a second click on it, or elsewhere, deselects it.
(() => {
  let kept = null;
  const show = (node) => {
    for (const graph of document.querySelectorAll("svg.graph[role]")) {
      const near = new Set(node === null ? [] : [node]);
      for (const edge of graph.querySelectorAll(".edge")) {
        const { i, j } = edge.dataset;
        const on = node !== null && (i === node || j === node);
        edge.classList.toggle("on", on);
        if (on) near.add(i).add(j);
      }
      for (const each of graph.querySelectorAll(".node")) each.classList.toggle("on", near.has(each.dataset.node));
      graph.classList.toggle("picked", node !== null);
    }
    for (const word of document.querySelectorAll(".word"))
      word.setAttribute("aria-pressed", String(word.dataset.node === kept));
  };
  const at = (event) => event.target.closest ? event.target.closest("[data-node]") : null;
  document.addEventListener("click", (event) => {
    const node = at(event);
    kept = node === null || node.dataset.node === kept ? null : node.dataset.node;
    show(kept);
  });
  document.addEventListener("mouseover", (event) => {
    const node = at(event);
    show(node === null ? kept : node.dataset.node);
  });
})();
