"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("canvas");
  const panel = document.getElementById("panel");
  const svg = canvas.querySelector("svg");
  const all = (kind) => Array.from(svg.querySelectorAll(kind));
  const whole = svg.getAttribute("viewBox").split(" ").map(Number);
  let view = whole.slice();
  let chosen = null;

  // Looking at a part: the view box moves, so that lines and text stay sharp at any scale.
  const show = () => svg.setAttribute("viewBox", view.join(" "));
  const scale = () => Math.min(canvas.clientWidth / view[2], canvas.clientHeight / view[3]);
  const zoom = (factor, x, y) => {
    const wide = Math.min(Math.max(view[2] * factor, 120), whole[2] * 4);
    const by = wide / view[2];
    view = [x - (x - view[0]) * by, y - (y - view[1]) * by, wide, view[3] * by];
    show();
  };
  const middle = (factor) => zoom(factor, view[0] + view[2] / 2, view[1] + view[3] / 2);
  const fit = () => { view = whole.slice(); show(); };
  const at = (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    return [point.x, point.y];
  };
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(Math.exp(event.deltaY * 0.0015), ...at(event));
  }, { passive: false });
  let grabbed = null;
  canvas.addEventListener("pointerdown", (event) => { grabbed = { x: event.clientX, y: event.clientY, moved: false }; });
  window.addEventListener("pointermove", (event) => {
    if (!grabbed) return;
    const dx = event.clientX - grabbed.x, dy = event.clientY - grabbed.y;
    if (!grabbed.moved && Math.hypot(dx, dy) < 4) return;
    view[0] -= dx / scale();
    view[1] -= dy / scale();
    grabbed = { x: event.clientX, y: event.clientY, moved: true };
    canvas.classList.add("dragging");
    show();
  });
  window.addEventListener("pointerup", () => {
    canvas.classList.remove("dragging");
    // The click that follows a drag chooses nothing.
    const moved = grabbed && grabbed.moved;
    grabbed = null;
    if (moved) window.addEventListener("click", (event) => event.stopPropagation(), { capture: true, once: true });
  });
  document.getElementById("in").addEventListener("click", () => middle(0.8));
  document.getElementById("out").addEventListener("click", () => middle(1.25));
  document.getElementById("fit").addEventListener("click", fit);

  // A node in focus: its arrows and their other ends stay, the rest fades.
  const focus = (name) => {
    svg.classList.toggle("focus", name !== null);
    const near = new Set([name]);
    for (const part of all(".arrow, .label")) {
      const { from, to } = part.dataset;
      const lit = from === name || to === name;
      part.classList.toggle("lit", lit);
      if (lit) near.add(from).add(to);
    }
    for (const node of all(".node")) {
      node.classList.toggle("lit", near.has(node.dataset.name));
      node.classList.toggle("chosen", node.dataset.name === chosen);
    }
  };

  const make = (tag, text, kind) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (kind) element.className = kind;
    return element;
  };
  const button = (name) => {
    const element = make("button", data.nodes[name].title);
    element.addEventListener("click", () => choose(name));
    element.addEventListener("mouseenter", () => focus(name));
    element.addEventListener("mouseleave", () => focus(chosen));
    return element;
  };
  const list = (heading, names) => names.length ? [make("h2", heading), ...names.map(button)] : [];
  const ends = (mine, other) => (name) =>
    Array.from(new Set(all(".arrow").filter((a) => a.dataset[mine] === name).map((a) => a.dataset[other])));
  const sources = ends("to", "from"), readers = ends("from", "to");

  const describe = (name) => {
    if (name === null) {
      panel.replaceChildren(make("h1", data.title), make("p", data.doc, "soft"), ...list("Nodes", Object.keys(data.nodes)));
      return;
    }
    const node = data.nodes[name];
    const settings = make("dl");
    for (const [key, value] of node.details) {
      const cell = make("dd");
      cell.append(make("code", value));
      settings.append(make("dt", key), cell);
    }
    const where = make("p", undefined, "soft");
    where.append(make("code", node.at));
    panel.replaceChildren(
      make("h1", node.title), make("p", `${node.kind} · ${node.mesh}`, "soft"), where,
      ...(node.details.length ? [make("h2", "Settings"), settings] : []),
      ...list("Reads", sources(name)), ...list("Read by", readers(name)),
    );
    panel.scrollTop = 0;
  };
  const choose = (name) => { chosen = name; describe(name); focus(name); };

  for (const node of all(".node")) {
    const name = node.dataset.name;
    node.setAttribute("tabindex", "0");
    node.addEventListener("mouseenter", () => focus(name));
    node.addEventListener("mouseleave", () => focus(chosen));
    node.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(name); });
    node.addEventListener("click", (event) => { event.stopPropagation(); choose(name); });
  }
  canvas.addEventListener("click", () => choose(null));
  window.addEventListener("keydown", (event) => {
    if (event.key === "Escape") choose(null);
    else if (event.key === "0") fit();
    else if (event.key === "+" || event.key === "=") middle(0.8);
    else if (event.key === "-") middle(1.25);
  });
  choose(null);
})();
