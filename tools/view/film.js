// Film: all that the page knows: steps, counts, requests, decisions, and the exact state of every unit at any step.

"use strict";

const BEYOND = 0, HOLE = 1, LIVE = 2, PENDING = 3, VACATED = 4, FENCED = 5, FIXED = 6, MOVED = 7;
const WIDE_STEP_COLUMNS = new Set(["sequence", "us", "took_us", "moved_bytes"]);
const BLOCKS_KEPT = 4;

const isLive = (code) => code === LIVE || code >= FIXED;

class Film {
  static async open() {
    const film = new Film();
    film.meta = JSON.parse(document.getElementById("meta").textContent);
    const [steps, requests, phases, decisions] = await Promise.all(
      ["steps", "requests", "phases", "decisions"].map(async (name) => new Columns(await chunk(name))),
    );
    film.readSteps(steps);
    film.readRequests(requests);
    film.readPhases(phases);
    film.readDecisions(decisions);
    await Promise.all(film.meta.stretches.map((stretch, at) => film.readCounts(stretch, at)));
    film.texts = new Map();
    film.ids = [];
    chunkLines("ids").then((lines) => { film.ids = lines; });
    return film;
  }

  get length() { return this.meta.steps; }

  readSteps(columns) {
    this.steps = {};
    for (const name of this.meta.stepColumns) {
      this.steps[name] = WIDE_STEP_COLUMNS.has(name) ? columns.wide() : columns.next();
    }
  }

  // stretch.counts[place][name]: an Int32Array over the stretch's steps.
  async readCounts(stretch, at) {
    const columns = new Columns(await chunk("counts" + at));
    stretch.at = at;
    stretch.counts = stretch.bands.map(() => {
      const named = {};
      for (const name of this.meta.counts) named[name] = columns.next();
      return named;
    });
    stretch.bands = stretch.bands.map(([stage, band, capacity, anchor, direction], place) => {
      const [name, kind, bytes] = stretch.stages[stage].bands[band];
      return { place, stage, band, capacity, anchor, direction, name, kind, bytes };
    });
  }

  readRequests(columns) {
    const r = { number: columns.next(), at: columns.next(), us: columns.wide(), endAt: columns.next() };
    Object.assign(r, { endUs: columns.wide(), prompt: columns.next(), most: columns.next(), out: columns.next() });
    Object.assign(r, { retractions: columns.next(), cached: columns.next(), lane: columns.next() });
    Object.assign(r, { queueLane: columns.next(), heldAt: columns.next() });
    Object.assign(r, { end: columns.next(), frontend: columns.next() });
    r.length = r.number.length;
    this.requests = r;
  }

  // Phases by request: those of request index k are [starts[k], starts[k + 1]) of `at`, `us` and `phase`.
  readPhases(columns) {
    const who = columns.next(), at = columns.next(), us = columns.wide(), phase = columns.next();
    const count = this.requests.length;
    const starts = new Int32Array(count + 1);
    for (const k of who) starts[k + 1]++;
    for (let k = 0; k < count; k++) starts[k + 1] += starts[k];
    const next = starts.slice();
    const sorted = { starts, at: new Int32Array(who.length), us: new Float64Array(who.length) };
    sorted.phase = new Uint8Array(who.length);
    for (let k = 0; k < who.length; k++) {
      const place = next[who[k]]++;
      sorted.at[place] = at[k];
      sorted.us[place] = us[k];
      sorted.phase[place] = phase[k];
    }
    this.phases = sorted;
    this.changes = { who, at, phase };
  }

  readDecisions(columns) {
    const d = { at: columns.next(), us: columns.wide(), sequence: columns.wide(), request: columns.next() };
    Object.assign(d, { by: columns.next(), verdict: columns.next(), reason: columns.next() });
    d.length = d.at.length;
    this.decisions = d;
  }

  // The sentence of a decision; undefined until its chunk is there, and then `ready` is called.
  text(at, ready) {
    const block = Math.floor(at / this.meta.texts);
    const lines = this.texts.get(block);
    if (Array.isArray(lines)) return lines[at % this.meta.texts];
    if (!lines) {
      this.texts.set(block, true);
      chunkLines("texts" + block).then((found) => { this.texts.set(block, found); ready(); });
    }
    return undefined;
  }

