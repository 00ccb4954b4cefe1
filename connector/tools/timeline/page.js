/* What holds the page together: its state, the link, pointer and keys, and when to draw. */

const SPEEDS = [["view in 20 s", 0], ["1/1000", 0.001], ["1/100", 0.01], ["1/10", 0.1], ["1×", 1], ["10×", 10], ["100×", 100]];
const PLAY_SECONDS = 20, ALIVE_EVERY_MS = 120, SPAN_MIN = 20;

performance.mark("read");
const doc = readDocument(document.getElementById("data").textContent);
performance.measure("read", "read");

const byId = (id) => document.getElementById(id);
const app = {
  doc, stories: doc.stories, selected: null, bar: null, hover: null, fault: null, cursor: null, isPlaying: false, times: new Map(),
  filter: { query: "", outcomes: new Set(), peer: "", shortest: 0, longest: Infinity },
};
const lanes = new Lanes(doc, byId("lanes"), byId("overview"));
const scroller = byId("scroller"), panel = byId("panel"), tip = byId("tip");

/* --- drawing --- */

let isDue = false;

function draw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(function () {
    isDue = false;
    performance.mark("draw");
    if (lanes.needsPacking()) repack();
    lanes.scroll = scroller.scrollTop;
    lanes.draw(app);
    lanes.drawOverview(app);
    measure("draw");
  });
}

/* New rows; what was chosen stays in sight. */
function repack() {
  lanes.pack();
  fitHeight();
  if (app.bar) scrollTo(app.bar.lane ? app.bar : app.selected.deciding);
}

function fitHeight() {
  byId("height").style.height = Math.max(0, lanes.full - scroller.clientHeight) + "px";
}

/* The latest only: a page that is open for long must not grow. */
function measure(name) {
  performance.clearMeasures(name);
  performance.measure(name, name);
  performance.clearMarks(name);
}

function resize() {
  lanes.resize(scroller.clientWidth, scroller.clientHeight);
  fitHeight();
  draw();
}

function dress() {
  lanes.dress(getComputedStyle(document.documentElement));
  draw();
}

/* All of it is made anew. Who was in it with the keyboard stays in it, at the same tab or at its beginning. */
function showPanel() {
  const held = panel.contains(document.activeElement) ? document.activeElement : null, isTab = held && held.role === "tab";
  if (app.selected) showStory(app, panel);
  else showSummary(app, panel);
  if (held) ((isTab && panel.querySelector("[aria-selected=true]")) || panel).focus({ preventScroll: true });
}

function say(text) {
  byId("said").textContent = text;
}

/* --- the view --- */

function setView(start, end) {
  const room = (doc.end - doc.start) * 0.02, low = doc.start - room, high = doc.end + room;
  const span = Math.max(SPAN_MIN, Math.min(high - low, end - start));
  start = Math.max(low, Math.min(high - span, start));
  lanes.view = [start, start + span];
  draw();
}

function zoom(factor, around) {
  const [start, end] = lanes.view;
  if (around === undefined) around = app.cursor !== null && app.cursor > start && app.cursor < end ? app.cursor : (start + end) / 2;
  setView(around - (around - start) * factor, around + (end - around) * factor);
}

function pan(share) {
  const [start, end] = lanes.view, by = (end - start) * share;
  setView(start + by, end + by);
}

function showAll() {
  const room = (doc.end - doc.start) * 0.01;
  setView(doc.start - room, doc.end + room);
}

app.goTo = function (time) {
  setCursor(time);
  const [start, end] = lanes.view;
  if (time < start || time > end) setView(time - (end - start) / 2, time + (end - start) / 2);
};

function setCursor(time) {
  app.cursor = time === null ? null : Math.max(doc.start, Math.min(doc.end, time));
  byId("scrubber").value = app.cursor === null ? 0 : Math.round(((app.cursor - doc.start) / (doc.end - doc.start)) * 10000);
  byId("clock").textContent = app.cursor === null ? "" : moment(app.cursor, 1e3);
  showAliveSoon();
  noteLink();
  draw();
}

