// A Baton client for Node: npm install @grpc/grpc-js @grpc/proto-loader
// Run in a checkout of Baton, whose protos/ it reads:  node docs/examples/generate.mjs [HOST:PORT]
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const target = process.argv[2] ?? "127.0.0.1:7000";
const options = { includeDirs: ["."], keepCase: true, longs: Number, enums: String, oneofs: true, defaults: true };
const { baton } = grpc.loadPackageDefinition(loader.loadSync("protos/generation.proto", options));
const client = new baton.v1.Generation(target, grpc.credentials.createInsecure());

const request = {
  chat: { messages: [{ role: "user", content: "Count from 3 by 2." }] },
  sampling: { temperature: 0 },
  stop: { max_tokens: 32 },
};
const call = client.Generate(request, { deadline: Date.now() + 30_000 });
call.on("data", (response) => {
  if (response.event === "chunk") process.stdout.write(response.chunk.text);
  if (response.event === "finish") console.log(`\n${response.finish.reason}`);
});
call.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
