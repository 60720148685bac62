// Strips: the arena over time, address by address or band by band, and the overview above it.

"use strict";

const EXACT_AFTER_MS = 140;
const EXACT_STEPS_MAX = 8000;
const ARC_PIXELS = 3.5, MOVES_MAX = 20_000;

class Memory {
  constructor(film, axis) {
    Object.assign(this, { film, axis, mode: "addresses", pictures: [], exact: null });
    this.places = film.meta.pieces.map((pieces, stage) => new Places(pieces, film.arena(stage)));
    this.plot = new Plot("memory", 200);
    for (const mark of film.meta.marks) {
      if (mark[3] !== "ended" && mark[3] !== "closed" && mark[3] !== "cut") continue;
      const stretch = film.meta.stretches.find((one) => one.end === mark[0] && one.first < mark[0]);
      if (stretch && stretch.endUs === undefined) stretch.endUs = mark[1];
    }
  }

  get stageHeight() { return (this.plot.height - 4) / Math.max(1, this.film.meta.pieces.length); }

  async load() {
    const steps = this.film.meta.heat.steps;
    const planes = await Promise.all(this.film.meta.pieces.map((_, stage) => chunk("heat" + stage)));
    this.pictures = planes.map((plane, stage) => new Picture(this.film, stage, plane, steps));
  }

  area(stage) { return [4 + stage * this.stageHeight, this.stageHeight - 8]; }

  draw(theme) {
    const { plot, axis } = this;
    const context = plot.clear(plot.base);
    const fresh = this.exact && this.exact.low <= axis.low && this.exact.high >= axis.high ? this.exact.pictures : null;
    this.film.meta.pieces.forEach((_, stage) => {
      const [top, height] = this.area(stage);
      context.fillStyle = theme.faint;
      context.fillRect(GUTTER, top, plot.width - GUTTER - MARGIN_RIGHT, height);
      if (this.mode === "addresses") {
        const picture = (fresh || this.pictures)[stage];
        if (picture) picture.draw(context, axis, plot.width, plot.ratio, top, height, theme);
        this.drawMoves(context, stage, theme);
        this.drawScale(context, stage, theme);
      } else {
        this.drawBands(context, stage, theme);
      }
    });
    this.drawMarks(context, theme);
  }

  // Where steps are wide: an arc from where each unit was to where it is now.
  drawMoves(context, stage, theme) {
    const { plot, axis, moves } = this, [top, height] = this.area(stage), places = this.places[stage];
    if (!moves || !this.wideSteps) return;
    const wide = (plot.width - GUTTER - MARGIN_RIGHT) / (axis.high - axis.low);
    context.save();
    context.beginPath();
    context.rect(GUTTER, top, plotRight(plot) - GUTTER, height);
    context.clip();
    context.strokeStyle = context.fillStyle = theme.moved;
    context.lineWidth = 1;
    for (const { step, stage: own, from, to } of moves.list) {
      if (own !== stage) continue;
      const x = axis.x(step + 0.5, plot.width), y0 = top + places.share(from) * height, y1 = top + places.share(to) * height;
      const bulge = Math.min(26, 5 + Math.abs(y1 - y0) * 0.22, Math.max(5, wide * 0.9));
      context.globalAlpha = 0.8;
      context.beginPath();
      context.moveTo(x, y0);
      context.bezierCurveTo(x + bulge, y0, x + bulge, y1, x, y1);
      context.stroke();
      context.fillRect(x - 1.5, y1 - 1.5, 3, 3);
    }
    context.restore();
  }

  get wideSteps() {
    return this.axis.mode === "steps" && (this.plot.width - GUTTER) / (this.axis.high - this.axis.low) >= ARC_PIXELS;
  }