let aliveAt = 0, aliveTimer = 0;

function showAliveSoon() {
  if (aliveTimer) return;
  aliveTimer = setTimeout(function () {
    aliveTimer = 0;
    aliveAt = performance.now();
    if (app.selected) showMoment(app, panel);
    else showAlive(app);
  }, Math.max(0, aliveAt + ALIVE_EVERY_MS - performance.now()));
}

/* --- choosing --- */

/* `moves`: bring it into view. `bar`: which of its machines to show the path of. */
app.choose = function (story, moves, bar) {
  app.selected = story || null;
  app.bar = story ? bar || story.deciding : null;
  if (story && moves) {
    // A lease may be much longer, above all one that its P did not live to end: the request is what is to be seen.
    const around = story.took * 4 + 1e5;
    const leases = story.leases.filter((each) => each.start > story.start - around);
    const start = Math.min(story.start, ...leases.map((each) => each.start));
    const end = Math.max(story.end, ...leases.map((each) => Math.min(each.end, story.end + around)));
    setView(start - (end - start) * 0.15 - 20, end + (end - start) * 0.15 + 20);
  } else if (story) {
    const [start, end] = lanes.view;
    if (story.end < start || story.start > end) {
      setView(story.start - (end - start) / 2, story.start + (end - start) / 2);
    }
  }
  if (story) scrollTo(story.deciding);
  document.body.classList.toggle("chosen", Boolean(story));
  showPanel();
  panel.scrollTop = 0;
  noteLink();
  if (story) say(story.name + ", " + doc.outcomes[story.outcome] + ", " + duration(story.took));
  draw();
};

function scrollTo(bar) {
  if (lanes.needsPacking()) repack();
  if (!bar.lane || !bar.isShown) return;
  const y = bar.lane.top + bar.lane.inset + bar.row * lanes.rowHeight, room = scroller.clientHeight - RULER;
  if (y < scroller.scrollTop || y > scroller.scrollTop + room - 30) scroller.scrollTop = y - room / 2;
}

function step(by) {
  if (!app.stories.length) return;
  const at = app.selected ? app.stories.indexOf(app.selected) : -1;
  const next = at < 0 ? (by > 0 ? firstInView() : app.stories.length - 1) : Math.max(0, Math.min(app.stories.length - 1, at + by));
  app.choose(app.stories[next], false);
}

function firstInView() {
  const found = app.stories.findIndex((story) => story.end >= lanes.view[0]);
  return Math.max(0, found);
}

/* --- the link: #r=<request>&t=<seconds>&v=<from>,<to> --- */

let linkTimer = 0;

function link() {
  const parts = [];
  if (app.selected) parts.push("r=" + encodeURIComponent(app.selected.key));
  if (app.cursor !== null) parts.push("t=" + (app.cursor / 1e6).toFixed(6));
  if (app.selected || app.cursor !== null) parts.push("v=" + lanes.view.map((each) => (each / 1e6).toFixed(6)).join(","));
  return parts.join("&");
}

function noteLink() {
  clearTimeout(linkTimer);
  linkTimer = setTimeout(() => history.replaceState(null, "", "#" + link()), 150);
}

function followLink() {
  const found = new URLSearchParams(location.hash.slice(1));
  const view = (found.get("v") || "").split(",").map((each) => parseFloat(each) * 1e6);
  const time = parseFloat(found.get("t")) * 1e6;
  const name = found.get("r");
  if (name !== null) {
    const story = doc.byKey.get(name) || doc.stories.find((each) => each.text.split("\n").includes(name.toLowerCase())) ||
      doc.stories.find((each) => each.text.includes(name.toLowerCase()));
    if (story) app.choose(story, !(view.length === 2 && view[1] > view[0]));
    else say("No request " + name + " in this trace");
  }
  if (view.length === 2 && view[1] > view[0]) setView(view[0], view[1]);
  if (!Number.isNaN(time)) setCursor(time);
}

