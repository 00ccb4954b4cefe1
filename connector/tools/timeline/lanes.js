/* The canvas: faults, P's lanes, D's lanes, and the overview above them. Only what can be seen is drawn: rows outside of
   the window are skipped, the first bar of a row is found by bisection, and bars that share a pixel become one, in the
   colour of the worst of them. */

const RULER = 28, PAD = 8, AROUND = 0.5, NARROWER = 4, FAULT_ROW = 17, LANE_PAD = 7, LANE_MIN = 44, LANE_EMPTY = 26, EMPTY_SHOWN = 4, ROW_MIN = 5, ROW_MAX = 24, TINY = 2.5, PLAIN = 6;
const BADGE = { left: 3, right: 21 };
const ARROWS_MAX = 60, DRAWN_MAX = 300, FONT = "12px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";

class Lanes {
  constructor(doc, canvas, overview) {
    this.doc = doc;
    this.canvas = canvas;
    this.overview = overview;
    this.context = canvas.getContext("2d");
    this.lanes = makeLanes(doc);
    this.faultRows = packFaults(doc.faults);
    this.view = [doc.start, doc.end];
    this.width = this.height = 0;
    this.scroll = 0;
    this.drawn = 0;
  }

  /* Show these stories. */
  arrange(stories, isAll) {
    if (!isAll) {
      for (const story of this.doc.stories) story.isShown = false;
      for (const story of stories) story.isShown = true;
    }
    for (const lane of this.lanes) {
      lane.shown = isAll ? lane.bars : lane.bars.filter((bar) => bar.stories.some((story) => story.isShown));
    }
    this.histogram = null;
    this.stories = stories;
    this.pack();
  }

  /* Rows for what lives in the view and around it, so that a view of few bars has tall rows. */
  pack() {
    const [start, end] = this.view, span = end - start;
    this.packed = [start - span * AROUND, end + span * AROUND];
    for (const bar of this.doc.bars) bar.isShown = false;
    for (const lane of this.lanes) lane.rows = packRows(lane.shown, this.packed, (span * (1 + 2 * AROUND)) / 3000);
    this.place();
  }

  /* Whether the view has left what rows were made for, or has become much narrower. */
  needsPacking() {
    const [start, end] = this.view, [from, to] = this.packed, { doc } = this;
    if (start < from && from > doc.start || end > to && to < doc.end) return true;
    return (Math.min(to, doc.end) - Math.max(from, doc.start)) > (end - start) * NARROWER;
  }

  /* The tallest rows with which everything fits; else the lowest, and the lanes scroll. */
  place() {
    const faults = this.faultRows.length ? this.faultRows.length * FAULT_ROW + 2 * LANE_PAD : 0;
    const empty = this.lanes.filter((lane) => !lane.rows.length).length;
    this.left = empty > EMPTY_SHOWN ? empty : 0;
    const tall = (lane, rowHeight) =>
      lane.rows.length ? Math.max(LANE_MIN, lane.rows.length * rowHeight + 2 * LANE_PAD) : this.left ? 0 : LANE_EMPTY;
    const all = (rowHeight) => RULER + faults + this.lanes.reduce((sum, lane) => sum + tall(lane, rowHeight), 0);
    this.rowHeight = ROW_MAX;
    while (this.rowHeight > ROW_MIN && all(this.rowHeight) > this.height) this.rowHeight--;
    let top = faults;
    for (const lane of this.lanes) {
      lane.top = top;
      lane.tall = tall(lane, this.rowHeight);
      lane.inset = Math.max(LANE_PAD, (lane.tall - lane.rows.length * this.rowHeight) / 2);
      top += lane.tall;
    }
    this.full = RULER + top + (this.left ? LANE_EMPTY : 0);
  }

  resize(width, height) {
    const ratio = window.devicePixelRatio || 1;
    this.width = width;
    this.height = height;
    this.gutter = width < 640 ? 82 : 132;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.width = width + "px";
    this.canvas.style.height = height + "px";
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const bounds = this.overview.getBoundingClientRect();
    this.overview.width = Math.round(bounds.width * ratio);
    this.overview.height = Math.round(bounds.height * ratio);
    this.overview.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    this.histogram = null;
    this.place();
  }

