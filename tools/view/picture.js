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
    const stretch = this.film.meta.stretches.find((one) => one.stages.length > this.stage);
    const bands = stretch ? stretch.stages[this.stage].bands : [];
    const others = [rgb(theme.hole), rgb(theme.pending), rgb(theme.fixed), rgb(theme.faint)];
    const tables = bands.map((_, at) => {
      const used = theme.band(bands, at);
      return [used, theme.cached(used), ...others];
    });
    tables[15] = [rgb(theme.quiet), rgb(theme.quiet), ...others];
    return tables;
  }

  // Draw the part that the axis shows: one colour column for each pixel column.
  draw(context, axis, width, ratio, top, height, theme) {
    if (this.theme !== theme) this.paint(theme);
    const columns = Math.round((width - GUTTER - MARGIN_RIGHT) * ratio);
    const image = new ImageData(columns, this.rows);
    const out = new Uint32Array(image.data.buffer);
    const count = this.steps.length, film = this.film;
    let at = 0;
    for (let x = 0; x < columns; x++) {
      const unit = axis.low + ((x + 0.5) / columns) * (axis.high - axis.low);
      const step = axis.stepAt(unit);
      while (at + 1 < count && this.steps[at + 1] <= step) at++;
      while (at > 0 && this.steps[at] > step) at--;
      if (!film.stretchAt(step) || (axis.mode === "time" && over(film, step, unit))) continue;
      for (let row = 0; row < this.rows; row++) out[row * columns + x] = this.pixels[row * count + at];
    }
    Picture.canvas ||= document.createElement("canvas");
    const canvas = Picture.canvas;
    canvas.width = columns;
    canvas.height = this.rows;
    canvas.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(canvas, GUTTER, top, width - GUTTER - MARGIN_RIGHT, height);
  }
}

// Whether at a time no arena is there any more: its epoch ended, and the next step is not yet.
function over(film, step, us) {
  const stretch = film.stretchAt(step);
  return step === stretch.end - 1 && stretch.endUs !== undefined && us > stretch.endUs;
}

// Rows of addresses without those that were never touched.
class Places {
  constructor(pieces, arena = 0) {
    this.pieces = pieces;
    this.arena = arena;
    this.total = pieces.reduce((sum, [low, high]) => sum + high - low, 0);
  }

  // Address at a share of the height, from the top.
  address(share) {
    let offset = share * this.total;
    for (const [low, high] of this.pieces) {
      if (offset < high - low) return low + offset;
      offset -= high - low;
    }
    return this.pieces[this.pieces.length - 1][1] - 1;
  }

  share(address) {
    let before = 0;
    for (const [low, high] of this.pieces) {
      if (address < high) return (before + Math.max(0, address - low)) / this.total;
      before += high - low;
    }
    return 1;
  }

  // Where something was left out: share of the height, bytes.
  breaks() {
    const out = [];
    for (let at = 1; at < this.pieces.length; at++) {
      out.push([this.share(this.pieces[at][0]), this.pieces[at][0] - this.pieces[at - 1][1]]);
    }
    const [first] = this.pieces;
    if (first && first[0] > 0) out.unshift([0, first[0]]);
    const end = this.pieces[this.pieces.length - 1][1];
    if (end < this.arena) out.push([1, this.arena - end]);
    return out;
  }
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
      const positions = new Int32Array(total).fill(-1);
      for (let at = 0; at < total; at++) {
        const address = Math.floor(this.places.address((at + 0.5) / total));
        const position = (Math.floor(address / band.bytes) - band.anchor) * band.direction;
        if (position >= 0 && position < band.capacity) positions[at] = position;
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