app.copyLink = async function () {
  const button = byId("link");
  history.replaceState(null, "", "#" + link());
  try {
    await navigator.clipboard.writeText(location.href);
    if (button) button.textContent = "Copied";
    say("The link was copied");
  } catch (error) {
    if (button) button.textContent = "It is in the address bar";
    say("The link is in the address bar");
  }
};

/* --- filters --- */

function applyFilter() {
  performance.mark("filter");
  const { filter } = app;
  const isAll = !filter.query && !filter.outcomes.size && !filter.peer && filter.shortest === 0 && filter.longest === Infinity;
  app.stories = isAll ? doc.stories : matching(doc, filter);
  lanes.arrange(app.stories, isAll);
  fitHeight();
  byId("count").textContent = isAll ? count(doc.stories.length, "request") :
    app.stories.length.toLocaleString("en") + " of " + count(doc.stories.length, "request");
  byId("clear").hidden = isAll;
  showEmpty();
  if (!app.selected) showPanel();
  lanes.scroll = scroller.scrollTop;
  lanes.draw(app);
  lanes.drawOverview(app);
  measure("filter");
}

function showEmpty() {
  const box = byId("empty"), [text] = box.getElementsByTagName("p"), [button] = box.getElementsByTagName("button");
  box.hidden = app.stories.length > 0;
  button.hidden = !doc.stories.length;
  text.textContent = doc.stories.length
    ? "No request matches the filter."
    : "There are no requests in this trace. Its processes have written no record of a request or a lease.";
}

function clearFilter() {
  byId("query").value = byId("shortest").value = byId("longest").value = "";
  byId("peer").value = "";
  app.filter = { query: "", outcomes: new Set(), peer: "", shortest: 0, longest: Infinity };
  for (const button of byId("outcomes").children) button.setAttribute("aria-pressed", "false");
  for (const id of ["shortest", "longest"]) byId(id).removeAttribute("aria-invalid");
  applyFilter();
}

function readFilter() {
  app.filter.query = byId("query").value.trim();
  app.filter.peer = byId("peer").value;
  for (const [id, none] of [["shortest", 0], ["longest", Infinity]]) {
    const text = byId(id).value.trim(), value = text ? readDuration(text) : none;
    byId(id).toggleAttribute("aria-invalid", Number.isNaN(value));
    app.filter[id] = Number.isNaN(value) ? none : value;
  }
  applyFilter();
}

function makeFilters() {
  const counts = new Array(doc.outcomes.length).fill(0);
  for (const story of doc.stories) counts[story.outcome]++;
  for (let outcome = doc.outcomes.length - 1; outcome >= 0; outcome--) {
    if (!counts[outcome]) continue;
    const button = make("button", { type: "button", class: "chip", "aria-pressed": "false", "data-outcome": doc.outcomes[outcome], onclick: function () {
      const chosen = app.filter.outcomes;
      if (chosen.has(outcome)) chosen.delete(outcome);
      else chosen.add(outcome);
      button.setAttribute("aria-pressed", String(chosen.has(outcome)));
      applyFilter();
    } }, mark(doc, outcome), doc.outcomes[outcome] + " ", make("b", {}, counts[outcome].toLocaleString("en")));
    byId("outcomes").append(button);
  }
  const engines = new Set();
  for (const story of doc.stories) for (const engine of story.engines) engines.add(engine);
  byId("peer").append(make("option", { value: "" }, "any"),
    ...[...engines].sort((a, b) => a.localeCompare(b, "en", { numeric: true })).map((engine) => make("option", { value: engine }, shortEngine(engine))));
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  for (const id of ["query", "shortest", "longest"]) byId(id).addEventListener("input", readFilter);
  byId("peer").addEventListener("change", readFilter);
  byId("clear").addEventListener("click", clearFilter);
  byId("empty").getElementsByTagName("button")[0].addEventListener("click", clearFilter);
}

