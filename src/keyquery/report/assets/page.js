// What is chosen, and the address that names it: #layer.head, #layer, and before it m1: for the second model.

function render() {
  header();
  summary();
  map();
  triangles();
  if (state.head === null) layer();
  else head();
  table();
  put("notes", model().notes.map((note) => el("p", {}, note)));
}

function settle() {  // a change of model or layer may leave the state without its view or head
  if (state.view !== "parts" && !views().includes(state.view)) state.view = "parts";
  if (!layerRow(state.layer)) state.layer = model().layers[0].layer;
  if (state.head !== null && !find(state.layer, state.head)) state.head = ofLayer(state.layer)[0].head;
}

function choose(change) {
  const held = document.activeElement?.dataset.focus;
  Object.assign(state, change);
  settle();
  render();
  // What was drawn anew keeps the keyboard: the same button, or the cell that is chosen now.
  if (held) document.querySelector(`[data-focus="${held}"]:not([tabindex="-1"])`)?.focus();
  const place = state.head === null ? `${state.layer}` : `${state.layer}.${state.head}`;
  try {
    history.replaceState(null, "", DATA.models.length > 1 ? `#m${state.model}:${place}` : `#${place}`);
  } catch {
    // a page inside a notebook has no address
  }
}

function follow() {
  const found = /^#(?:m(\d+):)?(\d+)(?:\.(\d+))?$/.exec(location.hash);
  if (!found) return;
  const [, at, layer, head] = found;
  if (Number(at ?? state.model) < DATA.models.length) state.model = Number(at ?? state.model);
  if (layerRow(Number(layer))) {
    Object.assign(state, { layer: Number(layer), head: head === undefined ? null : Number(head) });
  }
}

window.addEventListener("hashchange", () => {
  follow();
  settle();
  render();
});
document.getElementById("table").addEventListener("toggle", table);
state.layer = model().layers[0].layer;
follow();
settle();
render();
