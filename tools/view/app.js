// App: what is chosen, and who is drawn again when it changes.

"use strict";

const FIXED_HEIGHT = 522; // of all that is not memory, requests and map

class App {
  constructor(film) {
    this.film = film;
    this.axis = new Axis(film);
    this.blocks = new Blocks(film);
    this.board = new Board(film, this.blocks);
    this.holding = new Holding(film);
    this.exactHolding = new Holding(film);
    this.step = Math.max(0, film.length - 1);
    this.selected = -1;
    this.wanted = new Set();
    this.frames = [];
    this.overview = new Overview(film, this.axis);
    this.memory = new Memory(film, this.axis);
    this.work = new Work(film, this.axis);
    this.lanes = new Lanes(film, this.axis);
    this.map = new UnitMap(film, this.board);
    this.side = new Side(this);
    this.player = new Player(this);
    this.link = new Link(this);
    this.useTheme(keptTheme());
    this.plots = [this.memory.plot, this.work.plot, this.lanes.plot];
  }

  async start() {
    const { meta } = this.film;
    element("title").textContent = meta.title;
    element("facts").innerHTML = this.facts();
    this.side.drawMarks();
    this.drawLegend();
    await this.memory.load();
    new Hands(this);
    if (meta.chosen) this.select(this.film.indexOf(meta.chosen));
    this.link.read();
    window.addEventListener("hashchange", () => this.link.read());
    window.addEventListener("resize", () => this.later("view", "step"));
    await this.goto(this.step);
    this.later("view", "step", "side");
  }

  // What the page holds, in one line.
  facts() {
    const { film } = this, { meta } = film, count = film.requests.length;
    let requests = counted(count, "request");
    if (meta.arrivals !== count) requests += ` (choices of ${counted(meta.arrivals, "arrival")})`;
    const told = [counted(film.length, "step"), requests, counted(film.decisions.length, "decision"),
      counted(meta.lives, "life", "lives"), counted(meta.stretches.length, "epoch"), `<b>${duration(meta.us)}</b>`];
    return told.map((text) => `<span>${text}</span>`).join("");
  }

  // --- drawing -------------------------------------------------------------------------------------------------