/* --- playing --- */

function play(plays) {
  app.isPlaying = plays;
  byId("play").textContent = plays ? "❚❚" : "▶";
  byId("play").setAttribute("aria-label", plays ? "Pause" : "Play");
  if (!plays) return;
  if (app.cursor === null || app.cursor >= lanes.view[1] || app.cursor < lanes.view[0]) setCursor(Math.max(doc.start, lanes.view[0]));
  let last = performance.now();
  requestAnimationFrame(function tick(now) {
    if (!app.isPlaying) return;
    const speed = Number(byId("speed").value), [start, end] = lanes.view;
    const passed = (Math.max(0, now - last) / 1000) * (speed ? speed * 1e6 : (end - start) / PLAY_SECONDS);
    last = now;
    const time = app.cursor + passed;
    if (time >= doc.end) {
      setCursor(doc.end);
      play(false);
      return;
    }
    if (time > end) setView(time - (end - start) * 0.1, time + (end - start) * 0.9);
    setCursor(time);
    requestAnimationFrame(tick);
  });
}

/* --- pointer --- */

const fingers = new Map();
let drag = null;

function place(event) {
  const box = byId("lanes").getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

scroller.addEventListener("pointerdown", function (event) {
  if (event.button !== 0 || event.target.closest("#empty")) return;
  const [x, y] = place(event);
  fingers.set(event.pointerId, x);
  if (fingers.size === 2) {
    const [a, b] = [...fingers.values()];
    drag = { pinch: Math.abs(a - b), view: [...lanes.view], around: lanes.time((a + b) / 2) };
    return;
  }
  drag = { x, y, view: [...lanes.view], top: scroller.scrollTop, moved: false, rules: y < RULER };
  if (drag.rules) setCursor(lanes.time(x));
});

window.addEventListener("pointermove", function (event) {
  const [x, y] = place(event);
  if (fingers.has(event.pointerId)) fingers.set(event.pointerId, x);
  if (drag && drag.pinch !== undefined && fingers.size === 2) {
    const [a, b] = [...fingers.values()], factor = drag.pinch / Math.max(10, Math.abs(a - b));
    setView(drag.around - (drag.around - drag.view[0]) * factor, drag.around + (drag.view[1] - drag.around) * factor);
    return;
  }
  if (drag && drag.pinch === undefined) {
    if (drag.rules) {
      setCursor(lanes.time(x));
      return;
    }
    if (!drag.moved && Math.abs(x - drag.x) + Math.abs(y - drag.y) < 5) return;
    drag.moved = true;
    scroller.classList.add("grabbed");
    tip.hidden = true;
    const perPixel = (drag.view[1] - drag.view[0]) / (lanes.width - lanes.gutter);
    setView(drag.view[0] - (x - drag.x) * perPixel, drag.view[1] - (x - drag.x) * perPixel);
    if (event.pointerType === "mouse") scroller.scrollTop = drag.top - (y - drag.y);
    return;
  }
  if (event.target === byId("lanes") || event.target === scroller) point(x, y, event);
  else leave();
});

window.addEventListener("pointerup", function (event) {
  fingers.delete(event.pointerId);
  const was = drag;
  drag = null;
  scroller.classList.remove("grabbed");
  if (!was || was.moved || was.rules || was.pinch !== undefined) return;
  const [x, y] = place(event), bar = lanes.barAt(x, y);
  if (bar) app.choose(bar.stories.includes(app.selected) ? app.selected : bar.stories[0], false, bar);
  else if (x > lanes.gutter) {
    app.choose(null);
    setCursor(lanes.time(x));
  }
});

window.addEventListener("pointercancel", function (event) {
  fingers.delete(event.pointerId);
  drag = null;
});

scroller.addEventListener("dblclick", function (event) {
  const [x, y] = place(event), bar = lanes.barAt(x, y);
  if (bar) app.choose(bar.stories[0], true, bar);
});

scroller.addEventListener("pointerleave", leave);
scroller.addEventListener("scroll", draw);
scroller.addEventListener("wheel", function (event) {
  const [x] = place(event);
  const scrolls = lanes.full > scroller.clientHeight + 2;
  if (event.ctrlKey || event.metaKey || event.altKey || (!scrolls && !event.shiftKey && Math.abs(event.deltaY) > Math.abs(event.deltaX))) {
    event.preventDefault();
    zoom(Math.exp(Math.max(-120, Math.min(120, event.deltaY)) * 0.004), lanes.time(Math.max(lanes.gutter, x)));
  } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    event.preventDefault();
    pan((event.deltaX || event.deltaY) / lanes.width);
  }
}, { passive: false });

