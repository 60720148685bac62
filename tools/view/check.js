// Check: what `bandmaster view --check-browser` asks of the page.

"use strict";

const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, at) => {
  for (let bit = 0; bit < 8; bit++) at = at & 1 ? 0xedb88320 ^ (at >>> 1) : at >>> 1;
  return at >>> 0;
});

function crcOf(array) {
  let crc = 0xffffffff;
  for (const byte of new Uint8Array(array.buffer, array.byteOffset, array.byteLength)) {
    crc = CRC_TABLE[(crc ^ byte) & 255] ^ (crc >>> 8);
  }
  return (crc ^ 0xffffffff) >>> 0;
}

// For each step and stored band: checksums of codes, ids and takers, and the counts that the page shows.
async function checkSteps(steps) {
  const out = [];
  for (const step of steps) {
    await app.goto(step);
    const { stretch, bands } = app.board;
    out.push(bands.map((band) => {
      const counts = stretch.counts[band.place];
      const shown = app.film.meta.counts.map((name) => counts[name][step - stretch.first]);
      return [crcOf(band.codes), crcOf(band.ids), crcOf(band.takers), ...shown];
    }));
  }
  return out;
}

// Milliseconds that drawing takes: zooming in and out over the whole journal, and playing through it.
async function measureFrames(frames) {
  const { axis } = app;
  const frame = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
  const took = { zoom: [], play: [] };
  axis.fit();
  for (let k = 0; k < frames; k++) {
    axis.zoom(k < frames / 2 ? 0.8 : 1.25, axis.total * (0.2 + (0.6 * k) / frames));
    app.later("view");
    app.frames.length = 0;
    await frame();
    took.zoom.push(Math.max(0, ...app.frames));
  }
  axis.fit();
  await app.goto(0);
  for (let k = 1; k <= frames; k++) {
    app.frames.length = 0;
    const before = performance.now();
    await app.goto(Math.floor((k * (app.film.length - 1)) / frames));
    const moved = performance.now() - before;
    await frame();
    took.play.push(moved + Math.max(0, ...app.frames));
  }
  return { ...took, openMs: app.openMs };
}
