const FREE = 0, CACHED = 1, REQUEST = 2, TAIL = 3, SHARED = 4, LOADING = 5;
const KEPT = 256, MOST_CELLS = 65536, LINES = 400;

export default function (component) {
  const root = component.parentElement.querySelector(".pool");
  if (!root.view) root.view = new View(root);
  root.view.update(component);
  return () => root.view && root.view.stop();
}

function numbers(text) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new Int32Array(bytes.buffer);
}

class View {
  constructor(root) {
    this.$ = (name) => root.querySelector(name);
    this.root = root;
    this.canvas = this.$("canvas");
    this.frame = 0; this.playing = false; this.key = null; this.token = null; this.over = -1;
    for (const [rate, text] of [[2, "2 frames/s"], [10, "10 frames/s"], [60, "60 frames/s"],
                                [300, "300 frames/s"], [1500, "1,500 frames/s"]]) {
      const option = document.createElement("option");
      option.value = rate; option.textContent = text;
      this.$(".speed").append(option);
    }
    this.$(".play").onclick = () => this.playing ? this.stop(true) : this.play();
    this.$(".back").onclick = () => { this.stop(); this.go(this.frame - 1); this.tell(); };
    this.$(".next").onclick = () => this.next();
    this.$(".scrub").oninput = (e) => { this.stop(); this.go(Number(e.target.value)); };
    this.$(".scrub").onchange = () => this.tell();
    this.canvas.onmousemove = (e) => { this.over = this.cellAt(e); this.hint(); };
    this.canvas.onmouseleave = () => { this.over = -1; this.hint(); };
    this.canvas.onclick = (e) => this.click(e);
    new ResizeObserver(() => this.layout()).observe(this.$(".left"));
  }

  update(component) {
    this.component = component;
    const data = component.data;
    if (data.key !== this.key) this.load(data);
    this.chosen = data.chosen;
    if (data.token !== this.token) {
      this.token = data.token;
      this.stop();
      this.go(data.at - this.data.offset);
      if (data.autoplay || this.resume) this.play();
      this.resume = false;
    } else this.draw(true);
  }

  load(data) {
    this.stop();
    const grows = this.key !== null && data.grows && data.grows === this.data.grows;
    this.key = data.key; this.data = data; this.token = null;
    this.changes = numbers(data.changes); this.change = numbers(data.change);
    this.first = numbers(data.first); this.steps = numbers(data.steps);
    this.kept = new Map([[-1, numbers(data.before)]]);
    this.cells = this.kept.get(-1).slice();
    this.count = this.steps.length;
    // Nothing may outlive the frames and blocks that it counts: there may be fewer now.
    clearTimeout(this.telling);
    this.frame = 0; this.shown = -1; this.over = -1;
    this.$(".scrub").max = Math.max(this.count - 1, 0);
    this.$(".speed").value = grows ? this.$(".speed").value : String(data.speed);
    this.per = Math.ceil(data.blocks / MOST_CELLS);
    this.number = Math.ceil(data.blocks / this.per);
    this.layout();
  }

  // ---- time