  /* Colours from the style sheet. */
  dress(style) {
    const value = (name) => style.getPropertyValue(name).trim();
    this.ink = {};
    for (const name of ["fg", "muted", "line", "bg", "lane", "accent", "fault", "strong", "queued"]) this.ink[name] = value("--" + name);
    this.solid = this.doc.outcomes.map((name) => value("--" + name));
    this.tint = this.doc.outcomes.map((name) => value("--" + name + "-tint"));
    this.hatch = this.doc.outcomes.map((name, i) => hatched(this.solid[i], this.tint[i]));
    this.stripes = this.doc.outcomes.map((name, i) => hatched(this.ink.bg, this.solid[i]));
    this.fault = hatched(this.ink.fault, "transparent");
  }

  x(time) {
    return this.gutter + ((time - this.view[0]) / (this.view[1] - this.view[0])) * (this.width - this.gutter - PAD);
  }

  time(x) {
    return this.view[0] + ((x - this.gutter) / (this.width - this.gutter - PAD)) * (this.view[1] - this.view[0]);
  }

  rowTop(bar) {
    return RULER + bar.lane.top + bar.lane.inset + bar.row * this.rowHeight - this.scroll;
  }

  draw(state) {
    const { context: c, width, height, ink } = this;
    this.drawn = 0;
    c.clearRect(0, 0, width, height);
    c.font = FONT;
    c.textBaseline = "middle";
    c.textAlign = "left";
    c.save();
    c.beginPath();
    c.rect(0, RULER, width, height - RULER);
    c.clip();
    for (const lane of this.lanes) this.background(lane);
    const marks = !this.doc.stories.length ? [] : ticks(this.view[0], this.view[1], Math.max(2, (width - this.gutter) / 130));
    c.fillStyle = ink.line;
    for (const time of marks) c.fillRect(Math.round(this.x(time)), RULER, 1, height);
    this.shadeFaults(state);
    c.save();
    c.beginPath();
    c.rect(this.gutter, RULER, width - this.gutter, height - RULER);
    c.clip();
    const big = [];
    for (const lane of this.lanes) this.bars(lane, state, big);
    this.arrows(state, big);
    this.complaints();
    c.restore();
    for (const lane of this.lanes) this.label(lane);
    this.leftOut();
    this.faults(state);
    if (state.cursor !== null && state.cursor >= this.view[0] && state.cursor <= this.view[1]) this.cursor(state.cursor);
    c.restore();
    this.ruler(marks, state.cursor);
  }

  background(lane) {
    const { context: c, ink } = this, top = RULER + lane.top - this.scroll;
    if (!lane.tall || top > this.height || top + lane.tall < RULER) return;
    c.fillStyle = lane.side === "P" ? ink.lane : ink.bg;
    c.fillRect(0, top, this.width, lane.tall);
    c.fillStyle = ink.line;
    c.fillRect(0, top + lane.tall - 1, this.width, 1);
  }

  label(lane) {
    const { context: c, ink } = this, top = RULER + lane.top - this.scroll;
    if (!lane.tall || top > this.height || top + lane.tall < RULER) return;
    c.fillStyle = lane.side === "P" ? ink.lane : ink.bg;
    c.fillRect(0, top, this.gutter - 1, lane.tall - 1);
    c.fillStyle = ink.line;
    c.fillRect(this.gutter - 1, top, 1, lane.tall);
    // The words stay in sight while a tall lane is scrolled.
    const least = Math.min(lane.tall, LANE_MIN), narrow = this.gutter < 100, isEmpty = lane.tall < LANE_MIN;
    const y = Math.max(Math.min(RULER, top + lane.tall - least), top) + least / 2;
    const name = narrow ? lane.shortName : shortEngine(lane.engine);
    c.fillStyle = isEmpty ? ink.muted : ink.strong;
    c.beginPath();
    c.roundRect(8, y - 10, 20, 20, 5);
    c.fill();
    c.fillStyle = ink.bg;
    c.font = "bold " + FONT;
    c.textAlign = "center";
    c.fillText(lane.side, 18, y + 0.5);
    c.textAlign = "left";
    if (isEmpty) {
      c.fillStyle = ink.muted;
      c.font = FONT.replace("12px", "11px");
      c.fillText(narrow ? name : name + " · " + lane.rank, 34, y + 0.5);
      c.font = FONT;
      return;
    }
    c.fillStyle = ink.fg;
    c.fillText(name, 34, y - 7);
    c.font = FONT.replace("12px", "11px");
    c.fillStyle = ink.muted;
    c.fillText("rank " + lane.rank + (narrow ? "" : " · " + lane.shown.length.toLocaleString("en")), 34, y + 8);
    c.font = FONT;
  }

