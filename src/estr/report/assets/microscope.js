// The token microscope: one trajectory, token by token.

const SAMPLED = 1, TRAINED = 2, KEPT = 4, CLIPPED = 8;
const ROW = 54, MOST_SUSPICIOUS = 200, CHUNK = 4000;
const ARRAYS = { token_ids: Int32Array, text: Uint32Array, flags: Uint8Array, segment: Uint16Array, versions: Int32Array,
  behavior_logprobs: Float32Array, behavior_entropies: Float32Array, behavior_gini: Float32Array, policy_logprobs: Float32Array };

function sampled(report) {
  const parts = report.runs.filter((run) => run.microscope).map(({ name, microscope: m }) => {
    const shown = m.trajectories.length;
    const how = shown === m.num_all ? "all of them" : `${number(m.num_scored)} with the highest scores, ${number(m.num_random)} drawn at random`;
    const out = m.left_out ? `, ${number(m.left_out)} left out as too long for the token budget` : "";
    return `${name}: ${number(shown)} of ${number(m.num_all)} trajectories (${how}${out})`;
  });
  return parts.length ? `${parts.join("; ")}.` : "none, for no run has a ledger.";
}

// The columns of one run, as arrays, with what follows from them.
function columnsOf(run) {
  const columns = {};
  for (const [name, kind] of Object.entries(ARRAYS)) columns[name] = new kind(bytesOf(run.microscope.columns[name]).buffer);
  const length = columns.flags.length;
  columns.log_ratio = new Float32Array(length).fill(NaN);
  columns.score = new Float32Array(length).fill(NaN);
  for (const row of run.microscope.trajectories) {
    for (let i = row.offset; i < row.offset + row.num_tokens; i++) {
      if (!(columns.flags[i] & TRAINED)) continue;
      const delta = columns.policy_logprobs[i] - columns.behavior_logprobs[i];
      columns.log_ratio[i] = delta;
      columns.score[i] = (delta * delta) / (Math.max(0, columns.behavior_entropies[i]) + row.eps);
    }
  }
  return columns;
}

const verdictOf = (flags) => (!(flags & SAMPLED) ? "read" : !(flags & TRAINED) ? "untrained" : !(flags & KEPT) ? "rejected" : flags & CLIPPED ? "clipped" : "kept");
const VERDICTS = { kept: ["kept", "var(--ok)", 30], clipped: ["kept, clipped", "var(--warn)", 55], rejected: ["rejected", "var(--bad)", 75], untrained: ["not trained on", "var(--muted)", 35] };
const mixed = (mark, share) => `color-mix(in srgb, ${mark} ${Math.round(share)}%, transparent)`;

// How tokens are colored: fill(columns, i, row) gives a color or null; legend gives its key.
const COLORINGS = {
  entropy: { words: "entropy", fill: (c, i) => mixed("var(--c0)", 85 * Math.min(1, Math.sqrt(Math.max(0, c.behavior_entropies[i]) / 3))),
    legend: () => [0, 0.1, 0.5, 1, 2, 3].map((v) => [mixed("var(--c0)", 85 * Math.min(1, Math.sqrt(v / 3))), v === 3 ? "3 nats and more" : number(v)]) },
  log_ratio: { words: "log-ratio", fill: (c, i) => (Number.isNaN(c.log_ratio[i]) ? null : mixed(c.log_ratio[i] > 0 ? "var(--c3)" : "var(--c0)", 85 * Math.min(1, Math.sqrt(Math.abs(c.log_ratio[i]))))),
    legend: () => [-1, -0.3, -0.05, 0, 0.05, 0.3, 1].map((v) => [mixed(v > 0 ? "var(--c3)" : "var(--c0)", 85 * Math.min(1, Math.sqrt(Math.abs(v)))), Math.abs(v) === 1 ? (v < 0 ? "−1 and less" : "1 and more") : number(v)]) },
  score: { words: "score", fill: (c, i, row) => (Number.isNaN(c.score[i]) ? null : mixed(c.score[i] > (row.tau || 1) ? "var(--bad)" : "var(--c4)", scoreShare(c.score[i] / (row.tau || 1)))),
    legend: (row) => [0.001, 0.03, 0.3, 1, 3].map((v) => [mixed(v > 1 ? "var(--bad)" : "var(--c4)", scoreShare(v)), v > 1 ? `more than ${row.tau === null ? "1" : `tau = ${number(row.tau)}`}` : number(v * (row.tau || 1))]) },
  version: { words: "version", fill: (c, i, row) => versionColor(row.target_version - c.versions[i]),
    legend: (row) => { const lags = row.inter === null ? [] : Array.from({ length: Math.min(9, row.intra + 1) }, (_, i) => row.inter + row.intra - i); return lags.map((lag) => [versionColor(lag), `version ${row.target_version - lag} (lag ${lag})`]); } },
  verdict: { words: "verdict", fill: (c, i) => mixed(VERDICTS[verdictOf(c.flags[i])][1], VERDICTS[verdictOf(c.flags[i])][2]),
    legend: () => Object.values(VERDICTS).map(([words, mark, share]) => [mixed(mark, share), words]) },
};
const versionColor = (lag) => mixed(color(((lag % 8) + 8) % 8), 50);
const scoreShare = (share) => 85 * Math.max(0.04, Math.min(1, (Math.log10(Math.max(share, 1e-3)) + 3) / 3) ** 1.6);

