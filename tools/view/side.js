// Side: what is told in words: the step, the request that is chosen, the decisions around the step, the marks.

"use strict";

const DECISIONS_SHOWN = 80;
const OF_ARRIVAL = "one for each arrival, however many choices it has; ";
const COUNTED = { accepted: OF_ARRIVAL, refused: OF_ARRIVAL };

class Side {
  constructor(app) {
    this.app = app;
    this.film = app.film;
    this.hidden = new Set();
    this.counts = new Int32Array(this.film.meta.verdicts.length);
    for (const verdict of this.film.decisions.verdict) this.counts[verdict]++;
    this.makeFilter();
  }

  draw() {
    this.drawStep();
    this.drawRequest();
    this.drawDecisions();
  }

  // --- the step ------------------------------------------------------------------------------------------------

  drawStep() {
    const { film, app } = this, step = app.step, box = element("step-card");
    if (!film.length) { box.innerHTML = "<h2>No step</h2><p class=dim>The records that are shown have none.</p>"; return; }
    const s = film.steps, stretch = film.stretchAt(step);
    const ops = [["taken", "taken"], ["freed", "freed"], ["moved", "moved"], ["copied", "states copied"],
      ["rebound", "given to other pages"]].filter(([name]) => s[name][step])
      .map(([name, text]) => `<span class="chip ${name}">${number(s[name][step])} ${text}</span>`);
    if (s.flushes[step]) ops.push('<span class="chip">flush</span>');
    if (s.uses[step]) ops.push(`<span class="chip">${s.uses[step]} uses</span>`);
    box.innerHTML = `
      <h2>Step <b>${number(step + 1)}</b><small> of ${number(film.length)}</small>
        <button class="plain" id="copy-link" title="copy a link to this step">link</button></h2>
      <div class="rows">
        ${row("epoch", stretch ? `${stretch.epoch}${film.meta.lives > 1 ? ` of life ${stretch.life}` : ""}, its step ${number(s.seq[step])}` : "none", "wide")}
        ${row("record", "#" + number(s.sequence[step]))}
        ${row("time", app.clock(s.us[step]))}
        ${row("took", s.took_us[step] ? duration(s.took_us[step]) : "no report")}
        ${row("decode rows", number(s.decode_rows[step]))}
        ${row("prompt tokens", number(s.prefill_tokens[step]))}
      </div>
      <div class="chips">${ops.join("") || '<span class="dim">no unit changed hands</span>'}</div>
      ${stretch ? this.bandTables(stretch, step) : ""}`;
    element("copy-link").onclick = () => app.link.copy();
  }

  bandTables(stretch, step) {
    const { theme } = this.app;
    return stretch.stages.map((stage, k) => {
      const stored = stretch.bands.filter((band) => band.stage === k), at = step - stretch.first;
      const live = stored.reduce((sum, band) => sum + stretch.counts[band.place].live[at] * band.bytes, 0);
      const name = stretch.stages.length > 1 ? `stage ${k}` : "arena";
      return `<h3>${name}<span class="right">${bytes(live)} of ${bytes(stage.arena)} live,
        ${((live / stage.arena) * 100).toFixed(1)}%</span></h3>`
        + stored.map((band) => this.bandTable(stretch, band, theme.band(stage.bands, band.band), step)).join("");
    }).join("");
  }

  // A band at a step: a bar over the whole arena, and its units in words.
  bandTable(stretch, band, used, step) {
    const { film } = this, { theme } = this.app, c = stretch.counts[band.place], at = step - stretch.first;
    const colours = theme.kinds(used).map(css), share = band.bytes / stretch.stages[band.stage].arena;
    const bar = film.addKinds(stretch, band.place, step, [0, 0, 0, 0, 0])
      .map((units, kind) => `<i style="width:${units * share * 100}%;background:${colours[kind]}"></i>`).join("");
    const others = ["pending", "vacated", "fenced", "hole", "fixed"].filter((name) => c[name][at])
      .map((name) => `${number(c[name][at])} ${name === "hole" && c[name][at] > 1 ? "holes" : name}`);
    const told = [`${number(c.live[at] - c.cached[at])} in use`, `${number(c.cached[at])} cached`, ...others];
    return `<div class="band"><div>${dot(css(used))}<b>${escaped(band.name)}</b>
      <span class="dim">${bytes(band.bytes)} each</span>
      <span class="right">${bytes(c.live[at] * band.bytes)}</span></div>
      <div class="bar">${bar}</div><div class="dim">${told.join(", ")}</div></div>`;
  }

  // --- a request -----------------------------------------------------------------------------------------------