  /* Many ranks with nothing here would hide the others. */
  leftOut() {
    if (!this.left) return;
    this.context.fillStyle = this.ink.muted;
    this.context.font = FONT.replace("12px", "11px");
    this.context.fillText(count(this.left, "rank") + " with nothing to show around here", 8, this.full - LANE_EMPTY / 2 - this.scroll);
    this.context.font = FONT;
  }

  ruler(marks, cursor) {
    const { context: c, ink, width } = this;
    c.fillStyle = ink.bg;
    c.fillRect(0, 0, width, RULER);
    c.fillStyle = ink.line;
    c.fillRect(0, RULER - 1, width, 1);
    c.fillStyle = ink.muted;
    c.textAlign = "center";
    c.font = FONT.replace("12px", "11px");
    for (const time of marks) {
      const x = this.x(time), text = moment(time, marks.step), half = c.measureText(text).width / 2;
      if (x > this.gutter && x + half < width - 2) c.fillText(text, Math.max(x, this.gutter + half + 3), RULER / 2);
    }
    if (cursor === null || cursor < this.view[0] || cursor > this.view[1]) return;
    const text = moment(cursor, Math.min(marks.step / 20, 1e5)), half = c.measureText(text).width / 2 + 6;
    const x = Math.max(this.gutter + half, Math.min(width - half, this.x(cursor)));
    c.fillStyle = ink.accent;
    c.beginPath();
    c.roundRect(x - half, 4, 2 * half, RULER - 8, 4);
    c.fill();
    c.fillStyle = ink.bg;
    c.fillText(text, x, RULER / 2);
    c.font = FONT;
  }

  cursor(time) {
    this.context.fillStyle = this.ink.accent;
    this.context.fillRect(Math.round(this.x(time)) - 0.75, RULER, 1.5, this.height);
  }

  /* --- bars --- */

  bars(lane, state, big) {
    const { context: c, rowHeight } = this, top = RULER + lane.top + lane.inset - this.scroll;
    const first = Math.max(0, Math.floor((RULER - top) / rowHeight));
    const last = Math.min(lane.rows.length, Math.ceil((this.height - top) / rowHeight));
    const high = rowHeight - (rowHeight > 6 ? 2 : 1);
    const right = this.width;
    for (let number = first; number < last; number++) {
      const row = lane.rows[number], y = top + number * rowHeight;
      let runStart = -1, runEnd = -1, runOutcome = 0, runDim = false;
      const flush = () => {
        if (runStart < 0) return;
        c.globalAlpha = runDim ? 0.28 : 1;
        c.fillStyle = this.solid[runOutcome];
        c.fillRect(runStart, y, Math.max(TINY, runEnd - runStart), high);
        this.drawn++;
        runStart = -1;
      };
      for (let i = firstEndingAfter(row, this.view[0]); i < row.length; i++) {
        const bar = row[i];
        if (bar.start > this.view[1]) break;
        const x0 = this.x(bar.start), x1 = Math.min(this.x(bar.end), right + 4);
        const dim = state.selected !== null && !bar.stories.includes(state.selected);
        if (x1 - x0 < TINY) {
          const pixel = Math.floor(x0);
          if (runStart >= 0 && pixel <= runEnd && (runOutcome === bar.outcome || pixel - runStart < TINY) && runDim === dim) {
            runOutcome = Math.min(runOutcome, bar.outcome);
            runEnd = Math.max(runEnd, pixel + 1);
          } else {
            flush();
            runStart = pixel;
            runEnd = pixel + 1;
            runOutcome = bar.outcome;
            runDim = dim;
          }
          continue;
        }
        flush();
        c.globalAlpha = dim ? 0.28 : 1;
        if (x1 - x0 < PLAIN) {
          c.fillStyle = this.solid[bar.outcome];
          c.fillRect(x0, y, x1 - x0, high);
        } else if (bar.machine === "lease") this.lease(bar, x0, x1, y, high);
        else this.request(bar, x0, x1, y, high);
        this.drawn++;
        if (x1 - x0 > 24 && bar.machine === "request") big.push(bar);
        if (state.selected !== null && !dim) this.outline(x0, x1, y, high);
        else if (state.hover === bar) this.outline(x0, x1, y, high);
      }
      flush();
    }
    c.globalAlpha = 1;
  }

