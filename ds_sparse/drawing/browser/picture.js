/* What part of the sequence is seen, in all pictures alike: fractions of its length. */
const view = { x: 0, y: 0, size: 1 };
const chosen = { sheets: [], head: "all", tiles: "" };
const heads = page.sheets.map((sheet) => sheet.heads.map((said) => new Head(sheet, said)));
let panes = [], palette = {}, pointer = null, asked = false, drawn = 0;

function readPalette() {
  const style = getComputedStyle(document.documentElement);
  palette = Object.fromEntries(["ground", "line", "text", "cursor", ...KINDS].map((name) => {
    const value = style.getPropertyValue(`--${name}`).trim();
    return [name, [1, 3, 5].map((i) => parseInt(value.slice(i, i + 2), 16))];
  }));
}

/* The seen part of a head as shares of each kind in cells of some blocks. */
function cells(head, tiles, pixels) {
  const size = head.size, left = view.x * size, top = view.y * size, span = view.size * size;
  const along = Math.max(1, Math.ceil(span / pixels));
  const first = { x: Math.floor(left / along), y: Math.floor(top / along) };
  const end = { x: Math.min(size, Math.ceil(left + span)), y: Math.min(size, Math.ceil(top + span)) };
  const across = Math.ceil(end.x / along) - first.x, down = Math.ceil(end.y / along) - first.y;
  const image = new ImageData(across, down);
  const from = first.x * along, to = Math.min(size, (first.x + across) * along);
  const sums = new Int32Array(4 * across), inCell = new Int32Array(across);
  const causal = head.sheet.causal;
  const add = (row, live) => {
    if (tiles) {
      for (let column = from; column < to; column++) {
        if (!live[column] && !tiles.owners[tiles.at(row, column)]) continue;  // most blocks of a large layout
        const kind = tiles.kind(row, column, live[column]);
        if (kind !== NOTHING) sums[4 * Math.floor((column - from) / along) + kind]++;
      }
      return;
    }
    for (let cell = 0; cell < across; cell++) {
      if (inCell[cell]) sums[4 * cell + (causal && from + cell * along > row ? MASKED : LIVE)] += inCell[cell];
    }
  };
  let started = false;
  head.rows(first.y * along, Math.min(size, (first.y + down) * along), (row, live) => {
    if (!tiles && !started) {
      for (let column = from; column < to; column++) inCell[Math.floor((column - from) / along)] += live[column];
    } else if (!tiles) {
      for (let i = head.starts[row]; i < head.starts[row + 1]; i += 2) {
        for (let column = Math.max(from, head.places[i]); column < Math.min(to, head.places[i + 1]); column++) {
          inCell[Math.floor((column - from) / along)] += live[column] ? 1 : -1;
        }
      }
    }
    started = true;
    add(row, live);
    if ((row + 1) % along === 0 || row + 1 === size) {
      paint(image, Math.floor(row / along) - first.y, sums, (x) => {
        const width = Math.min(size, (first.x + x + 1) * along) - (first.x + x) * along;
        return width * (row % along + 1);
      });
      sums.fill(0);
    }
  });
  return { image, along, first };
}

function paint(image, y, sums, blocksIn) {
  for (let x = 0; x < image.width; x++) {
    const of = sums.subarray(4 * x, 4 * x + 4), any = of[0] + of[1] + of[2] + of[3];
    const share = any / blocksIn(x);
    const depth = any ? 0.25 + 0.75 * share : 0;  // a single block in a cell of many still shows
    for (let channel = 0; channel < 3; channel++) {
      let mixed = 0;
      if (any) KINDS.forEach((name, kind) => { mixed += of[kind] / any * palette[name][channel]; });
      image.data[4 * (y * image.width + x) + channel] = palette.ground[channel] * (1 - depth) + mixed * depth;
    }
    image.data[4 * (y * image.width + x) + 3] = 255;
  }
}

/* One head in one square: the picture, and over it what follows the pointer. */
class Square {
  constructor(pane, head) {
    this.pane = pane;
    this.head = head;
    this.figure = document.createElement("figure");
    this.square = document.createElement("div");
    this.square.className = "square";
    this.square.tabIndex = 0;
    this.square.setAttribute("role", "img");
    this.square.setAttribute("aria-label", `${head.sheet.name}, ${head.said.name}`);
    [this.picture, this.cursor] = [0, 1].map(() => this.square.appendChild(document.createElement("canvas")));
    this.figure.appendChild(this.square);
    const size = head.size * head.size;
    const caption = this.figure.appendChild(document.createElement("figcaption"));
    caption.textContent = `${head.said.name}: density ${percent(head.said.live / size)}`;
    listen(this);
  }

