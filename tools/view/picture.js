// Picture: the arena over time as colours, by address: from what the page has, or made again from exact changes.

"use strict";

// The picture of one stage as colours: rows of addresses, a column for each sampled step.
class Picture {
  constructor(film, stage, planes, steps) {
    Object.assign(this, { film, stage, planes, steps, rows: film.meta.heat.rows, points: film.meta.heat.points });
  }

  // Colours by row and column, as packed pixels.
  paint(theme) {
    const { rows, planes, points } = this;
    const count = this.steps.length, plane = rows * count;
    const pixels = new Uint32Array(plane);
    const tables = this.tables(theme);
    for (let at = 0; at < plane; at++) {
      const a = planes[at], b = planes[plane + at], c = planes[2 * plane + at];
      if (a === 0 && b === 0 && (c & 15) === 0) continue;
      const table = tables[c >> 4] || tables[15];
      let r = 0, g = 0, blue = 0, rest = points;
      for (let kind = 0; kind < 5; kind++) {
        const share = kind === 0 ? a >> 4 : kind === 1 ? a & 15 : kind === 2 ? b >> 4 : kind === 3 ? b & 15 : c & 15;
        if (share === 0) continue;
        const colour = table[kind];
        r += colour[0] * share; g += colour[1] * share; blue += colour[2] * share;
        rest -= share;
      }
      const back = table[5];
      r += back[0] * rest; g += back[1] * rest; blue += back[2] * rest;
      pixels[at] = (255 << 24 | (blue / points) << 16 | (g / points) << 8 | (r / points)) >>> 0;
    }
    this.pixels = pixels;
    this.theme = theme;
  }

  // By band the colours of used, cached, hole, pending, fixed, and of nothing.
  tables(theme) {
    const bands = this.film.bandsOf(this.stage);
    const others = [rgb(theme.hole), rgb(theme.pending), rgb(theme.fixed), rgb(theme.faint)];
    const tables = bands.map((_, at) => {
      const used = theme.band(bands, at);
      return [used, theme.cached(used), ...others];
    });
    tables[15] = [rgb(theme.quiet), rgb(theme.quiet), ...others];
    return tables;
  }

  // Draw the part that the axis shows: one colour column for each pixel column.
  draw(plot, axis, top, height, theme) {
    if (this.theme !== theme) this.paint(theme);
    const columns = Math.round(plot.inner * plot.ratio), { film, rows, steps, pixels } = this, count = steps.length;
    const canvas = pixelCanvas(columns, rows, (out) => {
      let at = 0;
      for (let x = 0; x < columns; x++) {
        const unit = axis.low + ((x + 0.5) / columns) * axis.span, step = axis.stepAt(unit);
        while (at + 1 < count && steps[at + 1] <= step) at++;
        while (at > 0 && steps[at] > step) at--;
        if (!film.stretchAt(step) || (axis.mode === "time" && isOver(film, step, unit))) continue;
        for (let row = 0; row < rows; row++) out[row * columns + x] = pixels[row * count + at];
      }
    });
    plot.base.imageSmoothingEnabled = false;
    plot.base.drawImage(canvas, GUTTER, top, plot.inner, height);
  }
}

// Whether at a time no arena is there any more: its epoch ended, and the next step is not yet.
function isOver(film, step, us) {
  const stretch = film.stretchAt(step);
  return step === stretch.end - 1 && stretch.endUs !== undefined && us > stretch.endUs;
}

// The same picture as heat.py makes, of other steps.
class PictureMaker {
  constructor(film, places, stage, count) {
    const { rows, points } = film.meta.heat;
    Object.assign(this, { places, stage, rows, points, count });
    this.planes = new Uint8Array(3 * rows * count);
    this.planes.fill(240, 2 * rows * count);
  }

  at(stretch) {
    if (this.stretch === stretch) return this.found;
    this.stretch = stretch;
    const total = this.rows * this.points;
    this.found = stretch.bands.filter((band) => band.stage === this.stage).map((band) => {
      const positions = new Int32Array(total);
      for (let at = 0; at < total; at++) {
        const address = Math.floor(this.places.address((at + 0.5) / total));
        positions[at] = positionAt(band, address);
      }
      return { band, positions };
    });
    return this.found;
  }

  look(board, active, column) {
    const { rows, points, count, planes } = this;
    for (const { band, positions } of this.at(board.stretch)) {
      const { codes, takers } = board.bands[band.place];
      for (let row = 0; row < rows; row++) {
        let used = 0, cached = 0, hole = 0, pending = 0, fixed = 0;
        for (let at = row * points; at < (row + 1) * points; at++) {
          if (positions[at] < 0) continue;
          const code = codes[positions[at]];
          if (code === BEYOND) continue;
          if (code === LIVE) active[takers[positions[at]]] ? used++ : cached++;
          else if (code === HOLE) hole++;
          else if (code === FIXED) fixed++;
          else pending++;
        }
        const all = used + cached + hole + pending + fixed;
        if (!all) continue;
        const cell = row * count + column;
        planes[cell] += used << 4 | cached;
        planes[rows * count + cell] += hole << 4 | pending;
        const third = 2 * rows * count + cell;
        planes[third] = band.band << 4 | ((planes[third] & 15) + fixed);
      }
    }
  }
}