  play() {
    if (this.frame >= this.count - 1 && !this.more()) this.go(0);
    this.playing = true;
    this.$(".play").textContent = "Pause";
    let last = performance.now(), due = 0;
    const tick = (now) => {
      if (!this.playing) return;
      if (!this.root.isConnected) return this.stop();
      due += (now - last) / 1000 * Number(this.$(".speed").value);
      last = now;
      const whole = Math.floor(due);
      due -= whole;
      if (whole) this.go(this.frame + whole);
      if (this.frame >= this.count - 1) {
        this.resume = this.more();
        return this.stop(!this.resume);
      }
      requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  }

  // Asks for the next part of the replay, where this one is at its end. False: it is not, or there is none.
  more() {
    const next = this.data.offset + this.count;
    if (this.frame < this.count - 1 || next >= this.data.total) return false;
    this.component.setStateValue("frame", next);
    return true;
  }

  stop(tell) {
    if (!this.playing) return;
    this.playing = false;
    this.$(".play").textContent = "Play";
    if (tell) this.tell();
  }

  // Python hears of a frame once one rests on it.
  tell() {
    clearTimeout(this.telling);
    const frame = this.frame + this.data.offset;
    this.telling = setTimeout(() => this.component.setStateValue("frame", frame), 250);
  }

  next() {
    this.stop();
    if (this.more()) return;
    this.go(this.frame + 1);
    this.tell();
  }

  go(frame) {
    this.frame = Math.max(0, Math.min(frame, this.count - 1));
    this.seek();
    this.draw();
  }

  // Brings the cells to the frame: forward by its changes, from a kept picture where that is nearer.
  seek() {
    if (!this.count) return;
    if (this.frame < this.shown || this.frame - this.shown > KEPT) {
      let from = Math.floor(this.frame / KEPT) * KEPT;
      while (from >= 0 && !this.kept.has(from)) from -= KEPT;
      if (from < 0) from = -1;
      if (this.frame < this.shown || from > this.shown) {
        this.cells.set(this.kept.get(from));
        this.shown = from;
      }
    }
    while (this.shown < this.frame) {
      const f = ++this.shown, c = this.changes;
      for (let i = 3 * this.change[f]; i < 3 * this.change[f + 1]; i += 3)
        this.cells.fill(c[i + 2], c[i], c[i] + c[i + 1]);
      if (f % KEPT === 0 && !this.kept.has(f) && this.kept.size * this.data.blocks < 3e7)
        this.kept.set(f, this.cells.slice());
    }
  }

  // ---- the picture

  layout() {
    if (!this.data) return;
    const width = Math.max(this.$(".left").clientWidth, 120), tall = this.number > 4096 ? 460 : 360;
    let size = Math.floor(Math.sqrt(width * tall / this.number));
    this.size = size = Math.max(2, Math.min(size, 34));
    this.columns = Math.max(1, Math.floor(width / size));
    if (this.columns > 16) this.columns -= this.columns % 8;
    this.rows = Math.ceil(this.number / this.columns);
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = this.columns * size * ratio; this.canvas.height = this.rows * size * ratio;
    this.canvas.style.width = this.columns * size + "px"; this.canvas.style.height = this.rows * size + "px";
    this.$(".log").style.height = Math.max(this.rows * size, 180) + "px";
    this.pen = this.canvas.getContext("2d");
    this.pen.scale(ratio, ratio);
    this.drawn = null;
    this.draw(true);
  }

  // What a cell shows: its block, or of several blocks what most of them are.
  value(cell) {
    if (this.per === 1) return this.cells[cell];
    const seen = [0, 0, 0, 0, 0, 0], one = [0, 0, 0, 0, 0, 0];
    const end = Math.min((cell + 1) * this.per, this.data.blocks);
    for (let b = cell * this.per; b < end; b++) {
      const look = this.cells[b] & 7;
      seen[look]++; one[look] = this.cells[b];
    }
    return one[seen.indexOf(Math.max(...seen))];
  }

  draw(all) {
    if (!this.pen || !this.data) return;
    if (all || !this.drawn) {
      this.drawn = new Int32Array(this.number).fill(-1);
      this.pen.clearRect(0, 0, this.columns * this.size, this.rows * this.size);
    }
    const style = getComputedStyle(this.root);
    this.ink = style.getPropertyValue("--st-text-color") || "#888";
    for (let cell = 0; cell < this.number; cell++) {
      const value = this.value(cell);
      if (value !== this.drawn[cell]) { this.paint(cell, value); this.drawn[cell] = value; }
    }
    this.mark();
    this.words();
  }

  color(value) {
    const look = value & 7, colors = this.data.colors;
    if (look === REQUEST || look === TAIL) return colors.requests[(value >> 3) % colors.requests.length];
    return colors[["free", "cached", "", "", "shared", "loading"][look]];
  }

  // Told apart by form as well, where a cell has room: cached hollow, tail half full, shared with a bar.
  paint(cell, value) {
    const { pen, size } = this, look = value & 7, gap = size >= 6 ? 1 : 0, s = size - gap;
    const x = (cell % this.columns) * size, y = Math.floor(cell / this.columns) * size;
    pen.clearRect(x, y, size, size);
    pen.fillStyle = this.color(value);
    if (look === TAIL) {
      pen.fillStyle = this.data.colors.tail;
      pen.fillRect(x, y, s, s);
      pen.fillStyle = this.color(value);
      if (size >= 6) pen.fillRect(x, y + s / 2, s, s - s / 2);
    } else if (look === CACHED && size >= 8) {
      pen.fillRect(x, y, s, s);
      pen.clearRect(x + 2, y + 2, s - 4, s - 4);
    } else pen.fillRect(x, y, s, s);
    if (look === SHARED && size >= 8) {
      pen.fillStyle = "#000";
      pen.fillRect(x, y + s - 3, s, 2);
    }
    if (size >= 20 && look !== FREE) this.letter(x, y, s, value);
  }

  letter(x, y, s, value) {
    const { pen } = this, look = value & 7, who = value >> 3;
    const text = look === SHARED ? "×" + who : this.name(who);
    pen.font = Math.round(s * (text.length > 2 ? 0.32 : 0.46)) + "px sans-serif";
    pen.textAlign = "center"; pen.textBaseline = "middle";
    pen.fillStyle = look === CACHED ? this.ink : "#000";
    pen.fillText(text, x + s / 2, y + s / 2 + 1, s - 2);
  }

  mark() {
    if (this.chosen === null || this.chosen === undefined) return;
    const cell = Math.floor(this.chosen / this.per), { pen, size } = this;
    const x = (cell % this.columns) * size, y = Math.floor(cell / this.columns) * size;
    pen.strokeStyle = this.ink; pen.lineWidth = 2;
    pen.strokeRect(x - 1, y - 1, size + 1, size + 1);
    this.drawn[cell] = -1;
    for (const near of [cell - 1, cell + 1, cell - this.columns, cell + this.columns])
      if (near >= 0 && near < this.number) this.drawn[near] = -1;
  }

  // ---- words

  name(number) { return this.data.names ? this.data.names[number] : String(number); }

  text(value) {
    const look = value & 7, who = value >> 3;
    if (look === FREE) return "free";
    if (look === CACHED) return "cached, written by request " + this.name(who);
    if (look === SHARED) return "shared by " + who + " requests";
    if (look === LOADING) return "request " + this.name(who) + ", being loaded from host memory";
    return "request " + this.name(who) + (look === TAIL ? ", its last block, partly full" : "");
  }

  words() {
    const n = this.count, seen = [0, 0, 0, 0, 0, 0];
    for (let b = 0; b < this.data.blocks; b++) seen[this.cells[b] & 7]++;
    const step = n ? this.steps[this.frame] : 0;
    const time = this.data.times && n ? this.data.times[this.frame] : null;
    this.$(".where").textContent = n
      ? "Step " + step.toLocaleString("en") + (time === null ? "" : ", at " + time.toFixed(3) + " s") +
        " (frame " + (this.frame + this.data.offset + 1).toLocaleString("en") + " of " +
        this.data.total.toLocaleString("en") + ")" +
        (this.per > 1 ? "; a cell is " + this.per + " blocks, and shows what most of them are" : "")
      : "Nothing has happened yet";
    this.$(".scrub").value = this.frame;
    this.$(".back").disabled = this.frame <= 0;
    this.$(".next").disabled = this.frame + this.data.offset >= this.data.total - 1;
    this.$(".play").disabled = this.data.total < 2;
    this.legend(seen);
    this.log();
    this.hint();
  }

  legend(seen) {
    const box = this.$(".legend"), colors = this.data.colors;
    if (!box.children.length) {
      for (const look of this.data.looks) {
        const item = document.createElement("span"), chip = document.createElement("canvas");
        chip.width = chip.height = 14;
        item.append(chip, document.createElement("span"));
        item.title = look.help;
        box.append(item);
        const real = this.pen, size = this.size, columns = this.columns;
        this.pen = chip.getContext("2d"); this.size = 14; this.columns = 1;
        this.paint(0, look.value);
        this.pen = real; this.size = size; this.columns = columns;
      }
    }
    this.data.looks.forEach((look, i) => {
      box.children[i].lastChild.textContent = look.name + ": " + seen[look.value & 7].toLocaleString("en");
    });
  }

  log() {
    const end = this.count ? this.first[this.frame + 1] : 0, begin = Math.max(0, end - LINES);
    const box = this.$(".log");
    box.textContent = this.data.log.slice(begin, end).reverse().join("\n");
    box.scrollTop = 0;
  }

  hint() {
    if (this.over < 0) {
      this.$(".hint").textContent = "Point at a block to see whose it is; click it for its chain.";
      return;
    }
    const block = this.over * this.per, last = Math.min(block + this.per, this.data.blocks) - 1;
    const name = last > block ? "Blocks " + block.toLocaleString("en") + " to " + last.toLocaleString("en") +
      ", mostly" : "Block " + block.toLocaleString("en");
    this.$(".hint").textContent = name + ": " + this.text(this.value(this.over));
  }

  cellAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.size);
    const cell = Math.floor((event.clientY - box.top) / this.size) * this.columns + column;
    return column >= 0 && column < this.columns && cell >= 0 && cell < this.number ? cell : -1;
  }

  click(event) {
    const cell = this.cellAt(event);
    if (cell < 0) return;
    this.stop();
    const block = cell * this.per;
    this.chosen = block;
    this.draw(true);
    clearTimeout(this.telling);
    this.component.setStateValue("frame", this.frame + this.data.offset);
    this.component.setStateValue("block", block);
  }
}
