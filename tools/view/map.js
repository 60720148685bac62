// Map: every unit of the arena behind one step, at its own address, and what the step changed.

"use strict";

const ARCS_MAX = 400, TOUCHES_MAX = 3000;

class UnitMap {
  constructor(film, board) {
    Object.assign(this, { film, board, colouring: "band", chosen: 0, zooms: film.meta.pieces.map(() => null) });
    this.places = film.meta.pieces.map((pieces) => new Places(pieces));
    this.plot = new Plot("map", 236);
  }

  // The addresses that a stage's part of the map shows.
  seen(stage) { return this.zooms[stage] ? new Places([this.zooms[stage]]) : this.places[stage]; }

  // Rows of the map: how many and how high, so that the smallest unit can be seen where that is possible.
  shape(stage) {
    const stages = this.film.meta.pieces.length, room = (this.plot.height - 6) / stages - 4;
    const { inner } = this.plot;
    const sizes = this.board.stretch.bands.filter((band) => band.stage === stage).map((band) => band.bytes);
    const unit = sizes.length ? Math.min(...sizes) : 1;
    const rowsFor = (pixels) => Math.ceil((this.seen(stage).total * pixels) / unit / inner);
    const rows = Math.max(1, Math.min(rowsFor(12), Math.floor(room / 14)), Math.min(rowsFor(4), Math.floor(room / 7)));
    return { rows, high: Math.min(34, room / rows), top: 4 + stage * (room + 4), inner };
  }

  draw(theme, active) {
    const context = this.plot.clear(this.plot.base);
    if (this.board.step < 0 || !this.board.stretch) return;
    this.film.meta.pieces.forEach((_, stage) => {
      if (stage >= this.board.stretch.stages.length) return;
      const shape = this.shape(stage);
      this.drawUnits(context, theme, active, stage, shape);
      this.drawSides(context, theme, stage, shape);
    });
    this.drawChanges(context, theme);
  }

  // By code, and for live units by whether their taker runs, the packed colours of one band.
  colours(theme, bands, at) {
    const used = theme.band(bands, at);
    const own = { used: packed(used), cached: packed(theme.cached(used)) };
    own.codes = [0, theme.hole, 0, theme.pending, theme.pending, theme.pending, theme.fixed]
      .map((hex) => (hex ? packed(rgb(hex)) : 0));
    own.faded = packed(mix(used, rgb(theme.panel), 0.22));
    return own;
  }

  drawUnits(context, theme, active, stage, { rows, high, top, inner }) {
    const columns = Math.round(inner * this.plot.ratio), cells = rows * columns, seen = this.seen(stage);
    const { start, bands: shapes } = this.board.stretch.stages[stage];
    const bands = this.board.bands.filter((band) => band.stage === stage).map((band) => (
      { band, colours: this.colours(theme, shapes, band.band), before: -1, parted: (band.bytes * cells) / seen.total >= 4 }));
    const sink = packed(rgb(theme.sink)), empty = packed(rgb(theme.faint)), tints = new Map();
    const canvas = pixelCanvas(columns, rows, (out) => {
      for (let at = 0; at < cells; at++) {
        const address = seen.address((at + 0.5) / cells);
        out[at] = address < start ? sink : empty;
        for (const own of bands) {
          const position = positionAt(own.band, address);
          if (position < 0 || own.band.codes[position] === BEYOND) continue;
          const edge = position !== own.before && own.parted;  // a line between units that are wide enough
          own.before = position;
          if (!edge) out[at] = this.unitColour(theme, own, position, active, tints);
          break;
        }
      }
    });
    context.imageSmoothingEnabled = false;
    const gap = high >= 6 ? 1 : 0;
    for (let row = 0; row < rows; row++) {
      context.drawImage(canvas, 0, row, columns, 1, GUTTER, top + row * high, inner, high - gap);
    }
  }

  unitColour(theme, { band, colours }, position, active, tints) {
    const code = band.codes[position], taker = band.takers[position];
    if (!isLive(code)) return colours.codes[code];
    if (this.chosen && taker !== this.chosen) return colours.faded;
    if (this.colouring === "request" && taker) return this.tint(theme, tints, taker, active[taker]);
    if (code === FIXED) return colours.codes[FIXED];
    return active[taker] ? colours.used : colours.cached;
  }

  tint(theme, tints, taker, runs) {
    const key = runs ? taker : -taker;
    let colour = tints.get(key);
    if (colour === undefined) {
      const full = theme.request(taker);
      colour = packed(runs ? full : mix(full, rgb(theme.panel), 0.45));
      tints.set(key, colour);
    }
    return colour;
  }