  // The moves of all steps that are seen, when they are wide enough for arcs.
  async movesSoon(blocks, done) {
    if (!this.wideSteps || this.mode !== "addresses") return;
    const first = this.axis.stepAt(this.axis.low), last = this.axis.stepAt(this.axis.high);
    if (this.moves && this.moves.first <= first && this.moves.last >= last) return;
    const ticket = (this.moveTicket = {}), board = new Board(this.film, blocks), list = [];
    const low = Math.max(0, first - 100), high = Math.min(this.film.length - 1, last + 100);
    for (let step = low; step <= high && list.length < MOVES_MAX; step++) {
      if (!this.film.steps.moved[step]) continue;
      if (!(await board.goto(step)) || this.moveTicket !== ticket) return;
      board.bands.forEach((band, place) => {
        const { positions, codes, from } = board.newest[place];
        const middle = (position) => (band.anchor + band.direction * position + 0.5) * band.bytes;
        for (let c = 0; c < positions.length; c++) {
          if (codes[c] !== MOVED || from[c] < 0) continue;
          list.push({ step, stage: band.stage, from: middle(from[c]), to: middle(positions[c]) });
        }
      });
    }
    this.moves = { first, last, list };
    done();
  }

  // Ticks of bytes at the left, and where addresses are left out.
  drawScale(context, stage, theme) {
    const [top, height] = this.area(stage), places = this.places[stage];
    context.textAlign = "right";
    context.fillStyle = theme.dim;
    const size = 2 ** Math.ceil(Math.log2(places.total / Math.max(2, height / 30)));
    let before = -99;
    for (const [low, high] of places.pieces) {
      for (let at = Math.ceil(low / size) * size; at <= high; at += size) {
        const y = top + places.share(at) * height;
        if (y - before < 16 || y > top + height + 1) continue;
        before = y;
        context.fillText(bytes(at), GUTTER - 8, Math.max(top + 5, Math.min(top + height - 5, y)));
        context.globalAlpha = 0.5;
        context.fillRect(GUTTER - 4, y - 0.5, 4, 1);
        context.globalAlpha = 1;
      }
    }
    context.textAlign = "center";
    for (const [share, left] of places.breaks()) {
      const y = top + share * height, text = `${bytes(left)} never touched`;
      context.strokeStyle = theme.dim;
      context.setLineDash([3, 3]);
      context.beginPath();
      context.moveTo(GUTTER, y);
      context.lineTo(plotRight(this.plot), y);
      context.stroke();
      context.setLineDash([]);
      const wide = context.measureText(text).width + 12, x = GUTTER + (this.plot.width - GUTTER) / 2;
      context.fillStyle = theme.panel;
      context.fillRect(x - wide / 2, y - 8, wide, 16);
      context.fillStyle = theme.dim;
      context.fillText(text, x, y + 0.5);
    }
    this.drawStage(context, stage, theme);
  }

  drawStage(context, stage, theme) {
    if (this.film.meta.pieces.length < 2) return;
    const [top] = this.area(stage), text = `stage ${stage}`, wide = context.measureText(text).width + 12;
    context.fillStyle = theme.panel;
    context.globalAlpha = 0.85;
    context.beginPath();
    context.roundRect(GUTTER + 6, top + 5, wide, 18, 5);
    context.fill();
    context.globalAlpha = 1;
    context.textAlign = "left";
    context.fillStyle = theme.text;
    context.fillText(text, GUTTER + 12, top + 14.5);
  }