function leave() {
  tip.hidden = true;
  if (!app.hover && !app.fault) return;
  app.hover = app.fault = null;
  draw();
}

function point(x, y, event) {
  const fault = lanes.faultAt(x, y), bar = fault ? null : lanes.barAt(x, y);
  scroller.classList.toggle("pointing", Boolean(bar || fault));
  if (bar !== app.hover || fault !== app.fault) {
    app.hover = bar;
    app.fault = fault;
    draw();
  }
  if (!bar && !fault) {
    tip.hidden = true;
    return;
  }
  if (fault) {
    tip.replaceChildren(make("b", {}, words(fault.kind)), make("span", {}, fault.target),
      make("span", { class: "quiet" }, moment(fault.start, 1e3) + " for " + duration(fault.end - fault.start) +
        (fault.probability < 1 ? ", hits one in " + trimmed(1 / fault.probability, 2) : "")));
  } else {
    const time = lanes.time(x), visit = visitAt(bar, time), kept = bar.machine === "lease" ? keptUntil(bar, time) : null;
    tip.replaceChildren(...[make("b", { class: "id" }, bar.subject), pill(doc, bar.outcome),
      visit ? make("span", {}, words(visit.state) + " for " + duration(visit.end - visit.start)) : null,
      make("span", { class: "quiet" }, shortEngine(bar.process.engine) + " rank " + bar.process.rank + ", " + duration(bar.end - bar.start) + " in all"),
      kept !== null && visit ? make("span", { class: "quiet" }, "kept for " + duration(kept - time) + " more") : null,
      bar.reason ? make("span", { class: "why" }, bar.reason) : null,
      bar.stories.length > 1 ? make("span", { class: "quiet" }, "read by " + count(bar.stories.length, "request")) : null].filter(Boolean));
  }
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(innerWidth - box.width - 4, event.clientX + 14)) + "px";
  tip.style.top = (event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18) + "px";
}

/* The overview: drag the window, its edges, or draw a new one. */
byId("overview").addEventListener("pointerdown", function (event) {
  const canvas = byId("overview"), box = canvas.getBoundingClientRect();
  const perPixel = (doc.end - doc.start) / (box.width - lanes.gutter - PAD);
  const time = (each) => doc.start + (each.clientX - box.left - lanes.gutter) * perPixel;
  const [start, end] = lanes.view, reach = perPixel * 7, begin = time(event);
  const isWhole = end - start > (doc.end - doc.start) * 0.99;
  const moves = !isWhole && begin > start + reach && begin < end - reach;
  const fixed = Math.abs(begin - start) < reach && !isWhole ? end : Math.abs(begin - end) < reach && !isWhole ? start : begin;
  canvas.setPointerCapture(event.pointerId);
  let moved = false;
  const move = function (each) {
    moved = moved || Math.abs(each.clientX - event.clientX) > 3;
    if (!moved) return;
    const now = time(each);
    if (moves) setView(start + now - begin, end + now - begin);
    else setView(Math.min(fixed, now), Math.max(fixed, now));
  };
  const up = function () {
    canvas.removeEventListener("pointermove", move);
    if (!moved) setView(begin - (end - start) / 2, begin + (end - start) / 2);
  };
  canvas.addEventListener("pointermove", move);
  canvas.addEventListener("pointerup", up, { once: true });
});
byId("overview").addEventListener("dblclick", showAll);

