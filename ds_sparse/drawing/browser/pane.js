class Pane {
  constructor(sheet) {
    this.sheet = page.sheets[sheet];
    this.node = document.createElement("section");
    this.node.className = "pane";
    const { file, name, block, blocks, causal } = this.sheet;
    this.add("h2").textContent = [file, name].filter(Boolean).join(": ");
    const mode = this.sheet.about.mode ? `mode ${this.sheet.about.mode}, ` : "";
    this.add("p").textContent = `${mode}${count(blocks)} x ${count(blocks)} blocks of ${block} tokens, ` +
      `${count(blocks * block)} tokens${causal ? ", causal" : ""}`;
    const shown = heads[sheet].filter((head) => chosen.head === "all" || head.said.numbers.includes(Number(chosen.head)));
    this.squares = shown.map((head) => new Square(this, head));
    const pictures = this.add("div");
    const frame = pictures.appendChild(document.createElement("div"));
    frame.className = `heads${shown.length === 1 ? " one" : ""}`;
    frame.append(...this.squares.map((square) => square.figure));
    this.range = pictures.appendChild(document.createElement("p"));
    this.range.className = "range";
    pictures.className = "pictures";
    this.pointer = this.add("dl");
    this.pointer.className = "pointer";
    const about = this.add("div");
    about.className = "about";
    about.append(this.waste(shown), this.keys());
    this.focus = this.squares[0];
  }

  add(tag) {
    return this.node.appendChild(document.createElement(tag));
  }

  walkNumber() {
    return this.sheet.heads[0].walks.findIndex((walk) => `${walk.side} ${walk.tile}` === chosen.tiles);
  }

  /* How much of what is walked is waste, in tiles of each kind. */
  waste(shown) {
    const frame = document.createElement("div");
    frame.className = "tables";
    if (this.sheet.noTiles) {
      frame.textContent = this.sheet.noTiles;
      return frame;
    }
    const table = frame.appendChild(document.createElement("table"));
    table.createCaption().textContent = `What tiles walk, ${shown.length > 1 ? "all these heads, each once" : shown[0].said.name}`;
    const head = table.createTHead().insertRow();
    for (const title of ["tiles", "entries", "walked blocks", "waste"]) {
      head.appendChild(document.createElement("th")).textContent = title;
    }
    shown[0].said.walks.forEach((walk, i) => {
      const total = (of) => shown.reduce((sum, { said }) => sum + of(said.walks[i]), 0);
      const walked = total((one) => one.walked), live = total((one) => one.live);
      const row = table.insertRow();
      const cellsOf = [kindOfTiles(walk), count(total((one) => one.entries)), count(walked), percent(walked ? 1 - live / walked : 0)];
      cellsOf.forEach((text) => { row.insertCell().textContent = text; });
    });
    return frame;
  }

  keys() {
    const details = document.createElement("details");
    details.appendChild(document.createElement("summary")).textContent = "The block of this layout";
    details.appendChild(document.createElement("pre")).textContent = JSON.stringify(this.sheet.about, null, 2);
    return details;
  }

  say() {
    const size = this.sheet.blocks * this.sheet.block;
    const from = (start) => `${count(Math.floor(start * size))}-${count(Math.ceil((start + view.size) * size) - 1)}`;
    this.range.textContent = `Seen: queries ${from(view.y)}, keys ${from(view.x)}`;
    const said = pointer && this.focus.head.places ? this.focus.describe() : [["block", "hover over a block"]];
    this.pointer.replaceChildren(...said.flatMap(([name, value]) => {
      const [term, text] = [document.createElement("dt"), document.createElement("dd")];
      term.textContent = name;
      text.textContent = value;
      return [term, text];
    }));
  }
}

const kindOfTiles = (walk) => `${walk.side}, ${walk.tile} tokens (${walk.by.join(", ")})`;
