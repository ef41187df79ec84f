// What is drawn of the runs, tab by tab. Each function gives the cards of one tab.

const STATUS_COLORS = { ok: "var(--ok)", truncated: "var(--c1)", timeout: "var(--c4)", env_error: "var(--c3)", engine_error: "var(--bad)", grader_error: "var(--c5)", cancelled: "var(--c6)", leftover: "var(--muted)" };
const X_AXES = { step: ["optimizer step", number], wall_s: ["wall time", duration], tokens: ["trained tokens", short] };

// The lines of every chart: runs, or recipes with an interval over their seeds.
function sources(report, state) {
  if (state.together) {
    return report.recipes.map((recipe, i) => {
      const single = recipe.runs.length === 1;
      return { name: single ? report.runs[recipe.runs[0]].name : `${recipe.label} (${recipe.runs.length} seeds)`, color: color(recipe.runs[0]),
        curves: recipe.curves || report.runs[recipe.runs[0]].curves, shown: recipe.runs.some((r) => !state.hidden.has(r)) };
    }).filter((source) => source.shown);
  }
  return shownRuns(report, state).map(([run, i]) => ({ name: run.name, color: color(i), curves: run.curves }));
}

const shownRuns = (report, state) => report.runs.map((run, i) => [run, i]).filter(([, i]) => !state.hidden.has(i));

function smoothed(values, width) {
  if (!width) return values;
  return values.map((_, i) => {
    if (values[i] === null || values[i] === undefined) return null;
    let sum = 0, count = 0;
    for (let j = Math.max(0, i - width); j <= Math.min(values.length - 1, i + width); j++)
      if (values[j] !== null && values[j] !== undefined) { sum += values[j]; count++; }
    return sum / count;
  });
}

// series: [metric, words, dash]; several series are told apart by their dash.
function curve(report, state, title, series, options = {}) {
  const [xLabel, xFormat] = X_AXES[state.x];
  const all = sources(report, state);
  const lines = all.flatMap((source) => series.map(([metric, words, dash], s) => {
    const { x, values, low, high } = source.curves;
    const width = options.raw ? 0 : state.smoothing;
    const interval = s === 0 && Object.keys(low).length > 0; // more than one band hides the lines
    return { name: series.length > 1 ? (all.length > 1 ? `${source.name}: ${words}` : words) : source.name, color: source.color, dash,
      xs: x[state.x], ys: smoothed(values[metric], width),
      low: interval ? smoothed(low[metric], width) : null, high: interval ? smoothed(high[metric], width) : null };
  }));
  const legend = series.length > 1 && all.length > 1
    ? [...all.map(({ name, color: mark }) => ({ name, color: mark, block: true })), ...series.map(([, words, dash]) => ({ name: words, color: "var(--ink)", dash }))] : null;
  return lineChart({ title, lines, xLabel, xFormat, legend, ...options });
}

function heldOut(report, state) {
  const [xLabel, xFormat] = X_AXES[state.x];
  const all = sources(report, state);
  const lines = all.filter((s) => s.curves.evaluations.length).map((source) => {
    const found = source.curves.evaluations;
    return { name: source.name, color: source.color, marks: true, xs: found.map((e) => e[state.x]), ys: found.map((e) => e.accuracy), low: found.map((e) => e.low), high: found.map((e) => e.high), over: found[0].over };
  });
  const over = [...new Set(lines.map((line) => line.over))];
  const hint = over.length ? `Bars: 95 % intervals over ${over.join(" or ")}.` : null;
  return lineChart({ title: "Held-out accuracy", hint, lines, xLabel, xFormat, least: 0.05, empty: "No evaluation was made." });
}

