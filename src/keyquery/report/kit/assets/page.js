// What is chosen, and the address that names it: #layer.head, #layer, and before it m1: for the second model.
// Each choice is a step that the browser's Back takes back.

function render() {
  header();
  summary();
  map();
  triangles();
  changes();
  if (state.head === null) layer();
  else head();
  table();
  put("notes", model().notes.map((note) => el("p", {}, note)));
}

function settle() {  // a change of model or layer may leave the state without its view or head
  if (!views().includes(state.view)) state.view = firstView();
  if (!layerRow(state.layer)) state.layer = model().layers[0].layer;
  if (state.head !== null && !find(state.layer, state.head)) state.head = ofLayer(state.layer)[0].head;
}

let stepping = false;  // whether the last choice was a step of a walk over the map: all of it is one step back

function choose(change, step = false) {
  const held = document.activeElement?.dataset.focus;
  Object.assign(state, change);
  settle();
  render();
  // What was drawn anew keeps the keyboard: the same button, or the cell that is chosen now.
  const again = held && document.querySelector(`[data-focus="${CSS.escape(held)}"]:not([tabindex="-1"])`);
  again?.focus({ preventScroll: true });
  try {
    if (address() !== location.hash) history[step && stepping ? "replaceState" : "pushState"](null, "", address());
  } catch {
    // a page inside a notebook has no address
  }
  stepping = step;
}

// What is not as at first is named behind the place: #3.1?view=raw&map=stable_rank&sort=-raw.symmetry
function address() {
  const place = state.head === null ? `${state.layer}` : `${state.layer}.${state.head}`, rest = new URLSearchParams();
  if (state.view !== firstView()) rest.set("view", state.view);
  if (state.figure !== FIRST) rest.set("map", state.figure);
  if (state.sort || state.down) rest.set("sort", (state.down ? "-" : "") + state.sort);
  return `#${DATA.models.length > 1 ? `m${state.model}:` : ""}${place}${String(rest) && `?${rest}`}`;
}

const firstView = () => (hasData() ? "on_data" : "raw");

function begin() {
  Object.assign(state, { model: 0, head: 0, figure: FIRST, sort: "", down: false });
  Object.assign(state, { layer: model().layers[0].layer, view: firstView() });
}

function follow() {
  if (location.hash.length < 2) return begin();  // also the way back to where one came in
  const found = /^#(?:m(\d+):)?(\d+)(?:\.(\d+))?(?:\?(.*))?$/.exec(location.hash);
  if (!found) return;
  const [, at, layer, head, rest] = found, said = new URLSearchParams(rest ?? "");
  if (Number(at ?? state.model) < DATA.models.length) state.model = Number(at ?? state.model);
  if (layerRow(Number(layer))) {
    Object.assign(state, { layer: Number(layer), head: head === undefined ? null : Number(head) });
  }
  const sort = said.get("sort") ?? "";
  Object.assign(state, { view: said.get("view") ?? firstView(), figure: said.get("map") ?? FIRST });
  Object.assign(state, { sort: sort.replace(/^-/, ""), down: sort.startsWith("-") });
  if (sort) document.getElementById("table").open = true;
}

window.addEventListener("hashchange", () => {
  stepping = false;
  follow();
  settle();
  render();
});
document.getElementById("table").addEventListener("toggle", table);
begin();
follow();
settle();
render();
