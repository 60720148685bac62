// Player: steps that go by themselves, at a speed that is chosen.

"use strict";

const SPEEDS = [1, 4, 16, 64, 256, 1024];
const PLAY_STEPS_PER_S = 15;

class Player {
  constructor(app) { Object.assign(this, { app, speed: SPEEDS[0], playing: false }); }

  play(on = !this.playing) {
    const { app } = this;
    this.playing = on && app.film.length > 0;
    element("play").classList.toggle("on", this.playing);
    if (!this.playing) return;
    if (app.step >= app.film.length - 1) app.step = 0;
    let before = performance.now(), owed = 0;
    const tick = async (now) => {
      if (!this.playing) return;
      owed += ((now - before) / 1000) * PLAY_STEPS_PER_S * this.speed;
      before = now;
      const steps = Math.floor(owed);
      owed -= steps;
      if (steps) await app.visit(app.step + steps);
      if (app.step >= app.film.length - 1) this.play(false);
      else requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  }

  faster(direction) {
    const at = SPEEDS.indexOf(this.speed) + direction;
    this.speed = SPEEDS[Math.max(0, Math.min(SPEEDS.length - 1, at))];
    element("speed").value = this.speed;
  }
}
