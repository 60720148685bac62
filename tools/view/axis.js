// Axis: what all charts share: which stretch of steps or time is seen, and canvases that follow the size of the page.

"use strict";

const GUTTER = 78, MARGIN_RIGHT = 14;

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
    const [first, last] = [this.stepAt(this.low), this.stepAt(this.high)];
    const all = this.high - this.low >= this.total * 0.999;
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

  x(unit, width) { return GUTTER + ((unit - this.low) / (this.high - this.low)) * (width - GUTTER - MARGIN_RIGHT); }

  unit(x, width) { return this.low + ((x - GUTTER) / (width - GUTTER - MARGIN_RIGHT)) * (this.high - this.low); }

  zoom(factor, around) {
    this.show(around + (this.low - around) * factor, around + (this.high - around) * factor);
  }

  pan(units) {
    const span = this.high - this.low;
    const low = Math.max(0, Math.min(this.low + units, this.total - span));
    this.low = low;
    this.high = low + span;
  }

  // For every pixel column the first step and the end of its steps; columns without a step have none (first = end).
  columns(width) {
    const count = Math.max(1, Math.floor(width - GUTTER - MARGIN_RIGHT));
    const edges = new Int32Array(count + 1);
    const last = this.film.length;
    for (let x = 0; x <= count; x++) {
      const unit = this.low + (x / count) * (this.high - this.low);
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

// Two canvases over each other: `base` for what changes with the view, `over` for the cursor.
class Plot {
  constructor(id, height) {
    this.box = element(id);
    this.height = height;
    this.canvases = ["base", "over"].map((name) => {
      const canvas = document.createElement("canvas");
      canvas.className = name;
      this.box.append(canvas);
      return canvas;
    });
    [this.base, this.over] = this.canvases.map((canvas) => canvas.getContext("2d"));
  }

  // Take the page's size; returns whether it changed.
  resize() {
    const ratio = Math.min(2, window.devicePixelRatio || 1);
    const width = this.box.clientWidth;
    if (this.width === width && this.ratio === ratio && this.drawn === this.height) return false;
    Object.assign(this, { width, ratio, drawn: this.height });
    this.box.style.height = this.height + "px";
    for (const canvas of this.canvases) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(this.height * ratio);
    }
    return true;
  }

  clear(context) {
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.font = "11px ui-sans-serif, system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
    context.textBaseline = "middle";
    return context;
  }

  // Where the pointer is, in the plot's own pixels.
  point(event) {
    const rect = this.box.getBoundingClientRect();
    return [event.clientX - rect.left, event.clientY - rect.top];
  }

  cursor(axis, theme, step) {
    const context = this.clear(this.over);
    if (step < 0) return;
    const x = axis.x(axis.ofStep(step), this.width);
    if (x < GUTTER - 1 || x > this.width - MARGIN_RIGHT + 1) return;
    const wide = axis.mode === "steps" ? (this.width - GUTTER - MARGIN_RIGHT) / (axis.high - axis.low) : 0;
    context.fillStyle = theme.cursor;
    if (wide > 3) {
      context.globalAlpha = 0.1;
      context.fillRect(x - wide / 2, 0, wide, this.height);
    }
    context.globalAlpha = 0.9;
    context.fillRect(Math.round(x) - 0.5, 0, 1, this.height);
    context.globalAlpha = 1;
  }
}
