// A Baton client in TypeScript. It asks one question, and continues a stream that broke at the next router.
// Usage, in a folder with these files and a copy of Baton's protos/ (see docs/client.md):
//   npm install && npm run types && npm run build && npm start -- HOST:PORT[,HOST:PORT...]
import crypto from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";
import type { ProtoGrpcType } from "./types/generation.js";
import type { GenerationClient } from "./types/baton/v1/Generation.js";
import type { GenerateRequest } from "./types/baton/v1/GenerateRequest.js";
import type { GenerateResponse__Output } from "./types/baton/v1/GenerateResponse.js";

const MAX_ATTEMPTS = 6;
const targets = (process.argv[2] ?? "127.0.0.1:7000").split(",");
const definition = loader.loadSync("baton/v1/generation.proto", {
  includeDirs: ["protos"], keepCase: true, longs: Number, enums: String, oneofs: true, defaults: true,
});
const { baton } = grpc.loadPackageDefinition(definition) as unknown as ProtoGrpcType;
const silence = { "grpc.keepalive_time_ms": 10_000, "grpc.keepalive_timeout_ms": 2_500 };
const clients = targets.map((target) => new baton.v1.Generation(target, grpc.credentials.createInsecure(), silence));

const tokens: number[] = []; // received so far; the next router computes them again and sends what follows
let drawnBy = ""; // the workers that generated them: others could continue differently
const request: GenerateRequest = {
  chat: { messages: [{ role: "user", content: "Count from 3 by 2." }] },
  // The seed is the client's, so that every router samples with the same one.
  sampling: { temperature: 0.2, seed: crypto.randomInt(2 ** 47) },
  stop: { max_tokens: 32 },
};
const deadline = Date.now() + 30_000;

/** Stream the rest of the answer to stdout; return text without tokens and the reason for the end. */
async function attempt(client: GenerationClient): Promise<string> {
  let held = ""; // text without tokens precedes the finish, and is sent again after a break
  const resumed = { resumed: [{ ids: tokens }], resumed_from: [drawnBy] };
  const stream = client.Generate({ ...request, ...resumed }, { deadline });
  for await (const response of stream as AsyncIterable<GenerateResponse__Output>) {
    if (response.finish) return `${held}\n${response.finish.reason}`;
    if (!response.chunk) continue;
    tokens.push(...response.chunk.token_ids);
    drawnBy ||= response.chunk.compatibility;
    if (response.chunk.token_ids.length) process.stdout.write(response.chunk.text);
    else held += response.chunk.text;
  }
  throw new Error("the stream ended without a finish");
}

/** Return whether an error has a gRPC status. */
function isServiceError(error: unknown): error is grpc.ServiceError {
  return error instanceof Error && "code" in error && "metadata" in error;
}

for (let failures = 0; ; ) {
  const before = tokens.length;
  try {
    console.log(await attempt(clients[failures % clients.length]!));
    break;
  } catch (error) {
    failures += 1;
    if (!isServiceError(error)) throw error;
    const isOver = failures >= MAX_ATTEMPTS && tokens.length === before;
    if (error.code !== grpc.status.UNAVAILABLE || isOver) {
      console.error(`\n${grpc.status[error.code]}: ${error.details}`);
      process.exitCode = 1;
      break;
    }
    const pushback = Number(error.metadata.get("grpc-retry-pushback-ms")[0] ?? 100); // milliseconds
    await sleep(failures < clients.length ? 0 : pushback);
  }
}
for (const client of clients) client.close();
