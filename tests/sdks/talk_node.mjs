// The SDK of OpenAI for Node: `runTools`, whose messages go before the next question.
import { readFileSync } from "node:fs";
import OpenAI from "openai";
import { tools } from "./tools.mjs";

const [baseURL, mode] = process.argv.slice(2);
const { system, questions, schemas } = JSON.parse(readFileSync(0, "utf-8"));

const given = schemas.map((schema) => ({
  type: "function",
  function: { ...schema.function, function: tools[schema.function.name], parse: JSON.parse },
}));

const client = new OpenAI({ baseURL, apiKey: "none" });
let messages = [{ role: "system", content: system }];
for (const content of questions) {
  messages.push({ role: "user", content });
  const body = { model: "gpt-4o-mini", messages, tools: given, stream: mode === "stream" };
  const runner = client.chat.completions.runTools(body);
  await runner.done();
  messages = runner.messages;
}
