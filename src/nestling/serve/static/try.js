"use strict";
// The page at /: asks about a picture and shows every stage's answer as it comes. Nothing is fetched from elsewhere.
const $ = name => document.getElementById(name);
const shown = 3, points = 60, period = 1000;
let models = [], asked = 0, last = null, history = [], stream = null, switching = false;

function headers(more) {
  const token = sessionStorage.getItem("nestling-token");
  return token ? { ...more, Authorization: `Bearer ${token}` } : more;
}
async function get(path, options = {}) {
  const reply = await fetch(path, { ...options, headers: headers(options.headers || {}) });
  if (reply.status === 401) $("token-row").hidden = false;
  if (!reply.ok) throw new Error((await reply.json().catch(() => ({ error: reply.statusText }))).error);
  return reply;
}
const model = () => models.find(each => each.name === $("model").value);
const deadline = () => Math.round(10 * 10 ** (Number($("deadline").value) / 43.5)) / 10; // 1 to 199 ms
const complain = error => { $("verdict").className = "bad"; $("verdict").textContent = error.message; };
const tone = stage => `tone${Math.min(stage, 6)}`;

function make(kind, text = "", name = "") {
  const made = document.createElement(kind);
  made.textContent = text;
  made.className = name;
  return made;
}

async function begin() {
  models = await (await get("try/models")).json();
  $("token-row").hidden = true;
  $("model").replaceChildren(...models.map(each => new Option(each.name)));
  await choose();
}
async function choose() {
  history = [];
  const legend = ["no answer", ...model().sizes.map((size, place) => `stage ${place + 1} (${size})`)];
  $("legend").replaceChildren(...legend.map((text, stage) => {
    const entry = make("span", text);
    entry.prepend(make("i", "", tone(stage)));
    return entry;
  }));
  const late = make("span", "late");
  late.prepend(make("i", "", "late"));
  $("legend").append(late);
  const samples = await (await get(`try/samples/${encodeURIComponent(model().name)}`)).json();
  $("samples").replaceChildren(...samples.map(sample => {
    const button = make("button"), image = make("img");
    button.type = "button";
    button.setAttribute("aria-pressed", "false");
    image.src = sample.picture;
    image.alt = sample.name;
    button.append(image);
    button.onclick = async () => {
      for (const other of $("samples").children) other.setAttribute("aria-pressed", String(other === button));
      ask(await (await fetch(sample.picture)).blob(), `A picture of: ${sample.name}`);
    };
    return button;
  }));
  $("samples-title").hidden = !samples.length;
}

function row(reply) {
  const names = model().classes, said = Object.fromEntries(reply.outputs.map(each => [each.name, each.data]));
  const stage = reply.parameters.stage, entry = make("li", "", tone(stage));
  const title = `Stage ${stage} (${model().sizes[stage - 1]}) after ${reply.parameters.elapsed_ms.toFixed(1)} ms: ${said.class[0]}`;
  entry.append(make("strong", title));
  const best = said.probabilities.map((value, place) => [value, names[place]]).sort((a, b) => b[0] - a[0]).slice(0, shown);
  for (const [value, name] of best) {
    const bar = make("div", "", "bar"), track = make("span", "", "track"), fill = make("span", "", "fill");
    fill.style.width = `${100 * value}%`;
    track.append(fill);
    bar.append(make("span", name), track, make("span", `${(100 * value).toFixed(1)} %`));
    entry.append(bar);
  }
  return entry;
}

