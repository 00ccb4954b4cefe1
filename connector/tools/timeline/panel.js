/* The side panel: what is known of all requests that are shown, or of the chosen one; and what lives at the cursor.
   Texts of the trace become text nodes, never markup. */

const SLOWEST = 12, ALIVE_SHOWN = 16, COMPLAINTS_SHOWN = 6;

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function mark(doc, outcome) {
  return make("i", { class: "mark o" + outcome + " " + doc.outcomes[outcome], "aria-hidden": "true" });
}

function pill(doc, outcome) {
  return make("span", { class: "pill o" + outcome }, mark(doc, outcome), doc.outcomes[outcome]);
}

/* --- nothing is chosen --- */

function showSummary(app, panel) {
  const { doc, stories } = app;
  const slowest = slowestOf(stories, SLOWEST), most = slowest.length ? slowest[0].took : 1;
  const parts = [make("section", { id: "alive" }), ...complaintsOf(app)];
  parts.push(make("h2", {}, stories.length === doc.stories.length ? "All requests" : "Requests that match"));
  if (!stories.length) parts.push(make("p", { class: "quiet" }, "None."));
  else {
    parts.push(timesTable(app, "request", "On D, time in state"), timesTable(app, "lease", "On P, time in state"));
    parts.push(make("h3", {}, "Slowest"));
    parts.push(make("ol", { class: "slowest" }, ...slowest.map((story) =>
      make("li", {}, make("button", { type: "button", onclick: () => app.choose(story, true) },
        mark(doc, story.outcome), make("span", { class: "id" }, story.name),
        make("span", { class: "figure" }, duration(story.took)),
        make("span", { class: "bar" }, barOf(story.took / most, story.outcome)))))));
  }
  parts.push(...clockNote(doc));
  panel.replaceChildren(...parts.filter(Boolean));
  showAlive(app);
}

function complaintsOf(app) {
  const { complaints } = app.doc;
  if (!complaints.length) return [];
  const more = complaints.length - COMPLAINTS_SHOWN;
  return [make("h2", {}, "What the oracles found"),
    make("ul", { class: "complaints" }, ...complaints.slice(0, COMPLAINTS_SHOWN).map((each) =>
      make("li", {}, make("button", { type: "button", onclick: () => app.goTo(each.at) },
        make("b", {}, each.oracle), " at " + moment(each.at, 1e3), make("span", {}, each.detail))))),
    more > 0 ? make("p", { class: "quiet more" }, "and " + more.toLocaleString("en") + " more") : make("p", { class: "more" })];
}

/* A share as a bar; SVG, because the page's policy forbids styles in attributes. */
function barOf(share, outcome) {
  const root = svg("svg", { class: "share o" + outcome, viewBox: "0 0 100 4", preserveAspectRatio: "none", "aria-hidden": "true" });
  root.append(svg("rect", { width: Math.max(1, 100 * share), height: 4 }));
  return root;
}

/* Those of all requests are made once. */
function timesOf(app, machine) {
  if (app.stories !== app.doc.stories) return stateTimes(app.doc, app.stories, machine);
  if (!app.times.has(machine)) app.times.set(machine, stateTimes(app.doc, app.stories, machine));
  return app.times.get(machine);
}

function timesTable(app, machine, title) {
  const rows = timesOf(app, machine);
  if (!rows.length) return null;
  return make("table", { class: "times" },
    make("caption", {}, title),
    make("thead", {}, make("tr", {}, ...["state", "times", "p50", "p95", "p99"].map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, make("th", { scope: "row" }, words(row.state)),
      make("td", {}, row.count.toLocaleString("en")), ...[row.p50, row.p95, row.p99].map((each) => make("td", {}, duration(each)))))));
}

function clockNote(doc) {
  const moved = doc.processes.filter((process) => process.shift);
  if (doc.command !== null) {
    return [make("h3", {}, "Simulated"), make("p", { class: "quiet" }, "Times are the simulator's own. Again: "), make("code", { class: "command" }, doc.command)];
  }
  if (!doc.processes.length) return [];
  if (!moved.length) {
    return [make("h3", {}, "Clocks"), make("p", { class: "quiet" },
      "The wall clocks of the processes agree with the order in which things must have happened; none was shifted.")];
  }
  return [make("h3", {}, "Clocks"), make("p", { class: "quiet" },
    "Wall clocks of these processes contradicted the order in which things must have happened (no answer comes before " +
    "its question). They were shifted:"),
  make("ul", { class: "shifts" }, ...moved.map((process) => make("li", {},
    make("span", { class: "id" }, shortEngine(process.engine) + " rank " + process.rank),
    make("span", { class: "figure" }, (process.shift > 0 ? "+" : "") + duration(process.shift)),
    make("span", { class: "quiet" }, count(process.pairs, "pair") + (process.error ? ", contradicts itself by " + duration(process.error) : "")))))];
}

