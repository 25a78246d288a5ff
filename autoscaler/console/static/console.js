"use strict";
// One page over /api/events. Text only ever enters through textContent; rows are reused, so focus and place stay.

const $ = (id) => document.getElementById(id);
const fmt = (v) => (v === null || v === undefined ? "–" : v >= 100 ? v.toFixed(0) : v >= 10 ? v.toFixed(1) : v.toFixed(2));
const clock = (at) => new Date(at * 1000).toISOString().slice(11, 19);
const el = (name, text, cls) => { const e = document.createElement(name); if (text !== undefined) e.textContent = text; if (cls) e.className = cls; return e; };
const put = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const WORDS = { served: "served", coming: "growing", short: "short", over: "over what is ready", unseen: "not seen" };

let page = null, chosen = decodeURIComponent(location.hash.slice(1)), wanted = 0, logged = -1;
const rows = new Map();

function objective(slo) {
  const limits = [["ttft_s", "TTFT"], ["tpot_s", "TPOT"], ["e2e_s", "end to end"], ["deadline_s", "deadline"]].filter(([k]) => slo[k] !== undefined);
  return `${(100 * slo.fraction).toFixed(0)} % ${limits.map(([k, word]) => `${word} ≤ ${slo[k]} s`).join(", ")}`;
}

const kept = (one) => (one.kept === null ? "–" : `${(100 * one.kept).toFixed(1)} %`);

function rowOf(one) {
  if (rows.has(one.service)) return rows.get(one.service);
  const tr = el("tr"), head = el("th"), pick = el("button", one.service);
  head.scope = "row";
  pick.type = "button";
  pick.addEventListener("click", () => choose(one.service));
  head.append(pick);
  tr.append(head);
  for (let i = 0; i < 9; i++) tr.append(el("td", "", i === 0 || i === 6 ? "" : "n"));
  tr.children[1].className = "state";
  rows.set(one.service, tr);
  return tr;
}

function showServices() {
  const text = $("filter").value.trim().toLowerCase(), only = $("trouble").checked, body = $("services").tBodies[0];
  const there = new Set(page.services.map((s) => s.service));
  for (const [name, tr] of rows) if (!there.has(name)) { tr.remove(); rows.delete(name); }
  let shown = 0;
  page.services.forEach((one, i) => {
    const tr = rowOf(one), c = tr.children;
    const cells = [WORDS[one.state], fmt(one.rps), fmt(one.planned_rps), fmt(one.carries_rps), `${one.ready} / ${one.wanted}`,
      one.short ? `${one.short}${one.expected_at_s ? ` until ~${clock(one.expected_at_s)}` : ""}` : "0", objective(one.slo), kept(one), fmt(one.usd_per_h)];
    cells.forEach((value, k) => put(c[k + 1], value));
    c[1].dataset.state = one.state;
    c[8].dataset.state = one.budget_left < 0 ? "short" : "";
    tr.title = one.why;
    tr.setAttribute("aria-current", String(one.service === chosen));
    tr.hidden = (text && !one.service.includes(text)) || (only && !["short", "over", "unseen"].includes(one.state));
    shown += tr.hidden ? 0 : 1;
    if (body.children[i] !== tr) body.insertBefore(tr, body.children[i] || null);
  });
  put($("shown"), `${shown} of ${page.services.length}`);
}

function showPools() {
  const kinds = [...new Set(page.pools.map((p) => `${p.instance_type} ${p.market.replace("_", " ")}`))].sort();
  const zones = [...new Set(page.pools.map((p) => p.zone))].sort();
  const head = el("tr"), at = new Map();
  head.append(Object.assign(el("th", "Type and market"), { scope: "col" }));
  for (const zone of zones) head.append(Object.assign(el("th", zone), { scope: "col" }));
  for (const p of page.pools) {
    const key = `${p.instance_type} ${p.market.replace("_", " ")}|${p.zone}`;
    at.set(key, [...(at.get(key) || []), p]);
  }
  const heat = getComputedStyle(document.documentElement).getPropertyValue("--heat");
  $("pools").tHead.replaceChildren(head);
  $("pools").tBodies[0].replaceChildren(...kinds.map((kind) => {
    const tr = el("tr");
    tr.append(Object.assign(el("th", kind), { scope: "row" }));
    for (const zone of zones) {
      const here = at.get(`${kind}|${zone}`) || [], td = el("td");
      for (const p of here) {
        td.append(el("span", `${(100 * p.odds).toFixed(0)} %`), el("small", `${p.held} held${p.starting ? `, ${p.starting} starting` : ""}`));
        if (p.cool_until_s) { td.append(el("small", `rests until ${clock(p.cool_until_s)}`)); td.className = "rest"; }
        td.style.background = `rgba(${heat}, ${(0.45 * p.odds).toFixed(2)})`;
        td.title = `${p.offering}: ${fmt(p.usd_per_h)} USD/h${p.last_refusal ? `, last refusal ${p.last_refusal}` : ""}`;
      }
      if (!here.length) td.textContent = "–";
      tr.append(td);
    }
    return tr;
  }));
}

