"""Style sheet and script of report.html.

The script adds one thing to the charts: the values under the pointer. Without it the page is complete.
"""

# Colours by name, for light and dark screens.
LIGHT = {
    "page": "#f9f9f7", "card": "#ffffff", "line": "#e2e1dc", "grid": "#eceae5", "ink": "#1a1a19", "soft": "#5f5e5a",
    "warn": "#8a4b00", "c1": "#2a78d6", "c2": "#e0562a", "c3": "#1a9e6e", "c4": "#d99100", "c5": "#c65a8c",
    "c6": "#8a8f98", "c7": "#7a5cc4", "c8": "#3aa8b8", "l1": "#b7d3f6", "l2": "#86b6ef", "l3": "#3987e5",
    "l4": "#184f95", "h0": "#eeede8", "h1": "#f5c3bd", "h2": "#ec9087", "h3": "#d94a44", "h4": "#96221f",
    "on-pale": "#1a1a19", "on-strong": "#ffffff",
}  # fmt: skip
DARK = {
    "page": "#141413", "card": "#1d1d1b", "line": "#3a3935", "grid": "#2c2b28", "ink": "#f2f1ec", "soft": "#a9a8a1",
    "warn": "#f0b357", "c1": "#4b93ea", "c2": "#e8693f", "c3": "#22b07d", "c4": "#d99a1a", "c5": "#dd7aa6",
    "c6": "#9aa0aa", "c7": "#9a80dc", "c8": "#4fc0cf", "l1": "#20406a", "l2": "#28609f", "l3": "#4b93ea",
    "l4": "#9cc7f7", "h0": "#383733", "h1": "#5f302d", "h2": "#97423d", "h3": "#e3645e", "h4": "#f7b3ae",
    "on-pale": "#f2f1ec", "on-strong": "#141413",
}  # fmt: skip


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


STYLE = (
    f":root {{ color-scheme: light dark; {_variables(LIGHT)} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}"
    """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 24px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 12px; }
p { margin: 4px 0; }
.soft, .note { color: var(--soft); }
.note { font-size: 13px; margin-top: 6px; }
.notices { margin: 14px 0 0; padding: 10px 14px 10px 30px; border: 1px solid var(--warn); border-radius: 6px; }
.notices li { overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(160px, 1fr)); gap: 10px; margin-top: 18px; }
.tile, figure, .table { background: var(--card); border: 1px solid var(--line); border-radius: 6px; }
.tile { padding: 10px 12px; }
.tile b { display: block; font-size: 22px; font-weight: 600; line-height: 1.25; }
.tile span { font-size: 13px; color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; }
.charts > .table { align-self: start; max-height: 420px; overflow: auto; }
figure { margin: 0; padding: 12px 12px 8px; min-width: 0; position: relative; }
figcaption { font-weight: 600; margin-bottom: 2px; }
svg { display: block; width: 100%; height: auto; touch-action: pan-y; }
.empty { color: var(--soft); padding: 30px 0; text-align: center; }
.legend, .scale { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 13px; color: var(--soft); }
.scale { gap: 4px 2px; margin: 4px 0 12px; }
.swatch { width: 62px; text-align: center; font-size: 12px; }
.swatch i { display: block; height: 12px; border: 1px solid var(--line); }
.key { display: inline-flex; align-items: center; gap: 6px; }
.key i { width: 16px; height: 3px; background: currentColor; display: inline-block; }
.key i.faint { opacity: .4; }
.key i.points { width: 9px; height: 9px; border-radius: 50%; }
.key i.bar { width: 12px; height: 12px; border-radius: 2px; }
.key i.flags { width: 0; height: 0; background: none; border: 5px solid transparent; border-top: 8px solid; }
.c1 { color: var(--c1); }
.c2 { color: var(--c2); }
.c3 { color: var(--c3); }
.c4 { color: var(--c4); }
.c5 { color: var(--c5); }
.c6 { color: var(--c6); }
.c7 { color: var(--c7); }
.c8 { color: var(--c8); }
path.line, path.faint, path.points { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; }
path.faint { stroke-width: 1; opacity: .45; }
path.points { stroke-width: 1; }
path.bar, path.flags, circle { fill: currentColor; }
path.bar { shape-rendering: crispEdges; }
.grid { stroke: var(--grid); } .axis { stroke: var(--soft); }
.frame { fill: none; stroke: var(--line); }
.cursor { stroke: var(--soft); stroke-dasharray: 3 3; }
text { font-size: 12px; fill: var(--soft); }
.end { text-anchor: end; } .mid { text-anchor: middle; }
.cell { shape-rendering: crispEdges; }
.cell.gap { stroke: var(--card); stroke-width: 2; }
.none { fill: none; background: none; }
.l1 { fill: var(--l1); background: var(--l1); }
.l2 { fill: var(--l2); background: var(--l2); }
.l3 { fill: var(--l3); background: var(--l3); }
.l4 { fill: var(--l4); background: var(--l4); }
.h0 { fill: var(--h0); background: var(--h0); }
.h1 { fill: var(--h1); background: var(--h1); }
.h2 { fill: var(--h2); background: var(--h2); }
.h3 { fill: var(--h3); background: var(--h3); }
.h4 { fill: var(--h4); background: var(--h4); }
.value { fill: var(--on-pale); }
.l3.value, .l4.value, .h3.value, .h4.value { fill: var(--on-strong); }
.tip { position: absolute; z-index: 1; pointer-events: none; padding: 4px 8px; font-size: 12px; white-space: nowrap;
  background: var(--card); border: 1px solid var(--line); border-radius: 4px; box-shadow: 0 2px 8px rgb(0 0 0 / .15); }
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 5px 12px; border-bottom: 1px solid var(--line); vertical-align: top; }
td:nth-child(2), td:nth-child(3) { overflow-wrap: anywhere; }
.table .note { padding: 0 12px 8px; }
tr:last-child td { border-bottom: 0; }
th { color: var(--soft); font-weight: 500; vertical-align: bottom; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number { white-space: nowrap; }
tr.changed td:first-child { white-space: nowrap; }
tr.changed td:first-child::before { content: "\\25CF  "; color: var(--c2); }
code { font: 13px ui-monospace, monospace; }
details { margin-top: 12px; }
summary { cursor: pointer; color: var(--soft); margin-bottom: 8px; }
@media (max-width: 760px) {
  main { padding: 16px 12px 32px; }
  .charts { grid-template-columns: minmax(0, 1fr); }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .tile b { font-size: 19px; }
  figure { padding: 10px 8px 6px; }
  th, td { padding: 5px 8px; }
}
@media (max-width: 480px) {
  text { font-size: 17px; }
  text.value { font-size: 14px; }
}
"""
)

