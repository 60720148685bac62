// Exact: where the axis shows few steps of many, pictures of every one of them, made from the exact changes.

"use strict";

const EXACT_AFTER_MS = 140, EXACT_STEPS_MAX = 8000, EXACT_COLUMNS_MAX = 2400, SLICE_MS = 12;

class Exact {
  constructor(film, axis, places) { Object.assign(this, { film, axis, places, found: null }); }

  // The pictures by stage, if there are such of all that is seen.
  get pictures() {
    const { found, axis } = this;
    return found && found.low <= axis.low && found.high >= axis.high ? found.pictures : null;
  }

  // Begin to make pictures when the view stays for a moment; `done` when they are there.
  look(blocks, holding, done) {
    clearTimeout(this.timer);
    const [first, last] = this.axis.steps();
    if (this.film.meta.heat.steps.length >= this.film.length || last - first > EXACT_STEPS_MAX) return;
    if (this.found && this.found.first <= first && this.found.last >= last) return;
    this.timer = setTimeout(() => this.make(first, last, blocks, holding, done), EXACT_AFTER_MS);
  }

  async make(first, last, blocks, holding, done) {
    const ticket = (this.ticket = {}), { film, axis } = this, margin = Math.floor((last - first) / 4);
    first = Math.max(0, first - margin);
    last = Math.min(film.length - 1, last + margin);
    const stride = Math.max(1, Math.ceil((last - first) / EXACT_COLUMNS_MAX)), steps = [];
    for (let step = first; step <= last; step += stride) steps.push(step);
    const board = new Board(film, blocks);
    const makers = this.places.map((places, stage) => new PictureMaker(film, places, stage, steps.length));
    let pause = performance.now();
    for (let at = 0; at < steps.length; at++) {
      const known = await board.goto(steps[at]);
      if (this.ticket !== ticket) return;
      const active = holding.at(steps[at]);
      if (known) for (const maker of makers) maker.look(board, active, at);
      if (performance.now() - pause > SLICE_MS) {
        await new Promise((resolve) => setTimeout(resolve));
        pause = performance.now();
      }
    }
    const pictures = makers.map((maker, stage) => new Picture(film, stage, maker.planes, steps));
    this.found = { first, last, pictures, low: axis.ofPosition(first), high: axis.ofPosition(last + 1) };
    done();
  }
}
