// Work: what the steps did, as small charts over one another, with the decisions that matter and the ruler.

"use strict";

const WORK = [
  { name: "prefill", title: "prompt tokens", column: "prefill_tokens", colour: (t) => t.phases.prefill, text: number },
  { name: "decode", title: "decode rows", column: "decode_rows", colour: (t) => t.phases.decode, text: number },
  { name: "step time", title: "step time", column: "took_us", colour: (t) => t.bands.full[0], text: duration },
  { name: "moved", title: "bytes moved", column: "moved_bytes", colour: (t) => t.moved, text: bytes },
];
const WORK_HEIGHT = 23, WORK_FLOOR = (WORK.length + 1) * WORK_HEIGHT, RULER_HEIGHT = 22;
const NOTABLE = {
  retracted: (t) => t.phases.retracted, refused: (t) => t.bad, parked: (t) => t.phases.parked,
  requeued: (t) => t.phases.requeued, stalled: (t) => t.bad, relief: (t) => t.phases.parked,
  shrunk: (t) => t.pending, evicted: (t) => t.quiet, waits: (t) => t.quiet, preempted: (t) => t.bad,
};
const RANKS = Object.keys(NOTABLE).reverse();

class Work {
  constructor(film, axis) {
    Object.assign(this, { film, axis, plot: new Plot("work", WORK_FLOOR + RULER_HEIGHT) });
  }

  draw(theme) {
    const { plot, axis, film } = this, context = plot.clear(plot.base), { count, edges } = axis.columns(plot);
    WORK.forEach((chart, place) => {
      const floor = (place + 1) * WORK_HEIGHT, room = WORK_HEIGHT - 6, peaks = this.peaks(film.steps[chart.column], count, edges);
      const most = peaks.reduce((high, peak) => Math.max(high, peak), 0);
      context.fillStyle = theme.line;
      context.fillRect(GUTTER, floor, count, 1);
      context.fillStyle = chart.colour(theme);
      context.beginPath();
      for (let x = 0; x < count; x++) {
        const high = most ? (peaks[x] / most) * room : 0;
        if (high) context.rect(GUTTER + x, floor - high, 1.05, high);
      }
      context.fill();
      plot.aside(theme, floor - room / 2, chart.name);
      if (most) plot.plaque(theme, `max ${chart.text(most)}`, GUTTER + 4, floor - room + 4, { align: "left", pad: 3, alpha: 0.75 });
    });
    this.drawDecisions(context, theme, edges);
    this.drawRuler(context, theme);
  }

  // The most that a step has, by pixel column.
  peaks(values, count, edges) {
    const peaks = new Float64Array(count), { axis } = this;
    for (let x = 0; x < count; x++) {
      let low = edges[x], high = edges[x + 1];
      if (high <= low && axis.mode === "steps") { low = axis.shown(edges, x); high = low + 1; }
      for (let step = low; step < high; step++) if (values[step] > peaks[x]) peaks[x] = values[step];
    }
    return peaks;
  }

  // Ticks where something was decided that matters: as high as there are many, in the colour of the gravest.
  drawDecisions(context, theme, edges) {
    const { film, axis, plot } = this, d = film.decisions;
    const floor = WORK_FLOOR, low = lastAtMost(d.at, edges[0] - 1) + 1;
    const ranks = film.meta.verdicts.map((verdict) => RANKS.indexOf(verdict));
    const best = new Int8Array(edges.length).fill(-1), counts = new Int32Array(edges.length);
    let most = 1;
    const right = edges[edges.length - 1];
    for (let k = low; k < d.length && d.at[k] <= right; k++) {
      const x = Math.round(axis.x(axis.of(d.at[k], d.us[k]), plot) - GUTTER);
      const rank = ranks[d.verdict[k]];
      if (x < 0 || x >= best.length || rank < 0) continue;
      if (rank > best[x]) best[x] = rank;
      if (++counts[x] > most) most = counts[x];
    }
    for (let x = 0; x < best.length; x++) {
      if (best[x] < 0) continue;
      const grave = best[x] >= RANKS.indexOf("shrunk"), many = 5 + 12 * Math.sqrt((counts[x] - 1) / Math.max(1, most - 1));
      const high = grave ? Math.max(9, many) : many;
      context.fillStyle = NOTABLE[RANKS[best[x]]](theme);
      context.globalAlpha = grave ? 1 : 0.6;
      context.fillRect(GUTTER + x, floor - high, grave && most < 4 ? 2 : 1, high);
    }
    context.globalAlpha = 1;
    context.fillStyle = theme.line;
    context.fillRect(GUTTER, floor, plot.inner, 1);
    plot.aside(theme, floor - 10, "decisions");
  }

  drawRuler(context, theme) {
    const { axis, plot } = this, top = WORK_FLOOR;
    let gap = nice(axis.span, (plot.width - GUTTER) / 110);
    if (axis.mode === "steps") gap = Math.max(1, gap);
    context.textAlign = "center";
    context.fillStyle = theme.dim;
    for (let at = Math.ceil(axis.low / gap) * gap; at <= axis.high + 1; at += gap) {
      const x = axis.x(axis.mode === "steps" ? at - 0.5 : at, plot);
      if (x < GUTTER || x > plot.right) continue;
      context.fillRect(x - 0.5, top, 1, 5);
      const text = axis.mode === "steps" ? number(at) : duration(at), half = context.measureText(text).width / 2;
      context.fillText(text, Math.min(Math.max(GUTTER + half, x), plot.right - half + 6), top + 13);
    }
    plot.aside(theme, top + 13, axis.mode === "steps" ? "step" : "time");
  }
}
