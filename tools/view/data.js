// Data: chunks out of the page and columns out of chunks, by the rules of pack.py.

"use strict";

const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;.=>?@^_`{|}~";
const VALUES = new Uint8Array(128);
for (let at = 0; at < DIGITS.length; at++) VALUES[DIGITS.charCodeAt(at)] = at;

// Five digits are four bytes; of n digits at the end n - 1 bytes.
function bytesOfText(text) {
  const whole = Math.floor(text.length / 5), rest = text.length % 5;
  const bytes = new Uint8Array(whole * 4 + Math.max(0, rest - 1)), view = new DataView(bytes.buffer);
  const digit = (at) => VALUES[text.charCodeAt(at)];
  for (let k = 0, at = 0; k < whole; k++, at += 5) {
    const high = ((digit(at) * 85 + digit(at + 1)) * 85 + digit(at + 2)) * 85 + digit(at + 3);
    view.setUint32(4 * k, (high * 85 + digit(at + 4)) >>> 0);
  }
  if (rest) {
    let value = 0;
    for (let k = 0; k < 5; k++) value = value * 85 + (k < rest ? digit(5 * whole + k) : 84);
    for (let k = 0; k < rest - 1; k++) bytes[4 * whole + k] = Math.floor(value / 256 ** (3 - k)) % 256;
  }
  return bytes;
}

// The bytes of a chunk; null where the page has none of that name.
async function chunk(name) {
  const node = element("c-" + name);
  if (!node) return null;
  const squeezed = new Blob([bytesOfText(node.textContent)]);
  const plain = squeezed.stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(plain).arrayBuffer());
}

async function chunkLines(name) {
  const bytes = await chunk(name);
  return bytes === null || bytes.length === 0 ? [] : new TextDecoder().decode(bytes).split("\n");
}

// Columns one after the other: `next` gives an Int32Array, `wide` a Float64Array, `small` a Uint8Array.
class Columns {
  constructor(bytes) {
    this.bytes = bytes;
    this.view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    this.at = 0;
  }

  head() {
    const count = this.view.getUint32(this.at, true);
    const flags = this.bytes[this.at + 4];
    const width = this.bytes[this.at + 5];
    const from = this.at + 8;
    this.at = from + count * width;
    return { count, width, from, differences: flags & 1, signed: flags & 2 };
  }

  next() {
    const { count, width, from, differences, signed } = this.head();
    const out = new Int32Array(count);
    const bytes = this.bytes;
    for (let plane = 0; plane < Math.min(width, 4); plane++) {
      const base = from + plane * count;
      const shift = 8 * plane;
      for (let at = 0; at < count; at++) out[at] |= bytes[base + at] << shift;
    }
    if (signed) for (let at = 0; at < count; at++) out[at] = (out[at] >>> 1) ^ -(out[at] & 1);
    return differences ? summed(out) : out;
  }

  wide() {
    const { count, width, from, differences, signed } = this.head();
    const out = new Float64Array(count);
    const bytes = this.bytes;
    for (let plane = width - 1; plane >= 0; plane--) {
      const base = from + plane * count;
      for (let at = 0; at < count; at++) out[at] = out[at] * 256 + bytes[base + at];
    }
    if (signed) for (let at = 0; at < count; at++) out[at] = out[at] % 2 ? -(out[at] + 1) / 2 : out[at] / 2;
    return differences ? summed(out) : out;
  }

  small() {
    const { count, from } = this.head();
    return this.bytes.subarray(from, from + count);
  }
}

// Differences to the value before become values, in place.
function summed(array) {
  for (let at = 1; at < array.length; at++) array[at] += array[at - 1];
  return array;
}

// The last place in a rising array whose value is at most `value`; -1 where there is none.
function lastAtMost(array, value, low = 0, high = array.length) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (array[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}
