// Hands: pointer, wheel and keys.

"use strict";

const CLICK_PIXELS = 4; // a pointer that moves less has clicked

// How much a turn of the wheel zooms: below 1 in, above it out.
const zoomOf = (event) => Math.exp(Math.max(-120, Math.min(120, event.deltaY)) * 0.003);

class Hands {
  constructor(app) {
    this.app = app;
    for (const plot of app.plots) this.chart(plot);
    this.overview(app.overview.plot);
    this.unitMap(app.map.plot);
    this.controls();
    this.lists();
    window.addEventListener("keydown", (event) => this.key(event));
  }

  // --- charts --------------------------------------------------------------------------------------------------

  // A wheel over a plot, which does not scroll the page where `act` takes it; double click, to see all.
  turned(plot, act, all) {
    plot.box.addEventListener("wheel", (event) => {
      if (act(event) === false) return;
      event.preventDefault();
      this.app.later("view", "step");
      this.app.writeLink();
    }, { passive: false });
    plot.box.addEventListener("dblclick", () => { all(); this.app.later("view", "step"); });
    plot.box.addEventListener("pointerleave", () => this.tip(null));
  }

  chart(plot) {
    const { app } = this, { axis, lanes } = app;
    this.turned(plot, (event) => {
      const along = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (plot === lanes.plot && event.altKey) lanes.scrollTo(lanes.scroll + event.deltaY);
      else if (along) axis.pan(((event.deltaX || event.deltaY) / plot.inner) * axis.span);
      else axis.zoom(zoomOf(event), axis.unit(plot.point(event)[0], plot));
    }, () => axis.fit());
    plot.box.addEventListener("pointerdown", (event) => this.drag(plot, event));
    plot.box.addEventListener("pointermove", (event) => this.hover(plot, event));
  }

  // Drag to move the view, on the ruler to move the step; a click chooses.
  drag(plot, event) {
    if (event.button !== 0) return;
    const { app } = this, { axis, lanes } = app, [x0, y0] = plot.point(event), { low, high } = axis, { scroll } = lanes;
    const ruler = plot === app.work.plot && y0 > plot.height - RULER_HEIGHT;
    let moved = false;
    plot.box.setPointerCapture(event.pointerId);
    const move = (next) => {
      const [x, y] = plot.point(next);
      if (!moved && Math.hypot(x - x0, y - y0) < CLICK_PIXELS) return;
      moved = true;
      this.tip(null);
      if (ruler) { app.goto(axis.stepAt(axis.unit(x, plot))); return; }
      Object.assign(axis, { low, high });
      axis.pan((-(x - x0) / plot.inner) * axis.span);
      if (plot === lanes.plot) lanes.scrollTo(scroll - (y - y0));
      app.later("view");
    };
    const up = () => {
      plot.box.removeEventListener("pointermove", move);
      if (moved) app.writeLink();
      else if (x0 >= GUTTER) this.choose(plot, x0, y0);
    };
    plot.box.addEventListener("pointermove", move);
    plot.box.addEventListener("pointerup", up, { once: true });
  }

  choose(plot, x, y) {
    const { app } = this;
    if (plot === app.lanes.plot) {
      const index = app.lanes.find(x, y);
      app.select(index === app.selected ? -1 : index);
    }
    app.goto(app.axis.stepAt(app.axis.unit(x, plot)));
  }

  overview(plot) {
    const { app } = this, { axis } = app, { whole } = app.overview;
    const unitOf = (event) => whole.unit(plot.point(event)[0], plot);
    const place = (event) => {
      const unit = unitOf(event);
      if (axis.whole) app.goto(axis.stepAt(unit));
      else axis.show(unit - axis.span / 2, unit + axis.span / 2);
      app.later("view");
    };
    plot.box.addEventListener("pointerdown", (event) => { plot.box.setPointerCapture(event.pointerId); place(event); });
    plot.box.addEventListener("pointermove", (event) => { if (event.buttons & 1) place(event); });
    this.turned(plot, (event) => axis.zoom(zoomOf(event), unitOf(event)), () => axis.fit());
  }

  unitMap(plot) {
    const { app } = this, found = (event) => app.map.find(...plot.point(event));
    this.turned(plot, (event) => {
      const at = found(event);
      if (!at) return false;
      app.map.zoom(at, zoomOf(event));
      return true;
    }, () => app.map.zooms.fill(null));
    plot.box.addEventListener("click", (event) => {
      const at = found(event);
      app.select(at && at.taker ? app.film.indexOf(at.taker) : -1);
    });
    plot.box.addEventListener("pointermove", (event) => {
      const at = found(event);
      this.tip(at && this.unitText(at), event);
    });
  }

