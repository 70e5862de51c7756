"use strict";
(() => {
  const said = JSON.parse(document.getElementById("details").textContent);
  const tip = document.getElementById("tip");
  const panel = document.getElementById("panel");
  const picture = document.getElementById("picture");

  // ---- what is said of an op or a quantizer

  const element = (tag, text, name) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (name) made.className = name;
    return made;
  };
  const listed = (rows) => {
    const list = element("dl", undefined, "said");
    for (const [label, text] of rows) list.append(element("dt", label), element("dd", text));
    return list;
  };
  const places = new Map();
  for (const place of document.querySelectorAll("[data-key]")) {
    if (!places.has(place.dataset.key)) places.set(place.dataset.key, []);
    places.get(place.dataset.key).push(place);
  }
  const light = (place, on) => {
    if (!picture || place.dataset.place === undefined) return;
    const number = place.dataset.place;
    for (const edge of place.closest(".layout").querySelectorAll(`[data-from="${number}"], [data-to="${number}"]`)) edge.classList.toggle("lit", on);
  };
  const hint = (place) => {
    const found = said[place.dataset.key];
    if (!found) return;
    tip.replaceChildren(element("b", found.title), listed(found.rows));
    tip.hidden = false;
    const box = place.getBoundingClientRect();
    const size = tip.getBoundingClientRect();
    const left = box.left - size.width - 8;
    tip.style.left = `${left > 0 ? left : Math.max(4, Math.min(box.right + 8, innerWidth - size.width - 4))}px`;
    tip.style.top = `${Math.max(4, Math.min(box.top, innerHeight - size.height - 4))}px`;
    light(place, true);
  };
  const hide = (place) => {
    tip.hidden = true;
    if (place) light(place, false);
  };
  const choose = (key) => {
    const found = said[key];
    if (!found) return;
    const title = element("h3", found.title);
    title.append(element("span", found.kind, `status ${found.kind}`));
    panel.replaceChildren(title, listed(found.rows));
    for (const old of document.querySelectorAll(".chosen")) old.classList.remove("chosen");
    for (const place of places.get(key) ?? []) place.classList.add("chosen");
  };
  const act = (place) => {
    choose(place.dataset.key);
    if (!place.classList.contains("block")) return;
    const block = place.dataset.key.slice("block ".length);
    hide(place);
    unfold(block);
    const inside = [...layout().querySelectorAll(".node")].filter((node) => !elsewhere.has(node.dataset.key));
    fit(inside);
    inside[0]?.focus({ preventScroll: true });
    hide(inside[0]);
  };
  const graph = document.querySelector(".graph");
  const placeOf = (event) => event.target.closest("[data-key]");
  for (const [begin, end] of [["pointerover", "pointerout"], ["focusin", "focusout"]]) {
    graph.addEventListener(begin, (event) => placeOf(event) && hint(placeOf(event)));
    graph.addEventListener(end, (event) => placeOf(event) && hide(placeOf(event)));
  }
  let dragged = false;
  graph.addEventListener("click", (event) => {
    if (placeOf(event) && !dragged) act(placeOf(event));
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
    const place = placeOf(event);
    if (place && place.closest("svg") && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      act(place);
    }
  });
  document.addEventListener("click", (event) => {
    const link = event.target.closest("[data-show]");
    if (!link) return;
    const key = link.dataset.show;
    choose(key);
    const place = best(places.get(key) ?? []);
    document.getElementById("graph").scrollIntoView();
    if (place && picture) center(place);
    else if (place) place.scrollIntoView({ block: "center" });
  });

  // ---- zoom

  const layouts = picture ? [...picture.querySelectorAll(".layout")] : [];
  const layout = () => layouts.find((each) => !each.hasAttribute("hidden"));
  // What the folded layout shows is in every layout; an op of a block is in that of its block alone.
  const elsewhere = new Set(layouts.length ? [...layouts[0].querySelectorAll(".node")].map((node) => node.dataset.key) : []);
  const unfold = (block) => {
    for (const each of layouts) each.toggleAttribute("hidden", each.dataset.block !== block);
  };
  const best = (found) => found.find((place) => !picture || place.closest(".layout") === layout()) ?? found[0];
  let view;
  const set = (x, y, width, height) => {
    view = { x, y, width, height };
    picture.setAttribute("viewBox", `${x} ${y} ${width} ${height}`);
  };
  const start = () => {
    const all = picture.querySelector("g").parentNode.getBBox();
    const width = picture.clientWidth / 1.25;
    const height = picture.clientHeight / 1.25;
    const first = layout().querySelector(".node").getBBox();
    const middle = all.width < width ? all.x + all.width / 2 : first.x + first.width / 2;
    set(middle - width / 2, all.y - 8, width, height);
  };
  const everything = () => {
    const all = picture.getBBox();
    set(all.x - 8, all.y - 8, all.width + 16, all.height + 16);
  };
  const zoom = (factor, x, y) => {
    const width = Math.min(Math.max(view.width * factor, 40), 1e5);
    const ratio = width / view.width;
    const at = { x: x ?? view.x + view.width / 2, y: y ?? view.y + view.height / 2 };
    set(at.x - (at.x - view.x) * ratio, at.y - (at.y - view.y) * ratio, width, view.height * ratio);
  };
  const move = (x, y) => set(view.x + x, view.y + y, view.width, view.height);
  const fit = (nodes) => {
    if (!nodes.length) return everything();
    const boxes = nodes.map((node) => node.getBBox());
    const left = Math.min(...boxes.map((box) => box.x)) - 8;
    const top = Math.min(...boxes.map((box) => box.y)) - 8;
    const right = Math.max(...boxes.map((box) => box.x + box.width)) + 8;
    const bottom = Math.max(...boxes.map((box) => box.y + box.height)) + 8;
    set(left, top, right - left, bottom - top);
  };
  const center = (place) => {
    unfold(place.closest(".layout").dataset.block);
    const box = place.getBBox();
    if (picture.getScreenCTM().a < 0.8) start();
    set(box.x + box.width / 2 - view.width / 2, box.y + box.height / 2 - view.height / 2, view.width, view.height);
  };
  const point = (event) => new DOMPoint(event.clientX, event.clientY).matrixTransform(picture.getScreenCTM().inverse());
  if (picture) {
    if (layouts.length > 1) everything();
    else start();
    const steps = {
      "+": () => zoom(0.8), "=": () => zoom(0.8), "-": () => zoom(1.25), 0: everything, Home: start,
      ArrowLeft: () => move(-view.width / 10, 0), ArrowRight: () => move(view.width / 10, 0),
      ArrowUp: () => move(0, -view.height / 10), ArrowDown: () => move(0, view.height / 10),
    };
    picture.addEventListener("keydown", (event) => {
      if (!steps[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      steps[event.key]();
      hide();
    });
    picture.addEventListener("wheel", (event) => {
      event.preventDefault();
      const at = point(event);
      zoom(Math.exp(Math.sign(event.deltaY) * Math.min(Math.abs(event.deltaY), 100) * 0.002), at.x, at.y);
      hide();
    }, { passive: false });
    let from = null;
    picture.addEventListener("pointerdown", (event) => {
      from = point(event);
      dragged = false;
    });
    addEventListener("pointermove", (event) => {
      if (!from) return;
      const at = point(event);
      const scale = picture.getScreenCTM().a;
      if (!dragged && Math.hypot(at.x - from.x, at.y - from.y) * scale < 4) return;
      dragged = true;
      picture.classList.add("drag");
      move(from.x - at.x, from.y - at.y);
      hide();
    });
    addEventListener("pointerup", () => {
      from = null;
      picture.classList.remove("drag");
    });
    const actions = { in: () => zoom(0.8), out: () => zoom(1.25), all: everything, start, fold: () => { unfold(""); everything(); } };
    for (const button of document.querySelectorAll("[data-do]")) button.addEventListener("click", actions[button.dataset.do]);
    const find = document.getElementById("find");
    let latest = -1;
    const nodes = [...picture.querySelectorAll(".node")].filter((node) => !node.closest(".layout").dataset.block || !elsewhere.has(node.dataset.key));
    const next = () => {
      const wanted = find.value.trim().toLowerCase();
      if (!wanted) return;
      for (let i = 1; i <= nodes.length; i++) {
        const place = (latest + i + nodes.length) % nodes.length;
        if (`${said[nodes[place].dataset.key]?.title} ${nodes[place].textContent}`.toLowerCase().includes(wanted)) {
          latest = place;
          center(nodes[place]);
          choose(nodes[place].dataset.key);
          return;
        }
      }
    };
    find.addEventListener("input", () => { latest = -1; next(); });
    find.addEventListener("keydown", (event) => event.key === "Enter" && next());
  }

  // ---- tables and cards

  for (const button of document.querySelectorAll("th button")) {
    button.addEventListener("click", () => {
      const head = button.parentNode;
      const column = head.cellIndex;
      const body = head.closest("table").tBodies[0];
      const falling = head.getAttribute("aria-sort") ? head.getAttribute("aria-sort") === "ascending" : head.classList.contains("number");
      const value = (row) => {
        const cell = row.cells[column];
        if (cell.dataset.sort === undefined) return cell.textContent;
        return { inf: Infinity, "-inf": -Infinity }[cell.dataset.sort] ?? Number(cell.dataset.sort);
      };
      const order = (a, b) => (typeof a === "number" && typeof b === "number" ? (a < b ? -1 : Number(a > b)) : String(a).localeCompare(String(b), undefined, { numeric: true }));
      const rows = [...body.rows].map((row) => [value(row), row]);
      rows.sort((a, b) => (falling ? -1 : 1) * order(a[0], b[0]));
      body.append(...rows.map((pair) => pair[1]));
      for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", falling ? "descending" : "ascending");
    });
  }
  for (const input of document.querySelectorAll("[data-filter]")) {
    const target = document.getElementById(input.dataset.filter);
    input.addEventListener("input", () => {
      const wanted = input.value.trim().toLowerCase();
      for (const row of target.tBodies ? target.tBodies[0].rows : target.children) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    });
  }
  document.documentElement.dataset.ready = "yes";
})();