function summaryTable(report, state) {
  const columns = ["run", "recipe", "correction", "seed", "steps", "held-out", "tokens/s", "rho_mask", "intra max", "inter max", "engine busy", "trainer busy", "wall time"];
  const rows = report.runs.map((run, i) => {
    const s = run.summary || {};
    const found = run.curves.evaluations;
    const accuracy = found.length ? `${number(found[0].accuracy)} → ${number(found[found.length - 1].accuracy)}` : MISSING;
    const wall = run.curves.x.wall_s;
    return h("tr", { class: state.hidden.has(i) ? "off" : null }, [
      [h("i", { class: "swatch", style: { background: color(i) } }), run.name], `${run.task}, ${visible(run.model)}`, run.correction, run.seed,
      `${run.steps_done} of ${run.steps_planned}`, accuracy, s.tokens_per_s === undefined ? MISSING : short(s.tokens_per_s),
      number(s.rho_mask), number(s.intra_max), number(s.inter_max), percent(s.engine_busy), percent(s.trainer_busy), duration(wall[wall.length - 1]),
    ].map((cell, c) => h("td", { class: c > 2 ? "n" : null }, cell)));
  });
  return h("section", { class: "card full" }, h("h3", {}, report.runs.length === 1 ? "The run" : "The runs"),
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, columns.map((c, i) => h("th", { class: i > 2 ? "n" : null }, c)))), h("tbody", {}, rows))));
}

function notes(report) {
  const lines = report.runs.flatMap((run) => run.notes.map((text) => [run.name, text]));
  return lines.length ? h("section", { class: "card full notes" }, h("h3", {}, "To know before reading"), h("ul", {}, lines.map(([name, text]) => h("li", {}, h("b", {}, name), " ", visible(text))))) : null;
}

function statuses(report, state) {
  const runs = shownRuns(report, state);
  const names = Object.keys(STATUS_COLORS).filter((status) => runs.some(([run]) => run.statuses[status]));
  return barChart({ title: "How rollouts ended", hint: "Every trajectory that reached an optimizer step, by status.", stacked: true, xLabel: "run", yFormat: short,
    groups: runs.map(([run]) => run.name), bars: names.map((status) => ({ name: status, color: STATUS_COLORS[status], values: runs.map(([run]) => run.statuses[status] || 0) })) });
}

function learning(report, state) {
  return [
    summaryTable(report, state), notes(report),
    curve(report, state, "Reward", [["reward_mean", "reward"]], { hint: "Mean over the scored trajectories of a step." }),
    heldOut(report, state),
    curve(report, state, "Entropy", [["policy_entropy", "policy, now"], ["behavior_entropy", "behavior, at the draw", "5 4"]], { hint: "Nats per token, of the whole distribution.", floor: 0 }),
    curve(report, state, "KL(behavior ‖ policy)", [["kl_k3", "k3"], ["kl_k1", "k1", "5 4"]], { hint: "Both estimate the same; k1 may be negative." }),
    curve(report, state, "Gradient norm", [["grad_norm", "norm"]], { hint: "Before clipping.", floor: 0 }),
    curve(report, state, "Loss", [["loss", "loss"]]),
    curve(report, state, "Groups without variance", [["num_zero_variance_groups", "equal outcomes"], ["num_groups", "all groups", "5 4"]], { hint: "Groups whose outcomes are all equal. They teach nothing, unless loss.variance_of is 'reward'.", floor: 0 }),
    statuses(report, state),
  ];
}

const KINDS = { lag: ["lag of a token", "tokens", "Target version − version, of each trained token."], staleness: ["staleness, v_target − v_first", "trajectories", "What max_staleness bounds."],
  intra: ["intra-trajectory staleness", "trajectories", "v_last − v_first: versions within one trajectory."], inter: ["inter-trajectory staleness", "trajectories", "v_target − v_last: versions since its last token."] };

function staleness(report, state) {
  const several = report.runs.length > 1;
  const maps = Object.entries(KINDS).flatMap(([kind, words]) => {
    const own = shownRuns(report, state).map(([run, i]) => stalenessMap(run, i, kind, words, several));
    return several && own.length ? h("div", { class: "multiples" }, h("h2", {}, words[0]), h("p", { class: "hint" }, shades(words)), h("div", {}, own)) : own;
  });
  return [
    curve(report, state, "Mean staleness", [["intra_mean", "intra"], ["inter_mean", "inter", "5 4"]], { hint: "Per trajectory of a step.", floor: 0 }),
    curve(report, state, "Largest staleness", [["staleness_max", "largest"], ["staleness_allowed", "allowed", "2 4"]], { hint: "v_target − v_first of the oldest trajectory of a step, and its bound.", floor: 0, raw: true }),
    ...maps,
  ];
}

const shades = ([, unit, meaning]) => `${meaning} The stronger the color, the larger the share of the ${unit}.`;

