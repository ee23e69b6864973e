class Tiles {
  constructor(head, walk, lines) {
    Object.assign(this, walk, { head, lines });
    const size = head.size;
    this.byRows = walk.side === "rows";
    this.count = lines.length / walk.height;
    this.tileOf = new Int32Array(size);
    this.placeOf = new Uint8Array(size);
    lines.forEach((line, i) => {
      if (line < 0) return;
      this.tileOf[line] = Math.floor(i / walk.height);
      this.placeOf[line] = i % walk.height;
    });
    const ofPart = walk.height / walk.parts;
    this.partOf = Array.from({ length: walk.height }, (_, k) => ((1 << ofPart) - 1) << (Math.floor(k / ofPart) * ofPart));
    this.width = this.byRows ? size : this.count;
    this.owners = new Uint8Array((this.byRows ? this.count : size) * this.width);
    head.rows(0, size, (row, live) => {
      const end = head.sheet.causal ? row + 1 : size;
      for (let column = 0; column < end; column++) {
        if (live[column]) this.owners[this.at(row, column)] |= 1 << this.placeOf[this.byRows ? row : column];
      }
    });
  }

  at(row, column) {
    return this.byRows ? this.tileOf[row] * this.width + column : row * this.width + this.tileOf[column];
  }

  /* What a block is, from its owner bits. */
  kind(row, column, live) {
    const masked = this.head.sheet.causal && column > row;
    if (live && !masked) return LIVE;
    const bits = this.owners[this.at(row, column)];
    if (bits & this.partOf[this.placeOf[this.byRows ? row : column]]) return WASTE;
    return bits ? PASSED : live ? MASKED : NOTHING;
  }

  linesOf(tile) {
    return Array.from(this.lines.subarray(tile * this.height, (tile + 1) * this.height));
  }

  /* Owner bits as digits, those of the tile's first line first. */
  bits(row, column) {
    const owners = this.owners[this.at(row, column)];
    return Array.from({ length: this.height }, (_, k) => (owners >> k) & 1).join("");
  }
}