SCRIPT = """
for (const svg of document.querySelectorAll("svg[data-values]")) {
  const {series, plot: [left, width, top, height, low, high]} = JSON.parse(svg.dataset.values);
  const cursor = document.createElementNS(svg.namespaceURI, "path");
  cursor.setAttribute("class", "cursor");
  const tip = document.createElement("div");
  tip.className = "tip";
  const hide = () => { tip.remove(); cursor.remove(); };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    const at = low + ((event.clientX - box.left) / scale - left) / width * (high - low);
    const lines = [];
    let step = null;
    for (const [name, x, y] of series) {
      let best = -1;
      x.forEach((value, i) => {
        if (y[i] !== null && (best < 0 || Math.abs(value - at) < Math.abs(x[best] - at))) best = i;
      });
      if (best < 0) continue;
      if (step === null) { step = x[best]; lines.push("step " + step.toLocaleString("en")); }
      const where = x[best] === step ? "" : " (step " + x[best].toLocaleString("en") + ")";
      lines.push(name + ": " + y[best].toLocaleString("en", {maximumSignificantDigits: 4}) + where);
    }
    if (step === null || at < low || at > high) return hide();
    const x = left + (step - low) / (high - low) * width;
    cursor.setAttribute("d", `M${x} ${top}v${height}`);
    svg.append(cursor);
    tip.replaceChildren(...lines.map(line => Object.assign(document.createElement("div"), {textContent: line})));
    svg.parentNode.append(tip);
    const card = svg.parentNode.getBoundingClientRect(), x_px = box.left - card.left + x * scale;
    const right = x_px + 12 + tip.offsetWidth < card.width;
    tip.style.left = Math.max(4, right ? x_px + 12 : x_px - 12 - tip.offsetWidth) + "px";
    tip.style.top = box.top - card.top + top * scale + "px";
  });
}
"""
