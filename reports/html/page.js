"use strict";
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const config = { displayModeBar: false, responsive: true, showTips: false };
  let dark = false;

  // Figures are stored in light colours; each has one dark counterpart.
  const themed = (value) => {
    if (typeof value === "string") return dark && page.dark[value] !== undefined ? page.dark[value] : value;
    if (Array.isArray(value)) return value.map(themed);
    if (value !== null && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, themed(inner)]));
    return value;
  };

  const merged = (base, over) => {
    const result = { ...base };
    for (const [key, value] of Object.entries(over)) {
      const both = value && typeof value === "object" && !Array.isArray(value) && typeof result[key] === "object";
      result[key] = both ? merged(result[key], value) : value;
    }
    return result;
  };

  const cards = [...document.querySelectorAll("[data-card]")].map((element) => ({
    element,
    data: page.cards[element.dataset.card],
    selects: [...element.querySelectorAll("select")],
    plots: [...element.querySelectorAll(".plot")],
  }));

  const chosen = (card) => card.selects.reduce((at, select, k) => at * card.data.counts[k] + select.selectedIndex, 0);

  const draw = (card, plot) => {
    const panel = card.data.panels[plot.dataset.panel];
    const variant = panel.variants.length ? panel.variants[chosen(card)] : panel;
    const layout = panel === variant ? panel.layout : merged(panel.layout, variant.layout);
    plot.setAttribute("aria-label", variant.alt);
    if (!window.Plotly) return null; // it is still starting: what is picked now is drawn then
    drawnIn.set(plot, round);
    return Plotly.react(plot, themed(variant.data), { ...themed(layout), template: themed(page.template) }, config);
  };

  // Each round draws every figure once; a new one (another theme, paper) takes the place of one that is under way.
  let round = 0;
  const drawnIn = new WeakMap();

  // Between two figures the page scrolls, paints and answers. After the first of them, and after a key or a click, the
  // others wait a little longer: what the reader does next comes first.
  const patience = 300;
  let lastAct = -patience;
  for (const act of ["keydown", "pointerdown", "change"])
    addEventListener(act, () => (lastAct = performance.now()), { capture: true, passive: true });

  const idle = () =>
    new Promise((resolve) => (window.requestIdleCallback ? requestIdleCallback(resolve, { timeout: 500 }) : setTimeout(resolve, 20)));

  const leisure = async () => {
    do await idle();
    while (performance.now() < lastAct + patience);
  };

  const distance = (plot) => {
    const box = plot.getBoundingClientRect();
    return Math.max(box.top - innerHeight, -box.bottom, 0);
  };

  // What is on the screen first, then whatever is nearest to it, wherever the reader has scrolled to.
  const takeNearest = (waiting) => {
    const far = waiting.map(({ plot }) => distance(plot));
    return waiting.splice(far.indexOf(Math.min(...far)), 1)[0];
  };

  const drawAll = async () => {
    if (!window.Plotly) return;
    const turn = ++round;
    root.dataset.ready = "false";
    const waiting = cards.flatMap((card) => card.plots.map((plot) => ({ card, plot })));
    while (waiting.length) {
      const { card, plot } = takeNearest(waiting);
      if (drawnIn.get(plot) === turn) continue;
      await draw(card, plot);
      if (turn === 1 && lastAct < 0) lastAct = performance.now();
      await leisure();
      if (turn !== round) return;
    }
    root.dataset.ready = "true";
  };

  const drawAtOnce = () => {
    ++round;
    cards.forEach((card) => card.plots.forEach((plot) => draw(card, plot)));
    root.dataset.ready = String(Boolean(window.Plotly));
  };

  const useTheme = (isDark) => {
    dark = isDark;
    root.dataset.theme = dark ? "dark" : "light";
    const button = document.getElementById("theme");
    button.setAttribute("aria-pressed", String(dark));
  };

  const shown = (cell) => {
    if (cell === null) return "–";
    if (typeof cell === "boolean") return cell ? "yes" : "no";
    if (typeof cell !== "number") return cell;
    const text = Number.isInteger(cell) ? cell.toLocaleString("en-US") : String(Number(cell.toPrecision(6)));
    return text.replace("-", "−");
  };

  const fillTable = (card) => {
    const place = card.element.querySelector("details .scroll");
    if (!place || place.firstChild) return;
    const table = place.appendChild(document.createElement("table"));
    const head = table.createTHead().insertRow();
    for (const column of card.data.columns) {
      const cell = head.appendChild(document.createElement("th"));
      cell.scope = "col";
      cell.textContent = column.heading;
    }
    const body = table.createTBody();
    for (const row of card.data.rows) {
      const line = body.insertRow();
      for (const value of row) {
        const cell = line.insertCell();
        if (typeof value === "number") cell.className = "n";
        cell.textContent = shown(value);
      }
    }
  };

  // A spreadsheet would run a text that starts like a formula.
  const csvCell = (cell) => {
    if (cell === null) return "";
    if (typeof cell !== "string") return String(cell);
    const text = /^[=+\-@\t\r]/.test(cell) ? `'${cell}` : cell;
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };

  const save = (name, type, text) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };

  const saveCsv = (card) => {
    const rows = [card.data.columns.map((column) => column.key), ...card.data.rows];
    save(`${card.element.dataset.card}.csv`, "text/csv", rows.map((row) => row.map(csvCell).join(",") + "\r\n").join(""));
  };

  for (const card of cards) {
    for (const select of card.selects)
      select.addEventListener("change", () => card.plots.forEach((plot) => draw(card, plot)));
    for (const button of card.element.querySelectorAll(".step"))
      button.addEventListener("click", () => {
        const select = card.selects[0];
        const count = select.options.length;
        select.selectedIndex = (select.selectedIndex + Number(button.dataset.step) + count) % count;
        select.dispatchEvent(new Event("change"));
      });
    card.element.querySelector("details")?.addEventListener("toggle", () => fillTable(card));
    card.element.querySelector(".csv").addEventListener("click", () => saveCsv(card));
    card.element.querySelector(".png")?.addEventListener("click", () =>
      card.plots.forEach((plot) => window.Plotly?.downloadImage(plot, { format: "png", scale: 2, filename: plot.dataset.panel })));
  }

  const system = matchMedia("(prefers-color-scheme: dark)");
  let asked = false;
  document.getElementById("theme").addEventListener("click", () => {
    asked = true;
    useTheme(!dark);
    drawAll();
  });
  system.addEventListener("change", () => {
    if (asked) return;
    useTheme(system.matches);
    drawAll();
  });
  // Paper is white, whatever the screen is.
  let before = false;
  addEventListener("beforeprint", () => {
    before = dark;
    useTheme(false);
    drawAtOnce();
  });
  addEventListener("afterprint", () => {
    useTheme(before);
    drawAll();
  });

  useTheme(system.matches);
  root.dataset.ready = "false";
  // By then plotly is there, whose script waits for the whole page; it is started from here (see bundle.py).
  addEventListener("DOMContentLoaded", () => {
    if (window.startPlotly) window.Plotly = startPlotly();
    drawAll();
  });
})();