  // Draw these parts again with the next frame: view (charts), step (map, cursors), side.
  later(...parts) {
    for (const part of parts) this.wanted.add(part);
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => {
      this.asked = false;
      const before = performance.now();
      this.draw();
      this.frames.push(performance.now() - before);
      if (this.frames.length > 600) this.frames.shift();
    });
  }

  draw() {
    const wanted = this.wanted;
    this.wanted = new Set();
    this.shareHeight();
    for (const plot of [this.overview.plot, ...this.plots, this.map.plot]) {
      if (plot.resize()) { wanted.add("view"); wanted.add("step"); }
    }
    if (wanted.has("view")) {
      this.overview.draw(this.theme);
      this.memory.draw(this.theme);
      this.work.draw(this.theme);
      this.lanes.draw(this.theme);
      this.memory.look(this.blocks, this.exactHolding, () => this.later("view"));
    }
    if (wanted.has("view") || wanted.has("step")) this.drawCursors();
    if (wanted.has("step")) {
      const chosen = this.selected >= 0 ? this.film.requests.number[this.selected] : 0;
      this.map.chosen = chosen;
      this.map.draw(this.theme, this.holding.at(this.step));
      element("slider").value = this.step;
      element("step-input").value = this.step + 1;
    }
    if (wanted.has("side")) this.side.draw();
  }

  // The window's height goes to memory, requests and map, so that all are seen at once where that is possible.
  shareHeight() {
    const free = window.innerHeight - FIXED_HEIGHT, stages = this.film.meta.pieces.length;
    this.memory.plot.height = Math.max(150, Math.min(420, free * 0.36), stages * 84);
    this.lanes.plot.height = Math.max(96, Math.min(360, free * 0.24));
    this.map.plot.height = Math.max(150, Math.min(460, free * 0.4), stages * 72);
  }

  drawCursors() {
    for (const plot of this.plots) plot.cursor(this.axis, this.theme, this.film.length ? this.step : -1);
    const { plot, whole } = this.overview, context = plot.clear(plot.over);
    if (!this.film.length) return;
    context.fillStyle = this.theme.cursor;
    context.fillRect(whole.x(whole.ofStep(this.step), plot) - 0.5, 2, 1, plot.height - 4);
  }

  drawLegend() {
    const { film, theme } = this, { stretches } = film.meta;
    const stages = stretches.length ? stretches[0].stages : [];
    const bands = stages.reduce((most, stage) => (stage.bands.length > most.length ? stage.bands : most), []);
    const bandItems = bands.map((band, at) => {
      const used = theme.band(bands, at);
      return `<span title="dark: taken by a request that runs; pale: left in the prefix cache by one that does not run any more">
        ${dot(css(used))}${dot(css(theme.cached(used)))}${escaped(band[0])}</span>`;
    });
    const states = [["hole", theme.hole, "free, inside a band's span"],
      ["pending", theme.pending, "freed or moved from; free once no forward or copy touches it"],
      ["fixed", theme.fixed, "a peer knows its address"], ["moved", theme.moved, "copied to another place in this step"]];
    const fixed = stretches.some((one) => one.counts.some((counts) => counts.fixed.some((units) => units)));
    element("legend").innerHTML = `<span class="dim">in use / cached:</span>${bandItems.join("")}` + states
      .filter(([name]) => name !== "fixed" || fixed)
      .map(([name, colour, title]) => `<span title="${title}">${dot(colour)}${name}</span>`).join("");
    element("phase-legend").innerHTML = film.meta.phases.filter((name) => name !== "over" && name !== "away")
      .map((name) => `<span>${dot(theme.phases[name])}${name}</span>`).join("");
  }

  // --- what is chosen ------------------------------------------------------------------------------------------

  async goto(step) {
    step = Math.max(0, Math.min(this.film.length - 1, Math.round(step)));
    if (Number.isNaN(step) || !this.film.length) return;
    this.step = step;
    const found = await this.board.goto(step);
    if (this.step !== step) return;
    if (!found && !this.film.stretchAt(step)) this.board.step = -1;
    this.later("step", "side");
    this.writeLink();
  }

  // Keep the step in sight.
  follow() {
    const at = this.axis.ofStep(this.step), { span } = this.axis;
    if (at < this.axis.low || at > this.axis.high) {
      this.axis.show(at - span * 0.2, at + span * 0.8);
      this.later("view");
    }
  }

  select(index) {
    this.selected = index;
    this.side.mine = undefined;
    this.lanes.revealing = index >= 0;
    this.lanes.selected = index;
    this.later("view", "step", "side");
    this.writeLink();
  }

  showLife(index) {
    const [begin, end] = this.lanes.reach(index), margin = (end - begin) * 0.15 + 1;
    this.axis.show(begin - margin, end + margin);
    this.later("view");
  }

  // A number, or a part of an id; whether there is such a request.
  search(text) {
    text = text.trim().replace(/,/g, "");
    let index = /^\d+$/.test(text) ? this.film.indexOf(Number(text)) : -1;
    if (index < 0 && text) index = this.film.ids.findIndex((id) => id.includes(text));
    if (index < 0) return false;
    this.select(index);
    this.visit(this.film.requests.at[index]);
    return true;
  }

  // The next decision or move or mark from here, in a direction.
  jump(what, direction) {
    const { film } = this, d = film.decisions;
    if (what === "move") {
      for (let step = this.step + direction; step >= 0 && step < film.length; step += direction) {
        if (film.steps.moved[step]) return this.visit(step);
      }
    } else if (what === "decision") {
      const chosen = this.selected >= 0 && this.side.mine !== false ? film.requests.number[this.selected] : 0;
      let k = direction > 0 ? lastAtMost(d.at, this.step) + 1 : lastAtMost(d.at, this.step - 1);
      for (; k >= 0 && k < d.length; k += direction) if (this.side.wanted(k, chosen)) return this.visit(d.at[k]);
    } else {
      const places = film.meta.marks.map((mark) => Math.min(mark[0], film.length - 1));
      const next = direction > 0 ? places.find((at) => at > this.step) : places.filter((at) => at < this.step).pop();
      if (next !== undefined) return this.visit(next);
    }
    return undefined;
  }

  // Go to a step, and see it.
  visit(step) { return this.goto(step).then(() => this.follow()); }

  // --- theme, time, switches --------------------------------------------------------------------------------------

  useTheme(name) {
    this.theme = new Theme(name);
    document.documentElement.dataset.theme = name;
  }

  setTheme(name, keep = true) {
    this.useTheme(name);
    if (keep) keepTheme(name);
    this.drawLegend();
    this.later("view", "step", "side");
  }

  // A time since the first record; with a wall clock the time of the day too.
  clock(us) {
    if (!this.film.meta.clock) return duration(us);
    return `${new Date(Date.parse(this.film.meta.clock) + us / 1000).toISOString().slice(11, 23)}`;
  }

  writeLink() { this.link.write(); }

  setAxis(mode) {
    this.axis.setMode(mode);
    this.switched("axis", mode, "view");
  }

  setMemory(mode) {
    this.memory.mode = mode;
    this.switched("memory-mode", mode, "view");
  }

  setColouring(mode) {
    this.map.colouring = mode;
    this.switched("map-mode", mode, "step");
  }

  // The switch shows what is on, and what it changes is drawn again.
  switched(id, mode, part) {
    element(id).querySelectorAll("button").forEach((button) => button.classList.toggle("on", button.value === mode));
    this.later(part);
    this.writeLink();
  }

  say(text) {
    const box = element("say");
    box.textContent = text;
    box.classList.add("on");
    clearTimeout(this.sayTimer);
    this.sayTimer = setTimeout(() => box.classList.remove("on"), 2600);
  }
}

async function openPage() {
  if (typeof DecompressionStream === "undefined") {
    document.body.innerHTML = "<p style='padding:2em'>This browser cannot inflate the page's data (DecompressionStream). Any of 2023 or later can.</p>";
    return;
  }
  const film = await Film.open();
  const app = new App(film);
  window.app = app;
  await app.start();
  await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
  app.openMs = performance.now();
  document.body.classList.add("ready");
}