  // Every band on its own line: used, cached, pending, holes, as bytes of one scale.
  drawBands(context, stage, theme) {
    const { plot, axis, film } = this, [top, height] = this.area(stage);
    const { count, edges } = axis.columns(plot.width);
    const shapes = film.meta.stretches.find((one) => one.stages.length > stage);
    const bands = shapes.stages[stage].bands, stored = shapes.bands.filter((band) => band.stage === stage);
    const lane = height / Math.max(1, stored.length);
    const arena = film.arena(stage);
    const kinds = this.bandKinds(theme);
    stored.forEach((band, place) => {
      const used = theme.band(bands, band.band), floor = top + (place + 1) * lane - 1, room = lane - 4;
      const most = Math.max(1, film.mostBytes(stage, band.band));
      const colours = [used, theme.cached(used), rgb(theme.fixed), rgb(theme.pending), rgb(theme.hole)].map(css);
      for (let x = 0; x < count; x++) {
        const sums = kinds.mean(film, stage, band.band, edges[x], edges[x + 1], axis.shown(edges, x));
        let y = floor;
        for (let kind = 0; kind < colours.length; kind++) {
          const high = (sums[kind] * band.bytes / most) * room;
          context.fillStyle = colours[kind];
          context.fillRect(GUTTER + x, y - high, 1.02, high);
          y -= high;
        }
      }
      context.textAlign = "right";
      context.fillStyle = theme.dim;
      context.fillText(bytes(most), GUTTER - 8, floor - room + 6);
      context.fillText(`${parseFloat(((most / arena) * 100).toFixed(1))}%`, GUTTER - 8, floor - room + 20);
      context.fillStyle = css(used);
      context.fillText(band.name, GUTTER - 8, floor - 8);
    });
    this.drawStage(context, stage, theme);
  }

  bandKinds() {
    const sums = new Float64Array(5);
    return {
      // Means over steps [low, high), or what step `shown` has where there is none.
      mean(film, stage, band, low, high, shown) {
        sums.fill(0);
        if (high <= low) { low = shown; high = shown + 1; }
        const stride = Math.max(1, Math.floor((high - low) / 12));
        let seen = 0;
        for (let step = low; step < high; step += stride) {
          const stretch = film.stretchAt(step);
          seen++;
          const own = stretch && stretch.bands.find((one) => one.stage === stage && one.band === band);
          if (!own) continue;
          const c = stretch.counts[own.place], at = step - stretch.first;
          sums[0] += c.live[at] - c.cached[at] - c.fixed[at];
          sums[1] += c.cached[at];
          sums[2] += c.fixed[at];
          sums[3] += c.pending[at] + c.vacated[at] + c.fenced[at];
          sums[4] += c.hole[at];
        }
        for (let kind = 0; kind < 5; kind++) sums[kind] = Math.max(0, sums[kind] / seen);
        return sums;
      },
    };
  }

  drawMarks(context, theme) {
    const { plot, axis, film } = this;
    let before = -1e9;
    for (const [at, us, , kind] of film.meta.marks) {
      const x = axis.x(axis.of(at, us), plot.width);
      if (x < GUTTER - 1 || x > plotRight(plot) + 1) continue;
      const bad = BAD_MARKS.has(kind);
      if (!bad && x - before < 2) continue;
      before = x;
      context.strokeStyle = bad ? theme.bad : theme.dim;
      context.globalAlpha = bad ? 0.95 : 0.55;
      context.setLineDash(bad ? [4, 3] : [1, 3]);
      context.beginPath();
      context.moveTo(Math.round(x) + 0.5, 0);
      context.lineTo(Math.round(x) + 0.5, plot.height);
      context.stroke();
      context.setLineDash([]);
      if (bad) {
        context.fillStyle = theme.bad;
        context.beginPath();
        context.moveTo(x - 5, 0);
        context.lineTo(x + 5, 0);
        context.lineTo(x, 7);
        context.fill();
      }
      context.globalAlpha = 1;
    }
  }

  // Where the axis shows few steps of many: the picture of every one of them, made from the exact changes.
  exactSoon(blocks, holding, done) {
    clearTimeout(this.timer);
    const first = this.axis.stepAt(this.axis.low), last = this.axis.stepAt(this.axis.high);
    const sampled = this.film.meta.heat.steps;
    if (sampled.length >= this.film.length || last - first > EXACT_STEPS_MAX || this.mode !== "addresses") return;
    if (this.exact && this.exact.first <= first && this.exact.last >= last) return;
    this.timer = setTimeout(() => this.makeExact(first, last, blocks, holding, done), EXACT_AFTER_MS);
  }