function stalenessMap(run, index, kind, words, several) {
  const [name, unit] = words;
  const title = several ? run.name : `${kind[0].toUpperCase()}${kind.slice(1)} over time`;
  if (!run.facts) return card({ title, draw: () => null, empty: "This run has no ledger (recipe key ledger), so its distributions are not known." });
  const counts = run.facts.staleness[kind];
  const totals = new Map();
  for (const [stretch, , count] of counts) totals.set(stretch, (totals.get(stretch) || 0) + count);
  const highest = Math.max(run.max_staleness, ...counts.map(([, value]) => value));
  const columns = run.facts.stretches.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`));
  return heatMap({ title, hint: several ? null : shades(words), columns, rows: Array.from({ length: highest + 1 }, (_, v) => `${v}`), xLabel: "steps", yLabel: name, mark: color(index), height: several ? 180 : HEIGHT,
    cells: counts.map(([stretch, value, count]) => [stretch, value, count / totals.get(stretch), [[unit, number(count)], ["share", percent(count / totals.get(stretch))]]]) });
}

const shareBars = (report, state, of, keys) => shownRuns(report, state).filter(([run]) => run.facts).map(([run, i]) => {
  const found = new Map(run.facts[of].map((share) => [share.key[0], share]));
  return { name: run.name, color: color(i), values: keys.map((key) => (found.has(key) ? found.get(key).rejected / found.get(key).tokens : null)),
    notes: keys.map((key) => (found.has(key) ? [["rejected", number(found.get(key).rejected)], ["of tokens", number(found.get(key).tokens)], ["clipped", percent(found.get(key).clipped / found.get(key).tokens)]] : [])) };
});

const keysOf = (report, state, of) => [...new Set(shownRuns(report, state).flatMap(([run]) => (run.facts ? run.facts[of].map((s) => s.key[0]) : [])))].sort((a, b) => a - b);

// Borders are float32 in the ledger.
const border = (value) => String(Number(value.toPrecision(4)));
const binNames = (keys) => keys.map((key) => (key > 0 ? `≥ ${border(key)}` : "< 0.01"));
const NO_LEDGER = "No run shown here has a ledger, so single tokens are not known.";

function region(report, state) {
  const bins = keysOf(report, state, "by_entropy");
  const lags = keysOf(report, state, "by_lag");
  return [
    curve(report, state, "Rejected tokens (rho_mask)", [["rho_mask", "rejected"]], { hint: "Share of the eligible tokens.", yFormat: percent, floor: 0 }),
    barChart({ title: "rho_mask by entropy", hint: "Entropy at the draw, nats, up to the next border; over the whole run.", xLabel: "entropy", groups: binNames(bins), bars: shareBars(report, state, "by_entropy", bins), empty: NO_LEDGER }),
    barChart({ title: "rho_mask by lag", hint: "Versions between a token and the loss.", xLabel: "lag", groups: lags.map(String), bars: shareBars(report, state, "by_lag", lags), empty: NO_LEDGER }),
    signCells(report, state),
    noise(report, state),
    ...shownRuns(report, state).filter(([run]) => run.facts).map(([run, i]) => entropyLag(run, i, report.runs.length > 1)),
    curve(report, state, "Variance of the log-ratio", [["log_ratio_variance", "all tokens"], ["log_ratio_variance_kept", "kept tokens", "5 4"]], { hint: "What the mask removes of it lies between the two.", log: state.log, floor: state.log ? undefined : 0 }),
    curve(report, state, "Effective sample size", [["effective_sample_size", "share"]], { hint: "(Σr)² / (n Σr²) over the tokens of a step: 1 when all ratios are equal.", ceiling: 1 }),
    curve(report, state, "Clipped tokens", [["clip_fraction", "clipped"]], { hint: "Kept, but at a bound of the surrogate, so without gradient.", yFormat: percent, floor: 0 }),
    curve(report, state, "Mean |ratio − 1|", [["ratio_deviation", "all tokens"], ["ratio_deviation_kept", "kept tokens", "5 4"]], { floor: 0 }),
  ];
}

function entropyLag(run, index, several) {
  const shares = run.facts.by_entropy_and_lag;
  const bins = [...new Set(shares.map((s) => s.key[0]))].sort((a, b) => a - b);
  const lags = [...new Set(shares.map((s) => s.key[1]))].sort((a, b) => a - b);
  const most = Math.max(...shares.map((s) => s.rejected / s.tokens)) || 1;
  return heatMap({ title: `rho_mask by entropy and lag${several ? `: ${run.name}` : ""}`, hint: `The strongest color: ${percent(most)} rejected.`, columns: binNames(bins), rows: lags.map(String), xLabel: "entropy", yLabel: "lag", mark: color(index), number: true,
    cells: shares.map((s) => [bins.indexOf(s.key[0]), lags.indexOf(s.key[1]), s.rejected / s.tokens / most, [["rejected", percent(s.rejected / s.tokens)], ["tokens", number(s.tokens)]]]) });
}

const CELLS = [[1, 1, "outward"], [1, -1, "restoring"], [-1, 1, "restoring"], [-1, -1, "outward"]];

function signCells(report, state) {
  const runs = shownRuns(report, state).filter(([run]) => run.facts);
  const head = ["", ...CELLS.map(([a, d, way]) => [`A ${a > 0 ? ">" : "<"} 0, δ ${d > 0 ? ">" : "<"} 0`, h("small", {}, way)])];
  const rows = runs.map(([run, i]) => h("tr", {}, h("td", {}, h("i", { class: "swatch", style: { background: color(i) } }), run.name), CELLS.map(([a, d]) => {
    const share = run.facts.by_cell.find((s) => s.key[0] === a && s.key[1] === d);
    return h("td", { class: "n" }, share ? [h("b", {}, percent(share.rejected / share.tokens)), h("small", {}, `of ${short(share.tokens)}`)] : MISSING);
  })));
  return h("section", { class: "card" }, h("h3", {}, "rho_mask by sign cell"), h("p", { class: "hint" }, "A: advantage, δ: log-ratio. In restoring cells a rejection drops a gradient that would bring the token back."),
    runs.length ? h("div", { class: "scroll" }, h("table", { class: "cells" }, h("thead", {}, h("tr", {}, head.map((cell, i) => h("th", { class: i ? "n" : null }, cell)))), h("tbody", {}, rows)))
      : h("p", { class: "empty" }, NO_LEDGER));
}

function noise(report, state) {
  const runs = shownRuns(report, state).filter(([run]) => run.facts && run.facts.noise.bins.length);
  const lines = runs.map(([run, i]) => {
    const bins = run.facts.noise.bins.filter((b) => b.second_moment > 0);
    return { name: run.name, color: color(i), bins, noise: run.facts.noise };
  });
  const said = runs.map(([run]) => `${run.name} (${run.facts.noise.which}): ${run.facts.noise.fits.map(saidOfFit).join("; ") || "too few tokens for a slope"}.`);
  const draw = (width, height) => {
    const all = lines.flatMap((line) => line.bins);
    if (!all.length) return null;
    const xs = range(all.map((b) => b.entropy + lines[0].noise.eps), { log: true });
    const ys = noiseRange(all);
    const [x, y] = [scale(...xs, MARGIN.left, width - MARGIN.right, true), scale(...ys, height - MARGIN.bottom, MARGIN.top, true)];
    const axes = frame(width, height, x, y, { xTicks: logTicks(...xs), yTicks: logTicks(...ys), xLabel: "entropy + eps, nats" });
    const marks = lines.map((line) => [fitted(line, x, y), line.bins.map((b) => {
      const [cx, cy] = [x(b.entropy + line.noise.eps), y(b.second_moment)];
      return [b.low > 0 && svg("line", { class: "bar", x1: cx, x2: cx, y1: y(b.low), y2: y(b.high), style: { stroke: line.color } }),
        svg("circle", { class: "dot", cx, cy, r: 4, style: { fill: b.fitted ? line.color : "var(--panel)", stroke: line.color },
          onpointermove: (e) => tip.show(e.clientX, e.clientY, line.name, [["entropy", number(b.entropy)], ["E[δ²]", number(b.second_moment)], ["interval", b.low === null ? MISSING : `${number(b.low)} to ${number(b.high)}`], ["tokens", number(b.tokens)], ["in the fit", b.fitted ? "yes" : "no, too few tokens"]]), onpointerleave: () => tip.hide() })];
    })]);
    const clip = `clip${clips++}`;
    return svg("svg", { width, height, role: "img", "aria-label": "Noise by entropy" }, plotArea(clip, width, height), axes, svg("g", { "clip-path": `url(#${clip})` }, bounds(runs, x, y, xs), marks));
  };
  return card({ title: "E[δ²] by entropy", hint: ["A trust region that scales with the entropy supposes a slope of 1. Dashed: the fits; red: where the correction rejects, δ² = tau (H + eps).", said.map((text) => h("span", { class: "said" }, text))], draw, wide: true, height: 260, empty: NO_LEDGER,
    legend: lines.map(({ name, color: mark }) => ({ name, color: mark, block: true })) });
}