  // --- words at the pointer ------------------------------------------------------------------------------------

  hover(plot, event) {
    if (event.buttons) return;
    const { app } = this, [x, y] = plot.point(event);
    if (x < GUTTER || x > plot.right || !app.film.length) return this.tip(null);
    const step = app.axis.stepAt(app.axis.unit(x, plot));
    let text = `<b>step ${number(step + 1)}</b> <span>${app.clock(app.film.steps.us[step])}</span>`;
    if (plot === app.memory.plot) text += this.memoryText(x, y);
    else if (plot === app.work.plot) text += this.workText(step, y);
    else {
      const index = app.lanes.find(x, y);
      plot.box.style.cursor = index >= 0 ? "pointer" : "";
      if (index >= 0) text = this.requestText(index, step);
    }
    const mark = this.markNear(plot, x);
    return this.tip(text + (mark ? `<br><em>${escaped(mark[4])}</em>` : ""), event);
  }

  markNear(plot, x) {
    const { axis, film } = this.app;
    return film.meta.marks.find((mark) => Math.abs(axis.x(axis.of(mark[0], mark[1]), plot) - x) < 5);
  }

  memoryText(x, y) {
    const { app } = this, found = app.memory.hover(x, y);
    if (!found) return "";
    const stretch = app.film.stretchAt(found.step);
    if (!stretch) return "<br>no arena";
    const stage = stretch.stages[found.stage];
    if (!stage) return "";
    const lines = stretch.bands.filter((band) => band.stage === found.stage).map((band) => {
      const [used, cached, fixed, pending, holes] = app.film.addKinds(stretch, band.place, found.step, [0, 0, 0, 0, 0])
        .map((units) => units * band.bytes);
      return `<br>${dot(css(app.theme.band(stage.bands, band.band)))}${escaped(band.name)} ${bytes(used + fixed)} in use, `
        + `${bytes(cached)} cached${pending + holes ? `, ${bytes(pending + holes)} free inside` : ""}`;
    });
    const moved = app.film.steps.moved[found.step];
    const where = found.address >= 0 ? `<br><span>at ${bytes(found.address)}${stretch.stages.length > 1 ? ` of stage ${found.stage}` : ""}</span>` : "";
    return where + lines.join("") + (moved ? `<br>${dot(app.theme.moved)}${number(moved)} units moved` : "");
  }

  workText(step, y) {
    const { app } = this, s = app.film.steps, d = app.film.decisions;
    const texts = WORK.map((one) => `<br>${dot(one.colour(app.theme))}${one.title} ${one.text(s[one.column][step])}`);
    const low = lastAtMost(d.at, step - 1) + 1, high = lastAtMost(d.at, step) + 1, counts = new Map();
    for (let k = low; k < high; k++) counts.set(d.verdict[k], (counts.get(d.verdict[k]) || 0) + 1);
    const told = [...counts].map(([verdict, count]) => `${count} ${app.film.meta.verdicts[verdict]}`).join(", ");
    return texts.join("") + (told ? `<br>decided before it: ${told}` : "");
  }

  requestText(index, step) {
    const { app } = this, r = app.film.requests, phase = app.film.phaseAt(index, step);
    const end = r.endAt[index] < 0 ? "" : `, ended: ${escaped(app.film.meta.ends[r.end[index]])}`;
    return `<b>request ${number(r.number[index])}</b> <span>${escaped(app.film.ids[index] || "")}</span>
      <br>${phase && phase !== "over" ? dot(app.theme.phases[phase]) + phase : ""} at step ${number(step + 1)}
      <br>${number(r.prompt[index])} prompt tokens, ${number(r.cached[index])} cached; output ${r.out[index] < 0 ? "?" : number(r.out[index])} of ${number(r.most[index])}${end}`;
  }

  unitText(found) {
    const { app } = this, where = `${bytes(found.address)}${app.board.stretch.stages.length > 1 ? ` of stage ${found.stage}` : ""}`;
    if (!found.band) {
      const sink = found.address < app.board.stretch.stages[found.stage].start;
      return `<b>${sink ? "sink" : "free"}</b> <span>${where}</span><br>${sink ? "never given to a request" : "in no band's span"}`;
    }
    const { band, code, taker } = found, index = app.film.indexOf(taker);
    const phase = index >= 0 ? app.film.phaseAt(index, app.step) : null;
    const runs = taker && app.holding.at(app.step)[taker];
    const whose = !taker ? "taker not known" : runs ? `taken by request ${number(taker)}, ${phase}`
      : `left in the cache by request ${number(taker)}`;
    const live = isLive(code) ? `id ${number(found.id)}<br>${whose}` : "";
    return `<b>${escaped(band.name)} unit ${number(found.unit)}</b> <span>${bytes(band.bytes)} at ${where}</span>
      <br>${app.film.meta.codes[code]} ${live}`;
  }

