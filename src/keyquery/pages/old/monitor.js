// Heads by steps as a heat map, the curve of one head, and the alarms.
"use strict";

const ROW = 14;
const names = Object.keys(DATA.curves);
let metric = names[0];
let head = 0;

const isLog = (name) => DATA.log.includes(name);
const level = (name, value) => (value === null || (isLog(name) && value <= 0) ? null : isLog(name) ? Math.log(value) : value);

const widthOf = (id, most) => Math.max(Math.min(document.getElementById(id).clientWidth, most), 240);

function limits(name, rows) {
  let [low, high] = [Infinity, -Infinity];
  for (const row of rows) for (const value of row) {
    const at = level(name, value);
    if (at !== null) [low, high] = [Math.min(low, at), Math.max(high, at)];
  }
  return high > low ? [low, high] : [low - 1, low + 1];
}

function drawMap() {
  const rows = DATA.curves[metric];
  const [low, high] = limits(metric, rows);
  const canvas = el("canvas", { role: "img", "aria-label": `${title(metric)} of every head by step` });
  const style = getComputedStyle(document.documentElement);
  canvas.width = widthOf("map", 1200);
  canvas.height = Math.max(ROW * rows.length, 40);
  canvas.style.setProperty("height", `${canvas.height}px`);
  const pen = canvas.getContext("2d");
  const [wide, tall] = [canvas.width / DATA.steps.length, canvas.height / rows.length];
  pen.fillStyle = style.getPropertyValue("--skew");
  rows.forEach((row, y) => row.forEach((value, x) => {
    const at = level(metric, value);
    if (at === null) return;
    pen.globalAlpha = 0.04 + 0.96 * (at - low) / (high - low);
    const [from, to] = [Math.round(x * wide), Math.round((x + 1) * wide)];
    pen.fillRect(from, Math.round(y * tall), to - from, Math.round(tall));
  }));
  pen.globalAlpha = 1;
  pen.strokeStyle = style.getPropertyValue("--ink");
  pen.lineWidth = 1.5;
  for (const alarm of DATA.alarms) for (const y of alarm.heads) {
    const x = (DATA.steps.indexOf(alarm.step) + 0.5) * wide;
    const middle = (y + 0.5) * tall;
    pen.beginPath();
    for (const sign of [-1, 1]) { pen.moveTo(x - 4, middle - 4 * sign); pen.lineTo(x + 4, middle + 4 * sign); }
    pen.stroke();
  }
  canvas.addEventListener("click", (event) => {
    const box = canvas.getBoundingClientRect();
    head = Math.min(Math.floor((event.clientY - box.top) / box.height * rows.length), rows.length - 1);
    of.value = head;
    drawCurve();
  });
  put("map", canvas);
  const back = (value) => figure3(isLog(metric) ? Math.exp(value) : value);
  put("scale", `${DATA.units[metric] ?? ""}: faint ${back(low)}, strong ${back(high)}${isLog(metric) ? ", logarithmic; blank: not above 0" : ""}`);
  put("under", `Rows: heads from ${DATA.heads[0]} to ${DATA.heads[DATA.heads.length - 1]}. Columns: steps ${DATA.steps[0]} to ${DATA.steps[DATA.steps.length - 1]}. Crosses: alarms. Click a row, or choose a head, for its curve.`);
}

function drawCurve() {
  const row = DATA.curves[metric][head];
  const [low, high] = limits(metric, [row]);
  const [width, height, left, base] = [widthOf("curve", 900), 220, 60, 190];
  const first = DATA.steps[0];
  const span = Math.max(DATA.steps[DATA.steps.length - 1] - first, 1);
  const x = (step) => left + (width - left - 10) * (step - first) / span;
  const y = (value) => base - (base - 14) * (value - low) / (high - low);
  const points = row.map((value, at) => [DATA.steps[at], level(metric, value)]).filter(([, value]) => value !== null);
  const path = points.map(([step, value], at) => `${at ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const marks = DATA.alarms.filter((alarm) => alarm.heads.includes(head));
  const back = (value) => figure3(isLog(metric) ? Math.exp(value) : value);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title(metric)} of ${DATA.heads[head]}` },
    marks.map((alarm) => draw("line", { class: "mark", x1: x(alarm.step), x2: x(alarm.step), y1: 14, y2: base })),
    draw("path", { class: "line", d: path || "M0 0" }),
    draw("text", { x: 0, y: 20 }, back(high)), draw("text", { x: 0, y: base }, back(low)),
    draw("text", { x: left, y: 212 }, `step ${first}`),
    draw("text", { x: width - 10, y: 212, "text-anchor": "end" }, `step ${first + span}`));
  put("chosen", `${DATA.heads[head]}: ${title(metric)}`);
  put("curve", svg);
}

put("facts", DATA.facts + (DATA.clips ? ` · ${DATA.clips} clips` : ""));
const select = document.getElementById("metric");
select.append(...names.map((name) => el("option", { value: name }, title(name))));
const of = document.getElementById("head");
of.append(...DATA.heads.map((name, at) => el("option", { value: at }, name)));
of.addEventListener("change", () => { head = Number(of.value); drawCurve(); });
select.addEventListener("change", () => { metric = select.value; drawMap(); drawCurve(); });
put("alarms", ...(DATA.alarms.length ? DATA.alarms.map((alarm) => el("li", {}, `step ${alarm.step}: ${alarm.reason}`)) : [el("li", {}, "none")]));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMap);
addEventListener("resize", () => { drawMap(); drawCurve(); });
head = DATA.alarms.length ? DATA.alarms[0].heads[0] : 0;
of.value = head;
drawMap();
drawCurve();