  async makeExact(first, last, blocks, holding, done) {
    const ticket = (this.ticket = {});
    const margin = Math.floor((last - first) / 4);
    first = Math.max(0, first - margin);
    last = Math.min(this.film.length - 1, last + margin);
    const stride = Math.max(1, Math.ceil((last - first) / 2400));
    const steps = [];
    for (let step = first; step <= last; step += stride) steps.push(step);
    const board = new Board(this.film, blocks);
    const makers = this.places.map((places, stage) => new PictureMaker(this.film, places, stage, steps.length));
    let pause = performance.now();
    for (let at = 0; at < steps.length; at++) {
      await board.goto(steps[at]);
      if (this.ticket !== ticket) return;
      const active = holding.at(steps[at]);
      for (const maker of makers) maker.look(board, active, at);
      if (performance.now() - pause > 12) {
        await new Promise((resolve) => setTimeout(resolve));
        pause = performance.now();
      }
    }
    const pictures = makers.map((maker, stage) => new Picture(this.film, stage, maker.planes, steps));
    const { axis } = this;
    this.exact = { first, last, pictures, low: axis.ofPosition(first), high: axis.ofPosition(last + 1) };
    done();
  }

  hover(x, y) {
    const stage = Math.floor((y - 4) / this.stageHeight);
    if (x < GUTTER || x > plotRight(this.plot) || !this.places[stage]) return null;
    const [top, height] = this.area(stage);
    const share = (y - top) / height;
    if (share < 0 || share >= 1) return null;
    const step = this.axis.stepAt(this.axis.unit(x, this.plot.width));
    return { step, stage, address: this.mode === "addresses" ? this.places[stage].address(share) : -1 };
  }
}

const BAD_MARKS = new Set(["ended", "cut", "diverged", "differs", "damage"]);
const plotRight = (plot) => plot.width - MARGIN_RIGHT;

// The whole journal in one line: how full the arenas are, what the charts show of it, and what went wrong.
class Overview {
  constructor(film, axis) {
    Object.assign(this, { film, axis, plot: new Plot("overview", 42) });
    this.whole = new Axis(film);
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
    const { plot, film, whole } = this;
    const context = plot.clear(plot.base);
    whole.mode = this.axis.mode;
    whole.fit();
    const { count, edges } = whole.columns(plot.width), floor = plot.height - 4, room = plot.height - 12;
    context.fillStyle = theme.faint;
    context.fillRect(GUTTER, 4, count, floor - 4);
    const used = css(rgb(theme.bands.full[0])), cached = css(theme.cached(rgb(theme.bands.full[0])));
    const filled = this.filled(count, edges), most = filled.reduce((high, [live]) => Math.max(high, live), 0);
    for (let x = 0; x < count && most; x++) {
      const live = (filled[x][0] / most) * room, own = ((filled[x][0] - filled[x][1]) / most) * room;
      context.fillStyle = cached;
      context.fillRect(GUTTER + x, floor - live, 1.02, live);
      context.fillStyle = used;
      context.fillRect(GUTTER + x, floor - own, 1.02, own);
    }
    context.fillStyle = theme.bad;
    for (const [at, us, , kind] of film.meta.marks) {
      if (BAD_MARKS.has(kind)) context.fillRect(whole.x(whole.of(at, us), plot.width) - 1, 2, 2, plot.height - 4);
    }
    context.textAlign = "right";
    context.fillStyle = theme.dim;
    context.fillText("live", GUTTER - 8, plot.height / 2 - 7);
    context.fillText(`max ${parseFloat((most * 100).toPrecision(3))}%`, GUTTER - 8, plot.height / 2 + 7);
    const low = whole.x(this.axis.low, plot.width), high = whole.x(this.axis.high, plot.width);
    context.fillStyle = theme.back;
    context.globalAlpha = 0.68;
    context.fillRect(GUTTER, 4, low - GUTTER, floor - 4);
    context.fillRect(high, 4, plotRight(plot) - high, floor - 4);
    context.globalAlpha = 1;
    context.strokeStyle = theme.text;
    context.lineWidth = 1;
    context.strokeRect(low + 0.5, 3.5, Math.max(2, high - low - 1), plot.height - 7);
  }
}
