// The page: tabs, and the controls that all charts follow.

const TABS = { learning: ["Learning", learning], staleness: ["Staleness", staleness], region: ["Trust region", region], work: ["Work", work], tokens: ["Tokens", null] };

function page(report) {
  for (const run of report.runs) run.name = visible(run.name);
  for (const recipe of report.recipes) recipe.label = visible(recipe.label);
  const seeds = report.recipes.some((recipe) => recipe.curves);
  const state = { tab: TABS[location.hash.slice(1)] ? location.hash.slice(1) : "learning", x: "step", smoothing: 0, log: true, together: seeds, hidden: new Set() };
  const body = h("div", { id: "body" });
  const reader = microscope(report);
  const draw = () => {
    tip.hide();
    document.body.dataset.tab = state.tab;
    if (state.tab === "tokens") body.replaceChildren(reader.element());
    else body.replaceChildren(h("div", { class: "grid-of-cards" }, TABS[state.tab][1](report, state).filter(Boolean)));
    for (const button of tabs.children) button.setAttribute("aria-selected", String(button.dataset.tab === state.tab));
  };
  const open = (tab) => { state.tab = tab; history.replaceState(null, "", `#${tab}`); draw(); };
  const tabs = h("nav", { role: "tablist", class: "tabs" }, Object.entries(TABS).map(([tab, [name]]) => h("button", { type: "button", role: "tab", "data-tab": tab, onclick: () => open(tab) }, name)));
  const change = (key) => (value) => { state[key] = value; draw(); };
  const controls = h("div", { class: "controls" },
    choice("Along", [["step", "steps"], ["wall_s", "wall time"], ["tokens", "trained tokens"]], state.x, change("x")),
    choice("Smooth", [["0", "not at all"], ["2", "5 points"], ["7", "15 points"], ["25", "51 points"]], "0", (value) => change("smoothing")(Number(value))),
    choice("Variance", [["log", "logarithmic"], ["linear", "linear"]], "log", (value) => change("log")(value === "log")),
    seeds && segmented("Seeds", [["together", "mean over seeds"], ["apart", "every run"]], "together", (value) => change("together")(value === "together")));
  addEventListener("hashchange", () => { if (TABS[location.hash.slice(1)]) open(location.hash.slice(1)); });
  const root = document.getElementById("page");
  root.replaceChildren(head(report, state, draw), h("div", { class: "bar" }, tabs, controls), body, foot(report));
  draw();
}

function head(report, state, draw) {
  const chips = report.runs.length < 2 ? null : h("div", { class: "chips", role: "group", "aria-label": "Runs" }, report.runs.map((run, i) => {
    const chip = h("button", { type: "button", class: "chip", "aria-pressed": "true", onclick: () => {
      if (state.hidden.has(i)) state.hidden.delete(i); else state.hidden.add(i);
      chip.setAttribute("aria-pressed", String(!state.hidden.has(i)));
      draw();
    } }, h("i", { class: "swatch", style: { background: color(i) } }), run.name);
    return chip;
  }));
  const themes = segmented("Theme", [["auto", "auto"], ["light", "light"], ["dark", "dark"]], "auto", (value) => {
    if (value === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = value;
  });
  const title = report.runs.length === 1 ? report.runs[0].name : `${report.runs.length} runs`;
  return h("header", {}, h("div", {}, h("h1", {}, title), h("p", { class: "hint" }, `estr report · ${describe(report)}`)), chips, themes);
}

function describe(report) {
  const count = (of) => report.runs.reduce((sum, run) => sum + (run.facts ? run.facts[of] : 0), 0);
  const thinned = report.stride > 1 ? ` · each point of a curve stands for ${report.stride} steps` : "";
  return count("num_trajectories") ? `${number(count("num_trajectories"))} trajectories, ${number(count("num_trained_tokens"))} trained tokens${thinned}` : `no ledger${thinned}`;
}

function foot(report) {
  return h("footer", { class: "hint" }, "Charts count every step, trajectory and token of the runs. Only the tab Tokens holds a sample: ", sampled(report));
}

unpack(document.getElementById("data").textContent.trim()).then(page).catch((error) => {
  document.getElementById("page").replaceChildren(h("p", { class: "empty" }, `The report cannot be shown by this browser: ${error.message}`));
  throw error;
});
