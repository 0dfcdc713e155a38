"use strict";

// Everything that comes from files is inserted as text or as a number, never as markup.

const state = { data: JSON.parse(document.getElementById("data").textContent), plots: [] };
const byId = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const COLORS = 8;
const WHOLE = [...Array(16).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));  // distances between ticks

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// ---- Numbers -------------------------------------------------------------------------------

function short(value) {
  if (value == null) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e15 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  for (const [limit, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) return `${Number((value / (limit === 1e4 ? 1e3 : limit)).toPrecision(4))}${suffix}`;
  }
  return String(Number(value.toPrecision(5)));
}

// ---- The horizontal axis -------------------------------------------------------------------

// The value of a curve at iteration `x`, interpolated between its points. `curve.x` is ascending.
function at(curve, x) {
  const xs = curve.x, ys = curve.y;
  let low = 0, high = xs.length - 1;
  if (high < 0) return null;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  if (low === 0 || xs[low] <= x) return ys[low];
  const part = (x - xs[low - 1]) / (xs[low] - xs[low - 1]);
  return ys[low - 1] + part * (ys[low] - ys[low - 1]);
}

function horizontal(run) {
  const axis = byId("axis").value, clock = state.data.runs[run].clock;
  if (axis === "samples") return (x) => at(clock.samples, x);
  if (axis === "tokens") return (x) => at(clock.samples, x) * state.data.runs[run].tokensPerSample;
  if (axis === "hours") return (x) => at(clock.hours, x);
  return (x) => x;
}

function offerAxes() {
  for (const option of byId("axis").options) {
    const has = {
      iteration: () => true,
      samples: (run) => run.clock.samples.x.length,
      tokens: (run) => run.clock.samples.x.length && run.tokensPerSample,
      hours: (run) => run.clock.hours.x.length,
    }[option.value];
    option.disabled = !state.data.runs.every(has);
    if (option.disabled && option.selected) byId("axis").value = "iteration";
  }
}

// ---- Curves --------------------------------------------------------------------------------

// Smooth by fitting a straight line around each point. This follows a falling curve without lagging.
function smoothed(xs, ys, percent) {
  const reach = Math.round(xs.length * percent / 200);
  if (reach < 1) return null;
  return ys.map((_, i) => {
    if (ys[i] == null) return null;
    let n = 0, sx = 0, sy = 0, sxx = 0, sxy = 0;
    for (let j = Math.max(0, i - reach); j <= Math.min(xs.length - 1, i + reach); j++) {
      if (ys[j] == null) continue;
      const x = xs[j] - xs[i];
      n += 1; sx += x; sy += ys[j]; sxx += x * x; sxy += x * ys[j];
    }
    const spread = n * sxx - sx * sx;
    return spread > 0 ? (sy * sxx - sx * sxy) / spread : sy / n;
  });
}

function label(curve) {
  const runs = state.data.runs;
  return runs.length > 1 ? `${runs[curve.run].name}: ${curve.tag}` : curve.tag;
}

// The columns of a chart for uPlot, and its series. A smoothed curve is drawn in front of its original
// values. If a curve has been reduced to fewer points, the band between its extremes is also drawn. The
// legend has one entry per curve, which shows its value and its extremes.
function columnsOf(chart) {
  const percent = Number(byId("smoothing").value);
  const log = byId("log").checked;
  const tables = [], series = [{}], bands = [];
  chart.curves.forEach((curve, index) => {
    const place = horizontal(curve.run);
    const stroke = color(`--c${index % COLORS}`);
    const xs = curve.x.map(place);
    const positive = (ys) => log ? ys.map((y) => y > 0 ? y : null) : ys;
    const smooth = curve.smooth ? smoothed(xs, curve.y, percent) : null;
    const columns = [xs, positive(curve.y)];
    const values = series.length;
    const aside = { class: "aside", curve: index, points: { show: false } };
    const main = {
      label: label(curve), curve: index, stroke, width: 2,
      value: (plot, _, __, at) => {
        if (at == null) return "–";
        const [value, high, low] = [values, values + columns.length - 3, values + columns.length - 2].map((i) => plot.data[i][at]);
        return curve.low && low != null ? `${short(value)} (${short(low)} to ${short(high)})` : short(value);
      },
    };
    if (smooth) {
      columns.push(positive(smooth));
      series.push({ ...aside, stroke: faded(stroke, 0.35), width: 1 }, { ...main, points: { show: false } });
    } else {
      series.push({ ...main, points: { show: xs.length < 2, size: 6 } });
    }
    if (curve.low) {
      columns.push(positive(curve.high), positive(curve.low));
      const edge = { ...aside, stroke: faded(stroke, 0.25), width: 1 };
      series.push(edge, { ...edge });
      bands.push({ series: [series.length - 2, series.length - 1], fill: faded(stroke, 0.15) });
    }
    tables.push(columns);
  });
  return { columns: tables.length > 1 ? uPlot.join(tables) : tables[0], series, bands };
}

