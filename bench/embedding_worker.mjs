// Embed texts by transformers.js in Node, as `bench/embedding_folder.py` asks.
//
// Usage: node embedding_worker.mjs FOLDER DTYPE TEXTS, in a folder with node_modules/@huggingface/transformers; DTYPE is
// fp32 (onnx/model.onnx) or q8 (onnx/model_quantized.onnx), TEXTS a file with a JSON list. Prints a line of JSON: vectors.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { basename, dirname, join } from "node:path";
import { pathToFileURL } from "node:url";

const [folder, dtype, texts] = process.argv.slice(2);
const require = createRequire(join(process.cwd(), "here.cjs"));
const { AutoModel, AutoTokenizer, env } = await import(pathToFileURL(require.resolve("@huggingface/transformers")));
env.allowRemoteModels = false;
env.localModelPath = dirname(folder);
const name = basename(folder);
const tokenizer = await AutoTokenizer.from_pretrained(name);
const model = await AutoModel.from_pretrained(name, { dtype });
const vectors = [];
for (const text of JSON.parse(readFileSync(texts, "utf8"))) {
  const found = await model(tokenizer(text, { truncation: true, max_length: 256 }));
  if (!found.sentence_embedding) throw new Error(`sentence_embedding must be an output, got ${Object.keys(found)}`);
  vectors.push(Array.from(found.sentence_embedding.data));
}
console.log(JSON.stringify(vectors));
