// A point cloud on its path from start to end, with a slider; and ranked lists before and after, joined by lines.

COMPONENTS.cloud = {
  uses: ["over", "hidden"],
  draw: (block) => {
    const { sketch, steps, unit, classes, curves } = block, last = steps.length - 1, count = sketch.classes.length,
      hidden = new Set(state.hidden.split(",").filter(Boolean));
    const flat = [...sketch.frames, sketch.targets], ends = [0, 1]
      .map((axis) => flat.flatMap((one) => one.filter((_, i) => i % 2 === axis)).reduce(([a, b], v) => [Math.min(a, v),
      Math.max(b, v)], [Infinity, -Infinity]));
    const [wide, spans] = [640, ends.map(([low, high]) => high - low)],
      scale = 600 / (Math.max(spans[0], 1.25 * spans[1]) || 1), tall = Math.min(Math.max(spans[1] * scale + 40, 240),
      520);
    const place = (one, i) => [wide / 2 + (one[2 * i] - (ends[0][0] + ends[0][1]) / 2) * scale,
      tall / 2 - (one[2 * i + 1] - (ends[1][0] + ends[1][1]) / 2) * scale];
    const points = sketch.classes.map((_, i) => {
      const [[x, y], [goalX, goalY]] = [place(sketch.frames[0], i), place(sketch.targets, i)];
      return [draw("line", { class: "best", x1: round(x), y1: round(y), x2: round(goalX), y2: round(goalY) }),
        draw("path", { class: "own" }), draw("circle", { class: "then", cx: round(x), cy: round(y), r: 2.5 }),
        draw("circle", { class: "goal", cx: round(goalX), cy: round(goalY), r: 4.2 }),
          draw("circle", { class: "dot", r: 3.4 })];
    });
    const groups = classes.map(({ tone }, own) => draw("g", { "data-class": own, "--tone": tone,
      class: hidden.has(String(own)) ? "off" : "" }, [0, 1, 2, 3, 4]
      .map((layer) => points.filter((_, i) => sketch.classes[i] === own).map((point) => point[layer]))));
    const picture = draw("svg", { viewBox: `0 0 ${wide} ${Math.round(tall)}`, role: "img", class: state.over,
      "aria-label": "Points at the start (small rings), now (dots), and at the end of optimal transport (large)" }, groups);
    const range = el("input", { type: "range", min: 0, max: last, step: 1, "aria-label": "recorded step",
      "data-focus": "step" }), now = el("output"), said = el("p", { class: "readout", "aria-live": "polite" });
    let at = last, playing = false;
    const show = () => {
      const before = Math.floor(at), part = at - before;
      points.forEach(([, own, , , dot], i) => {
        const [x, y] = place(sketch.frames[before], i), [further, deeper] = part ? place(sketch.frames[before + 1], i)
          : [x, y];
        const here = [x + (further - x) * part, y + (deeper - y) * part].map(round);
        fill(dot, { cx: here[0], cy: here[1] }, []);
        if (state.over === "way") {
          const past = Array.from({ length: before + 1 }, (_, k) => place(sketch.frames[k], i).map(round).join(" "));
          own.setAttribute("d", `M${[...past, here.join(" ")].join("L")}`);
        }
      });
      range.value = before;
      now.textContent = `${unit} ${steps[before]}`;
      const figures = Object.entries(block.said).map(([name, label]) => `${label} ${text(curves[name][before])}`);
      said.textContent = `From the start to this ${unit}: ${figures.join(", ")}. ${block.about}`;
      step = steps[before];
      for (const follow of followers) follow(step);
    };
    const button = el("button", { type: "button", id: "play", "data-focus": "play", onclick: () =>
      (playing ? go(Math.floor(at)) : run()) }, "play");
    const go = (step) => {
      [at, playing, button.textContent] = [step, false, "play"];
      show();
    };
    const run = () => {
      const from = at >= last ? 0 : at, pace = Math.min(Math.max(7000 / (last || 1), 120), 700),
        still = matchMedia("(prefers-reduced-motion: reduce)").matches;
      let begun = null;
      [playing, button.textContent] = [true, "pause"];
      const frame = (time) => {
        if (!playing) return;
        begun ??= time;
        at = from + (time - begun) / pace;
        if (at >= last) return go(last);
        if (still) at = Math.floor(at);
        show();
        requestAnimationFrame(frame);
      };
      requestAnimationFrame(frame);
    };
    range.addEventListener("input", () => go(Number(range.value)));
    jump = (step) => go(steps.indexOf(step));
    const toggled = (own) => [...(hidden.has(own) ? [...hidden].filter((one) => one !== own) : [...hidden, own])]
      .join(",");
    const keys = classes.length > 1 ? el("div", { class: "legend", role: "group", "aria-label": "classes" },
      classes.map(({ name, tone }, own) =>
      pressable(name, !hidden.has(String(own)), { hidden: toggled(String(own)) }, { class: hidden.has(String(own))
        ? "key off" : "key", "--tone": tone, "data-class": own }))) : null;
    const over = switchOf("overlay", [["coupling", "optimal coupling"], ["way", "trajectory"], ["none", "none"]]
      .map(([name, label]) => pressable(label, state.over === name, { over: name }, { "data-over": name })));
    show();
    return [el("div", { class: "bar" }, keys, over), el("div", { class: "cloud" }, picture),
      el("div", { class: "time" }, button, range, now), said];
  },
};

const followers = [];  // charts whose cursor follows the step
let step = null;
let jump = () => {};
COMPONENTS.steps = {
  draw: (block) => COMPONENTS.curve.draw({
    ...block, jump: (to) => jump(to), ready: (follow) => {
      followers.push(follow);
      if (step !== null) follow(step);
    },
  }),
};

// Lists before and after, as cards; lines join each item's two ranks, and come from the right edge for lower ranks.
const CARD = 84, GAP = 8, TALL = 46;
COMPONENTS.ranking = {
  draw: (block) => {
    const wide = block.most * (CARD + GAP), middle = (rank) => (rank === null || rank > block.most ? wide + 6
      : (rank - 1) * (CARD + GAP) + CARD / 2);
    const image = (data, name) => (data ? el("img", { src: `data:image/png;base64,${data}`, alt: name }) : null);
    return block.queries.map(({ name, note, picture, before, after, items }) => {
      const by = new Map(items.map((item) => [item.item, item]));
      const card = (item, side) => el("li", { class: `card ${item.kind}`, title: item.title[side] },
        image(block.pictures[item.item], item.name) ?? el("span", { class: "title" }, item.name),
        el("span", { class: "rank" }, el("b", {}, text(item[side])), side === "after" ? el("span", { class: item.went },
          item.mark) : null));
      const strip = (list, side) => el("ol", { class: side }, list.map((id) => card(by.get(id), side)));
      const lines = draw("svg", { class: "slopes", viewBox: `0 0 ${wide} ${TALL}`, width: wide, height: TALL,
        "aria-hidden": "true" },
        items.map((item) => draw("line", { class: item.went, x1: middle(item.before), y1: 0, x2: middle(item.after),
          y2: TALL })));
      return el("div", { class: "ranking" }, el("div", {}, image(picture, name), el("h2", {}, name),
        note ? el("p", { class: "muted" }, note) : null),
        el("div", { class: "wide" }, el("div", { class: "lists" }, el("p", { class: "muted" }, "before"),
          strip(before, "before"), lines, strip(after, "after"), el("p", { class: "muted" }, "after"))));
    });
  },
};
