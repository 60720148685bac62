// Lanes: what the steps did, as small charts over one another, and the lives of all requests.

"use strict";

const WORK = [
  { name: "prefill", title: "prompt tokens", column: "prefill_tokens", colour: (t) => t.phases.prefill, text: number },
  { name: "decode", title: "decode rows", column: "decode_rows", colour: (t) => t.phases.decode, text: number },
  { name: "step time", title: "step time", column: "took_us", colour: (t) => t.bands.full[0], text: duration },
  { name: "moved", title: "bytes moved", column: "moved_bytes", colour: (t) => t.moved, text: bytes },
];
const WORK_HEIGHT = 23;
const NOTABLE = {
  retracted: (t) => t.phases.retracted, refused: (t) => t.bad, parked: (t) => t.phases.parked,
  requeued: (t) => t.phases.requeued, stalled: (t) => t.bad, relief: (t) => t.phases.parked,
  shrunk: (t) => t.pending, evicted: (t) => t.quiet, waits: (t) => t.quiet, preempted: (t) => t.bad,
};
const RANKS = Object.keys(NOTABLE).reverse();

class Work {
  constructor(film, axis) {
    Object.assign(this, { film, axis, plot: new Plot("work", (WORK.length + 1) * WORK_HEIGHT + 22) });
  }

  draw(theme) {
    const { plot, axis, film } = this;
    const context = plot.clear(plot.base), { count, edges } = axis.columns(plot.width);
    WORK.forEach((row, place) => {
      const values = film.steps[row.column], floor = (place + 1) * WORK_HEIGHT, room = WORK_HEIGHT - 6;
      const peaks = new Float64Array(count);
      let most = 0;
      for (let x = 0; x < count; x++) {
        let low = edges[x], high = edges[x + 1];
        if (high <= low && axis.mode === "steps") { low = axis.shown(edges, x); high = low + 1; }
        for (let step = low; step < high; step++) if (values[step] > peaks[x]) peaks[x] = values[step];
        if (peaks[x] > most) most = peaks[x];
      }
      context.fillStyle = theme.line;
      context.fillRect(GUTTER, floor, count, 1);
      context.fillStyle = row.colour(theme);
      context.beginPath();
      for (let x = 0; x < count; x++) {
        const high = most ? (peaks[x] / most) * room : 0;
        if (high) context.rect(GUTTER + x, floor - high, 1.05, high);
      }
      context.fill();
      context.textAlign = "right";
      context.fillStyle = theme.dim;
      context.fillText(row.name, GUTTER - 8, floor - room / 2);
      context.textAlign = "left";
      if (most) this.label(context, theme, `max ${row.text(most)}`, GUTTER + 4, floor - room + 4);
    });
    this.drawDecisions(context, theme, edges);
    this.drawRuler(context, theme);
  }

  label(context, theme, text, x, y) {
    const wide = context.measureText(text).width;
    context.fillStyle = theme.panel;
    context.globalAlpha = 0.75;
    context.fillRect(x - 3, y - 7, wide + 6, 14);
    context.globalAlpha = 1;
    context.fillStyle = theme.dim;
    context.fillText(text, x, y);
  }

  // Ticks where something was decided that matters: as high as there are many, in the colour of the gravest.
  drawDecisions(context, theme, edges) {
    const { film, axis, plot } = this, d = film.decisions;
    const floor = (WORK.length + 1) * WORK_HEIGHT, low = lastAtMost(d.at, edges[0] - 1) + 1;
    const ranks = film.meta.verdicts.map((verdict) => RANKS.indexOf(verdict));
    const best = new Int8Array(edges.length).fill(-1), counts = new Int32Array(edges.length);
    let most = 1;
    const right = edges[edges.length - 1];
    for (let k = low; k < d.length && d.at[k] <= right; k++) {
      const x = Math.round(axis.x(axis.of(d.at[k], d.us[k]), plot.width) - GUTTER);
      const rank = ranks[d.verdict[k]];
      if (x < 0 || x >= best.length || rank < 0) continue;
      if (rank > best[x]) best[x] = rank;
      if (++counts[x] > most) most = counts[x];
    }
    for (let x = 0; x < best.length; x++) {
      if (best[x] < 0) continue;
      const grave = best[x] >= RANKS.indexOf("shrunk"), high = 5 + 12 * Math.sqrt((counts[x] - 1) / Math.max(1, most - 1));
      context.fillStyle = NOTABLE[RANKS[best[x]]](theme);
      context.globalAlpha = grave ? 1 : 0.6;
      context.fillRect(GUTTER + x, floor - (grave ? Math.max(9, high) : high), grave && most < 4 ? 2 : 1, grave ? Math.max(9, high) : high);
    }
    context.globalAlpha = 1;
    context.fillStyle = theme.line;
    context.fillRect(GUTTER, floor, plot.width - GUTTER - MARGIN_RIGHT, 1);
    context.textAlign = "right";
    context.fillStyle = theme.dim;
    context.fillText("decisions", GUTTER - 8, floor - 10);
  }

