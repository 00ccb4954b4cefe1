"use strict";
/* The document of export.py, read into objects; filters, lanes and figures. Nothing here draws.

   A bar is one history (one machine instance): `visits` are the states that it was in, `steps` everything that happened
   to it, `queue` its wait in vLLM's queue before the first of them, or null. Times are microseconds since the beginning of the document. */

const STEP = 6, NARROW_NAME = 5, QUEUED = "in vLLM's queue";

function readDocument(text) {
  const raw = JSON.parse(text);
  const strings = raw.strings;
  const machineNames = Object.keys(raw.machines);
  const terminal = {}, numberOf = {};
  for (const name of machineNames) {
    terminal[name] = new Set(raw.machines[name].terminal);
    numberOf[name] = Object.fromEntries(raw.machines[name].states.map((state, number) => [state, number]));
  }

  const bars = raw.histories.map(function (row, number) {
    const [machine, process, outcome, subject, peer, remote, blocks, lengthBytes, descriptors, queued, flat] = row;
    const bar = {
      number, machine: machineNames[machine], process: raw.processes[process], outcome, subject: strings[subject],
      peer: strings[peer], remote: strings[remote], blocks, lengthBytes, descriptors, queued,
      queue: null, steps: [], visits: [], stories: [], hold: null, lease: null, start: 0, end: 0, isOver: false, retries: 0, row: 0, lane: null, isShown: false, counting: 0,
    };
    let at = 0;
    for (let i = 0; i < flat.length; i += STEP) {
      at += flat[i];
      const kept = flat[i + 5];
      bar.steps.push({
        at, event: strings[flat[i + 1]], state: strings[flat[i + 2]], reason: strings[flat[i + 3]],
        detail: strings[flat[i + 4]], keptUntil: kept === null ? null : at + kept,
      });
    }
    for (const step of bar.steps) {
      const last = bar.visits[bar.visits.length - 1];
      if (last && last.state === step.state) continue;
      if (last) last.end = step.at;
      bar.visits.push({ state: step.state, number: numberOf[bar.machine][step.state], start: step.at, end: 0, event: step.event });
    }
    const last = bar.visits[bar.visits.length - 1];
    bar.state = last.state;
    bar.start = bar.steps[0].at - (queued || 0);
    if (queued) bar.queue = { state: QUEUED, start: bar.start, end: bar.steps[0].at };
    bar.end = bar.steps[bar.steps.length - 1].at;
    bar.isOver = terminal[bar.machine].has(bar.state);
    const final = bar.steps[bar.steps.length - 1];
    bar.reason = final.reason;
    bar.detail = final.detail;
    // Where the beginning was not recorded there may be no attempt at all.
    const attempts = bar.machine === "request" ? bar.visits.filter((v) => v.state === "pending_handshake").length : 0;
    bar.retries = Math.max(0, attempts - 1);
    return bar;
  });

  for (const bar of bars) bar.process.lastSeen = Math.max(bar.process.lastSeen || 0, bar.end);
  let end = 0;
  for (const bar of bars) end = Math.max(end, bar.end);
  for (const each of raw.complaints) end = Math.max(end, each.at_seconds * 1e6);
  for (const bar of bars) {
    if (!bar.isOver) bar.end = end;
    const last = bar.visits[bar.visits.length - 1];
    last.end = bar.end;
  }

  const stories = raw.stories.map(function (row, number) {
    const [deciding, requests, holds, leases, held] = row;
    const story = {
      number, deciding: bars[deciding], outcome: bars[deciding].outcome, requests: requests.map((n) => bars[n]),
      holds: holds.map((n) => bars[n]), leases: leases.map((n) => bars[n]), isShown: true,
    };
    const own = story.requests.length ? story.requests : story.leases;
    for (const bar of [...story.requests, ...story.holds, ...story.leases]) bar.stories.push(story);
    held.forEach(function (lease, index) {
      if (lease < 0) return;
      story.holds[index].lease = bars[lease];
      if (!bars[lease].hold) bars[lease].hold = story.holds[index];
    });
    story.name = own[0].subject;
    story.start = Math.min(...own.map((bar) => bar.start));
    story.end = Math.max(...own.map((bar) => bar.end));
    story.took = story.end - story.start;
    story.isOver = own.every((bar) => bar.isOver);
    story.retries = Math.max(0, ...story.requests.map((bar) => bar.retries));
    story.engines = new Set([...own, ...story.leases].map((bar) => bar.process.engine));
    for (const bar of story.requests) if (bar.peer) story.engines.add(bar.peer);
    const words = new Set(story.engines);
    for (const bar of [...story.requests, ...story.leases]) {
      words.add(bar.subject);
      if (bar.remote) words.add(bar.remote);
      if (bar.reason) words.add(bar.reason);
    }
    story.text = [...words].join("\n").toLowerCase();
    return story;
  });
  const named = new Map();
  for (const story of stories) {
    const times = named.get(story.name) || 0;
    named.set(story.name, times + 1);
    story.key = times ? story.name + "~" + (times + 1) : story.name;
  }

  const faults = raw.faults.map((fault) => ({
    kind: fault.kind, target: fault.target, start: fault.at_seconds * 1e6,
    end: (fault.at_seconds + fault.duration_seconds) * 1e6, probability: fault.probability, row: 0,
    engines: fault.target.split(">").map((each) => each.split(".")[0]),
  }));
  const complaints = raw.complaints.map((each) => ({
    oracle: each.oracle, detail: each.detail, at: each.at_seconds * 1e6,
  }));
  let start = raw.command === null && bars.length ? Infinity : 0;
  for (const bar of bars) start = Math.min(start, bar.start);
  return {
    title: raw.title, zeroWall: raw.zero_wall, command: raw.command, explain: raw.explain, outcomes: raw.outcomes, machines: raw.machines,
    processes: raw.processes, bars, stories, faults, complaints, start, end: Math.max(end, start + 1),
    knowsReaders: bars.some((bar) => bar.machine === "request"),
    byKey: new Map(stories.map((story) => [story.key, story])),
  };
}

