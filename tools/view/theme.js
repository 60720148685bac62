// Theme: the colours of everything that is drawn, in light and dark.

"use strict";

const PALETTES = {
  dark: {
    back: "#0f1319", panel: "#151a22", line: "#262e3a", faint: "#1c232d", text: "#e6ebf2", dim: "#8d99ab",
    cursor: "#ffffff", hole: "#39424f", pending: "#ffc14d", fixed: "#ff4d6d", moved: "#ff5fb0", sink: "#2a323d",
    bad: "#ff5c5c", good: "#3ddc97", quiet: "#66758c", cachedShare: 0.46,
    bands: { full: ["#4d8dff"], window: ["#22c3ae", "#7ed957", "#2bb4e6", "#c8d64b"], state: ["#a97bff"] },
    phases: {
      waiting: "#55637a", prefill: "#ff9f45", decode: "#35c98a", parked: "#b98cff", retracted: "#ff5c6a",
      requeued: "#ff8fb8", away: "#2b3340", over: "#000000",
    },
  },
  light: {
    back: "#f4f6f9", panel: "#ffffff", line: "#dde3ea", faint: "#eef1f5", text: "#17202c", dim: "#647085",
    cursor: "#0b1220", hole: "#c3ccd8", pending: "#f0a81c", fixed: "#e11d48", moved: "#e0218a", sink: "#d5dbe3",
    bad: "#d92d20", good: "#12946a", quiet: "#8a97ab", cachedShare: 0.42,
    bands: { full: ["#2f6fed"], window: ["#0d9f8e", "#57a639", "#1187b5", "#9aa51c"], state: ["#7d4fe0"] },
    phases: {
      waiting: "#a9b4c4", prefill: "#f5871f", decode: "#1faa70", parked: "#9a63f0", retracted: "#e5384a",
      requeued: "#e8669a", away: "#e6eaf0", over: "#ffffff",
    },
  },
};

const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const mix = (one, other, share) => one.map((value, at) => Math.round(value * share + other[at] * (1 - share)));
const packed = ([r, g, b]) => (255 << 24 | b << 16 | g << 8 | r) >>> 0;
const css = ([r, g, b]) => `rgb(${r},${g},${b})`;

// What a unit of a band's span is, as strips and bars tell it; pending: vacated and fenced ones too.
const KINDS = ["in use", "cached", "fixed", "pending", "hole"];

class Theme {
  constructor(name) {
    this.name = name;
    Object.assign(this, PALETTES[name]);
  }

  // The colour of a band's used units, as [r, g, b]: by kind, and among windows by its place.
  band(bands, at) {
    const kind = bands[at][1];
    const same = bands.slice(0, at).filter((band) => band[1] === kind).length;
    const choices = this.bands[kind];
    return rgb(choices[same % choices.length]);
  }

  // The colours of a band's units by KINDS, as [r, g, b].
  kinds(used) { return [used, this.cached(used), rgb(this.fixed), rgb(this.pending), rgb(this.hole)]; }

  cached(used) { return mix(used, rgb(this.panel), this.cachedShare); }

  // A colour that stands for one request.
  request(number) {
    const hue = (number * 137.508) % 360;
    const [s, l] = this.name === "dark" ? [0.68, 0.62] : [0.62, 0.5];
    const a = s * Math.min(l, 1 - l);
    const part = (n) => {
      const k = (n + hue / 30) % 12;
      return Math.round(255 * (l - a * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
    };
    return [part(0), part(8), part(4)];
  }
}