// A click on the legend shows or hides a curve with its band.
function toggleCurve(plot, index, { show }) {
  if (show == null || index == null) return;
  plot.series.forEach((other, i) => {
    if (i && other.curve === plot.series[index].curve && other.show !== show) plot.setSeries(i, { show }, false);
  });
}

function faded(stroke, alpha) {
  return stroke + Math.round(255 * alpha).toString(16).padStart(2, "0");
}

// Mark the places where values were not finite and where the run was restarted.
function drawMarks(index) {
  return (plot) => {
    const chart = state.data.charts[index];
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    state.data.runs.forEach((run, number) => {
      for (const event of run.events) {
        if (event.kind !== "resumed") continue;
        const x = plot.valToPos(horizontal(number)(event.iteration), "x", true);
        ctx.strokeStyle = color("--dim");
        ctx.setLineDash([4, 4]);
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
      }
    });
    ctx.setLineDash([]);
    ctx.fillStyle = color("--bad");
    for (const curve of chart.curves) {
      for (const iteration of curve.bad || []) {
        const x = plot.valToPos(horizontal(curve.run)(iteration), "x", true);
        ctx.fillRect(x - 1.5, bbox.top, 3, 12 * devicePixelRatio);
      }
    }
    ctx.restore();
  };
}

function describe(chart) {
  return chart.curves.map((curve) => {
    const finite = curve.y.filter((y) => y != null);
    if (!finite.length) return `${label(curve)}: no finite value`;
    const low = Math.min(...(curve.low || finite).filter((y) => y != null));
    const high = Math.max(...(curve.high || finite).filter((y) => y != null));
    const count = curve.bad ? curve.bad.length : 0;
    const bad = count ? `, not finite at ${count} ${count === 1 ? "point" : "points"}` : "";
    return `${label(curve)}: ${short(finite[0])} at iteration ${curve.x[0]}, ` +
      `${short(finite[finite.length - 1])} at iteration ${curve.x[curve.x.length - 1]}, ` +
      `lowest ${short(low)}, highest ${short(high)}${bad}`;
  }).join(". ");
}

function drawChart(chart, index, figure) {
  const { columns, series, bands } = columnsOf(chart);
  const log = byId("log").checked && columns.slice(1).some((ys) => ys.some((y) => y > 0));
  const axis = {
    stroke: color("--dim"), grid: { stroke: color("--grid"), width: 1 }, ticks: { stroke: color("--grid"), width: 1 },
    values: (_, splits) => splits.map((value) => value == null ? "" : short(value)),
  };
  const title = byId("axis").selectedOptions[0].textContent;
  series[0] = { label: title, value: (_, value) => short(value) };
  const options = {
    ...sizeOf(figure), series, bands,
    scales: { x: { time: false }, y: log ? { distr: 3 } : {} },
    axes: [byId("axis").value === "hours" ? axis : { ...axis, incrs: WHOLE }, { ...axis, size: 62 }],
    cursor: { sync: { key: "report" }, drag: { x: true, y: false } },
    hooks: { draw: [drawMarks(index)], setSeries: [toggleCurve] },
  };
  const holder = element("div");
  figure.append(holder);
  const plot = new uPlot(options, columns, holder);
  plot.root.querySelector("canvas").setAttribute("aria-hidden", "true");
  const words = element("p", { class: "note" }, describe(chart));
  figure.append(element("details", {}, element("summary", {}, "In words"), words));
  state.plots.push({ plot, figure, words });
}