  async draw() {
    await this.head.read();
    const number = this.pane.walkNumber();
    this.tiles = number < 0 ? null : await this.head.tiles(number);
    if (!this.square.isConnected) return;
    const side = Math.max(1, Math.round(this.square.clientWidth * devicePixelRatio));
    this.picture.width = this.picture.height = this.cursor.width = this.cursor.height = side;
    const context = this.picture.getContext("2d");
    const { image, along, first } = cells(this.head, this.tiles, side);
    const source = new OffscreenCanvas(image.width, image.height);
    source.getContext("2d").putImageData(image, 0, 0);
    this.pixels = side / (view.size * this.head.size);  // of a block
    const left = (first.x * along - view.x * this.head.size) * this.pixels;
    const top = (first.y * along - view.y * this.head.size) * this.pixels;
    // Cells of a few pixels are not all of one size, unless their edges are mixed.
    context.imageSmoothingEnabled = along * this.pixels < 4;
    context.imageSmoothingQuality = "high";
    context.drawImage(source, left, top, image.width * along * this.pixels, image.height * along * this.pixels);
    this.along = along;
    if (this.pixels >= 12 * devicePixelRatio) this.grid(context, side);
    this.point();
  }

  grid(context, side) {
    const size = this.head.size, pixels = this.pixels;
    context.fillStyle = `rgb(${palette.line})`;
    for (let block = Math.ceil(view.x * size); block <= (view.x + view.size) * size; block++) {
      context.fillRect(Math.round((block - view.x * size) * pixels), 0, 1, side);
    }
    for (let block = Math.ceil(view.y * size); block <= (view.y + view.size) * size; block++) {
      context.fillRect(0, Math.round((block - view.y * size) * pixels), side, 1);
    }
    if (this.tiles && this.tiles.height > 1 && pixels >= BITS_FROM * devicePixelRatio) this.write(context);
  }

  write(context) {
    const size = this.head.size, pixels = this.pixels;
    context.font = `${Math.round(pixels / Math.max(6, this.tiles.height))}px ui-monospace, monospace`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    const end = { x: Math.min(size, (view.x + view.size) * size), y: Math.min(size, (view.y + view.size) * size) };
    this.head.rows(Math.floor(view.y * size), Math.ceil(end.y), (row, live) => {
      for (let column = Math.floor(view.x * size); column < end.x; column++) {
        const kind = this.tiles.kind(row, column, live[column]);
        if (kind === NOTHING || kind === MASKED) continue;
        context.fillStyle = `rgb(${kind === LIVE ? palette.ground : palette.text})`;
        context.fillText(
          this.tiles.bits(row, column),
          (column + 0.5 - view.x * size) * pixels, (row + 0.5 - view.y * size) * pixels,
        );
      }
    });
  }

  /* The block at a place that is given in fractions of the sequence. */
  block(fraction) {
    return Math.min(this.head.size - 1, Math.max(0, Math.floor(fraction * this.head.size)));
  }

  point() {
    const context = this.cursor.getContext("2d");
    context.clearRect(0, 0, this.cursor.width, this.cursor.height);
    if (!pointer || !this.pixels) return;
    const size = this.head.size, pixels = this.pixels, row = this.block(pointer.y), column = this.block(pointer.x);
    const x = (column - view.x * size) * pixels, y = (row - view.y * size) * pixels;
    const thick = Math.max(1, Math.round(devicePixelRatio));
    context.strokeStyle = `rgb(${palette.cursor})`;
    context.lineWidth = thick;
    context.strokeRect(x, y, Math.max(2 * thick, pixels), Math.max(2 * thick, pixels));
    if (this.tiles) this.outline(context, this.tiles.tileOf[this.tiles.byRows ? row : column]);
    if (pixels < 6 * devicePixelRatio) {
      context.globalAlpha = 0.5;
      context.beginPath();
      context.moveTo(x, 0); context.lineTo(x, this.cursor.height);
      context.moveTo(0, y); context.lineTo(this.cursor.width, y);
      context.stroke();
      context.globalAlpha = 1;
    }
  }