  outline(x0, x1, y, high) {
    const c = this.context;
    c.strokeStyle = this.ink.strong;
    c.lineWidth = 1.5;
    c.strokeRect(x0 - 1, y - 1, x1 - x0 + 2, high + 2);
  }

  request(bar, x0, x1, y, high) {
    const c = this.context, o = bar.outcome;
    let widest = null, most = 0;
    for (const visit of bar.queue ? [bar.queue, ...bar.visits] : bar.visits) {
      const from = Math.max(this.x(visit.start), this.gutter - 2), to = Math.min(this.x(visit.end), this.width + 2);
      if (to <= from) continue;
      c.fillStyle = fillOf(this, visit.state, o);
      c.fillRect(from, y, Math.max(1, to - from), high);
      if (visit.state === "pending_handshake" && high > 5) {
        c.fillStyle = this.solid[o];
        c.fillRect(from, y + high - 1.5, to - from, 1.5);
      }
      if (to - from > most) {
        most = to - from;
        widest = [visit, from, to];
      }
    }
    this.unseen(bar, y, high);
    this.finish(bar, x0, x1, y, high);
    if (widest && most > 64 && high >= 12) {
      const [visit, from, to] = widest, badge = bar.retries ? this.badgeX(bar) : -Infinity;
      const isBefore = badge - BADGE.left > from + 24, isLined = visit.state === "draining" || visit.state === "proving";
      this.write(bar.subject, isBefore ? from + 5 : Math.max(from, badge + BADGE.right) + 5,
        isBefore ? Math.min(to - 18, badge - BADGE.left - 3) : to - 18, y + high / 2,
        visit === bar.queue ? "#ffffff" : visit.state === "pending_handshake" || isLined ? this.ink.fg : "#0c1418", isLined);
    }
    if (bar.retries) this.badge(bar, y, high);
  }

  lease(bar, x0, x1, y, high) {
    const c = this.context, o = bar.outcome;
    if (bar.queue) {
      const from = Math.max(this.x(bar.queue.start), this.gutter - 2), to = Math.min(this.x(bar.queue.end), this.width + 2);
      c.fillStyle = fillOf(this, QUEUED, o);
      if (to > from) c.fillRect(from, y, Math.max(1, to - from), high);
    }
    for (const visit of bar.visits) {
      const from = Math.max(this.x(visit.start), this.gutter - 2), to = Math.min(this.x(visit.end), this.width + 2);
      if (to <= from) continue;
      if (visit.state === "computing") {
        c.fillStyle = this.ink.muted;
        c.fillRect(from, y + high * 0.62, to - from, Math.max(1.5, high * 0.38));
        continue;
      }
      if (visit.state !== "held") continue;
      if (to - from < 16 || high < 8) {
        c.fillStyle = this.solid[o];
        c.fillRect(from, y, Math.max(1, to - from), high);
        continue;
      }
      c.fillStyle = this.tint[o];
      c.fillRect(from, y, to - from, high);
      const hold = bar.hold;
      const full = Math.max(fullDrain(bar), hold ? fullDrain(hold) : 1);
      c.fillStyle = this.stripes[o];
      this.drain(bar, full, visit, y, high);
      if (hold) {
        c.fillStyle = this.solid[o];
        this.drain(hold, full, visit, y, high);
      }
    }
    this.unseen(bar, y, high);
    this.finish(bar, x0, x1, y, high);
    const held = bar.visits.find((visit) => visit.state === "held");
    if (held && high >= 12) {
      const from = Math.max(this.x(held.start), this.gutter) + 5, to = Math.min(this.x(held.end), this.width) - 18;
      if (to - from > 50) this.write(bar.subject, from, to, y + high / 2, this.ink.fg, true);
    }
  }