function showUnits() {
  $("units").tBodies[0].replaceChildren(...page.units.map((u) => {
    const tr = el("tr");
    tr.append(Object.assign(el("th", u.unit || "used by nobody now"), { scope: "row" }));
    const month = u.month_usd === null ? "–" : `${fmt(u.month_usd)} of ${fmt(u.budget_usd_per_month)}`;
    for (const value of [fmt(u.usd_per_h), fmt(u.budget_usd_per_h), month, String(u.short)]) tr.append(el("td", value, "n"));
    return tr;
  }));
}

function showLog() {
  const newest = page.log.length ? page.log[0].seq : 0;
  if (newest === logged) return;
  logged = newest;
  $("log").replaceChildren(...page.log.map((line) => {
    const li = el("li", undefined, line.kind);
    const text = el("span", line.text);
    li.append(Object.assign(el("time", clock(line.at_s)), { title: `record ${line.seq}` }), el("b", line.kind), text);
    if (line.why) li.append(el("p", line.why, "why"));
    return li;
  }));
}

function choose(name) {
  chosen = name;
  history.replaceState(null, "", `#${encodeURIComponent(name)}`);
  showServices();
  showOne();
}

async function showOne() {
  const mine = ++wanted;
  const answer = await fetch(`/api/service?name=${encodeURIComponent(chosen)}`);
  if (!answer.ok || mine !== wanted) return;
  const one = await answer.json(), row = page.services.find((s) => s.service === chosen);
  put($("one-name"), one.service);
  put($("one-why"), row ? row.why : "");
  drawService($("chart"), one);
  $("ladder").replaceChildren(...(one.ladder.length ? one.ladder : [null]).map((p) => {
    if (!p) return el("li", "nothing was launched for it yet");
    const rest = p.cool_until_s ? `, rests until ${clock(p.cool_until_s)}` : "";
    const li = el("li", `${p.offering}: ${fmt(p.usd_per_h)} USD/h, odds ${(100 * p.odds).toFixed(0)} %, ${p.held} held${rest}`);
    li.style.borderLeftColor = `var(--${p.market})`;
    return li;
  }));
  $("causes").replaceChildren(...(one.causes.length ? one.causes : [null]).map((c) => {
    if (!c) return el("li", "none of those that the journal counts");
    const li = el("li");
    li.append(el("b", c.cause.replaceAll("_", " ")), el("span", `${(100 * c.share).toFixed(0)} %, ${c.misses.toFixed(0)} misses`), el("p", c.evidence, "why"));
    return li;
  }));
  const there = $("instance").value;
  $("instance").replaceChildren(...one.instances.map((name) => Object.assign(el("option", name), { selected: name === there })));
}

// The token stays in its field: it is sent with the order and kept nowhere.
async function give(event) {
  event.preventDefault();
  const verb = $("verb").value, order = { verb, subject: verb === "drain" ? $("instance").value : chosen, who: $("who").value, why: $("why").value };
  if (verb !== "unfreeze") order.minutes = Number($("minutes").value);
  if (verb === "floor") order.replicas = Number($("replicas").value);
  put($("said"), "…");
  const headers = { Authorization: `Bearer ${$("token").value}` };
  try {
    const answer = await fetch("/api/orders", { method: "POST", headers, body: JSON.stringify(order) });
    put($("said"), answer.ok ? `${verb} ${order.subject}: given; the controller journals it at its next tick.` : `Not given: ${(await answer.json()).error}.`);
  } catch { put($("said"), "Not given: the console does not answer, or the token has letters that no token has."); }
}

function fields() {
  const verb = $("verb").value;
  $("instance").parentElement.hidden = verb !== "drain";
  $("replicas").parentElement.hidden = verb !== "floor";
  $("minutes").parentElement.hidden = verb === "unfreeze";
}

function show(next) {
  const began = performance.now();
  page = next;
  const head = $("headline");
  put(head, page.headline.text);
  head.dataset.state = page.headline.state;
  const usd = page.units.reduce((sum, u) => sum + u.usd_per_h, 0);
  put($("meta"), `${fmt(usd)} USD/h · ${page.at_s ? `${new Date(page.at_s * 1000).toISOString().slice(0, 10)} ${clock(page.at_s)} UTC` : "no record yet"} · record ${page.seq}`);
  $("alarms").hidden = !page.alarms.length;
  $("alarms").replaceChildren(...page.alarms.map((line) => el("li", line)));
  $("orders").hidden = !page.orders.length;
  $("orders").replaceChildren(...page.orders.map((line) => el("li", `Ordered: ${line}`)));
  if (page.services.length && !page.services.some((s) => s.service === chosen)) {
    chosen = (page.services.find((s) => ["short", "over"].includes(s.state)) || page.services[0]).service;
  }
  showServices();
  showPools();
  showUnits();
  showLog();
  if (chosen) showOne();
  document.documentElement.dataset.updateMs = (performance.now() - began).toFixed(1);
}

$("filter").addEventListener("input", () => page && showServices());
$("order").addEventListener("submit", give);
$("verb").addEventListener("change", fields);
$("trouble").addEventListener("change", () => page && showServices());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page && show(page));
const source = new EventSource("/api/events");
source.addEventListener("page", (event) => show(JSON.parse(event.data)));
source.onerror = () => { put($("headline"), "Connection to the console lost; trying again."); $("headline").dataset.state = "unseen"; };