  // The index of the request with a number; -1 for none.
  indexOf(number) {
    const at = lastAtMost(this.requests.number, number);
    return at >= 0 && this.requests.number[at] === number ? at : -1;
  }

  stretchAt(step) {
    return this.meta.stretches.find((stretch) => stretch.first <= step && step < stretch.end) || null;
  }

  // The bytes of a stage's arena, of the largest epoch.
  arena(stage) {
    return Math.max(0, ...this.meta.stretches.map((one) => (one.stages[stage] ? one.stages[stage].arena : 0)));
  }

  // The most that a column of steps has.
  most(column) {
    this.mosts ||= {};
    return this.mosts[column] ??= this.steps[column].reduce((most, value) => Math.max(most, value), 0);
  }

  // The most bytes that a band's span had on a stage.
  mostBytes(stage, band) {
    this.spans ||= {};
    return this.spans[`${stage} ${band}`] ??= this.meta.stretches.reduce((most, stretch) => {
      const own = stretch.bands.find((one) => one.stage === stage && one.band === band);
      if (!own) return most;
      const { begin, end } = stretch.counts[own.place];
      for (let at = 0; at < begin.length; at++) most = Math.max(most, (end[at] - begin[at]) * own.bytes);
      return most;
    }, 0);
  }

  // How full all arenas are over some steps: shares of their bytes that are live, and that the cache alone keeps.
  filled(low, high, shown) {
    if (high <= low) { low = shown; high = shown + 1; }
    const stride = Math.max(1, Math.floor((high - low) / 8));
    let live = 0, cached = 0, seen = 0;
    for (let step = low; step < high; step += stride) {
      seen++;
      const stretch = this.stretchAt(step);
      if (!stretch) continue;
      const arena = stretch.stages.reduce((sum, stage) => sum + stage.arena, 0);
      for (const band of stretch.bands) {
        const counts = stretch.counts[band.place];
        live += (counts.live[step - stretch.first] * band.bytes) / arena;
        cached += (counts.cached[step - stretch.first] * band.bytes) / arena;
      }
    }
    return [live / seen, cached / seen];
  }

  // What a request (index) does behind a step; null before it came.
  phaseAt(index, step) {
    const { starts, at, phase } = this.phases;
    const place = lastAtMost(at, step, starts[index], starts[index + 1]);
    return place < starts[index] ? null : this.meta.phases[phase[place]];
  }

  blockOf(step) {
    let low = 0, high = this.meta.blocks.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.meta.blocks[middle][0] <= step) low = middle + 1;
      else high = middle;
    }
    const at = low - 1;
    if (at < 0) return -1;
    const [first, steps] = this.meta.blocks[at];
    return step < first + steps ? at : -1;
  }
}

// One block's columns by band: of step k the changes are [starts[k], starts[k + 1]); of change c, if it is live, `ids`
// and `takers` have it at lives[c]. Step 0 is the frame.
class Block {
  static async open(film, at) {
    const block = new Block();
    [block.first, block.steps] = film.meta.blocks[at];
    block.stretch = film.stretchAt(block.first);
    const columns = new Columns(await chunk("units" + at));
    const kinds = ["next", "next", "small", "next", "next"].map((read) => block.stretch.bands.map(() => columns[read]()));
    block.bands = block.stretch.bands.map((_, place) => {
      const [counts, positions, codes, ids, takers] = kinds.map((kind) => kind[place]);
      const starts = new Int32Array(counts.length + 1);
      for (let k = 0; k < counts.length; k++) starts[k + 1] = starts[k] + counts[k];
      const lives = new Int32Array(codes.length + 1);
      for (let c = 0; c < codes.length; c++) lives[c + 1] = lives[c] + (isLive(codes[c]) ? 1 : 0);
      return { starts, positions, codes, ids, takers, lives };
    });
    return block;
  }
}

class Blocks {
  constructor(film) {
    this.film = film;
    this.kept = new Map();
  }

