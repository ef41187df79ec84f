// Charts in SVG, drawn at the width that they are given and drawn anew when that changes.

const HEIGHT = 230;
const MARGIN = { top: 10, right: 14, bottom: 36, left: 56 };

function niceTicks(low, high, most) {
  const raw = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

function timeTicks(low, high, most) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200];
  const step = steps.find((s) => (high - low) / s <= most) || 86400 * Math.ceil((high - low) / most / 86400);
  const ticks = [];
  for (let t = Math.ceil(low / step) * step; t <= high; t += step) ticks.push(t);
  return ticks;
}

function logTicks(low, high) {
  const found = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
    for (const m of [1, 2, 5]) if (m * 10 ** e >= low * 0.999 && m * 10 ** e <= high * 1.001) found.push(Number((m * 10 ** e).toPrecision(3)));
  const powers = found.filter((t) => Number.isInteger(Math.round(Math.log10(t) * 1e6) / 1e6));
  const ticks = powers.length >= 3 ? powers : found;
  const every = Math.ceil(ticks.length / 6);
  return ticks.filter((_, i) => i % every === 0);
}

function scale(low, high, from, to, log) {
  const at = log ? Math.log10 : (v) => v;
  const [a, b] = [at(low), at(high)];
  const map = (v) => from + ((at(v) - a) / (b - a || 1)) * (to - from);
  map.back = (p) => { const v = a + ((p - from) / (to - from)) * (b - a); return log ? 10 ** v : v; };
  return map;
}

function range(values, { log, floor, ceiling, least }) {
  let low = Infinity, high = -Infinity;
  for (const v of values) {
    if (v === null || v === undefined || !Number.isFinite(v) || (log && v <= 0)) continue;
    if (v < low) low = v;
    if (v > high) high = v;
  }
  if (low > high) return null;
  if (log) low = Math.max(low, high * 1e-6); // one value at rounding would flatten all others
  if (log) return low === high ? [low / 2, high * 2] : [low / 1.15, high * 1.15];
  if (floor !== undefined) low = Math.min(low, floor);
  if (least !== undefined) high = Math.max(high, least);
  if (low === high) { const d = Math.abs(low) * 0.1 || 0.5; low = floor === low ? low : low - d; high += d; }
  const pad = (high - low) * 0.05;
  return [floor !== undefined && low >= floor ? floor : low - pad, ceiling === undefined ? high + pad : Math.min(high + pad, ceiling)];
}

// A card with a title, a legend, and what `draw(width, height)` returns (null: nothing to draw).
function card({ title, hint, legend, draw, empty, wide, height = HEIGHT }) {
  const figure = h("div", { class: "figure" });
  const element = h("section", { class: wide ? "card wide" : "card" }, h("h3", {}, title),
    hint && h("p", { class: "hint" }, hint), legend && legend.length > 1 && h("div", { class: "legend" }, legend.map(legendEntry)), figure);
  let width = 0;
  const render = () => {
    const drawn = draw(width, height);
    figure.replaceChildren(drawn || h("p", { class: "empty" }, empty || "Nothing was recorded for this."));
  };
  new ResizeObserver(([entry]) => {
    const found = Math.floor(entry.contentRect.width);
    if (found > 60 && found !== width) { width = found; render(); }
  }).observe(figure);
  return element;
}

function legendEntry({ name, color: mark, dash, block }) {
  return h("span", { class: "key" }, block ? h("i", { class: "swatch", style: { background: mark } })
    : svg("svg", { width: 22, height: 10 }, svg("line", { x1: 0, x2: 22, y1: 5, y2: 5, "stroke-width": 2.5,
      "stroke-dasharray": dash || null, style: { stroke: mark } })), name);
}

function frame(width, height, x, y, { xTicks, yTicks, xLabel, xFormat = short, yFormat = number }) {
  const bottom = height - MARGIN.bottom;
  return svg("g", { class: "axes" },
    yTicks.map((t) => [svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(t), y2: y(t) }),
      svg("text", { x: MARGIN.left - 8, y: y(t) + 4, "text-anchor": "end" }, yFormat(t))]),
    xTicks.map((t) => svg("text", { x: x(t), y: bottom + 16, "text-anchor": "middle" }, xFormat(t))),
    svg("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom }),
    svg("text", { class: "label", x: (MARGIN.left + width - MARGIN.right) / 2, y: height - 3, "text-anchor": "middle" }, xLabel));
}

function path(xs, ys, x, y, log) {
  let text = "", open = false;
  for (let i = 0; i < xs.length; i++) {
    const v = ys[i];
    if (v === null || v === undefined || !Number.isFinite(v) || (log && v <= 0)) { open = false; continue; }
    text += `${open ? "L" : "M"}${x(xs[i]).toFixed(1)},${y(v).toFixed(1)}`;
    open = true;
  }
  return text;
}

