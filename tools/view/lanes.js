// Lanes: the lives of all requests, and what each does when.

"use strict";

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
    const high = this.laneHeight, bar = high > 6 ? high - 2 : high > 3 ? high - 1 : high - 0.5;
    const colours = film.meta.phases.map((name) => theme.phases[name]);
    const last = new Float64Array(film.meta.lanes).fill(-1);
    if (this.revealing) this.reveal(this.selected);
    this.revealing = false;
    this.scroll = Math.min(this.scroll, this.scrollMost);
    plot.clipped(0, plot.height, () => {
      for (let index = 0; index < r.length; index++) {
        const y = this.top(r.lane[index]), queueY = r.queueLane[index] < 0 ? y : this.top(r.queueLane[index]);
        if (Math.max(y, queueY) < -high || Math.min(y, queueY) > plot.height) continue;
        const [begin, end] = this.reach(index);
        if (end < axis.low || begin > axis.high) continue;
        const endX = axis.x(end, plot);
        if (queueY === y && endX <= last[r.lane[index]] + 0.5) continue;
        last[r.lane[index]] = endX;
        context.globalAlpha = this.selected >= 0 && this.selected !== index ? 0.28 : 1;
        this.drawLife(context, index, colours, y, queueY, bar, endX);
        this.drawWords(context, theme, index, begin, endX, y, queueY, bar);
      }
      context.globalAlpha = 1;
      context.fillStyle = theme.dim;
      if (this.queued) context.fillRect(GUTTER, this.top(film.meta.runLanes) - 1, plot.inner, 1);
    });
    this.drawSides(context, theme);
  }

  top(lane) { return 2 + lane * this.laneHeight - this.scroll; }

  drawLife(context, index, colours, y, queueY, bar, endX) {
    const { plot, axis, film } = this;
    const { starts, at, us, phase } = film.phases;
    const over = film.meta.phases.indexOf("over");
    for (let k = starts[index]; k < starts[index + 1]; k++) {
      if (phase[k] === over) continue;
      const x = Math.max(GUTTER - 2, axis.x(axis.of(at[k], us[k]), plot));
      const more = k + 1 < starts[index + 1];
      const to = more ? Math.min(plot.right + 2, axis.x(axis.of(at[k + 1], us[k + 1]), plot)) : endX;
      if (to < GUTTER || x > plot.right) continue;
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
    const x = Math.max(GUTTER, axis.x(held, plot));
    if (bar >= 11 && endX - x > 46) {
      context.fillStyle = theme.name === "dark" ? "#0b1017" : "#ffffff";
      context.textAlign = "left";
      context.font = `600 10px ${FONT}`;
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
    const count = film.requests.length, queue = this.top(film.meta.runLanes);
    plot.aside(theme, 12, number(count), count === 1 ? "request" : "requests");
    if (this.queued && queue < plot.height - 8) plot.aside(theme, Math.max(44, queue + 8), "queue");
    if (this.scrollMost > 0) {
      const room = plot.height - 8, part = Math.max(0.06, plot.height / (plot.height + this.scrollMost));
      context.fillStyle = theme.line;
      context.fillRect(plot.width - 8, 4, 5, room);
      context.fillStyle = theme.dim;
      context.fillRect(plot.width - 8, 4 + (this.scroll / this.scrollMost) * room * (1 - part), 5, room * part);
    }
    eachMark(film, this.axis, plot, (x, bad) => { if (bad) plot.upright(theme.bad, x, [4, 3]); });
  }

  // The request under a point; -1 for none.
  find(x, y) {
    const { plot, axis, film } = this, lane = Math.floor((y - 2 + this.scroll) / this.laneHeight), r = film.requests;
    if (x < GUTTER || x > plot.right) return -1;
    const unit = axis.unit(x, plot), near = (2 / plot.inner) * axis.span;
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

  scrollTo(y) { this.scroll = Math.max(0, Math.min(this.scrollMost, y)); }

  // Bring a request's lane into sight.
  reveal(index) {
    const y = this.film.requests.lane[index] * this.laneHeight;
    if (y < this.scroll || y > this.scroll + this.plot.height - this.laneHeight) {
      this.scrollTo(y - this.plot.height / 2);
    }
  }
}
