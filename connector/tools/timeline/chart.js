/* The state chart of a machine, from its table, with the path of one instance lit; and the figure of both sides of one
   request. Both are SVG. */

const SVG = "http://www.w3.org/2000/svg";
const NODE_WIDTH = 130, NODE_HEIGHT = 38, CHART_WIDTH = 440;

/* Where the states stand. A test compares these with the tables. */
const PLACES = {
  request: {
    pending_handshake: [220, 30], reading: [220, 116], proving: [132, 202], draining: [328, 202],
    done: [72, 288], expired: [220, 288], failed: [368, 288],
  },
  hold: {
    wanted: [220, 30], held: [112, 116], assumed: [328, 116], releasing: [166, 202],
    released: [112, 288], gone: [328, 288],
  },
  lease: {
    computing: [220, 30], held: [220, 116], withdrawn: [360, 116],
    done: [72, 202], expired: [220, 202], superseded: [368, 202],
  },
};

/* Arrows that would run through a state: the points that bend them. */
const BENDS = {
  request: {
    "pending_handshake>done": [[10, 60], [6, 220]], "pending_handshake>failed": [[430, 60], [434, 220]],
    "pending_handshake>expired": [[70, 110], [220, 190]], "reading>done": [[30, 150], [30, 220]],
    "reading>failed": [[420, 150], [416, 220]], "reading>pending_handshake": [[304, 92], [304, 60]],
    "draining>pending_handshake": [[400, 130], [360, 50]], "proving>failed": [[190, 256], [290, 244]],
  },
  hold: {
    "wanted>gone": [[432, 50], [426, 210]], "held>wanted": [[84, 70], [120, 36]],
    "assumed>wanted": [[356, 70], [320, 36]],
  },
  lease: { "computing>done": [[30, 50], [40, 130]], "computing>superseded": [[420, 40], [433, 130]] },
};

function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/* Where the line from the middle of a state towards (x, y) leaves its box. */
function borderOf([cx, cy], [x, y]) {
  const dx = x - cx, dy = y - cy;
  const scale = Math.min(
    dx ? NODE_WIDTH / 2 / Math.abs(dx) : Infinity, dy ? NODE_HEIGHT / 2 / Math.abs(dy) : Infinity);
  return [cx + dx * scale, cy + dy * scale];
}

function stateChart(doc, bar) {
  const table = doc.machines[bar.machine], places = PLACES[bar.machine], bends = BENDS[bar.machine];
  const height = Math.max(...Object.values(places).map(([, y]) => y)) + NODE_HEIGHT / 2 + 12;
  const root = svg("svg", {
    viewBox: "0 0 " + CHART_WIDTH + " " + height, class: "chart", role: "img",
    "aria-label": "States of the machine " + bar.machine + "; this one went " + bar.visits.map((v) => words(v.state)).join(", "),
  });
  for (const [id, kind] of [["tip-plain", "plain"], ["tip-lit", "lit"]]) {
    root.append(svg("marker", {
      id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto", class: kind,
      markerUnits: "userSpaceOnUse",
    }, svg("path", { d: "M0,0.6 L7.4,4 L0,7.4 z" })));
  }
  const taken = new Map(), loops = new Map();
  let number = 0;
  bar.steps.forEach(function (step, index) {
    if (!index) return;
    const from = bar.steps[index - 1].state, key = from + ">" + step.state;
    if (from === step.state) loops.set(from, (loops.get(from) || 0) + 1);
    else {
      number++;
      if (!taken.has(key)) taken.set(key, { numbers: [], events: [] });
      const arrow = taken.get(key);
      arrow.numbers.push(number);
      if (!arrow.events.includes(step.event)) arrow.events.push(step.event);
    }
  });
  const plain = svg("g"), lit = svg("g"), labels = svg("g");
  const boxes = Object.values(places).map(([x, y]) =>
    [x - NODE_WIDTH / 2, y - NODE_HEIGHT / 2, x + NODE_WIDTH / 2, y + NODE_HEIGHT / 2]);
  for (const [from, to, events] of table.arrows) {
    const key = from + ">" + to, arrow = taken.get(key), title = svg("title");
    title.textContent = words(from) + " → " + words(to) + ": " + events.join(", ");
    if (from === to) {
      const [x, y] = places[from], right = x + NODE_WIDTH / 2, count = loops.get(from);
      const loop = svg("path", {
        d: `M${right},${y - 8} c18,-6 18,22 1,16`, class: count ? "arrow lit" : "arrow",
        "marker-end": `url(#tip-${count ? "lit" : "plain"})`,
      }, title);
      (count ? lit : plain).append(loop);
      if (count > 1) labels.append(svg("text", { x: right + 18, y: y + 4, class: "label" }, "×" + count));
      continue;
    }
    const a = places[from], b = places[to], bend = bends[key];
    const start = borderOf(a, bend ? bend[0] : b), end = borderOf(b, bend ? bend[1] : a);
    const path = bend
      ? `M${start} C${bend[0]} ${bend[1]} ${end}` : `M${start} L${end}`;
    const line = svg("path", {
      d: path, class: arrow ? "arrow lit" : "arrow", "marker-end": `url(#tip-${arrow ? "lit" : "plain"})`,
    }, title);
    (arrow ? lit : plain).append(line);
    if (arrow) {
      const text = arrow.numbers.join(", ") + "  " + arrow.events.join(", "), half = text.length * 3.1;
      const along = (t) => (bend ? bezier(start, bend[0], bend[1], end, t) : [0, 1].map((i) => start[i] + (end[i] - start[i]) * t));
      const [x, y] = freePlace(along, half, boxes);
      boxes.push([x - half, y - 8, x + half, y + 8]);
      labels.append(svg("text", { x, y: y + 4, class: "label" }, text));
    }
  }
  const nodes = svg("g");
  for (const state of table.states) {
    const [x, y] = places[state];
    const visits = bar.visits.filter((visit) => visit.state === state);
    const isTerminal = table.terminal.includes(state);
    const kind = ["node", visits.length ? "visited" : "", isTerminal ? "terminal" : "", bar.state === state ? "last" : ""];
    const group = svg("g", { class: kind.join(" ").trim() });
    group.append(svg("rect", {
      x: x - NODE_WIDTH / 2, y: y - NODE_HEIGHT / 2, width: NODE_WIDTH, height: NODE_HEIGHT, rx: isTerminal ? 19 : 7,
    }));
    const second = visits.length && !(isTerminal && bar.state === state);
    group.append(svg("text", { x, y: second ? y - 2 : y + 4 }, words(state)));
    if (second) {
      const spent = visits.reduce((sum, visit) => sum + visit.end - visit.start, 0);
      const still = bar.state === state ? " so far" : "";
      group.append(svg("text", { x, y: y + 12, class: "dwell" },
        duration(spent) + still + (visits.length > 1 ? " in " + visits.length : "")));
    }
    nodes.append(group);
  }
  root.append(plain, lit, nodes, labels);
  return root;
}

