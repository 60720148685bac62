// Board: the exact state of every unit behind any step, out of the blocks of changes; and who holds memory then.

"use strict";

const BEYOND = 0, HOLE = 1, LIVE = 2, PENDING = 3, VACATED = 4, FENCED = 5, FIXED = 6, MOVED = 7;
const BLOCKS_KEPT = 4;

const isLive = (code) => code === LIVE || code >= FIXED;

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