/* What lives at the cursor. */
function showAlive(app) {
  const place = document.getElementById("alive");
  if (!place) return;
  const { doc, cursor } = app;
  if (cursor === null) {
    place.replaceChildren();
    return;
  }
  const byState = new Map(), alive = [];
  const seen = new Set();
  for (const story of app.stories) {
    for (const bar of [...story.leases, ...story.requests]) {
      if (bar.start > cursor || bar.end <= cursor || seen.has(bar.number)) continue;
      seen.add(bar.number);
      const visit = visitAt(bar, cursor);
      if (!visit) continue;
      const key = (bar.machine === "lease" ? "P " : "D ") + words(visit.state);
      byState.set(key, (byState.get(key) || 0) + 1);
      alive.push([bar, visit]);
    }
  }
  const isLease = (bar) => Number(bar.machine === "lease");
  alive.sort((a, b) => isLease(a[0]) - isLease(b[0]) || a[1].start - b[1].start);
  const faults = doc.faults.filter((fault) => fault.start <= cursor && fault.end >= cursor);
  const total = [...byState].map(([key, number]) => make("span", { class: "chip" }, key + " ", make("b", {}, number.toLocaleString("en"))));
  place.replaceChildren(...[
    make("h2", {}, "At " + moment(cursor, 1e3), make("span", { class: "wall" }, wallClock(doc, cursor))),
    alive.length ? make("p", { class: "chips" }, ...total) : make("p", { class: "quiet" }, "Nothing that is shown lived then."),
    faults.length ? make("p", { class: "chips" }, ...faults.map((fault) => make("span", { class: "chip fault" }, words(fault.kind) + " " + fault.target))) : null,
    make("ul", { class: "alive" }, ...alive.slice(0, ALIVE_SHOWN).map(([bar, visit]) => make("li", {},
      make("button", { type: "button", onclick: () => app.choose(bar.stories[0], false, bar) },
        mark(doc, bar.outcome), make("span", { class: "id" }, bar.subject),
        make("span", { class: "quiet" }, words(visit.state) + ofRank(bar)), make("span", { class: "figure" }, duration(cursor - visit.start)))))),
    alive.length > ALIVE_SHOWN ? make("p", { class: "quiet" }, "and " + (alive.length - ALIVE_SHOWN).toLocaleString("en") + " more") : null,
  ].filter(Boolean));
}

/* Which of several ranks with the same request. */
function ofRank(bar) {
  const [story] = bar.stories, all = bar.machine === "lease" ? story.leases : story.requests;
  return all.length > 1 ? " · rank " + bar.process.rank : "";
}

/* The cursor, in the figure of both sides. */
function showMoment(app, panel) {
  const figure = panel.querySelector(".sides");
  if (figure) figure.replaceWith(bothSides(app.doc, app.selected, app.cursor));
}

/* --- one request --- */

