// Film: all that the page knows but for the units: steps, counts, requests, decisions.

"use strict";

const WIDE_STEP_COLUMNS = new Set(["sequence", "us", "took_us", "moved_bytes"]);

class Film {
  static async open() {
    const film = new Film();
    film.meta = JSON.parse(element("meta").textContent);
    film.firsts = film.meta.blocks.map(([first]) => first);
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

  // The shapes of a stage's bands, of the first epoch that has the stage.
  bandsOf(stage) {
    const stretch = this.meta.stretches.find((one) => one.stages.length > stage);
    return stretch ? stretch.stages[stage].bands : [];
  }

  // The bytes of a stage's arena, of the largest epoch.
  arena(stage) {
    return Math.max(0, ...this.meta.stretches.map((one) => (one.stages[stage] ? one.stages[stage].arena : 0)));
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

  // Units of a band in each of KINDS behind a step, written to `out` from its begin on; they add up with those there.
  addKinds(stretch, place, step, out) {
    const c = stretch.counts[place], at = step - stretch.first;
    out[0] += c.live[at] - c.cached[at] - c.fixed[at];
    out[1] += c.cached[at];
    out[2] += c.fixed[at];
    out[3] += c.pending[at] + c.vacated[at] + c.fenced[at];
    out[4] += c.hole[at];
    return out;
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

  // The block that has a step; -1 for none.
  blockOf(step) {
    const at = lastAtMost(this.firsts, step), [first, steps] = this.meta.blocks[at] || [0, 0];
    return step < first + steps ? at : -1;
  }
}
