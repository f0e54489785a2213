// Exported stages by hand, in JavaScript with onnxruntime-node alone: every stage's answer until time is up.
//
// node stages.mjs FOLDER SECONDS < pixels     // float32, normalised, in the order C,H,W; prints "stage class" lines

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { createRequire } from "node:module";

const ort = createRequire(join(process.cwd(), "_"))("onnxruntime-node");  // of the folder where this is started
const [folder, seconds] = process.argv.slice(2);
const manifest = JSON.parse(readFileSync(join(folder, "manifest.json"), "utf8"));
const open = (stage) => ort.InferenceSession.create(join(folder, stage.file));
const sessions = await Promise.all(manifest.stages.map(open));
const pixels = new Float32Array(new Uint8Array(readFileSync(0)).buffer);
let values = { input: new ort.Tensor("float32", pixels, [1, ...manifest.network.shape]) };
const began = performance.now();
for (const [index, stage] of manifest.stages.entries()) {
  const taken = Object.fromEntries(stage.takes.map((name) => [name, values[name]]));
  values = { ...values, ...(await sessions[index].run(taken, ["logits", ...stage.gives])) };
  const logits = values.logits.data;
  console.log(stage.stage, logits.indexOf(Math.max(...logits)));
  if ((performance.now() - began) / 1000 >= Number(seconds)) break;
}