function showStory(app, panel) {
  const { doc, selected: story, bar } = app;
  const own = story.requests.length ? story.requests : story.leases;
  const deciding = story.deciding;
  const parts = [
    make("div", { class: "head" }, pill(doc, story.outcome),
      make("span", { class: "spring" }),
      make("button", { type: "button", id: "link", title: "Copy a link to this request at this time (c)", onclick: () => app.copyLink() }, "Copy link"),
      make("button", { type: "button", id: "close", title: "Close (Esc)", "aria-label": "Close", onclick: () => app.choose(null) }, "✕")),
    make("h2", { class: "id" }, story.name),
  ];
  if (deciding.reason) parts.push(make("p", { class: "reason o" + story.outcome }, make("b", {}, deciding.reason), deciding.detail && deciding.detail !== deciding.reason ? make("span", {}, deciding.detail) : null));
  const facts = [[story.isOver ? "took" : "so far", duration(story.took)]];
  const queued = Math.max(...own.map((each) => each.queued || 0));
  if (queued) facts.push([QUEUED, duration(queued)]);
  const reading = longestVisit(story.requests, "reading");
  if (reading) {
    facts.push(["READ", duration(reading.end - reading.start)]);
    const bytes = story.requests.reduce((sum, each) => sum + each.lengthBytes, 0);
    if (bytes) facts.push(["moved", amount(bytes)]);
    if (bytes && reading.end > reading.start) facts.push(["at", amount((bytes / (reading.end - reading.start)) * 1e6) + "/s"]);
  }
  const blocks = Math.max(...[...own, ...story.leases].map((each) => each.blocks));
  if (blocks) facts.push(["blocks", blocks.toLocaleString("en")]);
  if (story.retries) facts.push(["retries", "↻ " + story.retries]);
  const margin = marginOf(story);
  if (margin !== null) facts.push([margin >= 0 ? "proof margin" : "proof short by", duration(Math.abs(margin))]);
  const from = [...new Set(story.leases.map((each) => each.process.engine).concat(story.requests.map((each) => each.peer).filter(Boolean)))];
  const to = [...new Set(story.requests.map((each) => each.process.engine))];
  facts.push(["P", from.length ? from.map(shortEngine).join(", ") : "not in this trace"]);
  const held = [...new Set(story.holds.map((each) => each.process.engine))];
  const unread = held.length ? held.map(shortEngine).join(", ") + " held it, and made no request of it"
    : doc.knowsReaders ? "nobody asked for it" : "not in this trace";
  facts.push(["D", to.length ? to.map(shortEngine).join(", ") : unread]);
  facts.push(["began", moment(story.start, 1e3), wallClock(doc, story.start)]);
  parts.push(make("dl", { class: "facts" }, ...facts.map(([name, value, also]) => make("div", {}, make("dt", {}, name), make("dd", {}, value,
    also ? make("span", { class: "wall" }, also) : null)))));
  if (!story.leases.length) parts.push(make("p", { class: "quiet" }, "P's lease is not in this trace."));
  parts.push(make("h3", {}, "Both sides"), bothSides(doc, story, app.cursor));
  parts.push(sidesLegend(story));
  const all = [...story.requests, ...story.holds, ...story.leases];
  parts.push(make("h3", {}, "Path"));
  parts.push(make("div", { class: "tabs", role: "tablist" }, ...all.map((each) => make("button", {
    type: "button", role: "tab", "aria-selected": String(each === bar), onclick: () => app.choose(story, false, each),
  }, tabName(story, each)))));
  parts.push(make("div", { class: "o" + bar.outcome }, stateChart(doc, bar)));
  parts.push(stepsTable(app, bar));
  if (doc.command === null) parts.push(make("h3", {}, "Explain it"), make("code", { class: "command" }, doc.explain.replace("REQUEST", () => shellWord(story.name))));
  panel.replaceChildren(...parts);
}

function tabName(story, bar) {
  const several = (bars) => bars.length > 1;
  if (bar.machine === "request") return "request" + (several(story.requests) ? " " + bar.process.rank : "");
  if (bar.machine === "lease") return "lease" + (several(story.leases) ? " " + bar.process.rank : "");
  return "hold" + (several(story.holds) ? " " + bar.process.rank + "→" + bar.subject.split("/").pop() : "");
}

function longestVisit(bars, state) {
  let best = null;
  for (const bar of bars) {
    for (const visit of bar.visits) {
      if (visit.state === state && (!best || visit.end - visit.start > best.end - best.start)) best = visit;
    }
  }
  return best;
}

/* By how much the proof outlived the last READ; the least of all ranks. Null: nothing was read, or nothing proven. */
function marginOf(story) {
  let least = null;
  for (const request of story.requests) {
    const reads = request.steps.filter((step) => step.event === "ReadCompleted");
    if (!reads.length) continue;
    const last = reads[reads.length - 1].at;
    for (const [hold] of pairsOf(story, request)) {
      if (!hold) continue;
      const kept = keptUntil(hold, request.isOver ? request.end : Infinity);
      if (kept !== null && (least === null || kept - last < least)) least = kept - last;
    }
  }
  return least;
}

function sidesLegend(story) {
  const { leases, holds } = story, isQueued = [...leases, ...story.requests].some((bar) => bar.queue);
  const item = (kind, text) => make("span", {}, make("i", { class: "swatch " + kind }), text);
  return make("p", { class: "legend o" + (leases[0] || story.deciding).outcome },
    isQueued ? item("queued", QUEUED) : null, leases.length ? item("drain", "left of P's lease") : null,
    ...(leases.length && holds.length ? [item("proof", "proven by D"), item("gap", "the margin")] : []));
}