  /* Around the lines of a tile, which need not be neighbours. */
  outline(context, tile) {
    const { byRows } = this.tiles, lines = this.tiles.linesOf(tile).filter((line) => line >= 0).sort((a, b) => a - b);
    const side = this.cursor.width, place = (line) => (line - (byRows ? view.y : view.x) * this.head.size) * this.pixels;
    lines.forEach((line, i) => {
      if (lines[i - 1] === line - 1) return;
      let last = i;
      while (lines[last + 1] === lines[last] + 1) last++;
      const start = place(line), wide = Math.max(2, place(lines[last] + 1) - start);
      if (byRows) context.strokeRect(-2, start, side + 4, wide);
      else context.strokeRect(start, -2, wide, side + 4);
    });
  }

  /* What is under the pointer, by name. */
  describe() {
    const head = this.head, size = head.size, row = this.block(pointer.y), column = this.block(pointer.x);
    const tokens = (block) => `${count(block * head.sheet.block)}-${count((block + 1) * head.sheet.block - 1)}`;
    let live = 0;
    head.rows(row, row + 1, (_, blocks) => { live = blocks[column]; });
    const masked = head.sheet.causal && column > row;
    const said = [
      ["head", `${head.said.name}, density ${percent(head.said.live / size / size)}`],
      ["queries", `block row ${count(row)}, tokens ${tokens(row)}: density ${percent(head.ofRows[row] / size)}`],
      ["keys", `block column ${count(column)}, tokens ${tokens(column)}: density ${percent(head.ofColumns[column] / size)}`],
      ["block", live ? (masked ? "live, after the diagonal: causal attention leaves it out" : "live") : "not live"],
    ];
    if (this.along > 1) said.push(["under the pointer", this.cell(row, column)]);
    if (this.tiles) said.push(...this.tile(row, column, live));
    return said;
  }

  cell(row, column) {
    const along = this.along, size = this.head.size;
    const first = { x: column - column % along, y: row - row % along };
    const end = { x: Math.min(size, first.x + along), y: Math.min(size, first.y + along) };
    let live = 0;
    this.head.rows(first.y, end.y, (_, blocks) => { for (let x = first.x; x < end.x; x++) live += blocks[x]; });
    const all = (end.x - first.x) * (end.y - first.y);
    return `${end.y - first.y} x ${end.x - first.x} blocks a cell, ${count(live)} of ${count(all)} live, ${percent(live / all)}`;
  }

  tile(row, column, live) {
    const tiles = this.tiles, number = tiles.tileOf[tiles.byRows ? row : column];
    const lines = tiles.linesOf(number), kind = tiles.kind(row, column, live);
    const named = lines.map((line) => (line < 0 ? "none" : count(line))).join(", ");
    const words = ["live", "waste: walked for another row of the tile", "left out by this half of the tile", "", ""];
    return [
      ["tile", `${count(number)} of ${count(tiles.count)}, block ${tiles.byRows ? "row" : "column"}${lines.length > 1 ? "s" : ""} ${named}`],
      ["owner bits", `${tiles.bits(row, column)}${words[kind] && `: ${words[kind]}`}`],
      ["its list", this.list(number)],
    ];
  }

  list(number) {
    const tiles = this.tiles, size = this.head.size, there = tiles.linesOf(number).filter((line) => line >= 0);
    let entries = 0, walked = 0, live = 0;
    const ofPart = tiles.height / tiles.parts;
    for (let other = 0; other < size; other++) {
      const owners = tiles.byRows ? tiles.owners[number * size + other] : tiles.owners[other * tiles.width + number];
      if (!owners) continue;
      entries++;
      for (let k = 0; k < tiles.height; k += ofPart) walked += owners & tiles.partOf[k] ? ofPart : 0;
      for (let bits = owners; bits; bits &= bits - 1) live++;
    }
    const waste = ` ${percent(walked ? 1 - live / walked : 0)} waste`;
    return `${count(entries)} entries, ${count(live)} of ${count(walked)} walked blocks live,${waste}` +
      (there.length < tiles.height ? `; ${tiles.height - there.length} lines are none` : "");
  }
}