  drawRequest() {
    const { film, app } = this, box = element("request-card"), index = app.selected;
    box.hidden = index < 0;
    if (index < 0) return;
    const r = film.requests, open = r.endAt[index] < 0;
    const spent = this.spent(index);
    const phases = film.meta.phases.map((name, at) => [name, spent[at]]).filter(([name, us]) => us && name !== "over");
    const total = phases.reduce((sum, [, us]) => sum + us, 0) || 1;
    const bar = phases.map(([name, us]) =>
      `<i style="width:${(us / total) * 100}%;background:${app.theme.phases[name]}"></i>`).join("");
    const now = film.phaseAt(index, app.step);
    box.innerHTML = `
      <h2>Request <b>${number(r.number[index])}</b>
        <button class="plain" id="request-zoom">show its life</button><button class="plain" id="request-close">×</button></h2>
      <p class="id">${escaped(film.ids[index] || "")} <span class="dim">from ${escaped(film.meta.frontends[r.frontend[index]])}</span></p>
      <div class="bar tall">${bar}</div>
      <p class="phases">${phases.map(([name, us]) => `${dot(app.theme.phases[name])}${name} ${duration(us)}`).join(" &nbsp;")}</p>
      <div class="rows">
        ${row("now", now === null ? "not here yet" : now === "over" ? "ended" : now)}
        ${row("end", open ? "none in these records" : escaped(film.meta.ends[r.end[index]]))}
        ${row("prompt tokens", number(r.prompt[index]))}
        ${row("from the cache", number(r.cached[index]))}
        ${row("output", (r.out[index] < 0 ? "?" : number(r.out[index])) + " of " + number(r.most[index]))}
        ${row("retracted", number(r.retractions[index]) + "×")}
        ${row("came", app.clock(r.us[index]))}
        ${row("lasted", open ? "to the end" : duration(r.endUs[index] - r.us[index]))}
      </div>`;
    element("request-zoom").onclick = () => app.showLife(index);
    element("request-close").onclick = () => app.select(-1);
  }

  // Time in each phase, in us.
  spent(index) {
    const { starts, us, phase } = this.film.phases, out = new Float64Array(this.film.meta.phases.length);
    const r = this.film.requests, end = r.endAt[index] < 0 ? this.film.meta.us : r.endUs[index];
    for (let k = starts[index]; k < starts[index + 1]; k++) {
      out[phase[k]] += Math.max(0, (k + 1 < starts[index + 1] ? us[k + 1] : end) - us[k]);
    }
    return out;
  }

  // --- decisions -----------------------------------------------------------------------------------------------

  makeFilter() {
    const { meta } = this.film, box = element("filter");
    meta.verdicts.forEach((verdict, at) => {
      const button = document.createElement("button");
      button.className = "chip on";
      button.innerHTML = `${escaped(verdict)} <small>${number(this.counts[at])}</small>`;
      button.title = `${COUNTED[verdict] || ""}click: show or hide; double click: only these`;
      button.onclick = () => {
        this.hidden.has(at) ? this.hidden.delete(at) : this.hidden.add(at);
        this.drawFilter();
      };
      button.ondblclick = () => {
        const alone = this.hidden.size === meta.verdicts.length - 1 && !this.hidden.has(at);
        this.hidden = new Set(alone ? [] : meta.verdicts.keys());
        this.hidden.delete(at);
        this.drawFilter();
      };
      box.append(button);
    });
  }

  drawFilter() {
    [...element("filter").children].forEach((button, at) => button.classList.toggle("on", !this.hidden.has(at)));
    this.drawDecisions();
  }

  // Whether a decision is one of those that are asked for.
  wanted(k, chosen) {
    const d = this.film.decisions;
    if (this.hidden.has(d.verdict[k])) return false;
    return !chosen || d.request[k] === chosen || d.by[k] === chosen;
  }

  // The newest decisions up to the step; of the chosen request, all.
  listed() {
    const { film, app } = this, d = film.decisions, out = [];
    const chosen = this.mine !== false && app.selected >= 0 ? film.requests.number[app.selected] : 0;
    const from = chosen ? d.length - 1 : lastAtMost(d.at, app.step);
    for (let k = from; k >= 0 && out.length < DECISIONS_SHOWN; k--) if (this.wanted(k, chosen)) out.push(k);
    return out;
  }

  drawDecisions() {
    const { film, app } = this, d = film.decisions, list = element("decisions");
    const mine = element("mine");
    mine.hidden = app.selected < 0;
    mine.classList.toggle("on", this.mine !== false);
    mine.textContent = app.selected >= 0 ? `only request ${number(film.requests.number[app.selected])}` : "";
    mine.onclick = () => { this.mine = this.mine === false; this.drawDecisions(); };
    const again = () => app.later("side");
    const items = this.listed().map((k) => {
      const verdict = film.meta.verdicts[d.verdict[k]], colour = (NOTABLE[verdict] || ((t) => t.dim))(app.theme);
      const text = film.text(k, again);
      const who = d.request[k] ? `<a data-request="${d.request[k]}">request ${number(d.request[k])}</a> ` : "";
      const here = d.at[k] === app.step ? " here" : d.at[k] > app.step ? " ahead" : "";
      return `<li class="${here}" data-at="${d.at[k]}" style="border-color:${colour}">
        <span class="dim">step ${number(d.at[k] + 1)}, ${app.clock(d.us[k])}</span>
        <div>${who}${text === undefined ? "…" : escaped(text)}</div></li>`;
    });
    list.innerHTML = items.join("") || '<li class="dim">none up to here</li>';
  }

  // --- marks ---------------------------------------------------------------------------------------------------

  drawMarks() {
    const { film, app } = this, list = element("marks"), marks = film.meta.marks;
    list.innerHTML = marks.map(([at, us, sequence, kind, text]) =>
      `<li data-at="${at}" class="${BAD_MARKS.has(kind) ? "bad" : ""}"><span class="dim">${app.clock(us)}, #${number(sequence)}</span>
       <div>${escaped(text)}</div></li>`).join("");
    const bad = marks.filter((mark) => BAD_MARKS.has(mark[3])).length;
    element("marks-title").innerHTML = `Lives and epochs <small>${bad ? `${bad} ended badly` : ""}</small>`;
    const notes = film.meta.notes.map((note) => `<p class="note">${escaped(note)}</p>`).join("");
    element("notes").innerHTML = notes;
  }
}
