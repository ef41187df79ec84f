"use strict";
// Building blocks. Text reaches the page through text nodes only: nothing here or in the other
// scripts parses a string as HTML.

const SVG = "http://www.w3.org/2000/svg";
const MISSING = "–";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
const svg = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);

// What cannot be seen, or turns the direction of what follows, is shown as its escape.
const UNSEEN = /[\u0000-\u0009\u000b-\u001f\u007f-\u00a0\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff0-\ufffb]|[\u{e0000}-\u{e0fff}]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/gu;
const NAMED = { "\t": "\\t", "\r": "\\r" };

function visible(text) {
  return text.replace(UNSEEN, (c) => NAMED[c] || "\\u" + c.codePointAt(0).toString(16).padStart(4, "0"));
}

function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return MISSING;
  if (Math.abs(value) > 2e38) return value > 0 ? "∞" : "−∞";
  if (Number.isInteger(value)) return value.toLocaleString("en").replace("-", "−");
  const size = Math.abs(value);
  if (size >= 1000 && size < 1e7) return Math.round(value).toLocaleString("en").replace("-", "−");
  const text = size >= 1e7 || size < 1e-3 ? value.toExponential(digits - 1).replace(/\.?0+e/, "e") : value.toPrecision(digits);
  return (text.includes("e") ? text : String(Number(text))).replace("-", "−");
}

const percent = (value) => (value === null || value === undefined || Number.isNaN(value) ? MISSING
  : `${number(100 * value, value && Math.abs(value) < 0.001 ? 2 : 3)} %`);

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${number(value / 1e9)}G`;
  if (size >= 1e6) return `${number(value / 1e6)}M`;
  return size >= 1e4 ? `${number(value / 1e3)}k` : number(value);
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return MISSING;
  const whole = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (n) => String(n).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

const color = (index) => `var(--c${index % 8})`;

// One tooltip for everything: rows of [text, value, color?].
const tip = {
  element: null,
  show(x, y, title, rows) {
    if (!this.element) document.body.append((this.element = h("div", { class: "tip", role: "status" })));
    const table = rows.map(([name, value, mark]) => h("div", { class: "tip-row" },
      mark && h("i", { class: "swatch", style: { background: mark } }), h("span", {}, name), h("b", {}, value)));
    this.element.replaceChildren(h("div", { class: "tip-title" }, title), ...table);
    this.element.hidden = false;
    const box = this.element.getBoundingClientRect();
    const left = x + 16 + box.width > innerWidth ? x - 16 - box.width : x + 16;
    const top = y + 16 + box.height > innerHeight ? y - 16 - box.height : y + 16;
    this.element.style.left = `${Math.max(4, left)}px`;
    this.element.style.top = `${Math.max(4, top)}px`;
  },
  hide() { if (this.element) this.element.hidden = true; },
};

function choice(label, options, value, change) {
  const select = h("select", { "aria-label": label, onchange: () => change(select.value) },
    options.map(([key, text]) => h("option", { value: key, selected: key === value }, text)));
  return h("label", { class: "control" }, h("span", {}, label), select);
}

function segmented(label, options, value, change) {
  const buttons = options.map(([key, text]) => h("button", {
    type: "button", "data-key": key, "aria-pressed": String(key === value),
    onclick: () => {
      for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.key === key));
      change(key);
    },
  }, text));
  return h("div", { class: "segmented", role: "group", "aria-label": label }, buttons);
}

function bytesOf(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

async function unpack(text) {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}