// From when on there was which answer: [milliseconds, stage], until the deadline.
function lane(name, answers, end, said) {
  const bar = make("div", "", "bar"), track = make("span", "", "track");
  [[0, 0], ...answers].forEach(([from, stage], place, all) => {
    const until = place + 1 < all.length ? all[place + 1][0] : end;
    const part = make("span", "", stage ? `fill ${tone(stage)}` : "");
    part.style.width = `${100 * (until - from) / end}%`;
    track.append(part);
  });
  bar.append(make("span", name), track, make("span", said));
  return bar;
}
function compare(replies, limit) {
  const answers = replies.map(each => [each.parameters.elapsed_ms, each.parameters.stage]);
  const end = Math.max(limit, ...answers.map(each => each[0])), names = replies.map(each => each.outputs.find(out => out.name === "class").data[0]);
  const whole = answers.filter(each => each[1] === model().sizes.length);
  $("lanes").replaceChildren(
    lane("this network", answers, end, names.length ? names[names.length - 1] : "nothing"),
    lane("ordinary one", whole, end, whole.length ? names[names.length - 1] : "nothing"));
  $("end").textContent = `${end.toFixed(0)} ms`;
  $("ordinary").textContent = whole.length
    ? `A network that answers only at its end, as ordinary ones do, had said nothing before ${whole[0][0].toFixed(1)} ms.`
    : "A network that answers only at its end, as ordinary ones do, had said nothing by then.";
  $("times").hidden = false;
}

async function ask(blob, alt) {
  const mine = ++asked, limit = deadline();
  last = [blob, alt];
  if (stream) stream.abort();
  stream = new AbortController();
  URL.revokeObjectURL($("picture").src);
  $("picture").src = URL.createObjectURL(blob);
  $("picture").alt = alt;
  $("picture").hidden = false;
  $("stages").replaceChildren();
  $("times").hidden = true;
  const replies = [];
  try {
    const path = `v2/models/${encodeURIComponent(model().name)}/infer`;
    const options = { method: "POST", body: blob, signal: stream.signal };
    options.headers = { Accept: "text/event-stream", "Content-Type": blob.type, "Nestling-Deadline-Ms": String(limit) };
    const reply = await get(path, options), reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let text = "", part; !(part = await reader.read()).done;) {
      text += part.value;
      for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
        const message = text.slice(0, end), found = JSON.parse(message.slice(message.indexOf("data: ") + 6));
        if (mine !== asked) return;
        if (found.error) throw new Error(found.error);
        const said = Object.fromEntries(found.outputs.map(each => [each.name, each.data]));
        if (model().classes[said.label[0]] !== said.class[0]) models = await (await get("try/models")).json(); // opened anew
        if (mine !== asked) return;
        replies.push(found);
        $("stages").append(row(found));
      }
    }
    const answer = replies[replies.length - 1];
    if (mine !== asked || !answer) return;
    const said = answer.outputs.find(each => each.name === "class").data[0], at = answer.parameters;
    const end = at.final ? "and nothing better can come" : "the best there was by the deadline";
    $("verdict").textContent = `${said}, ${(100 * at.confidence).toFixed(0)} % sure: stage ${at.stage} of ${model().sizes.length} after ${at.elapsed_ms.toFixed(1)} ms, ${end} (${limit} ms).`;
    $("verdict").className = "";
  } catch (error) {
    if (error.name === "AbortError" || mine !== asked) return;
    const late = error.message.startsWith("no stage");
    $("verdict").className = "bad";
    $("verdict").textContent = late ? `No answer: no stage was done by the deadline (${limit} ms).` : error.message;
    if (!late) return;
  }
  compare(replies, limit);
}

function chart(found) {
  history.push(found);
  history = history.slice(-points);
  const width = 600 / points, parts = [], most = Math.max(1, ...history.map(each => each.requests));
  function bar(place, top, count, name) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const at = { x: place * width, y: top, width: width - 1, height: 160 * count / most };
    for (const [key, value] of Object.entries(at)) made.setAttribute(key, value.toFixed(2));
    made.setAttribute("class", name);
    parts.push(made);
  }
  history.forEach((each, index) => {
    const place = points - history.length + index;
    let top = 160;
    each.stages.forEach((count, stage) => { if (count) bar(place, top -= 160 * count / most, count, tone(stage)); });
    if (each.late) bar(place, top, each.late, "late");
  });
  if (!switching) $("busy").checked = found.busy;
  $("top").textContent = `height: up to ${(most / found.seconds).toFixed(most < 10 * found.seconds ? 1 : 0)} requests a second`;
  $("chart").replaceChildren($("chart").querySelector("title"), ...parts);
  const rate = (found.requests / found.seconds).toFixed(1);
  $("load").textContent = found.requests
    ? `${rate} requests a second in the last ${found.seconds} s; half of them took at most ${found.median_ms.toFixed(1)} ms, 99 of 100 at most ${found.p99_ms.toFixed(1)} ms; ${found.late} came late.`
    : `No requests in the last ${found.seconds} s.`;
}
async function look() {
  try {
    if (models.length && !document.hidden) chart(await (await get(`try/summary/${encodeURIComponent(model().name)}`)).json());
  } catch { $("load").textContent = "The server does not answer."; }
  setTimeout(look, period);
}

