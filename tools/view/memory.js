// Memory: the arena over time, address by address or band by band.

"use strict";

const MEAN_STEPS = 12; // looked at for one pixel column of a band

class Memory {
  constructor(film, axis) {
    Object.assign(this, { film, axis, mode: "addresses", pictures: [], plot: new Plot("memory", 200) });
    this.places = film.meta.pieces.map((pieces, stage) => new Places(pieces, film.arena(stage)));
    this.moves = new Moves(film, axis, this.plot);
    this.exact = new Exact(film, axis, this.places);
    for (const [at, us, , kind] of film.meta.marks) {
      if (kind !== "ended" && kind !== "closed" && kind !== "cut") continue;
      const stretch = film.meta.stretches.find((one) => one.end === at && one.first < at);
      if (stretch && stretch.endUs === undefined) stretch.endUs = us;
    }
  }

  get stageHeight() { return (this.plot.height - 4) / Math.max(1, this.film.meta.pieces.length); }

  async load() {
    const { film } = this, planes = await Promise.all(film.meta.pieces.map((_, stage) => chunk("heat" + stage)));
    this.pictures = planes.map((plane, stage) => new Picture(film, stage, plane, film.meta.heat.steps));
  }

  area(stage) { return [4 + stage * this.stageHeight, this.stageHeight - 8]; }

  draw(theme) {
    const { plot, axis, film } = this, context = plot.clear(plot.base), pictures = this.exact.pictures || this.pictures;
    film.meta.pieces.forEach((_, stage) => {
      const [top, height] = this.area(stage);
      context.fillStyle = theme.faint;
      context.fillRect(GUTTER, top, plot.inner, height);
      if (this.mode === "addresses") {
        if (pictures[stage]) pictures[stage].draw(plot, axis, top, height, theme);
        this.moves.draw(theme, stage, this.places[stage], top, height);
        this.drawScale(context, stage, theme);
      } else {
        this.drawBands(context, stage, theme);
      }
      if (film.meta.pieces.length > 1) plot.plaque(theme, `stage ${stage}`, GUTTER + 12, top + 14, { align: "left" });
    });
    drawMarks(film, axis, plot, theme);
  }

  // What takes a while is made beside the drawing; `done` when there is more to draw.
  look(blocks, holding, done) {
    if (this.mode !== "addresses") return;
    this.moves.look(blocks, done);
    this.exact.look(blocks, holding, done);
  }

  // Ticks of bytes at the left, and where addresses are left out.
  drawScale(context, stage, theme) {
    const { plot } = this, [top, height] = this.area(stage), places = this.places[stage];
    const size = 2 ** Math.ceil(Math.log2(places.total / Math.max(2, height / 30)));
    let before = -99;
    for (const [low, high] of places.pieces) {
      for (let at = Math.ceil(low / size) * size; at <= high; at += size) {
        const y = top + places.share(at) * height;
        if (y - before < 16 || y > top + height + 1) continue;
        before = y;
        plot.aside(theme, Math.max(top + 5, Math.min(top + height - 5, y)), bytes(at));
        context.globalAlpha = 0.5;
        context.fillRect(GUTTER - 4, y - 0.5, 4, 1);
        context.globalAlpha = 1;
      }
    }
    for (const [share, left] of places.breaks()) {
      const y = top + share * height;
      context.strokeStyle = theme.dim;
      context.setLineDash([3, 3]);
      context.beginPath();
      context.moveTo(GUTTER, y);
      context.lineTo(plot.right, y);
      context.stroke();
      context.setLineDash([]);
      plot.plaque(theme, `${bytes(left)} never touched`, GUTTER + plot.inner / 2, y + 0.5, { alpha: 1 });
    }
  }

  // Every band on its own line: its units by KINDS, as bytes; each line as high as the band's largest span.
  drawBands(context, stage, theme) {
    const { plot, axis, film } = this, [top, height] = this.area(stage), { count, edges } = axis.columns(plot);
    const bands = film.bandsOf(stage), stored = bands.map((_, band) => band).filter((band) => bands[band][2]);
    const lane = height / Math.max(1, stored.length);
    stored.forEach((band, place) => {
      const [name, , unitBytes] = bands[band], used = theme.band(bands, band), most = Math.max(1, film.mostBytes(stage, band));
      const colours = theme.kinds(used).map(css), floor = top + (place + 1) * lane - 1, room = lane - 4;
      for (let x = 0; x < count; x++) {
        const units = this.meanKinds(stage, band, edges[x], edges[x + 1], axis.shown(edges, x));
        let y = floor;
        for (let kind = 0; kind < colours.length; kind++) {
          const high = (units[kind] * unitBytes / most) * room;
          context.fillStyle = colours[kind];
          context.fillRect(GUTTER + x, y - high, 1.02, high);
          y -= high;
        }
      }
      plot.aside(theme, floor - room + 6, bytes(most), `${parseFloat(((most / film.arena(stage)) * 100).toFixed(1))}%`);
      context.fillStyle = css(used);
      context.fillText(name, GUTTER - 8, floor - 8);
    });
  }

  // Units of a band by KINDS, means over steps [low, high), or what step `shown` has where there is none.
  meanKinds(stage, band, low, high, shown) {
    const sums = (this.sums ||= new Float64Array(KINDS.length)).fill(0), { film } = this;
    if (high <= low) { low = shown; high = shown + 1; }
    const stride = Math.max(1, Math.floor((high - low) / MEAN_STEPS));
    let seen = 0;
    for (let step = low; step < high; step += stride, seen++) {
      const stretch = film.stretchAt(step), own = stretch && stretch.bands.find((one) => one.stage === stage && one.band === band);
      if (own) film.addKinds(stretch, own.place, step, sums);
    }
    for (let kind = 0; kind < sums.length; kind++) sums[kind] = Math.max(0, sums[kind] / seen);
    return sums;
  }

  hover(x, y) {
    const stage = Math.floor((y - 4) / this.stageHeight);
    if (x < GUTTER || x > this.plot.right || !this.places[stage]) return null;
    const [top, height] = this.area(stage), share = (y - top) / height;
    if (share < 0 || share >= 1) return null;
    const step = this.axis.stepAt(this.axis.unit(x, this.plot));
    return { step, stage, address: this.mode === "addresses" ? this.places[stage].address(share) : -1 };
  }
}