function band(line, x, y) {
  const points = [];
  const known = line.xs.map((_, i) => i).filter((i) => line.low[i] !== null && line.high[i] !== null);
  for (const i of known) points.push(`${x(line.xs[i]).toFixed(1)},${y(line.high[i]).toFixed(1)}`);
  for (const i of known.reverse()) points.push(`${x(line.xs[i]).toFixed(1)},${y(line.low[i]).toFixed(1)}`);
  return svg("polygon", { class: "band", points: points.join(" "), style: { fill: line.color } });
}

// lines: {name, color, dash, xs, ys, low, high, marks}; marks: points with bars from low to high.
function lineChart({ lines, xLabel, xFormat, log, floor, ceiling, least, yFormat = number, ...rest }) {
  const named = lines.filter((line) => line.ys.some((v) => v !== null && Number.isFinite(v) && !(log && v <= 0)));
  const draw = (width, height) => {
    const ends = range(named.flatMap((line) => line.xs), {});
    const span = range(named.flatMap((line) => (line.marks ? [...line.ys, ...line.low, ...line.high] : line.ys)), { log, floor, ceiling, least });
    if (!ends || !span) return null;
    const one = named.every((line) => line.xs.length < 2);
    const [first, last] = one ? ends : [Math.min(...named.map((l) => l.xs[0])), Math.max(...named.map((l) => l.xs[l.xs.length - 1]))];
    const x = scale(first, last, MARGIN.left, width - MARGIN.right);
    const linear = scale(span[0], span[1], height - MARGIN.bottom, MARGIN.top, log);
    const y = log ? (v) => linear(Math.max(v, span[0] * 1e-3)) : linear; // an interval may reach below 0
    const ticks = (xFormat === duration ? timeTicks : niceTicks)(first, last, Math.max(2, width / 90));
    const axes = frame(width, height, x, y, { xLabel, xFormat, yFormat,
      xTicks: xLabel === "optimizer step" ? ticks.filter(Number.isInteger) : ticks,
      yTicks: log ? logTicks(...span) : niceTicks(span[0], span[1], 5) });
    const clip = `clip${clips++}`;
    const body = svg("g", { "clip-path": `url(#${clip})` },
      named.filter((line) => line.low && !line.marks).map((line) => band(line, x, y)),
      named.map((line) => svg("path", { class: "line", d: path(line.xs, line.ys, x, y, log), "stroke-dasharray": line.dash || null, style: { stroke: line.color } })),
      named.map((line) => dots(line, x, y, log)));
    const cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden" });
    const picture = svg("svg", { width, height, role: "img", "aria-label": rest.title },
      plotArea(clip, width, height),
      axes, body, cursor);
    follow(picture, cursor, named, x, { xLabel, xFormat, yFormat });
    return picture;
  };
  return card({ ...rest, draw, legend: rest.legend || legendOf(named) });
}

let clips = 0;

const plotArea = (id, width, height) => svg("clipPath", { id },
  svg("rect", { x: MARGIN.left - 5, y: 0, width: width - MARGIN.left - MARGIN.right + 10, height: height - MARGIN.bottom + 3 }));

function legendOf(lines) {
  return lines.map(({ name, color: mark, dash }) => ({ name, color: mark, dash }));
}

function dots(line, x, y, log) {
  if (line.xs.length > 1 && !line.marks) return [];
  return line.xs.map((v, i) => {
    if (line.ys[i] === null || (log && line.ys[i] <= 0)) return null;
    const [cx, cy] = [x(v), y(line.ys[i])];
    return [line.marks && svg("line", { class: "bar", x1: cx, x2: cx, y1: y(line.low[i]), y2: y(line.high[i]), style: { stroke: line.color } }),
      svg("circle", { class: "dot", cx, cy, r: 3.2, style: { fill: line.color } })];
  });
}

function nearest(xs, at) {
  let low = 0, high = xs.length - 1;
  while (low < high) { const mid = (low + high) >> 1; if (xs[mid] < at) low = mid + 1; else high = mid; }
  return low > 0 && at - xs[low - 1] < xs[low] - at ? low - 1 : low;
}

function follow(picture, cursor, lines, x, { xLabel, xFormat, yFormat }) {
  picture.addEventListener("pointermove", (event) => {
    const at = x.back(event.clientX - picture.getBoundingClientRect().left);
    const widest = lines.reduce((a, b) => (b.xs.length > a.xs.length ? b : a));
    const here = widest.xs[nearest(widest.xs, at)];
    cursor.setAttribute("x1", x(here)); cursor.setAttribute("x2", x(here));
    cursor.setAttribute("visibility", "visible");
    const rows = lines.map((line) => {
      const i = nearest(line.xs, here);
      const interval = line.low && line.low[i] !== null ? ` [${yFormat(line.low[i])}, ${yFormat(line.high[i])}]` : "";
      return [line.name, yFormat(line.ys[i]) + interval + (line.marks && line.xs[i] !== here ? ` at ${(xFormat || short)(line.xs[i])}` : ""), line.color];
    });
    tip.show(event.clientX, event.clientY, `${xLabel} ${(xFormat || number)(here)}`, rows);
  });
  picture.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); tip.hide(); });
}

