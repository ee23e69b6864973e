"use strict";

const page = JSON.parse(document.getElementById("data").textContent);
const KEPT_EVERY = 1024;     // block rows between two that are kept whole
const LEAST_BLOCKS = 4;      // of a side, at the largest zoom
const BITS_FROM = 46;        // pixels of a block from which its owner bits are written into it
const LIVE = 0, WASTE = 1, PASSED = 2, MASKED = 3, NOTHING = 4;
const KINDS = ["live", "waste", "passed", "masked"];
const element = (id) => document.getElementById(id);
const count = (number) => number.toLocaleString("en-US");
const percent = (share) => `${share > 0 && share < 0.001 ? (100 * share).toPrecision(2) : (100 * share).toFixed(1)}%`;

async function numbers(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Int32Array(await new Response(stream).arrayBuffer());
}

/* The live blocks of a head, from what changes from row to row: see changes.py. */
class Head {
  constructor(sheet, said) {
    this.sheet = sheet;
    this.said = said;
    this.size = sheet.blocks;
    this.owned = new Map();
  }

  async read() {
    if (this.places) return;
    const size = this.size, data = await numbers(this.said.changes);
    this.starts = new Int32Array(size + 1);
    for (let row = 0; row < size; row++) this.starts[row + 1] = this.starts[row] + data[row];
    this.places = data.subarray(size);
    for (let row = 0; row < size; row++) {
      for (let i = this.starts[row]; i < this.starts[row + 1]; i++) {
        this.places[i] += i === this.starts[row] ? row : this.places[i - 1];
      }
    }
    this.kept = [];
    this.ofRows = new Int32Array(size);
    this.ofColumns = new Int32Array(size);
    const live = new Uint8Array(size);
    let inRow = 0;
    for (let row = 0; row < size; row++) {
      for (let i = this.starts[row]; i < this.starts[row + 1]; i += 2) {
        for (let column = this.places[i]; column < this.places[i + 1]; column++) {
          live[column] ^= 1;
          inRow += live[column] ? 1 : -1;
          this.ofColumns[column] += live[column] ? size - row : row - size;
        }
      }
      this.ofRows[row] = inRow;
      if (row % KEPT_EVERY === 0) this.kept.push(live.slice());
    }
  }

  /* Calls back with each row from `first` on and its live blocks, which are overwritten by the next. */
  rows(first, end, take) {
    const at = Math.floor(first / KEPT_EVERY);
    const live = this.kept[at].slice();
    for (let row = at * KEPT_EVERY; row < end; row++) {
      if (row > at * KEPT_EVERY) {
        for (let i = this.starts[row]; i < this.starts[row + 1]; i += 2) {
          for (let column = this.places[i]; column < this.places[i + 1]; column++) live[column] ^= 1;
        }
      }
      if (row >= first) take(row, live);
    }
  }

  /* The tiles of one kind, with owner bits for each of their entries. */
  async tiles(number) {
    if (!this.owned.has(number)) {
      const walk = this.said.walks[number], lines = await numbers(walk.lines);
      this.owned.set(number, new Tiles(this, walk, lines));
    }
    return this.owned.get(number);
  }
}
