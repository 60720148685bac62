// Moves: from where to where units were copied, as arcs over the steps that are seen, where steps are wide enough.

"use strict";

const ARC_PIXELS = 3.5, MOVES_MAX = 20_000, STEPS_BESIDE = 100;

class Moves {
  constructor(film, axis, plot) { Object.assign(this, { film, axis, plot, found: null }); }

  get wide() { return this.axis.stepWidth(this.plot) >= ARC_PIXELS; }

  draw(theme, stage, places, top, height) {
    const { plot, axis, found } = this;
    if (!found || !this.wide) return;
    const wide = axis.stepWidth(plot);
    plot.clipped(top, height, (context) => {
      context.strokeStyle = context.fillStyle = theme.moved;
      context.lineWidth = 1;
      context.globalAlpha = 0.8;
      for (const { step, stage: own, from, to } of found.list) {
        if (own !== stage) continue;
        const x = axis.x(step + 0.5, plot), y0 = top + places.share(from) * height, y1 = top + places.share(to) * height;
        const bulge = Math.min(26, 5 + Math.abs(y1 - y0) * 0.22, Math.max(5, wide * 0.9));
        context.beginPath();
        context.moveTo(x, y0);
        context.bezierCurveTo(x + bulge, y0, x + bulge, y1, x, y1);
        context.stroke();
        context.fillRect(x - 1.5, y1 - 1.5, 3, 3);
      }
    });
  }

  // Read the moves of all steps that are seen, and some beside, when they are wide enough; `done` when there are new ones.
  async look(blocks, done) {
    if (!this.wide) return;
    const [first, last] = this.axis.steps();
    if (this.found && this.found.first <= first && this.found.last >= last) return;
    const ticket = (this.ticket = {}), board = new Board(this.film, blocks), list = [];
    const low = Math.max(0, first - STEPS_BESIDE), high = Math.min(this.film.length - 1, last + STEPS_BESIDE);
    for (let step = low; step <= high && list.length < MOVES_MAX; step++) {
      if (!this.film.steps.moved[step]) continue;
      if (!(await board.goto(step)) || this.ticket !== ticket) return;
      board.bands.forEach((band, place) => {
        const { positions, codes, from } = board.newest[place];
        for (let c = 0; c < positions.length; c++) {
          if (codes[c] !== MOVED || from[c] < 0) continue;
          list.push({ step, stage: band.stage, from: middleOf(band, from[c]), to: middleOf(band, positions[c]) });
        }
      });
    }
    this.found = { first: low, last: high, list };
    done();
  }
}