  drawRuler(context, theme) {
    const { axis, plot } = this, top = (WORK.length + 1) * WORK_HEIGHT;
    const span = axis.high - axis.low;
    let gap = nice(span, (plot.width - GUTTER) / 110);
    if (axis.mode === "steps") gap = Math.max(1, gap);
    context.textAlign = "center";
    context.fillStyle = theme.dim;
    for (let at = Math.ceil(axis.low / gap) * gap; at <= axis.high + 1; at += gap) {
      const x = axis.x(axis.mode === "steps" ? at - 0.5 : at, plot.width);
      if (x < GUTTER || x > plotRight(plot)) continue;
      context.fillRect(x - 0.5, top, 1, 5);
      const text = axis.mode === "steps" ? number(at) : duration(at), half = context.measureText(text).width / 2;
      context.fillText(text, Math.min(Math.max(GUTTER + half, x), plotRight(plot) - half + 6), top + 13);
    }
    context.textAlign = "right";
    context.fillText(axis.mode === "steps" ? "step" : "time", GUTTER - 8, top + 13);
  }
}

class Lanes {
  constructor(film, axis) {
    Object.assign(this, { film, axis, selected: -1, scroll: 0, plot: new Plot("requests", 190) });
  }

  get laneHeight() {
    const room = (this.plot.height - 4) / Math.max(1, this.film.meta.lanes);
    return Math.max(this.queued ? 3 : 4, Math.min(18, Math.floor(room)));
  }

  // Whether those that wait have lanes of their own, behind the others'.
  get queued() { return this.film.meta.runLanes < this.film.meta.lanes; }

  get scrollMost() { return Math.max(0, this.film.meta.lanes * this.laneHeight + 4 - this.plot.height); }

  // From where to where a request lives, in axis units, and where it was admitted first.
  reach(index) {
    const { axis, film } = this, r = film.requests;
    const begin = axis.of(r.at[index], r.us[index]);
    const open = r.endAt[index] < 0;
    const end = open ? axis.total : axis.of(r.endAt[index], r.endUs[index]);
    return [begin, Math.max(end, begin)];
  }