// Bins at rounding may lie many decades lower; the range is that of the moments themselves.
function noiseRange(bins) {
  const values = bins.flatMap((b) => [b.second_moment, b.low, b.high]).filter((v) => v > 0);
  return [Math.min(...values) / 2, Math.max(...values) * 3];
}

function bounds(runs, x, y, [low, high]) {
  const taus = [...new Set(runs.map(([run]) => run.tau).filter((tau) => tau !== null))];
  return taus.map((tau) => svg("line", { class: "line", x1: x(low), x2: x(high), y1: y(tau * low), y2: y(tau * high), style: { stroke: "var(--bad)" } }));
}

function saidOfFit(fit) {
  const where = fit.from_entropy ? `from ${number(fit.from_entropy)} nats on` : "of all bins";
  return `slope ${where} ${number(fit.slope)}${fit.low === null ? " (too few steps for an interval)" : ` (95 %: ${number(fit.low)} to ${number(fit.high)})`}`;
}

function fitted({ noise: n, bins, color: mark }, x, y) {
  return n.fits.map((fit) => {
    const used = bins.filter((b) => b.fitted && b.entropy >= fit.from_entropy);
    const ends = [used[0], used[used.length - 1]].map((b) => b.entropy + n.eps);
    const at = (v) => Math.exp(fit.intercept + fit.slope * Math.log(v));
    return svg("line", { class: "line", x1: x(ends[0]), x2: x(ends[1]), y1: y(at(ends[0])), y2: y(at(ends[1])), "stroke-dasharray": fit.from_entropy ? "2 3" : "7 4", style: { stroke: mark } });
  });
}