  async get(at) {
    let block = this.kept.get(at);
    if (block) this.kept.delete(at);
    else block = Block.open(this.film, at);
    this.kept.set(at, block);
    while (this.kept.size > BLOCKS_KEPT) this.kept.delete(this.kept.keys().next().value);
    return block;
  }
}

// The exact state of every unit behind one step. `newest`: the changes of that step, by band.
class Board {
  constructor(film, blocks) {
    this.film = film;
    this.blocks = blocks;
    this.block = null;
    this.step = -1;
    this.bands = [];
    this.newest = [];
  }

  // Go to a step; false where its arena is not known. Only the newest of calls that overlap is carried out.
  async goto(step) {
    this.wanted = step;
    const at = this.film.blockOf(step);
    if (at < 0) return false;
    const block = await this.blocks.get(at);
    if (this.wanted !== step) return false;
    this.advance(block, step);
    return true;
  }

  advance(block, step) {
    const through = step - block.first + 1;
    let from = this.step - block.first + 2;
    if (this.block !== block || this.step > step || from < 1) {
      this.begin(block);
      from = 0;
    }
    this.newest = [];
    for (let place = 0; place < this.bands.length; place++) {
      const band = this.bands[place], read = block.bands[place];
      if (from <= through) {
        this.apply(band, read, read.starts[from], read.starts[through]);
        this.newest.push(this.applyNewest(band, read, read.starts[through], read.starts[through + 1]));
      } else {
        this.newest.push(this.kept ? this.kept[place] : { positions: [], codes: [], from: [] });
      }
    }
    this.kept = this.newest;
    this.step = step;
  }

  begin(block) {
    this.block = block;
    this.stretch = block.stretch;
    this.bands = block.stretch.bands.map((band) => ({
      ...band,
      codes: new Uint8Array(band.capacity),
      ids: new Int32Array(band.capacity),
      takers: new Int32Array(band.capacity),
      places: new Int32Array((band.kind === "state" ? block.stretch.slots : block.stretch.pages) + 1).fill(-1),
    }));
    this.kept = null;
  }

  apply(band, read, low, high) {
    const { codes, ids, takers, places } = band;
    for (let c = low; c < high; c++) {
      const position = read.positions[c], code = read.codes[c];
      if (isLive(codes[position]) && places[ids[position]] === position) places[ids[position]] = -1;
      if (isLive(code)) {
        const live = read.lives[c], id = read.ids[live];
        codes[position] = code === MOVED ? LIVE : code;
        ids[position] = id;
        takers[position] = read.takers[live];
        places[id] = position;
      } else {
        codes[position] = code;
        ids[position] = 0;
        takers[position] = 0;
      }
    }
  }

  // The newest step's changes: `before` is what a position was, `from` where what moved there came from (-1: nowhere).
  applyNewest(band, read, low, high) {
    const changes = { positions: read.positions.subarray(low, high), codes: read.codes.subarray(low, high) };
    changes.from = new Int32Array(high - low).fill(-1);
    changes.before = new Uint8Array(high - low);
    for (let c = low; c < high; c++) {
      if (read.codes[c] === MOVED) changes.from[c - low] = band.places[read.ids[read.lives[c]]];
      changes.before[c - low] = band.codes[read.positions[c]];
    }
    this.apply(band, read, low, high);
    return changes;
  }
}

// Which requests hold memory as running ones, behind a step: 1 by request number.
class Holding {
  constructor(film) {
    this.film = film;
    const numbers = film.requests.number;
    this.active = new Uint8Array((numbers.length ? numbers[numbers.length - 1] : 0) + 2);
    this.next = 0;
    this.holds = film.meta.phases.map((_, at) => (film.meta.holds.includes(at) ? 1 : 0));
  }

  at(step) {
    const { who, at, phase } = this.film.changes;
    if (this.next > 0 && at[this.next - 1] > step) {
      this.active.fill(0);
      this.next = 0;
    }
    const numbers = this.film.requests.number;
    while (this.next < at.length && at[this.next] <= step) {
      this.active[numbers[who[this.next]]] = this.holds[phase[this.next]];
      this.next++;
    }
    return this.active;
  }
}