/* Where on an arrow a label fits: as near to the middle as no box is in its way. */
function freePlace(along, half, boxes) {
  const found = [0.5, 0.42, 0.58, 0.34, 0.66, 0.26, 0.74, 0.18, 0.82].map(function (t) {
    const [x, y] = along(t);
    return [Math.max(half + 3, Math.min(CHART_WIDTH - half - 3, x)), y];
  });
  const isFree = ([x, y]) => !boxes.some(([left, top, right, bottom]) =>
    x + half > left && x - half < right && y + 7 > top && y - 7 < bottom);
  return found.find(isFree) || found[0];
}

function bezier(a, b, c, d, t) {
  const u = 1 - t;
  return [0, 1].map((i) => u * u * u * a[i] + 3 * u * u * t * b[i] + 3 * u * t * t * c[i] + t * t * t * d[i]);
}

/* --- both sides of one request --------------------------------------------------------------------------------------- */

const SIDES_LEFT = 70, SIDES_WIDTH = 440, SIDES_ROW = 26, SIDES_GAP = 14;

/* P's leases over D's requests, with what drains, the proof, the READs and the arrows between them. */
function bothSides(doc, story, cursor) {
  const bars = [...story.leases, ...story.requests];
  let start = Math.min(...bars.map((bar) => bar.start)), end = Math.max(...bars.map((bar) => bar.end));
  if (end - start < 10) end = start + 10;
  const room = (end - start) * 0.02;
  start -= room;
  end += room;
  const x = (time) => SIDES_LEFT + ((time - start) / (end - start)) * (SIDES_WIDTH - SIDES_LEFT - 8);
  const y = new Map();
  let top = 8;
  for (const bar of story.leases) {
    y.set(bar, top);
    top += SIDES_ROW + 6;
  }
  if (story.leases.length && story.requests.length) top += SIDES_GAP;
  for (const bar of story.requests) {
    y.set(bar, top);
    top += SIDES_ROW + 6;
  }
  const height = top + 20;
  const root = svg("svg", {
    viewBox: `0 0 ${SIDES_WIDTH} ${height}`, class: "sides", role: "img", "aria-label": "Both sides of this request",
  });
  root.append(svg("marker", {
    id: "tip-side", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto", class: "lit",
    markerUnits: "userSpaceOnUse",
  }, svg("path", { d: "M0,0.6 L7.4,4 L0,7.4 z" })));
  const zero = start + room;
  for (const time of ticks(0, end - zero, 4)) {
    const at = x(zero + time);
    root.append(svg("line", { x1: at, x2: at, y1: 4, y2: height - 18, class: "grid" }));
    root.append(svg("text", { x: Math.min(at, SIDES_WIDTH - 22), y: height - 5, class: "tick" }, time ? "+" + duration(time) : "0"));
  }
  for (const bar of bars) {
    const isLease = bar.machine === "lease", at = y.get(bar), group = svg("g", { class: "o" + bar.outcome });
    root.append(svg("text", { x: 2, y: at + SIDES_ROW / 2 + 4, class: "who" },
      (isLease ? "P" : "D") + " rank " + bar.process.rank));
    for (const visit of bar.queue ? [bar.queue, ...bar.visits] : bar.visits) {
      const width = Math.max(2, x(visit.end) - x(visit.start));
      if (visit === bar.visits[bar.visits.length - 1] && bar.isOver) continue;
      const title = svg("title"), kind = visit === bar.queue ? "queued" : visit.state;
      title.textContent = words(visit.state) + " for " + duration(visit.end - visit.start);
      const rect = svg("rect", {
        x: x(visit.start), y: at, width, height: SIDES_ROW, rx: 3, class: "state " + kind,
      }, title);
      group.append(rect);
      if (width > words(visit.state).length * 6.4 + 6) {
        const label = svg("text", { x: x(visit.start) + 5, y: at + SIDES_ROW - 7, class: "on " + kind }, words(visit.state));
        if (!isLease || visit.state !== "held") group.append(label);
      }
    }
    if (!isLease) {
      const from = x(bar.start), to = x(bar.end), longest = longestVisit([bar], "reading") || longestVisit([bar], "pending_handshake");
      if (to - from < 70 && longest) {
        const isRight = to < SIDES_WIDTH - 130;
        group.append(svg("text", {
          x: isRight ? to + 9 : from - 9, y: at + SIDES_ROW - 9, class: "beside", "text-anchor": isRight ? "start" : "end",
        }, words(longest.state) + " " + duration(longest.end - longest.start)));
      }
    }
    root.append(group);
    if (isLease) {
      const hold = story.holds.find((each) => each.lease === bar) || null;
      const full = Math.max(...[bar, ...(hold ? [hold] : [])].map(fullDrain));
      group.append(svg("path", { d: drainPath(bar, x, at, SIDES_ROW, full, bar.start, bar.end), class: "drain" }));
      if (hold) {
        group.append(svg("path", {
          d: drainPath(hold, x, at, SIDES_ROW, full, Math.max(hold.start, bar.start), Math.min(hold.end, bar.end)), class: "proof",
        }));
      }
    }
  }
  for (const [from, at, to, until, what] of arrowsOf(story)) {
    const down = y.get(from) < y.get(to);
    const y0 = down ? y.get(from) + SIDES_ROW : y.get(from), y1 = down ? y.get(to) : y.get(to) + SIDES_ROW;
    const bend = (y1 - y0) / 2, title = svg("title");
    title.textContent = what + ", " + duration(until - at) + " later";
    root.append(svg("path", {
      d: `M${x(at)},${y0} C${x(at)},${y0 + bend} ${x(until)},${y1 - bend} ${x(until)},${y1}`, class: "arrow lit",
      "marker-end": "url(#tip-side)",
    }, title));
  }
  if (cursor !== null && cursor >= start && cursor <= end) {
    root.append(svg("line", { x1: x(cursor), x2: x(cursor), y1: 2, y2: height - 16, class: "cursor" }));
  }
  return root;
}