  drain(bar, full, visit, y, high) {
    const c = this.context, points = drainPoints(bar, full, visit.start, visit.end);
    if (!points.length) return;
    c.beginPath();
    c.moveTo(this.x(points[0][0]), y + high);
    for (const [time, level] of points) c.lineTo(this.x(time), y + high * (1 - level));
    c.lineTo(this.x(points[points.length - 1][0]), y + high);
    c.fill();
  }

  /* A bar that is open goes on to the end of the trace. Pale is what its process has written nothing in. */
  unseen(bar, y, high) {
    if (bar.isOver || bar.process.lastSeen >= bar.end) return;
    const c = this.context, from = Math.max(this.x(bar.process.lastSeen), this.gutter - 2);
    c.fillStyle = bar.lane.side === "P" ? this.ink.lane : this.ink.bg;
    c.fillRect(from, y - 1, this.width - from, high + 2);
    c.fillStyle = this.tint[bar.outcome];
    c.fillRect(from, y + high * 0.3, this.x(bar.end) - from, Math.max(1.5, high * 0.4));
  }

  /* The end of a bar, so that nobody needs colours: a cross failed, an hourglass expired, a slash was aborted, dots are
     still open. */
  finish(bar, x0, x1, y, high) {
    const c = this.context, outcome = this.doc.outcomes[bar.outcome];
    if (outcome === "done" || outcome === "withdrawn" || x1 - x0 < 14 || high < 9) return;
    const r = Math.min(4, high / 2 - 2), x = Math.min(x1, this.width) - r - 4, m = y + high / 2;
    c.fillStyle = this.ink.bg;
    c.fillRect(x - r - 2, y + 1, 2 * r + 4, high - 2);
    c.strokeStyle = c.fillStyle = this.ink.strong;
    c.lineWidth = 1.8;
    c.beginPath();
    if (outcome === "failed") {
      c.moveTo(x - r, m - r);
      c.lineTo(x + r, m + r);
      c.moveTo(x + r, m - r);
      c.lineTo(x - r, m + r);
      c.stroke();
    } else if (outcome === "expired") {
      c.moveTo(x - r, m - r);
      c.lineTo(x + r, m - r);
      c.lineTo(x - r, m + r);
      c.lineTo(x + r, m + r);
      c.closePath();
      c.fill();
    } else if (outcome === "aborted") {
      c.moveTo(x - r, m + r);
      c.lineTo(x + r, m - r);
      c.stroke();
    } else {
      for (const dx of [-r, 0, r]) c.fillRect(x + dx - 1, m - 1, 2, 2);
    }
  }

  write(text, from, to, y, colour, halo) {
    const c = this.context, room = to - from;
    if (room < 24) return;
    c.font = FONT.replace("12px", "11px");
    const width = c.measureText(text).width;
    // Ids begin alike, and differ at their ends.
    if (width > room) text = "…" + text.slice(-Math.max(1, Math.floor((text.length * room) / width) - 1));
    if (halo) {
      c.strokeStyle = this.ink.bg;
      c.lineWidth = 3;
      c.lineJoin = "round";
      c.strokeText(text, from, y + 0.5);
    }
    c.fillStyle = colour;
    c.fillText(text, from, y + 0.5);
    c.font = FONT;
  }

  /* Where the first retry began. */
  badgeX(bar) {
    const again = bar.visits.filter((visit) => visit.state === "pending_handshake")[1];
    return Math.max(this.x(again.start), this.gutter + 10);
  }

  badge(bar, y, high) {
    const c = this.context, x = this.badgeX(bar);
    if (high < 12) {
      c.fillStyle = this.ink.strong;
      c.beginPath();
      c.moveTo(x - 3, y - 1);
      c.lineTo(x + 3, y - 1);
      c.lineTo(x, y + 3.5);
      c.fill();
      return;
    }
    c.fillStyle = this.ink.strong;
    c.beginPath();
    c.roundRect(x - BADGE.left, y + high / 2 - 7, BADGE.left + BADGE.right, 14, 7);
    c.fill();
    c.fillStyle = this.ink.bg;
    c.font = "bold " + FONT.replace("12px", "10px");
    c.textAlign = "center";
    c.fillText("↻ " + bar.retries, x + 9, y + high / 2 + 0.5);
    c.textAlign = "left";
    c.font = FONT;
  }

