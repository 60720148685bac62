// Axis: which stretch of steps or time all charts show, and where a step lies.

"use strict";

class Axis {
  constructor(film) {
    this.film = film;
    this.mode = "steps";
    this.fit();
  }

  get total() { return Math.max(1, this.mode === "steps" ? this.film.length : this.film.meta.us); }

  fit() { this.show(0, this.total); }

  // See [low, high), kept inside of what there is and not smaller than a few steps.
  show(low, high) {
    const least = this.mode === "steps" ? 8 : 2000;
    const span = Math.min(this.total, Math.max(least, high - low));
    this.low = Math.max(0, Math.min(low + (high - low - span) / 2, this.total - span));
    this.high = this.low + span;
  }

  setMode(mode) {
    const [first, last] = this.steps();
    const all = this.whole;
    this.mode = mode;
    if (all) this.fit();
    else this.show(this.ofPosition(first), this.ofPosition(last + 1));
  }

  // Axis units of a position (steps before it), and of something with its own time.
  ofPosition(position) {
    if (this.mode === "steps") return position;
    return position < this.film.length ? this.film.steps.us[Math.max(0, position)] : this.film.meta.us;
  }

  of(position, us) { return this.mode === "steps" ? position : us; }

  ofStep(step) { return this.mode === "steps" ? step + 0.5 : this.film.steps.us[step] || 0; }

  // The step at axis units: the newest that began by then.
  stepAt(unit) {
    const last = this.film.length - 1;
    if (this.mode === "steps") return Math.max(0, Math.min(last, Math.floor(unit)));
    return Math.max(0, Math.min(last, lastAtMost(this.film.steps.us, unit)));
  }

  get span() { return this.high - this.low; }

  // Whether all there is is seen.
  get whole() { return this.span >= this.total * 0.999; }

  // The first and the last step that are seen.
  steps() { return [this.stepAt(this.low), this.stepAt(this.high)]; }

  x(unit, plot) { return GUTTER + ((unit - this.low) / this.span) * plot.inner; }

  unit(x, plot) { return this.low + ((x - GUTTER) / plot.inner) * this.span; }

  // Pixels of one step; 0 where steps are not equally wide.
  stepWidth(plot) { return this.mode === "steps" ? plot.inner / this.span : 0; }

  zoom(factor, around) {
    this.show(around + (this.low - around) * factor, around + (this.high - around) * factor);
  }

  pan(units) {
    const { span } = this;
    const low = Math.max(0, Math.min(this.low + units, this.total - span));
    this.low = low;
    this.high = low + span;
  }

  // For every pixel column the first step and the end of its steps; columns without a step have none (first = end).
  columns(plot) {
    const count = Math.max(1, Math.floor(plot.inner));
    const edges = new Int32Array(count + 1);
    const last = this.film.length;
    for (let x = 0; x <= count; x++) {
      const unit = this.low + (x / count) * this.span;
      if (this.mode === "steps") edges[x] = Math.min(last, Math.max(0, Math.ceil(unit - 1e-9)));
      else edges[x] = Math.min(last, lastAtMost(this.film.steps.us, unit - 1e-9) + 1);
    }
    return { count, edges };
  }

  // The step that a pixel column shows: its last, or the one that lasts through it.
  shown(edges, x) {
    const end = edges[x + 1];
    return Math.max(0, Math.min(this.film.length - 1, end - 1));
  }
}