function sizeOf(figure) {
  const style = getComputedStyle(figure);
  const width = figure.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  return { width, height: figure.matches(":first-child") ? 340 : 230 };
}

function drawCharts() {
  for (const { plot } of state.plots) plot.destroy();
  state.plots = [];
  byId("charts").replaceChildren(...state.data.charts.map((chart) => {
    const unit = chart.unit ? element("small", {}, ` ${chart.unit}`) : "";
    const figure = element("figure", { role: "group", "aria-label": chart.title }, element("h2", {}, chart.title, unit));
    return figure;
  }));
  state.data.charts.forEach((chart, index) => drawChart(chart, index, byId("charts").children[index]));
}

// Show new data in the existing charts and keep the reader's zoom. If the set of curves has changed,
// draw the charts again.
function updateCharts(before) {
  const shape = (data) => JSON.stringify(data.charts.map(({ title, curves }) =>
    [title, curves.map((curve) => [curve.run, curve.tag, Boolean(curve.low)])]));
  const updates = state.data.charts.map(columnsOf);
  const fits = shape(before) === shape(state.data) &&
    updates.every(({ series }, i) => series.length === state.plots[i].plot.series.length);
  if (!fits) return drawCharts();
  updates.forEach(({ columns }, i) => {
    const { plot, words } = state.plots[i];
    const xs = plot.data[0], { min, max } = plot.scales.x;
    plot.setData(columns, min <= xs[0] && max >= xs[xs.length - 1]);
    if (!plot.scales.x.auto) plot.redraw();
    words.textContent = describe(state.data.charts[i]);
  });
}

// ---- Tables --------------------------------------------------------------------------------

function table(head, rows) {
  const header = element("tr", {}, ...head.map((text) => element("th", { scope: "col" }, text)));
  const mark = (paint) => {
    const square = element("span", { class: "swatch" });
    square.style.background = paint;
    return square;
  };
  const body = rows.map(({ cells, kind, swatch }) => element("tr", kind ? { class: kind } : {},
    element("th", { scope: "row" }, ...(swatch ? [mark(swatch)] : []), String(cells[0])),
    ...cells.slice(1).map((text) => element("td", {}, text == null ? "–" : String(text)))));
  return element("div", { class: "table" }, element("table", {}, element("thead", {}, header), element("tbody", {}, ...body)));
}

function drawSummary() {
  const names = [...new Set(state.data.runs.flatMap((run) => run.summary.map(([name]) => name)))];
  const rows = state.data.runs.map((run) => {
    const values = new Map(run.summary);
    return { cells: [run.name, ...names.map((name) => values.get(name))] };
  });
  byId("summary").replaceChildren(table(["Run", ...names], rows));
}

