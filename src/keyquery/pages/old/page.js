// The selection and its URL fragment: #layer.head or #layer, preceded by m1: for the second model.
// Each selection is an entry in the browser history.

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

function settle() {  // after a change of model or layer, the view or head may not exist
  if (!views().includes(state.view)) state.view = firstView();
  if (!layerRow(state.layer)) state.layer = model().layers[0].layer;
  if (state.head !== null && !find(state.layer, state.head)) state.head = ofLayer(state.layer)[0].head;
}

let stepping = false;  // whether the last selection was by arrow key: a whole walk is one history entry

function choose(change, step = false) {
  const held = document.activeElement?.dataset.focus;
  Object.assign(state, change);
  settle();
  render();
  // Restore the keyboard focus after redrawing: the same button, or the cell that is now selected.
  const again = held && document.querySelector(`[data-focus="${CSS.escape(held)}"]:not([tabindex="-1"])`);
  again?.focus({ preventScroll: true });
  try {
    if (address() !== location.hash) history[step && stepping ? "replaceState" : "pushState"](null, "", address());
  } catch {
    // a page inside a notebook has no URL
  }
  stepping = step;
}

// Settings that differ from the defaults follow the place: #3.1?view=raw&map=stable_rank&sort=-raw.symmetry
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
  if (location.hash.length < 2) return begin();  // also when going back to the first entry
  const match = /^#(?:m(\d+):)?(\d+)(?:\.(\d+))?(?:\?(.*))?$/.exec(location.hash);
  if (!match) return;
  const [, at, layer, head, rest] = match, settings = new URLSearchParams(rest ?? "");
  if (Number(at ?? state.model) < DATA.models.length) state.model = Number(at ?? state.model);
  if (layerRow(Number(layer))) {
    Object.assign(state, { layer: Number(layer), head: head === undefined ? null : Number(head) });
  }
  const sort = settings.get("sort") ?? "";
  Object.assign(state, { view: settings.get("view") ?? firstView(), figure: settings.get("map") ?? FIRST });
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