// --- own pictures ----------------------------------------------------------------------------------------------------
const paper = $("paper"), pen = paper.getContext("2d"), video = $("video");
let drawing = false;
function wipe() { // digits are often light on dark, and a network knows no other
  const dark = model().dark;
  paper.classList.toggle("dark", dark);
  pen.fillStyle = dark ? "#000" : "#fff";
  pen.strokeStyle = dark ? "#fff" : "#000";
  pen.fillRect(0, 0, paper.width, paper.height);
}
function close() {
  for (const track of video.srcObject ? video.srcObject.getTracks() : []) track.stop();
  video.srcObject = null;
  $("studio").hidden = video.hidden = paper.hidden = true;
}
function open(element) {
  close();
  $("studio").hidden = element.hidden = false;
  $("clear").hidden = element !== paper;
  $("take").focus();
}
$("draw").onclick = () => { open(paper); wipe(); };
$("camera").onclick = async () => {
  try {
    if (!navigator.mediaDevices) throw new Error("browsers lend it to https and to this machine only");
    const camera = await navigator.mediaDevices.getUserMedia({ video: true });
    open(video);
    video.srcObject = camera;
    await video.play();
  } catch (error) { $("verdict").textContent = `No camera: ${error.message}`; }
};
paper.onpointerdown = event => { drawing = true; paper.setPointerCapture(event.pointerId); pen.beginPath(); stroke(event); };
paper.onpointermove = event => { if (drawing) stroke(event); };
paper.onpointerup = () => { drawing = false; };
function stroke(event) {
  const box = paper.getBoundingClientRect(), scale = paper.width / box.width;
  pen.lineWidth = Math.max(18, 1.3 * paper.width / model().side); // a thinner line is none in a picture of 8 x 8
  pen.lineCap = pen.lineJoin = "round";
  pen.lineTo((event.clientX - box.left) * scale, (event.clientY - box.top) * scale);
  pen.stroke();
}
$("clear").onclick = wipe;
$("close").onclick = close;
$("take").onclick = () => {
  if (!video.hidden) {
    const side = Math.min(video.videoWidth, video.videoHeight);
    const left = (video.videoWidth - side) / 2, top = (video.videoHeight - side) / 2;
    pen.drawImage(video, left, top, side, side, 0, 0, paper.width, paper.height);
  }
  paper.toBlob(blob => ask(blob, "Your own picture"), "image/png");
};
$("file").onchange = () => { if ($("file").files[0]) ask($("file").files[0], $("file").files[0].name); };

$("model").onchange = () => choose().catch(complain);
$("deadline").oninput = () => { $("deadline-text").value = `${deadline()} ms`; };
$("deadline").onchange = () => { if (last) ask(...last); };
$("token-row").onsubmit = event => {
  event.preventDefault();
  sessionStorage.setItem("nestling-token", $("token").value);
  begin().then(() => {
    $("verdict").className = "";
    $("verdict").textContent = "Nothing has been asked yet.";
  }, complain);
};
$("busy").onchange = async () => {
  switching = true;
  try {
    await get(`try/busy/${encodeURIComponent(model().name)}?on=${$("busy").checked}`, { method: "POST" });
  } catch (error) { complain(error); }
  switching = false;
};
$("deadline").oninput();
begin().then(look, error => { complain(error); look(); });