function svg(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function section(title, ...children) {
  return element("section", { "aria-label": title }, element("h2", {}, title), ...children);
}

// The title of a section about one run. If there are several runs, it names the run.
function ofRun(title, run) {
  return state.data.runs.length > 1 ? `${title}: ${run.name}` : title;
}

function eventSection(run) {
  if (!run.events.length) return [];
  const rows = [...run.events].reverse().map((event) => ({
    cells: [
      event.kind, event.iteration.toLocaleString("en"),
      event.time == null ? null : new Date(event.time * 1000).toISOString().slice(0, 19).replace("T", " "),
      event.text,
    ],
    kind: { failure: "bad", "skipped update": "bad", "failed checkpoint": "bad" }[event.kind],
  }));
  const counts = Object.entries(run.eventCounts).map(([kind, count]) => `${kind}: ${count.toLocaleString("en")}`).join(", ");
  const all = Object.values(run.eventCounts).reduce((sum, count) => sum + count, 0);
  const older = all > rows.length ? `. Only the last ${rows.length} are listed` : "";
  const list = table(["Event", "Iteration", "Time (UTC)", "Details"], rows);
  list.classList.add("tall");
  list.tabIndex = 0;
  return [section(ofRun("Events", run), element("p", { class: "note" }, counts + older), list)];
}

// Colors of the heat map: white is an even share, as in the image for TensorBoard.
function warmth(load) {
  const value = Math.log(Math.min(4, Math.max(0.25, load))) / Math.log(4);
  const pale = Math.round(255 * (1 - Math.abs(value)));
  return value > 0 ? `rgb(255 ${pale} ${pale})` : `rgb(${pale} ${pale} 255)`;
}

function expertSection(run) {
  const layers = Object.entries(run.expertLoad);
  if (!layers.length) return [];
  const size = 16, left = 60, widest = Math.max(...layers.map(([, loads]) => loads.length));
  const width = left + widest * size, height = layers.length * size;
  const low = Math.min(...layers.map(([, loads]) => Math.min(...loads)));
  const high = Math.max(...layers.map(([, loads]) => Math.max(...loads)));
  const text = `Between ${short(low)} and ${short(high)} times an even share of the tokens. White is an even share, ` +
    "red is more and blue is less. One row per layer, one square per expert.";
  const map = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": text });
  layers.forEach(([layer, loads], row) => {
    const name = svg("text", { x: 0, y: row * size + 12, "font-size": 11, fill: "currentColor" });
    name.append(`layer ${layer}`);
    map.append(name);
    loads.forEach((load, expert) => {
      const square = svg("rect", { x: left + expert * size, y: row * size, width: size - 1, height: size - 1, fill: warmth(load) });
      const title = svg("title", {});
      title.append(`layer ${layer}, expert ${expert}: ${short(load)}`);
      square.append(title);
      map.append(square);
    });
  });
  return [section(ofRun("Expert load at the last log line", run), element("p", { class: "note" }, text),
    element("div", { class: "table", tabindex: 0 }, map))];
}

function timelineSection(run) {
  if (!run.timelines.length) return [];
  const left = 70, right = 1100, bar = 15;
  const end = Math.max(...run.timelines.flatMap(({ total, rows }) =>
    [total, ...rows.flatMap(({ spans }) => spans.map(([start, length]) => start + length))]));
  const names = [...new Set(run.timelines.flatMap(({ rows }) => rows.flatMap(({ spans }) => spans.map((span) => span[2]))))];
  const height = run.timelines.reduce((sum, { rows }) => sum + bar * rows.length + 8, 0);
  const { iteration } = run.timelines[0];
  const text = `Iteration ${iteration.toLocaleString("en")}, ${short(end)} ms, as recorded by --profile. ` +
    "The host's rows are timers and named ranges, some of which may only queue work for the GPU.";
  const picture = svg("svg", { viewBox: `0 0 ${right} ${height}`, width: right, height, role: "img", "aria-label": text });
  const totals = new Map();
  let top = 0;
  for (const { rank, rows } of run.timelines) {
    rows.forEach(({ name, spans }, row) => {
      if (name) {
        const title = svg("text", { x: 0, y: top + 12, "font-size": 11, fill: "currentColor" });
        title.append(row ? name : `rank ${rank}`);
        picture.append(title);
      }
      for (const [start, length, what] of spans) {
        const x = left + (right - left) * start / end, width = Math.max(0.5, (right - left) * length / end);
        const box = svg("rect", { x, y: top, width, height: bar - 2, fill: color(`--c${names.indexOf(what) % COLORS}`) });
        const title = svg("title", {});
        title.append(`rank ${rank}: ${what}, ${short(length)} ms from ${short(start)} ms`);
        box.append(title);
        picture.append(box);
        const sum = totals.get(what) || [0, 0];
        totals.set(what, [sum[0] + 1, sum[1] + length]);
      }
      top += bar;
    });
    top += 8;
  }
  const rows = [...totals].sort((a, b) => b[1][1] - a[1][1]).map(([name, [count, sum]]) => ({
    cells: [name, count.toLocaleString("en"), short(sum)], swatch: color(`--c${names.indexOf(name) % COLORS}`),
  }));
  return [section(ofRun("Timeline of an iteration", run), element("p", { class: "note" }, text),
    element("div", { class: "table", tabindex: 0 }, picture), table(["Range", "Count", "Total ms"], rows))];
}

// One table of all runs. Rows that differ between runs come first and are marked. Rows for which
// `isFirst` is true also come first, without a mark.
function comparison(title, name, tablesOf, isFirst, note) {
  const runs = state.data.runs, tables = runs.map(tablesOf);
  const keys = [...new Set(tables.flatMap((values) => Object.keys(values)))];
  if (!keys.length) return [];
  const differs = (key) => tables.some((values) => values[key] !== tables[0][key]);
  const rows = keys.map((key) => ({
    cells: [key, ...tables.map((values) => values[key])],
    kind: runs.length > 1 && differs(key) ? "changed" : "",
    first: (runs.length > 1 && differs(key)) || isFirst(key),
  }));
  const head = [name, ...(runs.length > 1 ? runs.map((run) => run.name) : ["Value"])];
  const first = rows.filter((row) => row.first), rest = rows.filter((row) => !row.first);
  const others = rest.length
    ? [element("details", {}, element("summary", {}, `${rest.length} others`), table(head, rest))] : [];
  return [section(title, ...(note ? [element("p", { class: "note" }, note)] : []),
    ...(first.length ? [table(head, first)] : []), ...others)];
}

function drawSections() {
  const runs = state.data.runs;
  const changed = new Set(runs.flatMap((run) => run.changed));
  const files = runs.flatMap((run) => [{
    cells: [run.sources.join(", "), run.damaged ? `${run.damaged} damaged or incomplete records were skipped` : "undamaged"],
    kind: run.damaged ? "bad" : "",
  }, ...run.notes.map((note) => ({ cells: [...note.split(/: (.*)/s).slice(0, 2)], kind: "bad" }))]);
  const constants = Object.entries(state.data.constants).map(([tag, value]) => `${tag} ${short(value)}`);
  const open = [...byId("sections").querySelectorAll("details")].map((details) => details.open);
  byId("sections").replaceChildren(
    ...runs.flatMap(timelineSection),
    ...runs.flatMap(expertSection),
    ...runs.flatMap(eventSection),
    ...comparison("Facts", "Fact", (run) => run.facts, () => true),
    ...comparison("Settings", "Flag", (run) => run.settings, (key) => changed.has(key),
      "Settings that differ from their defaults come first, whether they were set directly or follow from others."),
    section("Files", table(["File", "State"], files),
      ...(constants.length ? [element("p", { class: "note" }, `Constant over all iterations: ${constants.join(", ")}`)] : [])),
  );
  [...byId("sections").querySelectorAll("details")].forEach((details, i) => { details.open = open[i] || false; });
}

function drawStatus(problem) {
  const times = state.data.runs.map((run) => run.lastTime).filter((time) => time != null);
  const last = times.length
    ? `last record: ${new Date(1000 * Math.max(...times)).toISOString().slice(0, 19).replace("T", " ")} UTC` : "no records yet";
  byId("status").textContent = problem || (isLive ? `live, ${last}` : last);
  byId("status").classList.toggle("bad", Boolean(problem));
}

const isLive = document.body.hasAttribute("data-live");

async function poll() {
  try {
    const response = await fetch("data.json", { cache: "no-cache", headers: state.tag ? { "If-None-Match": state.tag } : {} });
    if (response.status !== 304 && !response.ok) throw new Error(`status ${response.status}`);
    const tag = response.headers.get("ETag");
    if (tag !== state.tag && response.status !== 304) {
      const before = state.data;
      state.data = await response.json();
      state.tag = tag;
      const names = state.data.runs.map((run) => run.name).join(" and ") || "no runs yet";
      document.querySelector("h1").textContent = names;
      document.title = `${names}: report`;
      offerAxes();
      drawSummary();
      updateCharts(before);
      drawSections();
    }
    drawStatus();
  } catch (error) {
    drawStatus(`the server does not answer (${error.message}); the page shows the last data received`);
  }
  setTimeout(poll, 2000);
}

function draw() {
  offerAxes();
  drawStatus();
  drawSummary();
  drawCharts();
  drawSections();
}

for (const id of ["axis", "smoothing", "log"]) byId(id).addEventListener("input", drawCharts);
byId("controls").addEventListener("submit", (event) => event.preventDefault());
addEventListener("resize", () => state.plots.forEach(({ plot, figure }) => plot.setSize(sizeOf(figure))));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
if (isLive) poll();