function work(report, state) {
  const runs = shownRuns(report, state).filter(([run]) => run.facts);
  const flights = runs.filter(([run]) => run.facts.in_flight.length);
  return [
    curve(report, { ...state, x: "wall_s", together: false }, "Busy processes", [["engine_busy", "engine"], ["trainer_busy", "trainer", "5 4"]], { hint: "Share of the time since the step before that each spent at work.", yFormat: percent, floor: 0, ceiling: 1, least: 1, wide: true }),
    statuses(report, state),
    lineChart({ title: "Rollouts under way", hint: "Of those that reached an optimizer step.", xLabel: "wall time", xFormat: duration, floor: 0, wide: true, empty: "No times are known: no ledger, or a run that was resumed (each life has its own clock).",
      lines: flights.map(([run, i]) => ({ name: run.name, color: color(i), xs: run.facts.in_flight.map((p) => p[0]), ys: run.facts.in_flight.map((p) => p[1]) })) }),
    curve(report, state, "Lengths", [["length_mean", "dispatched, mean"], ["length_p90", "dispatched, 90 % quantile", "2 4"], ["length_trained_mean", "trained, mean", "7 4"]], { hint: "Sampled tokens of a trajectory.", floor: 0 }),
    ...runs.map(([run, i]) => lengths(run, i, report.runs.length > 1)),
    curve(report, state, "Trained tokens of a step", [["eligible_tokens", "tokens"]], { floor: 0 }),
    curve(report, state, "Seconds of the trainer", [["trainer_s", "seconds"]], { hint: "Per optimizer step.", floor: 0 }),
  ];
}

function lengths(run, index, several) {
  const { length_width: width, lengths: rows } = run.facts;
  const groups = rows.map(([from]) => (width === 1 ? `${from}` : `${from}–${from + width - 1}`));
  const reward = rows.map(([, , trained, sum]) => [["mean reward", trained ? number(sum / trained) : MISSING]]);
  return barChart({ title: `Lengths, dispatched and trained${several ? `: ${run.name}` : ""}`, hint: "Trajectories by sampled tokens.", xLabel: "tokens", yFormat: short, groups,
    bars: [{ name: "dispatched", color: "var(--muted)", values: rows.map((r) => r[1]), notes: reward }, { name: "trained", color: color(index), values: rows.map((r) => r[2]), notes: reward }] });
}
