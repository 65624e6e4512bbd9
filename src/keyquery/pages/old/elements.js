// Elements, numbers and CSV. Texts enter the page as text nodes only, and nothing is fetched.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) node.style.setProperty(name, value);
    else if (name.startsWith("aria-")) node.setAttribute(name, String(value));
    else if (value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const put = (id, ...children) => document.getElementById(id).replaceChildren(...children.flat().filter(Boolean));

// Numbers as they are shown

const minus = (text) => text.replace("-", "−");
const figure3 = (value) => minus(String(Number(value.toPrecision(3))));
const percent = (value) => `${minus(String(Math.round(100 * value) + 0))} %`;  // + 0: no minus before 0
function signed(value) {
  const text = value.toFixed(2);
  return Number(text) === 0 ? "0.00" : (value > 0 ? "+" : "−") + text.replace("-", "");
}
const figure = (name, value) => {
  if (value === null) return "";
  return /^(symmetry|column_directionality)/.test(name) ? signed(value) : figure3(value);
};

// Decode numbers: three digits in 16 bits, a sign and 1 + 900·(exponent + 18) + (digits − 100); 0 is zero.
function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return Array.from({ length: bytes.length / 2 }, (_, i) => {
    const code = bytes[2 * i] | (bytes[2 * i + 1] << 8);
    const size = (code & 32767) - 1;
    if (size < 0) return 0;
    return (code & 32768 ? -1 : 1) * Number(`${100 + (size % 900)}e${Math.floor(size / 900) - 20}`);
  });
}

function unpackBytes(text) {  // multiples of a step, -127 to 127
  return Array.from(atob(text), (letter) => (letter.charCodeAt(0) << 24) >> 24);
}

// Leading spaces of tokens, as tokenizers write them, and line breaks are made visible.
const word = (text) => text.replace(/^[Ġ▁ ]/, "·").replace(/[\nĊ]/g, "↵");
const short = (text, most = 9) => (word(text).length > most ? word(text).slice(0, most - 1) + "…" : word(text));
const tokens = (texts) => texts.map((text) => el("span", { class: "token", title: text }, word(text)));
const title = (name) => name.replaceAll("_", " ");

// Charts and tables that can be copied as CSV

function csv(rows) {
  const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  return rows.map((row) => row.map((value) => quoted(String(value ?? ""))).join(",")).join("\n") + "\n";
}

async function copy(button, rows) {
  const text = csv(rows());
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // no permission, as in a frame: use the legacy method
    const area = document.body.appendChild(el("textarea"));
    area.value = text;
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "copied";
  setTimeout(() => (button.textContent = "copy CSV"), 1500);
}

function copyButton(name, rows) {
  const button = el("button", { class: "copy", type: "button", "aria-label": `copy CSV: ${name}` }, "copy CSV");
  button.addEventListener("click", () => copy(button, rows));
  return button;
}

function framed(name, note, rows, size, ...content) {
  const words = [el("h3", {}, name), el("span", { class: "muted" }, note), copyButton(name, rows)];
  return el("figure", { class: size }, el("figcaption", {}, words), ...content);
}

const row = (head, cells) => el("tr", {}, head, cells);
const heading = (name, kind = "") => el("th", { scope: "col", class: kind }, name);
const measure = (name) => el("th", { scope: "row", title: DATA.units[name] ?? null }, title(name));

// Drawing: coordinates to a tenth of a pixel, and ticks of an axis

const round = (value) => value.toFixed(1);
function ticks(low, high) {
  const raw = (high - low) / 3 || 1;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((times) => times * size).find((one) => one >= raw);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, i) => (first + i) * step);
}
