// Reads out the point of a plot that is nearest to the pointer. Without it the page loses nothing else.
for (const figure of document.querySelectorAll(".plot")) {
  const svg = figure.querySelector("svg"), cursor = figure.querySelector(".cursor");
  const told = figure.querySelector("output"), points = JSON.parse(figure.querySelector("script").textContent);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const near = points.reduce((best, point) => Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best);
    cursor.style.display = "inline";
    cursor.setAttribute("transform", `translate(${near[0]} 0)`);
    told.textContent = near[1];
  });
  svg.addEventListener("pointerleave", () => {
    cursor.style.display = "none";
    told.textContent = "step";
  });
}