  /* --- arrows, faults, complaints --- */

  arrows(state, big) {
    const chosen = new Set();
    if (state.selected) chosen.add(state.selected);
    if (state.hover) state.hover.stories.forEach((story) => chosen.add(story));
    const many = new Set();
    for (const bar of big) {
      for (const story of bar.stories) many.add(story);
      if (many.size > ARROWS_MAX) break;
    }
    if (many.size <= ARROWS_MAX && this.drawn <= DRAWN_MAX && !state.selected) for (const story of many) if (!chosen.has(story)) this.arrowsOf(story, false);
    for (const story of chosen) this.arrowsOf(story, true);
  }

  arrowsOf(story, strong) {
    const c = this.context, named = new Set();
    for (const [from, at, to, until, what] of arrowsOf(story)) {
      if (!from.isShown || !to.isShown) continue;
      const down = from.lane.top < to.lane.top, high = this.rowHeight - 2;
      const x0 = this.x(at), x1 = this.x(until);
      if (Math.max(x0, x1) < this.gutter || Math.min(x0, x1) > this.width) continue;
      const y0 = this.rowTop(from) + (down ? high : 0), y1 = this.rowTop(to) + (down ? 0 : high);
      const bend = (y1 - y0) / 2;
      c.strokeStyle = c.fillStyle = strong ? this.ink.strong : this.ink.muted;
      c.globalAlpha = strong ? 1 : 0.5;
      c.lineWidth = strong ? 1.6 : 1;
      c.beginPath();
      c.moveTo(x0, y0);
      c.bezierCurveTo(x0, y0 + bend, x1, y1 - bend, x1, y1);
      c.stroke();
      const tip = down ? -5 : 5;
      c.beginPath();
      c.moveTo(x1, y1);
      c.lineTo(x1 - 3, y1 + tip);
      c.lineTo(x1 + 3, y1 + tip);
      c.fill();
      c.globalAlpha = 1;
      if (strong && Math.abs(y1 - y0) > 26 && !named.has(what)) {
        named.add(what);
        c.font = FONT.replace("12px", "11px");
        const text = what === "grant" ? "grant → READ" : "release";
        const left = what === "grant" && Math.abs(x1 - x0) < 70;
        c.textAlign = left ? "right" : "left";
        c.lineWidth = 3;
        c.strokeStyle = this.ink.bg;
        const x = (x0 + x1) / 2 + (left ? -6 : 6), y = (y0 + y1) / 2;
        c.strokeText(text, x, y);
        c.fillText(text, x, y);
        c.textAlign = "left";
        c.font = FONT;
      }
    }
  }

  shadeFaults(state) {
    const c = this.context;
    const chosen = state.fault ? [state.fault] : this.doc.faults;
    for (const fault of chosen) {
      const from = Math.max(this.x(fault.start), this.gutter), to = Math.min(Math.max(this.x(fault.end), this.x(fault.start) + 2), this.width);
      if (to < from) continue;
      c.fillStyle = this.ink.fault;
      c.globalAlpha = state.fault ? 0.22 : 0.06 / Math.sqrt(this.doc.faults.length);
      for (const lane of this.lanes) {
        if (!fault.engines.some((name) => lane.engine === name || lane.engine.startsWith(name + "-"))) continue;
        c.fillRect(from, RULER + lane.top - this.scroll, to - from, lane.tall);
      }
    }
    c.globalAlpha = 1;
  }

