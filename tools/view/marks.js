// Marks: what happened between steps, as lines in the charts.

"use strict";

const BAD_MARKS = new Set(["ended", "cut", "diverged", "differs", "damage"]);

// Calls `draw(x, bad)` for every mark that a chart shows.
function eachMark(film, axis, plot, draw) {
  for (const [at, us, , kind] of film.meta.marks) {
    const x = axis.x(axis.of(at, us), plot);
    if (x >= GUTTER - 1 && x <= plot.right + 1) draw(x, BAD_MARKS.has(kind));
  }
}

// Lines through a chart; a bad mark has a head too, and is never left out for one beside it.
function drawMarks(film, axis, plot, theme) {
  let before = -1e9;
  eachMark(film, axis, plot, (x, bad) => {
    if (!bad && x - before < 2) return;
    before = x;
    plot.upright(bad ? theme.bad : theme.dim, x, bad ? [4, 3] : [1, 3], bad ? 0.95 : 0.55);
    if (!bad) return;
    plot.base.fillStyle = theme.bad;
    plot.base.beginPath();
    plot.base.moveTo(x - 5, 0);
    plot.base.lineTo(x + 5, 0);
    plot.base.lineTo(x, 7);
    plot.base.fill();
  });
}