/* --- lanes --------------------------------------------------------------------------------------------------------- */

function engineOrder(a, b) {
  return a.engine.localeCompare(b.engine, "en", { numeric: true }) || a.rank - b.rank;
}

/* One lane for each engine and rank and side; P's above D's. */
function makeLanes(doc) {
  const lanes = new Map();
  for (const bar of doc.bars) {
    if (bar.machine === "hold") continue;
    const side = bar.machine === "lease" ? "P" : "D";
    const key = side + bar.process.rank + "/" + bar.process.engine;
    if (!lanes.has(key)) {
      lanes.set(key, { side, engine: bar.process.engine, rank: bar.process.rank, bars: [], shown: [], rows: [] });
    }
    bar.lane = lanes.get(key);
    bar.lane.bars.push(bar);
  }
  const sorted = [...lanes.values()].sort((a, b) => (a.side === b.side ? engineOrder(a, b) : a.side === "P" ? -1 : 1));
  const names = [...new Set(sorted.map((lane) => lane.engine))];
  const begins = new Set(names.map((name) => name.slice(0, NARROW_NAME)));
  for (const lane of sorted) {
    lane.bars.sort((a, b) => a.start - b.start || a.end - b.end);
    const { engine } = lane, fits = engine.length <= NARROW_NAME + 1;
    lane.shortName = fits ? engine : begins.size === names.length ? engine.slice(0, NARROW_NAME) + "…" : "…" + engine.slice(-NARROW_NAME);
  }
  return sorted;
}

/* Bars that live between two moments into as few rows as need be, none upon another. `gap`: least time between two. */
function packRows(bars, [from, to], gap) {
  const rows = [];
  const ends = [];
  for (const bar of bars) {
    if (bar.start > to) break;
    if (bar.end < from) continue;
    bar.isShown = true;
    let row = 0;
    while (row < ends.length && ends[row] > bar.start) row++;
    if (row === ends.length) rows.push([]);
    rows[row].push(bar);
    ends[row] = bar.end + gap;
    bar.row = row;
  }
  return rows;
}