  drawSides(context, theme, stage, { rows, high, top, inner }) {
    const seen = this.seen(stage), every = Math.max(1, Math.ceil(15 / high));
    for (let row = 0; row < rows; row += every) this.plot.aside(theme, top + (row + 0.5) * high, bytes(seen.address(row / rows)));
    for (const [share, left] of this.zooms[stage] ? [] : seen.breaks()) {
      const place = Math.min(rows - 1e-6, share * rows), line = Math.floor(place);
      const x = GUTTER + (place - line) * inner, y = top + line * high, text = `${bytes(left)} never touched`;
      context.fillStyle = theme.text;
      context.fillRect(x - 1, y, 2, high - 1);
      const half = context.measureText(text).width / 2 + 6;
      if (high >= 12) this.plot.plaque(theme, text, Math.min(Math.max(x, GUTTER + half), this.plot.right - half), y + high / 2);
    }
  }

  // The middle of a unit on the map; null where it is not seen.
  spot(band, position) {
    const { rows, high, top, inner } = this.shape(band.stage), seen = this.seen(band.stage);
    const address = middleOf(band, position);
    if (!seen.pieces.some(([low, end]) => low <= address && address < end)) return null;
    const place = seen.share(address) * rows, row = Math.min(rows - 1, Math.floor(place));
    return [GUTTER + (place - row) * inner, top + row * high + high / 2, high];
  }

  // What the step changed: a foot under what was taken, freed or moved, and an arc for each move.
  drawChanges(context, theme) {
    let drawn = 0, arcs = 0;
    this.board.bands.forEach((band, place) => {
      const { positions, codes, from, before } = this.board.newest[place];
      const { inner } = this.shape(band.stage);
      const wide = Math.max(2, (band.bytes / (this.seen(band.stage).total / this.shape(band.stage).rows)) * inner - 1);
      for (let c = 0; c < positions.length && drawn < TOUCHES_MAX; c++) {
        const spot = this.spot(band, positions[c]);
        const grown = codes[c] === HOLE && before[c] === BEYOND;
        if (!spot || grown || codes[c] === BEYOND || (codes[c] === HOLE && before[c] !== LIVE)) continue;
        const [x, y, high] = spot;
        context.fillStyle = codes[c] === MOVED ? theme.moved : isLive(codes[c]) ? theme.cursor : theme.pending;
        context.fillRect(x - wide / 2, y + high / 2 - 3, wide, 2);
        drawn++;
        if (codes[c] === MOVED && from[c] >= 0 && arcs < ARCS_MAX) {
          const source = this.spot(band, from[c]);
          if (source) { this.arc(context, theme, source, spot); arcs++; }
        }
      }
    });
    context.globalAlpha = 1;
  }

  arc(context, theme, [x0, y0], [x1, y1]) {
    const lift = Math.min(46, 10 + Math.hypot(x1 - x0, y1 - y0) * 0.18);
    context.strokeStyle = theme.moved;
    context.globalAlpha = 0.75;
    context.lineWidth = 1.2;
    context.beginPath();
    context.moveTo(x0, y0);
    context.quadraticCurveTo((x0 + x1) / 2, Math.max(2, Math.min(y0, y1) - lift), x1, y1);
    context.stroke();
    context.globalAlpha = 1;
    context.fillStyle = theme.moved;
    context.beginPath();
    context.arc(x1, y1, 2.4, 0, 7);
    context.fill();
  }

  // What lies at a point: stage, address, and the unit if there is one.
  find(x, y) {
    if (this.board.step < 0 || !this.board.stretch) return null;
    for (let stage = 0; stage < this.board.stretch.stages.length; stage++) {
      const { rows, high, top, inner } = this.shape(stage);
      const row = Math.floor((y - top) / high), share = (x - GUTTER) / inner;
      if (row < 0 || row >= rows || share < 0 || share >= 1) continue;
      const address = Math.floor(this.seen(stage).address((row + share) / rows));
      return { stage, address, ...unitAt(this.board, stage, address) };
    }
    return null;
  }

  // Zoom into a stage around an address.
  zoom(found, factor) {
    const whole = this.board.stretch.stages[found.stage].arena;
    const [low, high] = this.zooms[found.stage] || [this.places[found.stage].pieces[0][0], whole];
    const span = Math.min(whole, Math.max(4096, (high - low) * factor));
    if (span >= whole * 0.98) { this.zooms[found.stage] = null; return; }
    const share = this.seen(found.stage).share(found.address);
    const from = Math.max(0, Math.min(whole - span, found.address - share * span));
    this.zooms[found.stage] = [from, from + span];
  }
}
