// Run exported models in transformers.js, as `tests/onnx/test_transformersjs.py` asks.
//
// Usage: node transformersjs.mjs PACKAGES REQUEST. PACKAGES is a folder with node_modules/@huggingface/transformers,
// REQUEST a JSON file:
//   root         the folder that the models' folders are in
//   class        the class that loads them, such as AutoModelForCausalLM
//   inputs       name -> {type, dims, data}
//   new_tokens   how many tokens to generate; 0 for a model that does not
//   runs         [{folder, options, web}]: `options` of from_pretrained; where `web` names the graph's file, it runs in
//                ONNX Runtime Web (WebAssembly), which is what browsers have, in place of ONNX Runtime for Node
//   asked        [{task, folder, options, input, arguments}]: what to ask pipelines
// Prints a line of JSON: {runs: [{logits, tokens}], asked: [answers]}.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [packages, file] = process.argv.slice(2);
const request = JSON.parse(readFileSync(file, "utf8"));
const require = createRequire(join(resolve(packages), "here.cjs"));
const load = (name) => import(pathToFileURL(require.resolve(name)));
const library = await load("@huggingface/transformers");
const { Tensor, env, pipeline } = library;
env.allowRemoteModels = false;
env.localModelPath = request.root;

function tensor({ type, dims, data }) {
  return new Tensor(type, type === "int64" ? BigInt64Array.from(data, BigInt) : Float32Array.from(data), dims);
}

async function browserSession({ config }, graph) {
  const ort = await load("onnxruntime-web");
  ort.env.wasm.numThreads = 1;
  const session = await ort.InferenceSession.create(readFileSync(graph), { executionProviders: ["wasm"] });
  const { inputNames, inputMetadata } = session;
  // Each of the two has a class of its own for tensors, which the other does not know.
  const change = (tensors, make) => Object.fromEntries(Object.entries(tensors).map(([name, t]) => [name, make(t)]));
  const run = async (feed) => {
    const found = await session.run(change(feed, (t) => new ort.Tensor(t.type, t.data, t.dims)));
    return change(found, (t) => new Tensor(t.type, t.data, t.dims).ort_tensor);
  };
  return { config, inputNames, inputMetadata, run };
}

const answer = { runs: [], asked: [] };
for (const { folder, options, web } of request.runs) {
  const model = await library[request.class].from_pretrained(folder, options);
  if (web) model.sessions.model = await browserSession(model.sessions.model, web);
  const inputs = Object.fromEntries(Object.entries(request.inputs).map(([name, value]) => [name, tensor(value)]));
  const { logits } = await model(inputs);
  const run = { logits: Array.from(logits.data), tokens: null };
  if (request.new_tokens) {
    const tokens = await model.generate({ ...inputs, max_new_tokens: request.new_tokens, do_sample: false });
    run.tokens = tokens.tolist().map((row) => row.map(Number));
  }
  answer.runs.push(run);
}
for (const { task, folder, options, input, arguments: more } of request.asked) {
  const ask = await pipeline(task, folder, options);
  answer.asked.push(await ask(input, more));
}
console.log(JSON.stringify(answer));
