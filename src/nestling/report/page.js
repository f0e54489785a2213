// A deadline for each gallery: drag it, and stages that would not have answered yet fade.
for (const gallery of document.querySelectorAll(".gallery")) {
  const { sizes, errors, times, n } = JSON.parse(gallery.dataset.facts);
  const measured = times.length === sizes.length;
  const end = measured ? times[times.length - 1] * 1.15 : sizes.length;
  const input = Object.assign(document.createElement("input"), { type: "range", min: 0, max: 1000, value: 1000 });
  const output = document.createElement("output");
  const label = document.createElement("label");
  label.append(measured ? "Deadline" : "Stages", input, output);
  gallery.querySelector(".slider").replaceChildren(label);
  const short = (ms) => (ms >= 0.1 ? `${Number(ms.toPrecision(3))} ms` : `${Number((ms * 1000).toPrecision(3))} µs`);
  const bold = (text) => Object.assign(document.createElement("b"), { textContent: text });
  const update = () => {
    const now = (end * input.value) / 1000;
    const done = measured ? times.filter((time) => time <= now).length : Math.floor(now);
    const when = measured ? `By ${short(now)} ` : "";
    const error = done ? `${(100 * errors[done - 1]).toFixed(2)} % error` : "";
    output.replaceChildren(
      ...(done
        ? [when, bold(sizes[done - 1]), " has answered: ", bold(error), ` on all ${n.toLocaleString("en")} images.`]
        : [when, bold("nothing is ready"), ": only a guess is left."]),
    );
    for (const said of gallery.querySelectorAll("li[data-stage]")) said.classList.toggle("later", said.dataset.stage > done);
    for (const card of gallery.querySelectorAll(".card")) card.classList.toggle("waiting", done === 0);
  };
  input.addEventListener("input", update);
  update();
}
