function move(x, y, size) {
  const least = Math.min(1, LEAST_BLOCKS / Math.max(...chosen.sheets.map((sheet) => page.sheets[sheet].blocks)));
  view.size = Math.min(1, Math.max(least, size));
  view.x = Math.min(1 - view.size, Math.max(0, x));
  view.y = Math.min(1 - view.size, Math.max(0, y));
  draw();
}

/* Zooms so that the place stays where it is. */
function zoom(factor, at = { x: view.x + view.size / 2, y: view.y + view.size / 2 }) {
  const least = Math.min(1, LEAST_BLOCKS / Math.max(...chosen.sheets.map((sheet) => page.sheets[sheet].blocks)));
  const size = Math.min(1, Math.max(least, view.size * factor)), by = size / view.size;
  move(at.x - (at.x - view.x) * by, at.y - (at.y - view.y) * by, size);
}

function listen(square) {
  const node = square.square, fingers = new Map();
  const place = (event) => {
    const box = node.getBoundingClientRect();
    return {
      x: view.x + view.size * (event.clientX - box.left) / box.width,
      y: view.y + view.size * (event.clientY - box.top) / box.height,
    };
  };
  node.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(1.2 ** Math.sign(event.deltaY), place(event));
  }, { passive: false });
  node.addEventListener("dblclick", (event) => zoom(0.5, place(event)));
  node.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, event);
    node.setPointerCapture(event.pointerId);
  });
  for (const name of ["pointerup", "pointercancel"]) {
    node.addEventListener(name, (event) => fingers.delete(event.pointerId));
  }
  node.addEventListener("pointermove", (event) => {
    const before = fingers.get(event.pointerId), others = [...fingers.values()].filter((finger) => finger !== before);
    if (before && others.length) {
      const far = (one) => Math.hypot(one.clientX - others[0].clientX, one.clientY - others[0].clientY);
      if (far(event) > 0) zoom(far(before) / far(event), place(event));
    } else if (before) {
      const scale = view.size / node.getBoundingClientRect().width;
      move(view.x - (event.clientX - before.clientX) * scale, view.y - (event.clientY - before.clientY) * scale, view.size);
    }
    if (before) fingers.set(event.pointerId, event);
    point(square, place(event));
  });
  node.addEventListener("pointerleave", () => point(square, null));
  node.addEventListener("keydown", (event) => {
    const step = view.size / 8;
    const steps = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
    if (steps[event.key]) move(view.x + steps[event.key][0], view.y + steps[event.key][1], view.size);
    else if (event.key === "+" || event.key === "=") zoom(1 / 1.5);
    else if (event.key === "-") zoom(1.5);
    else if (event.key === "0") move(0, 0, 1);
    else return;
    event.preventDefault();
  });
}

/* The same place in all pictures. */
function point(square, place) {
  pointer = place;
  square.pane.focus = square;
  for (const pane of panes) {
    if (pane !== square.pane) {
      pane.focus = pane.squares.find(({ head }) => head.said.numbers.includes(square.head.said.numbers[0])) || pane.squares[0];
    }
    pane.squares.forEach((one) => one.point());
    pane.say();
  }
}

function draw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(async () => {
    asked = false;
    readPalette();
    const now = panes;
    for (const pane of now) {
      for (const square of pane.squares) {
        await square.draw();
        if (now !== panes) return;
      }
    }
    panes.forEach((pane) => pane.say());
    legend();
    remember();
    document.body.dataset.drawn = ++drawn;
  });
}

/* What is seen stands in the address, so that a reload, or who gets the address, sees it too. Inside of another page
   there is none. */
function remember() {
  if (location.protocol === "about:") return;
  const [left, right = ""] = chosen.sheets, { x, y, size } = view;
  const place = size < 1 ? { x: x.toFixed(7), y: y.toFixed(7), size: size.toFixed(7) } : {};
  history.replaceState(null, "", `#${new URLSearchParams({ left, right, head: chosen.head, tiles: chosen.tiles, ...place })}`);
}

