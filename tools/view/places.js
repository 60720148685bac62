// Places: which addresses are shown at which height, and which unit lies where.

"use strict";

// Rows of addresses without those that were never touched.
class Places {
  constructor(pieces, arena = 0) {
    this.pieces = pieces;
    this.arena = arena;
    this.total = pieces.reduce((sum, [low, high]) => sum + high - low, 0);
  }

  // Address at a share of the height, from the top.
  address(share) {
    let offset = share * this.total;
    for (const [low, high] of this.pieces) {
      if (offset < high - low) return low + offset;
      offset -= high - low;
    }
    return this.pieces[this.pieces.length - 1][1] - 1;
  }

  share(address) {
    let before = 0;
    for (const [low, high] of this.pieces) {
      if (address < high) return (before + Math.max(0, address - low)) / this.total;
      before += high - low;
    }
    return 1;
  }

  // Where something was left out: share of the height, bytes.
  breaks() {
    const out = [];
    for (let at = 1; at < this.pieces.length; at++) {
      out.push([this.share(this.pieces[at][0]), this.pieces[at][0] - this.pieces[at - 1][1]]);
    }
    const [first] = this.pieces;
    if (first && first[0] > 0) out.unshift([0, first[0]]);
    const end = this.pieces[this.pieces.length - 1][1];
    if (end < this.arena) out.push([1, this.arena - end]);
    return out;
  }
}

// The position of a band's unit at an address; -1 where the band can have none.
function positionAt(band, address) {
  const position = (Math.floor(address / band.bytes) - band.anchor) * band.direction;
  return position >= 0 && position < band.capacity ? position : -1;
}

// The address of the middle of a unit.
function middleOf(band, position) { return (band.anchor + band.direction * position + 0.5) * band.bytes; }

// The unit at an address of a board: its band, position and state; empty where no band has it.
function unitAt(board, stage, address) {
  for (const band of board.bands) {
    if (band.stage !== stage) continue;
    const position = positionAt(band, address);
    if (position < 0 || band.codes[position] === BEYOND) continue;
    return { band, unit: band.anchor + band.direction * position, code: band.codes[position], id: band.ids[position], taker: band.takers[position] };
  }
  return {};
}