  draw(theme) {
    const { plot, axis, film } = this, context = plot.clear(plot.base), r = film.requests;
    const high = this.laneHeight, right = plotRight(plot), bar = high > 6 ? high - 2 : high > 3 ? high - 1 : high - 0.5;
    const colours = film.meta.phases.map((name) => theme.phases[name]);
    const last = new Float64Array(film.meta.lanes).fill(-1);
    if (this.revealing) this.reveal(this.selected);
    this.revealing = false;
    this.scroll = Math.min(this.scroll, this.scrollMost);
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, right - GUTTER, plot.height);
    context.clip();
    for (let index = 0; index < r.length; index++) {
      const y = this.top(r.lane[index]), queueY = r.queueLane[index] < 0 ? y : this.top(r.queueLane[index]);
      if (Math.max(y, queueY) < -high || Math.min(y, queueY) > plot.height) continue;
      const [begin, end] = this.reach(index);
      if (end < axis.low || begin > axis.high) continue;
      const endX = axis.x(end, plot.width);
      if (queueY === y && endX <= last[r.lane[index]] + 0.5) continue;
      last[r.lane[index]] = endX;
      context.globalAlpha = this.selected >= 0 && this.selected !== index ? 0.28 : 1;
      this.drawLife(context, index, colours, y, queueY, bar, endX);
      this.drawWords(context, theme, index, begin, endX, y, queueY, bar);
    }
    context.globalAlpha = 1;
    if (this.queued) {
      context.fillStyle = theme.dim;
      context.fillRect(GUTTER, this.top(film.meta.runLanes) - 1, right - GUTTER, 1);
    }
    context.restore();
    this.drawSides(context, theme);
  }

  top(lane) { return 2 + lane * this.laneHeight - this.scroll; }

  drawLife(context, index, colours, y, queueY, bar, endX) {
    const { plot, axis, film } = this, right = plotRight(plot);
    const { starts, at, us, phase } = film.phases;
    const over = film.meta.phases.indexOf("over");
    for (let k = starts[index]; k < starts[index + 1]; k++) {
      if (phase[k] === over) continue;
      const x = Math.max(GUTTER - 2, axis.x(axis.of(at[k], us[k]), plot.width));
      const more = k + 1 < starts[index + 1];
      const to = more ? Math.min(right + 2, axis.x(axis.of(at[k + 1], us[k + 1]), plot.width)) : endX;
      if (to < GUTTER || x > right) continue;
      const thin = phase[k] === 0 || phase[k] >= 4;
      context.fillStyle = colours[phase[k]];
      const inset = thin && bar > 5 ? Math.floor(bar / 4) : 0;
      const top = k === starts[index] ? queueY : y;
      context.fillRect(x, top + inset, Math.max(0.8, to - x), bar - 2 * inset);
    }
  }

  drawWords(context, theme, index, begin, endX, y, queueY, bar) {
    const { plot, axis, film } = this, r = film.requests;
    const held = queueY === y || r.heldAt[index] < 0 ? begin : axis.ofPosition(r.heldAt[index]);
    const x = Math.max(GUTTER, axis.x(held, plot.width));
    if (bar >= 11 && endX - x > 46) {
      context.fillStyle = theme.name === "dark" ? "#0b1017" : "#ffffff";
      context.textAlign = "left";
      context.font = "600 10px ui-sans-serif, system-ui, 'DejaVu Sans', sans-serif";
      context.fillText(number(r.number[index]), x + 4, y + bar / 2 + 0.5);
    }
    if (this.selected === index) {
      context.strokeStyle = theme.text;
      context.lineWidth = 1.5;
      context.strokeRect(x - 1, y - 1, Math.max(4, endX - x + 2), bar + 2);
    }
    const end = film.meta.ends[r.end[index]];
    if (r.endAt[index] >= 0 && end !== "stop" && end !== "length") {
      context.fillStyle = end === "abort" ? theme.quiet : theme.bad;
      context.fillRect(endX - 1, y - 1, 3, bar + 2);
    }
  }

  drawSides(context, theme) {
    const { plot, film } = this;
    context.textAlign = "right";
    context.fillStyle = theme.dim;
    context.fillText(number(film.requests.length), GUTTER - 8, 12);
    context.fillText("requests", GUTTER - 8, 26);
    const queue = this.top(film.meta.runLanes);
    if (this.queued && queue < plot.height - 8) context.fillText("queue", GUTTER - 8, Math.max(44, queue + 8));
    if (this.scrollMost > 0) {
      const room = plot.height - 8, part = Math.max(0.06, plot.height / (plot.height + this.scrollMost));
      context.fillStyle = theme.line;
      context.fillRect(plot.width - 8, 4, 5, room);
      context.fillStyle = theme.dim;
      context.fillRect(plot.width - 8, 4 + (this.scroll / this.scrollMost) * room * (1 - part), 5, room * part);
    }
    for (const [at, us, , kind] of film.meta.marks) {
      if (!BAD_MARKS.has(kind)) continue;
      const x = this.axis.x(this.axis.of(at, us), plot.width);
      if (x < GUTTER || x > plotRight(plot)) continue;
      context.fillStyle = theme.bad;
      for (let y = 0; y < plot.height; y += 7) context.fillRect(Math.round(x), y, 1, 4);
    }
  }

  // The request under a point; -1 for none.
  find(x, y) {
    const { plot, axis, film } = this, lane = Math.floor((y - 2 + this.scroll) / this.laneHeight), r = film.requests;
    if (x < GUTTER || x > plotRight(plot)) return -1;
    const unit = axis.unit(x, plot.width), near = (2 / (plot.width - GUTTER)) * (axis.high - axis.low);
    let found = -1;
    for (let index = 0; index < r.length; index++) {
      const own = r.lane[index] === lane, queue = r.queueLane[index] === lane;
      if (!own && !queue) continue;
      let [begin, end] = this.reach(index);
      if (r.queueLane[index] >= 0 && r.heldAt[index] >= 0) {
        if (own) begin = axis.ofPosition(r.heldAt[index]);
        else end = axis.ofPosition(r.heldAt[index]);
      }
      if (begin - near <= unit && unit <= end + near) found = index;
    }
    return found;
  }

  // Bring a request's lane into sight.
  reveal(index) {
    const y = this.film.requests.lane[index] * this.laneHeight;
    if (y < this.scroll || y > this.scroll + this.plot.height - this.laneHeight) {
      this.scroll = Math.max(0, Math.min(this.scrollMost, y - this.plot.height / 2));
    }
  }
}