  faults(state) {
    if (!this.faultRows.length) return;
    const { context: c, ink } = this, top = RULER - this.scroll, tall = this.faultRows.length * FAULT_ROW + 2 * LANE_PAD;
    if (top + tall < RULER) return;
    c.fillStyle = ink.bg;
    c.fillRect(0, top, this.width, tall);
    c.fillStyle = ink.line;
    c.fillRect(0, top + tall - 1, this.width, 1);
    c.fillStyle = ink.fg;
    c.font = "bold " + FONT;
    c.fillText("Faults", 8, top + 18);
    c.font = FONT.replace("12px", "11px");
    c.fillStyle = ink.muted;
    if (tall > 40 && this.gutter > 100) c.fillText(count(this.doc.faults.length, "fault") + " in the plan", 8, top + 34);
    c.save();
    c.beginPath();
    c.rect(this.gutter, top, this.width, tall);
    c.clip();
    this.faultRows.forEach((row, number) => {
      for (const fault of row) {
        const x0 = this.x(fault.start), x1 = Math.max(this.x(fault.end), x0 + 4), y = top + LANE_PAD + number * FAULT_ROW;
        if (x1 < this.gutter || x0 > this.width) continue;
        c.fillStyle = ink.lane;
        c.fillRect(x0, y, x1 - x0, FAULT_ROW - 3);
        c.fillStyle = this.fault;
        c.globalAlpha = state.fault && state.fault !== fault ? 0.3 : 1;
        c.fillRect(x0, y, x1 - x0, FAULT_ROW - 3);
        c.strokeStyle = ink.fault;
        c.lineWidth = 1;
        c.strokeRect(x0 + 0.5, y + 0.5, x1 - x0 - 1, FAULT_ROW - 4);
        const text = words(fault.kind) + " " + fault.target, wide = c.measureText(text).width;
        const next = row[row.indexOf(fault) + 1], left = Math.max(x0, this.gutter);
        const isInside = left + wide + 14 < x1, from = isInside ? left + 7 : x1 + 5;
        if (isInside || from + wide < (next ? this.x(next.start) - 4 : this.width)) {
          c.fillStyle = ink.bg;
          if (isInside) c.fillRect(from - 4, y + 1, wide + 8, FAULT_ROW - 5);
          c.fillStyle = ink.fg;
          c.fillText(text, from, y + FAULT_ROW / 2 - 1);
        }
        c.globalAlpha = 1;
      }
    });
    c.restore();
    c.fillStyle = ink.line;
    c.fillRect(this.gutter - 1, top, 1, tall);
    c.font = FONT;
  }

  complaints() {
    const c = this.context;
    for (const each of this.doc.complaints) {
      const x = Math.round(this.x(each.at));
      if (x < this.gutter || x > this.width) continue;
      c.strokeStyle = c.fillStyle = this.ink.fault;
      c.lineWidth = 2;
      c.setLineDash([5, 4]);
      c.beginPath();
      c.moveTo(x, RULER);
      c.lineTo(x, this.height);
      c.stroke();
      c.setLineDash([]);
    }
  }

  /* --- what lies under the pointer --- */

  laneAt(y) {
    const inside = y - RULER + this.scroll;
    return this.lanes.find((lane) => inside >= lane.top && inside < lane.top + lane.tall) || null;
  }

  barAt(x, y) {
    if (x < this.gutter || y < RULER) return null;
    const lane = this.laneAt(y);
    if (!lane) return null;
    const number = Math.floor((y - RULER + this.scroll - lane.top - lane.inset) / this.rowHeight);
    const row = lane.rows[number];
    if (!row) return null;
    const reach = ((this.view[1] - this.view[0]) / (this.width - this.gutter)) * 4, time = this.time(x);
    let best = null, nearest = reach;
    for (let i = firstEndingAfter(row, time - reach); i < row.length && row[i].start <= time + reach; i++) {
      const away = Math.max(0, row[i].start - time, time - row[i].end);
      if (best === null ? away <= nearest : away < nearest || (away === nearest && row[i].outcome < best.outcome)) {
        best = row[i];
        nearest = away;
      }
    }
    return best;
  }

  faultAt(x, y) {
    const number = Math.floor((y - RULER + this.scroll - LANE_PAD) / FAULT_ROW);
    if (y < RULER || x < this.gutter || !this.faultRows[number]) return null;
    const time = this.time(x), reach = ((this.view[1] - this.view[0]) / this.width) * 4;
    return this.faultRows[number].find((fault) => time >= fault.start - reach && time <= fault.end + reach) || null;
  }

  /* --- the overview --- */