/* --- keys --- */

document.addEventListener("keydown", function (event) {
  const types = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "range";
  if (byId("keys").open) return;
  if (event.key === "Escape") {
    if (types) event.target.blur();
    else if (app.selected) app.choose(null);
    else clearFilter();
    event.preventDefault();
    return;
  }
  if (event.key === "Enter" && event.target.id === "query") {
    if (app.stories.length) app.choose(app.stories[0], true);
    event.target.blur();
    return;
  }
  if (types || event.ctrlKey || event.metaKey || event.altKey) return;
  const onButton = event.target.tagName === "BUTTON";
  if (onButton && (event.key === "Enter" || event.key === " ")) return;
  const act = {
    ArrowLeft: () => (event.shiftKey ? nudge(-0.01) : pan(-0.15)), ArrowRight: () => (event.shiftKey ? nudge(0.01) : pan(0.15)),
    ArrowUp: () => step(-1), ArrowDown: () => step(1), "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6),
    "0": showAll, Enter: () => app.selected && app.choose(app.selected, true, app.bar), " ": () => play(!app.isPlaying),
    "/": () => byId("query").select(), "?": () => showKeys(app, byId("keys")), c: () => app.copyLink(), t: nextTheme,
  }[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});

function nudge(share) {
  const [start, end] = lanes.view;
  app.goTo((app.cursor === null ? start : app.cursor) + (end - start) * share);
}

/* --- light and dark --- */

const THEMES = { "": "Theme: auto", light: "Theme: light", dark: "Theme: dark" };

function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  byId("theme").textContent = THEMES[name];
  dress();
}

function nextTheme() {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches, now = document.documentElement.dataset.theme || "";
  setTheme(now === "" ? (isDark ? "light" : "dark") : now === (isDark ? "light" : "dark") ? (isDark ? "dark" : "light") : "");
}

/* --- the beginning --- */

byId("title").textContent = doc.title;
const engines = (side) => new Set(lanes.lanes.filter((lane) => lane.side === side).map((lane) => lane.engine));
const sides = [engines("P").size, engines("D").size];
const about = [];
if (doc.stories.length) {
  about.push(sides[0] ? count(sides[0], "prefill engine") : "P's side is not in this trace", sides[1] ? count(sides[1], "decode engine") : "D's side is not in this trace",
    duration(doc.end - doc.start));
  if (doc.command === null) about.push("from " + new Date(doc.zeroWall * 1000).toISOString().replace("T", " ").replace(/\.\d+Z/, " UTC"));
  const shifted = doc.processes.filter((process) => process.shift).length;
  if (shifted && doc.command === null) about.push(count(shifted, "clock") + " shifted");
}
if (doc.complaints.length) about.push(count(doc.complaints.length, "violation"));
byId("about").textContent = about.join(" · ");
makeFilters();
for (const [name, value] of SPEEDS) byId("speed").append(make("option", { value }, name));
byId("play").addEventListener("click", () => play(!app.isPlaying));
byId("scrubber").addEventListener("input", () => app.goTo(doc.start + (Number(byId("scrubber").value) / 10000) * (doc.end - doc.start)));
byId("in").addEventListener("click", () => zoom(0.6));
byId("out").addEventListener("click", () => zoom(1 / 0.6));
byId("all").addEventListener("click", showAll);
byId("theme").addEventListener("click", nextTheme);
byId("help").addEventListener("click", () => showKeys(app, byId("keys")));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", dress);
window.addEventListener("hashchange", followLink);
new ResizeObserver(resize).observe(scroller);
lanes.resize(scroller.clientWidth, scroller.clientHeight);
setTheme("");
play(false);
showAll();
applyFilter();
resize();
followLink();
requestAnimationFrame(() => {
  performance.measure("open", { start: 0, end: performance.now() });
  document.body.classList.add("ready");
});