/* The first in a row that ends at `time` or later. */
function firstEndingAfter(row, time) {
  let low = 0, high = row.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row[middle].end < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

/* --- filters ------------------------------------------------------------------------------------------------------- */

/* "250", "250 ms", "1.5s", "2 min" to microseconds; plain figures are milliseconds. NaN: it makes no sense. */
function readDuration(text) {
  const found = /^\s*([\d.]+)\s*(us|µs|ms|s|m|min)?\s*$/.exec(text);
  if (!found) return NaN;
  return parseFloat(found[1]) * { us: 1, "µs": 1, ms: 1e3, s: 1e6, m: 6e7, min: 6e7 }[found[2] || "ms"];
}

function matching(doc, filter) {
  const words = filter.query.toLowerCase().split(/\s+/).filter(Boolean);
  return doc.stories.filter(function (story) {
    if (filter.outcomes.size && !filter.outcomes.has(story.outcome)) return false;
    if (filter.peer && !story.engines.has(filter.peer)) return false;
    if (story.took < filter.shortest || story.took > filter.longest) return false;
    return words.every((word) => story.text.includes(word));
  });
}

/* --- figures ------------------------------------------------------------------------------------------------------- */

function percentile(sorted, share) {
  return sorted[Math.min(sorted.length - 1, Math.max(0, Math.ceil(sorted.length * share) - 1))];
}

let countings = 0;

/* Of the states of one machine in these stories, and of vLLM's queue before the first: how often, percentiles and sum of the time in them. */
function stateTimes(doc, stories, machine) {
  const { states } = doc.machines[machine], times = states.map(() => []), queues = [];
  const others = new Map(); // states that a later version has
  countings++; // a lease that several requests have read is counted once
  for (const story of stories) {
    for (const bar of machine === "lease" ? story.leases : story.requests) {
      if (bar.counting === countings) continue;
      bar.counting = countings;
      if (bar.queued !== null) queues.push(bar.queued);
      const { visits } = bar;
      for (let i = 0; i < visits.length - 1; i++) {
        const { number, state, start, end } = visits[i];
        if (number === undefined && !others.has(state)) others.set(state, []);
        (number === undefined ? others.get(state) : times[number]).push(end - start);
      }
    }
  }
  const found = [];
  for (const [state, all] of [[QUEUED, queues], ...states.map((state, number) => [state, times[number]]), ...others]) {
    if (!all.length) continue;
    const sorted = Float64Array.from(all).sort();
    found.push({ state, count: all.length, ...Object.fromEntries([50, 95, 99].map((p) => ["p" + p, percentile(sorted, p / 100)])) });
  }
  return found;
}

/* The slowest, the slowest first. */
function slowestOf(stories, most) {
  const found = [];
  for (const story of stories) {
    if (found.length === most && story.took <= found[most - 1].took) continue;
    let at = found.length;
    while (at > 0 && found[at - 1].took < story.took) at--;
    found.splice(at, 0, story);
    if (found.length > most) found.pop();
  }
  return found;
}

function visitAt(bar, time) {
  if (bar.queue && time >= bar.queue.start && time < bar.queue.end) return bar.queue;
  for (const visit of bar.visits) if (time >= visit.start && time < visit.end) return visit;
  return null;
}

/* Until when the blocks are kept (lease) or proven to be (hold), as far as was known at `time`. */
function keptUntil(bar, time) {
  let known = null;
  for (const step of bar.steps) {
    if (step.at > time) break;
    known = step.keptUntil;
  }
  return known;
}

/* Which lease and hold rows a request on a D rank deals with: [hold or null, lease or null]. */
function pairsOf(story, request) {
  const pairs = story.holds.filter((hold) => hold.process === request.process).map((hold) => [hold, hold.lease]);
  return pairs.length ? pairs : story.leases.map((lease) => [null, lease]);
}

/* grant -> READ -> release: [from bar, time, to bar, time, what]. A request that was tried again has several READs. */
function arrowsOf(story) {
  const arrows = [];
  for (const request of story.requests) {
    // Where nothing is to be read of this peer, PeerReady leads to the end at once.
    const begun = request.steps.filter((step) => step.event === "PeerReady" && step.state === "reading");
    for (const [hold, lease] of pairsOf(story, request)) {
      if (!lease) continue;
      const granted = lease.steps.find((step) => step.event === "Granted");
      if (granted) for (const read of begun) arrows.push([lease, granted.at, request, read.at, "grant"]);
      const letGo = hold && hold.steps.find((step) => step.event === "Unwanted");
      const from = letGo ? letGo.at : request.isOver ? request.end : null;
      const heard = lease.steps.find((step) => step.event === "ReaderDone" && from !== null && step.at >= from - 1000);
      if (from !== null && heard) arrows.push([request, Math.min(from, request.end), lease, heard.at, "release"]);
    }
  }
  return arrows;
}

/* --- words --------------------------------------------------------------------------------------------------------- */

function trimmed(value, digits) {
  return String(Number(value.toPrecision(digits))).replace("-", "−");
}

/* Microseconds for people. */
function duration(us) {
  const size = Number(Math.abs(us).toPrecision(3));
  if (size < 1e3) return trimmed(us, 3) + " µs";
  if (size < 1e6) return trimmed(us / 1e3, 3) + " ms";
  if (size < 6e7) return trimmed(us / 1e6, 3) + " s";
  const seconds = Math.round(Math.abs(us) / 1e6), minutes = Math.floor(seconds / 60), sign = us < 0 ? "−" : "";
  if (minutes < 60) return sign + minutes + " min " + (seconds % 60) + " s";
  return sign + Math.floor(minutes / 60).toLocaleString("en") + " h " + (minutes % 60) + " min";
}

/* What clocks on the wall said at a moment of a trace, as in logs. A simulator has no wall: "". */
function wallClock(doc, us) {
  return doc.command === null ? new Date(doc.zeroWall * 1000 + us / 1e3).toISOString().slice(11, 23) + " UTC" : "";
}

/* A moment, in seconds with as many digits as `step` (microseconds) needs. */
function moment(us, step) {
  const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(step / 1e6) - 1e-9)));
  return (us / 1e6).toFixed(digits) + " s";
}

function amount(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1) {
    bytes /= 1000;
    unit++;
  }
  return trimmed(bytes, 3) + " " + units[unit];
}

function shortEngine(name) {
  return name.length > 12 ? name.slice(0, 6) + "…" + name.slice(-3) : name;
}

function count(number, one, many) {
  return number.toLocaleString("en") + " " + (number === 1 ? one : many || one + "s");
}

/* As a shell takes it for one word. Ids come from clients, and commands with them are pasted. */
function shellWord(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : "'" + text.replaceAll("'", "'\"'\"'") + "'";
}

function words(state) {
  return state.replaceAll("_", " ");
}