  drawOverview(state) {
    const c = this.overview.getContext("2d"), ratio = window.devicePixelRatio || 1;
    const width = this.overview.width / ratio, height = this.overview.height / ratio, { doc, ink } = this;
    const left = this.gutter, wide = 3, bins = Math.max(10, Math.floor((width - left - PAD) / wide));
    if (!this.histogram) this.histogram = this.bin(bins);
    c.clearRect(0, 0, width, height);
    const { counts, most } = this.histogram;
    for (let bin = 0; bin < bins; bin++) {
      let y = height - 2;
      const total = counts[bin].reduce((sum, each) => sum + each, 0);
      if (!total) continue;
      const tall = Math.max(3, Math.sqrt(total / most) * (height - 10));
      for (let outcome = 0; outcome < counts[bin].length; outcome++) {
        if (!counts[bin][outcome]) continue;
        const part = Math.max(2, (tall * counts[bin][outcome]) / total);
        c.fillStyle = this.solid[outcome];
        y -= part;
        c.fillRect(left + bin * wide, y, wide - 0.6, part);
      }
    }
    c.fillStyle = ink.fault;
    for (const fault of doc.faults) {
      const from = this.overviewX(fault.start, width);
      c.fillRect(from, 0, Math.max(2, this.overviewX(fault.end, width) - from), 3);
    }
    const from = this.overviewX(this.view[0], width), to = this.overviewX(this.view[1], width);
    c.fillStyle = ink.bg;
    c.globalAlpha = 0.68;
    c.fillRect(left, 0, from - left, height);
    c.fillRect(to, 0, width - PAD - to, height);
    c.globalAlpha = 1;
    c.fillStyle = ink.muted;
    c.font = FONT.replace("12px", "11px");
    c.textBaseline = "middle";
    if (left > 100) c.fillText("began, over time", 8, height / 2);
    c.strokeStyle = ink.accent;
    c.lineWidth = 1.5;
    if (to - from < width - left - PAD - 20) c.strokeRect(from + 0.75, 0.75, Math.max(3, to - from - 1.5), height - 1.5);
    if (state.cursor !== null) {
      c.fillStyle = ink.accent;
      c.fillRect(this.overviewX(state.cursor, width) - 0.75, 0, 1.5, height);
    }
  }

  overviewX(time, width) {
    const share = (time - this.doc.start) / (this.doc.end - this.doc.start);
    return this.gutter + Math.max(0, Math.min(1, share)) * (width - this.gutter - PAD);
  }

  bin(bins) {
    const { start, end, outcomes } = this.doc, counts = [];
    for (let bin = 0; bin < bins; bin++) counts.push(new Array(outcomes.length).fill(0));
    let most = 1;
    for (const story of this.stories) {
      const bin = Math.min(bins - 1, Math.floor(((story.start - start) / (end - start)) * bins));
      counts[bin][story.outcome]++;
    }
    for (const each of counts) most = Math.max(most, each.reduce((sum, one) => sum + one, 0));
    return { counts, most };
  }
}

function fillOf(lanes, state, outcome) {
  if (state === QUEUED) return lanes.ink.queued;
  if (state === "pending_handshake") return lanes.tint[outcome];
  if (state === "draining") return lanes.hatch[outcome];
  if (state === "proving") return lanes.stripes[outcome];
  return lanes.solid[outcome];
}

/* Diagonal lines of one colour on another. */
function hatched(line, ground) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const c = tile.getContext("2d");
  if (ground !== "transparent") {
    c.fillStyle = ground;
    c.fillRect(0, 0, 6, 6);
  }
  c.strokeStyle = line;
  c.lineWidth = 1.6;
  c.beginPath();
  for (const shift of [-6, 0, 6]) {
    c.moveTo(shift - 1, 7);
    c.lineTo(shift + 7, -1);
  }
  c.stroke();
  return c.createPattern(tile, "repeat");
}

function packFaults(faults) {
  const rows = [], ends = [];
  const span = faults.length ? Math.max(...faults.map((fault) => fault.end)) : 0;
  for (const fault of [...faults].sort((a, b) => a.start - b.start)) {
    let row = 0;
    while (row < ends.length && ends[row] > fault.start) row++;
    if (row === rows.length) rows.push([]);
    rows[row].push(fault);
    ends[row] = Math.max(fault.end, fault.start + span * 0.16); // room for its words
  }
  return rows;
}