// groups: names along x; bars: {name, color, values (one for each group), notes}.
function barChart({ groups, bars, xLabel, yFormat = percent, stacked, ...rest }) {
  const draw = (width, height) => {
    const totals = groups.map((_, g) => bars.reduce((sum, bar) => (stacked ? sum + (bar.values[g] || 0) : Math.max(sum, bar.values[g] || 0)), 0));
    if (!bars.length || !groups.length || bars.every((bar) => bar.values.every((v) => v === null))) return null;
    const y = scale(0, Math.max(...totals) * 1.06 || 1, height - MARGIN.bottom, MARGIN.top);
    const slot = (width - MARGIN.left - MARGIN.right) / groups.length;
    const x = (g) => MARGIN.left + slot * (g + 0.5);
    const thick = Math.min(46, (slot * 0.8) / (stacked ? 1 : bars.length));
    const every = Math.ceil((groups.reduce((most, name) => Math.max(most, name.length), 0) * 7 + 8) / slot);
    const axes = frame(width, height, x, y, { xLabel, yFormat, xTicks: groups.map((_, g) => g).filter((g) => g % every === 0),
      xFormat: (g) => groups[g], yTicks: niceTicks(0, Math.max(...totals) * 1.06 || 1, 5) });
    const below = groups.map(() => 0);
    const rects = bars.map((bar, b) => bar.values.map((v, g) => {
      if (v === null || v === undefined) return null;
      const left = stacked ? x(g) - thick / 2 : x(g) + (b - bars.length / 2) * thick;
      const [top, base] = [y(below[g] + v), y(below[g])];
      const tall = Math.max(v > 0 ? 1.5 : 0, base - top); // what is there can be seen
      if (stacked) below[g] += v;
      return svg("rect", { class: "block", x: left + 0.5, y: base - tall, width: Math.max(1, thick - 1), height: tall, style: { fill: bar.color },
        onpointermove: (e) => tip.show(e.clientX, e.clientY, `${xLabel}: ${groups[g]}`, [[bar.name, yFormat(v), bar.color], ...((bar.notes && bar.notes[g]) || [])]),
        onpointerleave: () => tip.hide() });
    }));
    return svg("svg", { width, height, role: "img", "aria-label": rest.title }, axes, rects);
  };
  return card({ ...rest, draw, legend: bars.map(({ name, color: mark }) => ({ name, color: mark, block: true })) });
}

// cells: [column, row, share in 0..1, rows for the tooltip]; columns and rows are names.
function heatMap({ columns, rows, cells, xLabel, yLabel, mark = "var(--heat)", number: shown, ...rest }) {
  const draw = (width, height) => {
    if (!cells.length) return null;
    const [w, t] = [(width - MARGIN.left - MARGIN.right) / columns.length, (height - MARGIN.bottom - MARGIN.top) / rows.length];
    const x = (c) => MARGIN.left + w * (c + 0.5);
    const y = (r) => height - MARGIN.bottom - t * (r + 0.5);
    const every = Math.ceil((columns.reduce((m, c) => Math.max(m, c.length), 0) * 7 + 10) / w);
    const everyRow = Math.ceil(14 / t);
    const axes = frame(width, height, x, y, { xLabel, xFormat: (c) => columns[c], yFormat: (r) => rows[r],
      xTicks: columns.map((_, c) => c).filter((c) => c % every === 0), yTicks: rows.map((_, r) => r).filter((r) => r % everyRow === 0) });
    const rects = cells.map(([c, r, share, lines]) => [svg("rect", { class: "cell", x: x(c) - w / 2 + 0.5, y: y(r) - t / 2 + 0.5, width: Math.max(0.5, w - 1), height: Math.max(0.5, t - 1),
      style: { fill: mark, "fill-opacity": (0.04 + 0.96 * Math.sqrt(share)).toFixed(3) },
      onpointermove: (e) => tip.show(e.clientX, e.clientY, `${xLabel} ${columns[c]}, ${yLabel} ${rows[r]}`, lines), onpointerleave: () => tip.hide() }),
    shown && w > 44 && svg("text", { class: "in-cell", x: x(c), y: y(r) + 4, "text-anchor": "middle" }, lines[0][1])]);
    return svg("svg", { width, height, role: "img", "aria-label": rest.title }, axes, rects);
  };
  return card({ ...rest, draw });
}
