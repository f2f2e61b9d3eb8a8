// A Baton client for Node: npm install @grpc/grpc-js @grpc/proto-loader
// Run in a checkout of Baton, whose protos/ it reads:  node docs/examples/generate.mjs [HOST:PORT,HOST:PORT]
// Of several routers one goes on with what another left unfinished.
import crypto from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const MAX_ATTEMPTS = 6;
const targets = (process.argv[2] ?? "127.0.0.1:7000").split(",");
const options = { includeDirs: ["protos"], keepCase: true, longs: Number, enums: String, oneofs: true, defaults: true };
const { baton } = grpc.loadPackageDefinition(loader.loadSync("baton/v1/generation.proto", options));
const silence = { "grpc.keepalive_time_ms": 1500, "grpc.keepalive_timeout_ms": 2500 };
const clients = targets.map((target) => new baton.v1.Generation(target, grpc.credentials.createInsecure(), silence));

const tokens = []; // all that came; the next router computes them again and sends what follows
let drawnBy = ""; // which workers drew them: others would go on with another answer
const request = {
  chat: { messages: [{ role: "user", content: "Count from 3 by 2." }] },
  sampling: { temperature: 0.2, seed: crypto.randomInt(2 ** 47) }, // ours: the next router must draw with the same
  stop: { max_tokens: 32 },
};
const deadline = Date.now() + 30_000;

async function attempt(client) {
  let held = ""; // text without tokens stands before the finish, and comes again without it
  for await (const response of client.Generate({ ...request, resumed: [{ ids: tokens }], resumed_from: [drawnBy] },
                                                { deadline })) {
    if (response.event === "finish") return `${held}\n${response.finish.reason}`;
    tokens.push(...response.chunk.token_ids);
    drawnBy ||= response.chunk.compatibility;
    if (response.chunk.token_ids.length) process.stdout.write(response.chunk.text);
    else held += response.chunk.text;
  }
}

for (let failures = 0; ; ) {
  const before = tokens.length;
  try {
    console.log(await attempt(clients[failures % clients.length]));
    break;
  } catch (error) {
    failures += 1;
    if (error.code !== grpc.status.UNAVAILABLE || (failures >= MAX_ATTEMPTS && tokens.length === before)) {
      console.error(`\n${grpc.status[error.code]}: ${error.details}`);
      process.exitCode = 1;
      break;
    }
    const asked = Number(error.metadata?.get("grpc-retry-pushback-ms")[0] ?? 100); // what RetryInfo says, in ms
    await sleep(failures < clients.length ? 0 : asked);
  }
}
for (const client of clients) client.close();
