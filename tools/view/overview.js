// Overview: the whole journal in one line: how full the arenas are, what the charts show of it, and what went wrong.

"use strict";

class Overview {
  constructor(film, axis) {
    Object.assign(this, { film, axis, plot: new Plot("overview", 42), whole: new Axis(film) });
  }

  // How full the arenas are, by pixel column; it changes with the width and the kind of axis only.
  filled(count, edges) {
    const key = `${count} ${this.whole.mode}`;
    if (this.key !== key) {
      this.key = key;
      this.kept = Array.from({ length: count }, (_, x) => this.film.filled(edges[x], edges[x + 1], this.whole.shown(edges, x)));
    }
    return this.kept;
  }

  draw(theme) {
    const { plot, film, whole, axis } = this, context = plot.clear(plot.base);
    whole.mode = axis.mode;
    whole.fit();
    const { count, edges } = whole.columns(plot), floor = plot.height - 4, room = plot.height - 12;
    context.fillStyle = theme.faint;
    context.fillRect(GUTTER, 4, count, floor - 4);
    const used = rgb(theme.bands.full[0]), colours = [css(theme.cached(used)), css(used)];
    const filled = this.filled(count, edges), most = filled.reduce((high, [live]) => Math.max(high, live), 0);
    for (let x = 0; x < count && most; x++) {
      const [live, cached] = filled[x];
      [live, live - cached].forEach((share, at) => {
        context.fillStyle = colours[at];
        context.fillRect(GUTTER + x, floor - (share / most) * room, 1.02, (share / most) * room);
      });
    }
    context.fillStyle = theme.bad;
    eachMark(film, whole, plot, (x, bad) => { if (bad) context.fillRect(x - 1, 2, 2, plot.height - 4); });
    plot.aside(theme, plot.height / 2 - 7, "live", `max ${parseFloat((most * 100).toPrecision(3))}%`);
    this.drawSeen(context, theme, floor);
  }

  // A frame around what the charts show; the rest is pale.
  drawSeen(context, theme, floor) {
    const { plot, whole, axis } = this, low = whole.x(axis.low, plot), high = whole.x(axis.high, plot);
    context.fillStyle = theme.back;
    context.globalAlpha = 0.68;
    context.fillRect(GUTTER, 4, low - GUTTER, floor - 4);
    context.fillRect(high, 4, plot.right - high, floor - 4);
    context.globalAlpha = 1;
    context.strokeStyle = theme.text;
    context.lineWidth = 1;
    context.strokeRect(low + 0.5, 3.5, Math.max(2, high - low - 1), plot.height - 7);
  }
}
