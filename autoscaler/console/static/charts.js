"use strict";
// Demand with its forecast fan and supply by rung, on one axis of requests/s. Plain SVG, all colours by CSS variables.

const svgNS = "http://www.w3.org/2000/svg";
const shape = (name, attributes, text) => {
  const made = document.createElementNS(svgNS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
};
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function drawService(box, one) {
  const W = Math.max(300, box.clientWidth), H = 260, L = 48, R = 12, T = 10, B = 24;
  const rows = one.history;
  box.replaceChildren();
  if (!rows.length) { box.append(Object.assign(document.createElement("p"), { textContent: "No plan for it yet.", className: "quiet" })); return; }
  const fan = one.forecast, from = rows[0].at_s, end = rows[rows.length - 1].at_s;
  const until = Math.max(end, fan ? fan.at_s + fan.lead_s : end, from + 60);
  const used = one.markets.filter((m) => rows.some((r) => r.supply_rps[m]));
  const total = (r) => used.reduce((sum, m) => sum + (r.supply_rps[m] || 0), 0);
  const top = 1.08 * Math.max(0.01, ...rows.map((r) => Math.max(total(r), r.rps || 0, r.planned_rps || 0)), ...(fan ? fan.quantiles.map((q) => q[1]) : []));
  const x = (at) => L + (W - L - R) * (at - from) / (until - from);
  const y = (v) => H - B - (H - T - B) * v / top;
  const last = rows[rows.length - 1];
  const svg = shape("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label":
    `${one.service}: demand ${fmt(last.rps)}, planned for ${fmt(last.planned_rps)}, ready supply ${fmt(total(last))} requests per second` });
  const parts = W < 600 ? 2 : 4;
  for (let i = 0; i <= parts; i++) {
    const v = top * i / parts;
    svg.append(shape("line", { x1: L, x2: W - R, y1: y(v), y2: y(v), stroke: colour("line") }), shape("text", { x: L - 6, y: y(v) + 4, "text-anchor": "end" }, fmt(v)));
    const at = from + (until - from) * i / parts;
    svg.append(shape("text", { x: x(at), y: H - 6, "text-anchor": i === 0 ? "start" : i === parts ? "end" : "middle" }, clock(at)));
  }
  const floor = rows.map(() => 0);
  for (const market of used) {
    const upper = rows.map((r, i) => floor[i] + (r.supply_rps[market] || 0));
    const there = rows.map((r, i) => `${x(r.at_s)},${y(upper[i])}`);
    const back = rows.map((r, i) => `${x(r.at_s)},${y(floor[i])}`).reverse();
    svg.append(shape("polygon", { points: [...there, ...back].join(" "), fill: colour(market), "fill-opacity": .45 }));
    upper.forEach((v, i) => { floor[i] = v; });
  }
  const line = (values, style) => {
    let path = "", pen = "M";
    values.forEach(([at, v]) => { if (v === null || v === undefined) { pen = "M"; } else { path += `${pen}${x(at).toFixed(1)},${y(v).toFixed(1)}`; pen = "L"; } });
    svg.append(shape("path", { d: path, fill: "none", ...style }));
  };
  if (fan) {
    const now = last.rps ?? fan.quantiles[0][1], low = fan.quantiles[0][1], high = fan.quantiles[fan.quantiles.length - 1][1], at = fan.at_s + fan.lead_s;
    svg.append(shape("polygon", { points: `${x(fan.at_s)},${y(now)} ${x(at)},${y(high)} ${x(at)},${y(low)}`, fill: colour("fan"), "fill-opacity": .22 }));
    for (const [, v] of fan.quantiles) line([[fan.at_s, now], [at, v]], { stroke: colour("fan"), "stroke-width": 1 });
    svg.append(shape("line", { x1: x(end), x2: x(end), y1: T, y2: H - B, stroke: colour("quiet"), "stroke-dasharray": "2 4" }));
  }
  line(rows.map((r) => [r.at_s, r.planned_rps]), { stroke: colour("fan"), "stroke-width": 1.5, "stroke-dasharray": "6 4" });
  line(rows.map((r) => [r.at_s, r.rps]), { stroke: colour("demand"), "stroke-width": 2 });
  const legend = document.createElement("ul");
  legend.className = "legend";
  for (const [label, name] of [["demand", "demand"], ["planned for (dashed) and forecast", "fan"], ...used.map((m) => [`supply: ${m.replace("_", " ")}`, m])]) {
    const item = document.createElement("li"), key = document.createElement("i");
    key.style.background = colour(name);
    item.append(key, label);
    legend.append(item);
  }
  box.append(legend, svg);
}