function microscope(report) {
  const runs = report.runs.map((run, i) => i).filter((i) => report.runs[i].microscope && report.runs[i].microscope.trajectories.length);
  const state = { run: runs[0], open: 0, selected: null, coloring: "score", status: "all", order: "score", list: "tokens", place: -1 };
  const cache = new Map();
  const run = () => report.runs[state.run];
  const rows = () => run().microscope.trajectories;
  const columns = () => { if (!cache.has(state.run)) cache.set(state.run, columnsOf(run())); return cache.get(state.run); };
  const aside = h("div", { class: "side-list" }), text = h("div", { class: "reading", tabindex: 0, "aria-label": "Tokens" });
  const heading = h("div", { class: "reading-head" }), legend = h("div", { class: "legend" });
  const next = h("button", { type: "button", id: "next", class: "strong", onclick: () => jump(1) }, "Most suspicious token ▶");
  let built = null, spans = new Map(), suspects = null;

  function build() {
    if (!runs.length) return h("section", { class: "card full" }, h("h3", {}, "Tokens"), h("p", { class: "empty" }, "No run here has a ledger, so there are no tokens to read (recipe key ledger)."));
    const coloring = segmented("Color by", Object.entries(COLORINGS).map(([key, c]) => [key, c.words]), state.coloring, (key) => { state.coloring = key; paint(); });
    const bar = h("div", { class: "microscope-bar" },
      runs.length > 1 && choice("Run", runs.map((i) => [String(i), report.runs[i].name]), String(state.run), (value) => { state.run = Number(value); suspects = null; state.place = -1; list(); open(0); }),
      h("span", { class: "control" }, h("span", {}, "Color by"), coloring),
      h("span", { class: "jump" }, h("button", { type: "button", id: "previous", "aria-label": "Previous suspicious token", onclick: () => jump(-1) }, "◀"), next));
    const lists = segmented("List", [["tokens", "suspicious tokens"], ["trajectories", "trajectories"]], state.list, (key) => { state.list = key; list(); });
    text.addEventListener("pointermove", (event) => { const i = indexOf(event.target); if (i === null) tip.hide(); else show(i, event.clientX, event.clientY); });
    text.addEventListener("pointerleave", () => tip.hide());
    text.addEventListener("click", (event) => { const i = indexOf(event.target); if (i !== null) select(i, false); });
    text.addEventListener("keydown", keys);
    built = h("section", { class: "microscope" }, h("p", { class: "hint" }, sampled({ runs: runs.map((i) => report.runs[i]) })), bar,
      h("div", { class: "two" }, h("div", { class: "side" }, lists, aside), h("div", { class: "card reader" }, heading, legend, text)));
    list();
    open(0);
    return built;
  }

  const indexOf = (target) => (target.dataset && target.dataset.i !== undefined ? Number(target.dataset.i) : null);

  function rank() {
    if (suspects) return suspects;
    const c = columns();
    const found = [];
    rows().forEach((row, r) => { for (let i = row.offset; i < row.offset + row.num_tokens; i++) if (!Number.isNaN(c.score[i])) found.push([c.score[i], r, i]); });
    found.sort((a, b) => b[0] - a[0]);
    return (suspects = found.slice(0, MOST_SUSPICIOUS));
  }

  function jump(by) {
    const all = rank();
    if (!all.length) return;
    state.place = Math.max(0, Math.min(all.length - 1, state.place + by));
    go(state.place);
  }

  function go(place) {
    state.place = place;
    const [, r, i] = rank()[place];
    if (r !== state.open) open(r);
    select(i, true);
    next.replaceChildren(`Next suspicious token (at ${place + 1} of ${rank().length}) ▶`);
    mark();
  }

  function list() {
    if (state.list === "tokens") return listTokens();
    const statuses = [...new Set(rows().map((row) => row.status))].sort();
    if (state.status !== "all" && !statuses.includes(state.status)) state.status = "all";
    const keys = { score: (a, b) => (b.max_score ?? -1) - (a.max_score ?? -1), step: (a, b) => a.step - b.step || a.trajectory - b.trajectory, reward: (a, b) => (a.reward ?? -Infinity) - (b.reward ?? -Infinity), length: (a, b) => b.num_sampled_tokens - a.num_sampled_tokens, rejected: (a, b) => lost(b) - lost(a), intra: (a, b) => (b.intra ?? -1) - (a.intra ?? -1) };
    const chosen = rows().map((row, r) => [row, r]).filter(([row]) => state.status === "all" || row.status === state.status).sort((a, b) => keys[state.order](a[0], b[0]));
    const filters = h("div", { class: "filters" },
      choice("First", [["score", "highest score"], ["rejected", "most rejected"], ["length", "longest"], ["intra", "most switches"], ["reward", "lowest reward"], ["step", "earliest"]], state.order, (value) => { state.order = value; list(); }),
      choice("Status", [["all", "all"], ...statuses.map((s) => [s, s])], state.status, (value) => { state.status = value; list(); }));
    windowed(chosen, filters, ([row, r]) => entry(r === state.open, () => { state.place = -1; open(r); mark(); }, { "data-r": r },
      [h("b", {}, `step ${row.step}`), ` group ${row.group_id}.${row.index}`, row.status !== "ok" && h("em", {}, ` ${row.status}`)],
      `reward ${number(row.reward)} · ${row.num_sampled_tokens} tokens · ${lost(row)} rejected · score ${number(row.max_score)}`));
  }

  function listTokens() {
    const c = columns();
    windowed(rank().map((one, place) => [one, place]), null, ([[score, r, i], place]) => entry(place === state.place, () => go(place), { "data-place": place },
      [h("code", {}, visible(run().microscope.texts[c.text[i]]).replace(/\n/g, "↵") || "(nothing)"), ` score ${number(score)}`],
      `step ${rows()[r].step} · lag ${rows()[r].target_version - c.versions[i]} · δ ${number(c.log_ratio[i])} · H ${number(c.behavior_entropies[i])} · ${VERDICTS[verdictOf(c.flags[i])][0]}`));
  }

  const lost = (row) => row.num_trained_tokens - row.num_kept_tokens;
  const entry = (current, onclick, data, first, second) => h("button", { type: "button", class: "entry", "aria-current": String(current), onclick, ...data }, h("span", {}, first), h("small", {}, second));

  // Only the rows in view exist, so that thousands of them scroll well.
  function windowed(items, filters, draw) {
    const inner = h("div", { class: "entries" }), box = h("div", { class: "scroller" }, inner);
    inner.style.height = `${items.length * ROW}px`;
    const render = () => {
      const from = Math.max(0, Math.floor(box.scrollTop / ROW) - 5), to = Math.min(items.length, from + Math.ceil((box.clientHeight || 700) / ROW) + 12);
      inner.replaceChildren(...items.slice(from, to).map((item, i) => { const element = draw(item); element.style.top = `${(from + i) * ROW}px`; return element; }));
    };
    box.addEventListener("scroll", render);
    aside.render = render;
    aside.replaceChildren(...[filters, box].filter(Boolean), ...(items.length ? [] : [h("p", { class: "empty" }, "None.")]));
    render();
    requestAnimationFrame(render);
  }

  const mark = () => aside.render && aside.render();

  function open(r) {
    state.open = r;
    state.selected = null;
    const row = rows()[r];
    const facts = [["step", row.step], ["group", `${row.group_id}, member ${row.index}${row.attempt ? `, attempt ${row.attempt}` : ""}`], ["problem", row.problem], ["status", row.status], ["reward", number(row.reward)], ["advantage", number(row.advantage)],
      ["tokens", `${number(row.num_sampled_tokens)} sampled of ${number(row.num_tokens)}`], ["rejected", `${lost(row)} of ${row.num_trained_tokens}`], ["intra", number(row.intra)], ["inter", number(row.inter)], ["mean entropy", number(row.mean_entropy)], ["highest score", number(row.max_score)], ["chosen", row.picked === "score" ? "by score" : "at random"],
      ...Object.entries(row.rewards).map(([name, value]) => [visible(`reward ${name}`), number(value)])];
    heading.replaceChildren(h("div", { class: "facts" }, facts.map(([name, value]) => h("span", {}, h("small", {}, name), h("b", {}, value)))), row.error ? h("p", { class: "error" }, visible(row.error)) : "", run().microscope.note ? h("p", { class: "hint" }, run().microscope.note) : "");
    write(row);
    mark();
  }

  // Blocks of what was read and of what was written; switches of version and new segments between.
  function write(row) {
    const c = columns(), texts = run().microscope.texts;
    const turns = turnsOf(row, c);
    spans = new Map();
    text.replaceChildren();
    text.scrollTop = 0;
    let version = null, segment = null, block = null, wrote = null, number_of_turn = 0;
    const end = row.offset + row.num_tokens;
    for (let i = row.offset; i < end; i++) {
      const mine = (c.flags[i] & SAMPLED) > 0, turn = turns.starts.get(i);
      if (c.segment[i] !== segment) {
        if (segment !== null) text.append(h("div", { class: "segment" }, `segment ${c.segment[i] + 1}: the history was rewritten here`));
        segment = c.segment[i];
        block = null;
      }
      if (block === null || mine !== wrote || turn !== undefined) {
        if (turn !== undefined) number_of_turn = turn + 1;
        const first = i === row.offset;
        const label = mine ? `turn ${number_of_turn}${turn === undefined ? "" : ` · ${row.turns[turn][3]}`}` : first ? "prompt" : "tool output";
        block = h("div", { class: "tokens" });
        text.append(h("div", { class: mine ? "stretch wrote" : "stretch read" }, h("span", { class: "who" }, label), block));
        wrote = mine;
      }
      if (mine && version !== null && c.versions[i] !== version) block.append(h("span", { class: "switch", title: "new weights from here on" }, `v${c.versions[i]}`));
      if (mine) version = c.versions[i];
      const said = visible(texts[c.text[i]]);
      const span = h("span", { class: mine ? "t w" : "t", "data-i": i }, said === "" ? "∅" : said === "\n" ? "↵\n" : said.replace(/\n/g, "↵\n"));
      block.append(span);
      if (mine) spans.set(i, span);
      if ((i - row.offset + 1) % CHUNK === 0) block = null;
    }
    paint();
  }

  function turnsOf(row, c) {
    const begin = [];
    for (let i = row.offset; i < row.offset + row.num_tokens; i++) if (begin[c.segment[i]] === undefined) begin[c.segment[i]] = i;
    return { starts: new Map(row.turns.map(([segment, start], t) => [begin[segment] + start, t])) };
  }

  function paint() {
    const c = columns(), row = rows()[state.open], { fill: colored, legend: keysOfColors } = COLORINGS[state.coloring];
    for (const [i, span] of spans) {
      const mark = colored(c, i, row);
      span.style.background = mark || "";
      span.classList.toggle("rejected", verdictOf(c.flags[i]) === "rejected");
    }
    legend.replaceChildren(...keysOfColors(row).map(([mark, words]) => h("span", { class: "key" }, h("i", { class: "swatch wide", style: { background: mark } }), words)), h("span", { class: "key" }, h("i", { class: "swatch wide underlined" }), "rejected"));
  }

  function show(i, x, y) {
    const c = columns(), row = rows()[state.open], mine = c.flags[i] & SAMPLED;
    const known = [["token id", String(c.token_ids[i])], ["position", number(i - row.offset)], ["segment", number(c.segment[i] + 1)]];
    if (mine) known.push(["version", String(c.versions[i])], ["lag", number(row.target_version - c.versions[i])], ["entropy", number(c.behavior_entropies[i], 4)], ["gini", number(c.behavior_gini[i], 4)], ["log-prob, behavior", number(c.behavior_logprobs[i], 4)],
      ["log-prob, policy", number(c.policy_logprobs[i], 4)], ["log-ratio δ", number(c.log_ratio[i], 4)], ["ratio", number(Math.exp(c.log_ratio[i]), 4)], ["score", number(c.score[i], 4)], ["tau", number(row.tau)], ["advantage", number(row.advantage)], ["verdict", VERDICTS[verdictOf(c.flags[i])][0], VERDICTS[verdictOf(c.flags[i])][1]]);
    else known.push(["", "read, not sampled"]);
    tip.show(x, y, visible(run().microscope.texts[c.text[i]]).replace(/\n/g, "↵") || "(nothing)", known);
  }

  function select(i, scroll) {
    const before = text.querySelector(".selected");
    if (before) before.classList.remove("selected");
    const span = text.querySelector(`[data-i="${i}"]`);
    if (!span) return;
    state.selected = i;
    span.classList.add("selected");
    if (scroll) span.scrollIntoView({ block: "nearest", inline: "nearest" });
    const box = span.getBoundingClientRect();
    show(i, Math.max(box.right, text.getBoundingClientRect().right - 250), box.top - 16);
  }

  function keys(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") tip.hide();
    if (event.key === "n" || event.key === "p") jump(event.key === "n" ? 1 : -1);
    if (!by) return;
    event.preventDefault();
    const row = rows()[state.open];
    const next = (state.selected === null ? row.offset - (by > 0 ? 1 : 0) : state.selected) + by;
    if (next >= row.offset && next < row.offset + row.num_tokens) select(next, true);
  }

  return { element: () => built || build() };
}