function stepsTable(app, bar) {
  const rows = bar.steps.map(function (step, index) {
    const before = index ? bar.steps[index - 1] : null;
    const kept = step.keptUntil === null || (before && before.keptUntil === step.keptUntil) ? null
      : (bar.machine === "hold" ? "proven for " : "kept for ") + duration(step.keptUntil - step.at) + " more";
    const stays = before && before.state === step.state;
    // The whole row can be clicked; its button is what the keyboard reaches, and its click is the row's.
    return make("tr", { class: stays ? "stays" : "", onclick: () => app.goTo(step.at) },
      make("td", { class: "figure" }, make("button", { type: "button", title: "Move the cursor here" },
        index ? "+" + duration(step.at - bar.steps[0].at) : moment(step.at, 1e3))),
      make("td", {}, make("b", {}, step.event), stays ? null : make("span", { class: "to" }, " → " + words(step.state)),
        step.reason && (!before || before.reason !== step.reason) ? make("div", { class: "why" }, step.reason) : null,
        kept ? make("div", { class: "quiet" }, kept) : null),
      make("td", { class: "figure" }, before ? duration(step.at - before.at) : ""));
  });
  return make("table", { class: "steps" },
    make("thead", {}, make("tr", {}, ...["when", "what", "after"].map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...rows));
}

/* --- the legend and the keys --- */

const KEYS = [
  ["← →", "earlier, later"], ["Shift ← →", "move the cursor"], ["↑ ↓", "request before, after"], ["+ −", "zoom"],
  ["0", "show everything"], ["Enter", "zoom to the request"], ["Space", "play, pause"], ["/", "filter"],
  ["c", "copy a link"], ["t", "light, dark"], ["Esc", "close, clear"], ["?", "this"],
];

function showKeys(app, dialog) {
  const { doc } = app;
  const outcomes = {
    done: "served", failed: "ended by a failure", expired: "the lease, or the time for it, was over",
    aborted: "the client left", open: "not over when the trace ended", withdrawn: "never lent",
  };
  const row = (sample, text) => make("li", {}, sample, make("span", {}, text));
  dialog.replaceChildren(
    make("div", { class: "head" }, make("h2", {}, "Keys and legend"), make("span", { class: "spring" }),
      make("button", { type: "button", "aria-label": "Close", onclick: () => dialog.close() }, "✕")),
    make("div", { class: "columns" },
      make("div", {}, make("h3", {}, "Colour: how it ended"),
        make("ul", { class: "key" }, ...[...doc.outcomes.keys()].reverse().map((o) => row(mark(doc, o), doc.outcomes[o] + ": " + outcomes[doc.outcomes[o]]))),
        make("h3", {}, "Pattern: the state"),
        make("ul", { class: "key" },
          row(sampleOf("queued"), QUEUED + ", before the first state"), row(sampleOf("pending"), "pending handshake: D waits for P"), row(sampleOf("solid"), "reading"),
          row(sampleOf("proving"), "proving: was the lease still held?"), row(sampleOf("draining"), "draining: READs may still write"),
          row(sampleOf("computing"), "P computes the prompt"), row(sampleOf("lease"), "P's lease drains; solid is what D can prove of it"),
          row(make("b", { class: "sign" }, "↻ 1"), "tried again, once"), row(make("b", { class: "sign" }, "→"), "grant → READ → release"))),
      make("div", {}, make("h3", {}, "Keys"),
        make("ul", { class: "key keys" }, ...KEYS.map(([key, text]) => row(make("kbd", {}, key), text))),
        make("h3", {}, "Pointer"),
        make("ul", { class: "key keys" }, row(make("kbd", {}, "click"), "choose a request; on the ruler, set the cursor"),
          row(make("kbd", {}, "drag"), "move"), row(make("kbd", {}, "Ctrl wheel"), "zoom"),
          row(make("kbd", {}, "overview"), "drag the window or its edges")))));
  dialog.showModal();
}

function sampleOf(kind) {
  const root = svg("svg", { class: "sample o5 " + kind, viewBox: "0 0 34 14", "aria-hidden": "true" });
  if (kind === "lease") {
    root.append(svg("rect", { class: "ground", width: 34, height: 14 }), svg("path", { class: "outer", d: "M0,14 V2 L16,8 V1 L34,8 V14 z" }), svg("path", { class: "inner", d: "M0,14 V4 L16,10 V3 L34,10 V14 z" }));
  } else {
    root.append(svg("rect", { class: "ground", y: kind === "computing" ? 8 : 0, width: 34, height: kind === "computing" ? 6 : 14 }));
    if (kind === "proving" || kind === "draining") {
      for (let x = -10; x < 34; x += 6) root.append(svg("path", { class: "line", d: `M${x},14 l14,-14` }));
    }
  }
  return root;
}
