// Plot: a chart's canvases, which follow the size of the page, and what all charts draw alike.

"use strict";

const GUTTER = 78, MARGIN_RIGHT = 14;
const FONT = "ui-sans-serif, system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";

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

  // Where the charts end at the right, and how wide they are.
  get right() { return this.width - MARGIN_RIGHT; }

  get inner() { return this.width - GUTTER - MARGIN_RIGHT; }

  clear(context) {
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.font = `11px ${FONT}`;
    context.textBaseline = "middle";
    return context;
  }

  // Where the pointer is, in the plot's own pixels.
  point(event) {
    const rect = this.box.getBoundingClientRect();
    return [event.clientX - rect.left, event.clientY - rect.top];
  }

  // Only what lies between these heights, and between the gutter and the right margin, is drawn by `draw`.
  clipped(top, height, draw) {
    this.base.save();
    this.base.beginPath();
    this.base.rect(GUTTER, top, this.inner, height);
    this.base.clip();
    draw(this.base);
    this.base.restore();
  }

  // Words at the left of the chart, one line for each.
  aside(theme, y, ...lines) {
    this.base.textAlign = "right";
    this.base.fillStyle = theme.dim;
    lines.forEach((line, at) => this.base.fillText(line, GUTTER - 8, y + 14 * at));
  }

  // Words on a ground of their own, around `x`, or from it on.
  plaque(theme, text, x, y, { align = "center", pad = 6, alpha = 0.85 } = {}) {
    const context = this.base, wide = context.measureText(text).width, left = align === "center" ? x - wide / 2 : x;
    context.fillStyle = theme.panel;
    context.globalAlpha = alpha;
    context.fillRect(left - pad, y - 7.5, wide + 2 * pad, 15);
    context.globalAlpha = 1;
    context.textAlign = "left";
    context.fillStyle = theme.dim;
    context.fillText(text, left, y);
  }

  // A line from top to bottom, of dashes.
  upright(colour, x, dashes, alpha = 1) {
    const context = this.base;
    context.strokeStyle = colour;
    context.globalAlpha = alpha;
    context.setLineDash(dashes);
    context.beginPath();
    context.moveTo(Math.round(x) + 0.5, 0);
    context.lineTo(Math.round(x) + 0.5, this.height);
    context.stroke();
    context.setLineDash([]);
    context.globalAlpha = 1;
  }

  cursor(axis, theme, step) {
    const context = this.clear(this.over);
    if (step < 0) return;
    const x = axis.x(axis.ofStep(step), this), wide = axis.stepWidth(this);
    if (x < GUTTER - 1 || x > this.right + 1) return;
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

// Pixels (packed, rows of `columns`) as a canvas that is drawn from; it is the same one at every call.
function pixelCanvas(columns, rows, paint) {
  const image = new ImageData(columns, rows), canvas = (pixelCanvas.canvas ||= document.createElement("canvas"));
  paint(new Uint32Array(image.data.buffer));
  canvas.width = columns;
  canvas.height = rows;
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}