/* How much was promised at most, in microseconds. */
function fullDrain(bar) {
  let full = 1;
  for (const step of bar.steps) if (step.keptUntil !== null) full = Math.max(full, step.keptUntil - step.at);
  return full;
}

/* What is left of the promise, as height over time: it drains, and each renewal fills it again. */
function drainPoints(bar, full, from, to) {
  const points = [];
  for (let i = 0; i < bar.steps.length; i++) {
    const step = bar.steps[i];
    if (step.keptUntil === null) continue;
    const start = Math.max(step.at, from);
    const end = Math.min(i + 1 < bar.steps.length ? bar.steps[i + 1].at : bar.end, to, Math.max(step.keptUntil, start));
    if (end < start) continue;
    points.push([start, Math.max(0, step.keptUntil - start) / full], [end, Math.max(0, step.keptUntil - end) / full]);
  }
  return points;
}

function drainPath(bar, x, top, height, full, from, to) {
  const points = drainPoints(bar, full, from, to);
  if (!points.length) return "M0,0";
  const line = points.map(([time, level]) => `${x(time).toFixed(2)},${(top + height * (1 - level)).toFixed(2)}`);
  return `M${x(points[0][0]).toFixed(2)},${top + height} L${line.join(" L")} L${x(points[points.length - 1][0]).toFixed(2)},${top + height} Z`;
}

/* Round moments between two, about `wanted` of them. */
function ticks(start, end, wanted) {
  const rough = (end - start) / wanted;
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= rough);
  const found = [];
  for (let time = Math.ceil(start / step) * step; time <= end; time += step) found.push(time);
  found.step = step;
  return found;
}