function recall() {
  const second = page.sheets.findIndex((sheet) => sheet.file !== page.sheets[0].file);
  const said = new URLSearchParams(location.hash.slice(1));
  chosen.sheets = [said.get("left") ?? 0, said.get("right") ?? (second < 0 ? "" : second)];
  chosen.head = said.get("head") ?? "all";
  chosen.tiles = said.get("tiles") ?? "";
  const place = ["x", "y", "size"].map((name) => Number(said.get(name) ?? NaN));
  if (place.every(Number.isFinite)) [view.x, view.y, view.size] = place;
}

function legend() {
  const tiles = chosen.tiles !== "", causal = chosen.sheets.some((sheet) => page.sheets[sheet].causal);
  const parts = chosen.sheets.some((sheet) =>
    page.sheets[sheet].heads[0].walks.some((walk) => walk.parts > 1 && `${walk.side} ${walk.tile}` === chosen.tiles));
  const names = {
    live: "live block",
    waste: tiles && "walked for another row of the tile: waste, of which kernels leave out some",
    passed: parts && "left out by this half of the tile",
    masked: causal && "live, left out by causal attention",
  };
  element("legend").replaceChildren(...KINDS.filter((kind) => names[kind]).map((kind) => {
    const item = document.createElement("li"), swatch = item.appendChild(document.createElement("span"));
    swatch.className = "swatch";
    swatch.style.background = `var(--${kind})`;
    item.append(names[kind]);
    return item;
  }));
}

function options(id, entries, value) {
  const select = element(id);
  select.replaceChildren(...entries.map(([key, text]) => new Option(text, key)));
  select.value = entries.some(([key]) => String(key) === String(value)) ? value : entries[0][0];
  select.disabled = entries.length === 1;
  return select.value;
}

/* What can be chosen, and the panes, after a choice. */
function choose() {
  const names = page.sheets.map((sheet, i) => [i, [sheet.file, sheet.name].filter(Boolean).join(": ")]);
  const [left, right] = [options("left", names, chosen.sheets[0]), options("right", [["", "nothing"], ...names], chosen.sheets[1])];
  chosen.sheets = [left, right].filter((sheet) => sheet !== "").map(Number);
  const apart = chosen.sheets.some((sheet) => page.sheets[sheet].heads.length > 1);
  const all = chosen.sheets.map((sheet) => new Set(page.sheets[sheet].heads.flatMap((head) => head.numbers)));
  const alone = apart ? [...all[0]].filter((head) => all.every((one) => one.has(head))).sort((a, b) => a - b) : [];
  chosen.head = options("head", [["all", apart ? "all that differ" : page.sheets[chosen.sheets[0]].heads[0].name],
    ...alone.map((head) => [head, `head ${head}`])], chosen.head);
  const kinds = new Map(chosen.sheets.flatMap((sheet) =>
    page.sheets[sheet].heads[0].walks.map((walk) => [`${walk.side} ${walk.tile}`, kindOfTiles(walk)])));
  chosen.tiles = options("tiles", [["", kinds.size ? "not shown" : "too many blocks"], ...kinds], chosen.tiles);
  panes = chosen.sheets.map((sheet) => new Pane(sheet));
  element("panes").className = panes.length === 1 ? "alone" : "";
  element("panes").replaceChildren(...panes.map((pane) => pane.node));
  pointer = null;
  move(view.x, view.y, view.size);
}

element("notes").replaceChildren(...page.notes.map((note) => {
  const item = document.createElement("li");
  item.textContent = note;
  return item;
}));
element("left").addEventListener("change", (event) => { chosen.sheets[0] = event.target.value; choose(); });
element("right").addEventListener("change", (event) => { chosen.sheets[1] = event.target.value; choose(); });
element("head").addEventListener("change", (event) => { chosen.head = event.target.value; choose(); });
element("tiles").addEventListener("change", (event) => { chosen.tiles = event.target.value; choose(); });
element("in").addEventListener("click", () => zoom(0.5));
element("out").addEventListener("click", () => zoom(2));
element("whole").addEventListener("click", () => move(0, 0, 1));
element("controls").addEventListener("submit", (event) => event.preventDefault());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
addEventListener("resize", draw);
recall();
choose();