  tip(text, event) {
    const box = element("tip");
    box.classList.toggle("on", Boolean(text));
    if (!text) return;
    box.innerHTML = text;
    const { offsetWidth: wide, offsetHeight: high } = box;
    box.style.left = `${Math.max(8, Math.min(innerWidth - wide - 8, event.clientX + 16))}px`;
    box.style.top = `${event.clientY + 18 + high > innerHeight ? event.clientY - high - 12 : event.clientY + 18}px`;
  }

  // --- buttons, lists, keys ------------------------------------------------------------------------------------

  controls() {
    const { app } = this, slider = element("slider"), { axis, film } = app;
    const clicks = {
      play: () => app.player.play(), first: () => app.visit(0), last: () => app.visit(film.length - 1),
      back: () => app.visit(app.step - 1), next: () => app.visit(app.step + 1),
      theme: () => app.setTheme(app.theme.name === "dark" ? "light" : "dark"),
      fit: () => { axis.fit(); app.later("view"); }, help: () => element("helping").showModal(),
    };
    for (const [id, act] of Object.entries(clicks)) element(id).onclick = act;
    const switches = { axis: "setAxis", "memory-mode": "setMemory", "map-mode": "setColouring" };
    for (const [id, setter] of Object.entries(switches)) {
      element(id).onclick = ({ target }) => { if (target.value) app[setter](target.value); };
    }
    slider.max = Math.max(0, film.length - 1);
    slider.oninput = () => app.visit(Number(slider.value));
    element("step-input").onchange = (event) => app.visit(Number(event.target.value.replace(/,/g, "")) - 1);
    element("speed").innerHTML = SPEEDS.map((speed) => `<option value="${speed}">${speed}×</option>`).join("");
    element("speed").onchange = (event) => { app.player.speed = Number(event.target.value); };
    element("search").onkeydown = (event) => {
      event.stopPropagation();
      if (event.key === "Escape") event.target.blur();
      if (event.key === "Enter" && !app.search(event.target.value)) app.say(`no request ${event.target.value}`);
    };
  }

  lists() {
    const { app } = this;
    for (const id of ["decisions", "marks"]) {
      element(id).onclick = (event) => {
        const who = event.target.closest("[data-request]"), item = event.target.closest("[data-at]");
        if (who) app.select(app.film.indexOf(Number(who.dataset.request)));
        else if (item) app.visit(Number(item.dataset.at));
      };
    }
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.target.matches("input:not([type=range]), select, dialog *")) return;
    const { app } = this, far = event.shiftKey ? 10 : 1, { axis } = app;
    const around = axis.ofStep(app.step);
    const keys = {
      ArrowLeft: () => app.visit(app.step - far), ArrowRight: () => app.visit(app.step + far),
      PageUp: () => app.visit(app.step - 100), PageDown: () => app.visit(app.step + 100),
      Home: () => app.visit(0), End: () => app.visit(app.film.length - 1),
      " ": () => app.player.play(), ",": () => app.player.faster(-1), ".": () => app.player.faster(1),
      "+": () => axis.zoom(0.6, around), "=": () => axis.zoom(0.6, around), "-": () => axis.zoom(1 / 0.6, around),
      0: () => axis.fit(), t: () => element("theme").click(), x: () => app.setAxis(axis.mode === "steps" ? "time" : "steps"),
      b: () => app.setMemory(app.memory.mode === "bands" ? "addresses" : "bands"),
      c: () => app.setColouring(app.map.colouring === "band" ? "request" : "band"),
      d: () => app.jump("decision", 1), D: () => app.jump("decision", -1), m: () => app.jump("move", 1),
      M: () => app.jump("move", -1), n: () => app.jump("mark", 1), N: () => app.jump("mark", -1),
      "/": () => { element("search").focus(); element("search").select(); }, "?": () => element("helping").showModal(),
      z: () => { if (app.selected >= 0) app.showLife(app.selected); }, Escape: () => app.select(-1),
    };
    const act = keys[event.key];
    if (!act) return;
    act();
    event.preventDefault();
    app.later("view");
  }
}
