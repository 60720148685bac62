// Link: what is seen, in the page's address; and the theme, where a browser keeps it.

"use strict";

const LINK_AFTER_MS = 250;

class Link {
  constructor(app) { this.app = app; }

  // What is seen, as the part of an address behind `#`.
  get text() {
    const { axis, film, memory, map, selected, step } = this.app, parts = [`step=${step + 1}`];
    if (!axis.whole) parts.push(`from=${Math.round(axis.low)}`, `to=${Math.round(axis.high)}`);
    if (axis.mode !== "steps") parts.push(`axis=${axis.mode}`);
    if (memory.mode !== "addresses") parts.push(`memory=${memory.mode}`);
    if (map.colouring !== "band") parts.push(`map=${map.colouring}`);
    if (selected >= 0) parts.push(`request=${film.requests.number[selected]}`);
    return "#" + parts.join("&");
  }

  // Put it into the page's own address, once it stays for a moment.
  write() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => { try { history.replaceState(null, "", this.text); } catch { /* a sandbox */ } }, LINK_AFTER_MS);
  }

  copy() {
    const link = location.href.split("#")[0] + this.text, say = (text) => this.app.say(text);
    navigator.clipboard?.writeText(link).then(() => say("link copied"), () => say(link));
  }

  read() {
    const { app } = this, asked = new URLSearchParams(location.hash.slice(1)), of = (name) => asked.get(name);
    if (PALETTES[of("theme")]) app.setTheme(of("theme"), false);
    if (of("axis") === "time" || of("axis") === "steps") app.setAxis(of("axis"));
    if (asked.has("from")) app.axis.show(Number(of("from")), Number(of("to")));
    if (asked.has("request")) app.select(app.film.indexOf(Number(of("request"))));
    if (of("memory") === "bands") app.setMemory("bands");
    if (of("map") === "request") app.setColouring("request");
    if (asked.has("step")) app.goto(Number(of("step")) - 1);
    app.later("view", "step", "side");
  }
}

function keptTheme() {
  try { const kept = localStorage.getItem("theme"); if (PALETTES[kept]) return kept; } catch { /* not allowed here */ }
  return matchMedia("(prefers-color-scheme: light)").matches ? "light" : "dark";
}

function keepTheme(name) {
  try { localStorage.setItem("theme", name); } catch { /* not allowed here */ }
}
