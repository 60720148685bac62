// Words: numbers, bytes and times in words, and small pieces of the page.

"use strict";

const number = (value) => Math.round(value).toLocaleString("en-US");

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (Math.abs(value) >= 1024 && at < units.length - 1) { value /= 1024; at++; }
  const digits = at === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${parseFloat(value.toFixed(digits))} ${units[at]}`;
}

function duration(us) {
  if (us < 0) return "-" + duration(-us);
  if (us < 1000) return `${Math.round(us)} µs`;
  if (us < 1e6) return `${parseFloat((us / 1e3).toFixed(us < 1e4 ? 2 : 1))} ms`;
  if (us < 6e7) return `${parseFloat((us / 1e6).toFixed(us < 1e7 ? 3 : 2))} s`;
  const seconds = Math.round(us / 1e6);
  const parts = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, seconds % 60];
  const [h, m, s] = parts.map((part) => String(part).padStart(2, "0"));
  return parts[0] ? `${parts[0]}:${m}:${s} h` : `${parts[1]}:${s} min`;
}

// Steps of 1, 2 or 5 times a power of ten, at most so many over a length.
function nice(length, most) {
  const rough = length / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough) || 10 * power;
}

const element = (id) => document.getElementById(id);
const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const row = (name, value, wide = "") => `<div class="row ${wide}"><span>${name}</span><b>${value}</b></div>`;
const dot = (colour) => `<i class="dot" style="background:${colour}"></i>`;

// "1 life", "2 lives": the number is bold.
function counted(count, one, many = one + "s") {
  return `<b>${number(count)}</b> ${count === 1 ? one : many}`;
}
