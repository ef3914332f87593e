// Serve one GGUF file in llama.cpp to `llamacpp.py`, by node-llama-cpp: a request a line on standard input, an answer a
// line on standard output, both JSON. Times are taken here, where the model runs.
//
// Usage: node llamacpp.mjs FOLDER, a folder below or beside whose node_modules node-llama-cpp is.

import {createRequire} from "node:module";
import path from "node:path";
import readline from "node:readline";
import {pathToFileURL} from "node:url";

// What libraries print must not get between the answers.
const answer = (value) => process.stdout.write(JSON.stringify(value) + "\n");
console.log = console.info = console.warn = console.error;

const found = createRequire(path.join(path.resolve(process.argv[2]), "here.js")).resolve("node-llama-cpp");
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(found));

let llama, model, context, sequences, options;
const feeds = [];

// Load a file. `exact`: attend in float32, where llama.cpp's default is flash attention on a cache in float16.
async function open({file, threads, exact}) {
    llama = await getLlama({
        gpu: false, build: "never", skipDownload: true, maxThreads: threads,
        logLevel: LlamaLogLevel.error, logger: (level, text) => process.stderr.write(text + "\n")
    });
    model = await llama.loadModel({modelPath: file});
    const float32 = {experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32", flashAttention: false};
    options = {threads: {ideal: threads, min: threads}, ignoreMemorySafetyChecks: true, ...(exact ? float32 : {})};
    return {
        release: `${llama.llamaCppRelease.repo} ${llama.llamaCppRelease.release}`,
        device: llama.gpu || "cpu",
        fileType: model.fileInfo.metadata.general.file_type,
        architecture: model.fileInfo.metadata.general.architecture
    };
}

// Make room for so many texts of so many tokens; a context that has it stays.
async function reserve(rows, tokens) {
    if (sequences?.length >= rows && sequences[0].contextSize >= tokens) return;
    await context?.dispose();
    context = await model.createContext({...options, sequences: rows, contextSize: tokens});
    sequences = Array.from({length: rows}, () => context.getSequence());
}

// Keep tokens to run: all of `texts`, or with `step` the last one, with the others in the cache.
async function prepare({texts, step}) {
    await reserve(texts.length, Math.max(...texts.map((text) => text.length)) + 1);
    return feeds.push(texts.map((text) => ({before: step ? text.slice(0, -1) : [], now: step ? text.slice(-1) : text}))) - 1;
}

// Run a feed, and return its time in nanoseconds; with `probabilities`, also those of the next token of each text.
async function run({feed, probabilities}) {
    const rows = feeds[feed];
    await reserve(rows.length, Math.max(...rows.map(({before, now}) => before.length + now.length)) + 1);
    await Promise.all(rows.map(async ({before}, row) => {
        const sequence = sequences[row];
        if (before.length === 0) return sequence.clearHistory();
        await sequence.adaptStateToTokens(before, false);
        const missing = before.slice(sequence.nextTokenIndex);
        if (missing.length > 0) await sequence.evaluateWithoutGeneratingNewTokens(missing);
    }));
    const wanted = probabilities ? {probabilities: true} : {token: true, options: {temperature: 0}};
    const inputs = rows.map(({now}) => [...now.slice(0, -1), [now.at(-1), {generateNext: wanted}]]);
    const start = process.hrtime.bigint();
    const outputs = await Promise.all(inputs.map((input, row) => sequences[row].controlledEvaluate(input)));
    const nanoseconds = Number(process.hrtime.bigint() - start);
    if (!probabilities) return {nanoseconds};
    return {nanoseconds, probabilities: outputs.map((output) => encoded(output.at(-1).next.probabilities))};
}

// Return the probabilities of the token after each one of a text, row after row.
async function follow({text}) {
    await reserve(1, text.length + 1);
    await sequences[0].clearHistory();
    const outputs = await sequences[0].controlledEvaluate(text.map((token) => [token, {generateNext: {probabilities: true}}]));
    return encoded(...outputs.map((output) => output.next.probabilities));
}

// Return probabilities by token as base64 of 32-bit floats, row after row.
function encoded(...rows) {
    // Not by spreading the keys: a function takes fewer arguments than large vocabularies have tokens.
    let size = 0;
    for (const token of rows[0].keys()) size = Math.max(size, token + 1);
    const values = new Float32Array(rows.length * size);
    rows.forEach((row, number) => {
        for (const [token, value] of row) values[number * size + token] = value;
    });
    return Buffer.from(values.buffer).toString("base64");
}

// Return the tokens of texts by llama.cpp's own tokenizer, without special ones around them.
function tokenize({texts}) {
    return {tokens: texts.map((text) => [...model.tokenize(text, false)])};
}

const methods = {open, prepare, run, follow, tokenize};
for await (const line of readline.createInterface({input: process.stdin})) {
    const {method, ...given} = JSON.parse(line);
    try {
        answer({result: await methods[method](given)});
    } catch (error) {
        answer({error: String(error?.message ?? error)});
    }
}
process.exit(0);
