// The SDK of Anthropic for Node: the content of each reply is appended.
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";
import { call } from "./tools.mjs";

const [baseURL, mode] = process.argv.slice(2);
const { system, questions, schemas } = JSON.parse(readFileSync(0, "utf-8"));
const client = new Anthropic({ baseURL: baseURL.replace(/\/v1$/, ""), apiKey: "none" });
const tools = schemas.map(({ function: { name, description, parameters } }) => ({
  name,
  description,
  input_schema: parameters,
}));

const messages = [];
for (const content of questions) {
  messages.push({ role: "user", content });
  for (;;) {
    const body = { model: "claude", max_tokens: 4096, system, messages, tools };
    const reply =
      mode === "stream" ? await client.messages.stream(body).finalMessage() : await client.messages.create(body);
    messages.push({ role: reply.role, content: reply.content });
    const calls = reply.content.filter((block) => block.type === "tool_use");
    if (calls.length === 0) break;
    messages.push({
      role: "user",
      content: calls.map(({ id, name, input }) => ({ type: "tool_result", tool_use_id: id, content: call(name, input) })),
    });
  }
}
