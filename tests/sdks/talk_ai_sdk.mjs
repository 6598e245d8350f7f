// The AI SDK of Vercel: replies are appended. In Responses, its default, they become references to items.
import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { call } from "./tools.mjs";

const [baseURL, mode] = process.argv.slice(2);
const { system, questions, schemas } = JSON.parse(readFileSync(0, "utf-8"));
const provider = createOpenAI({ baseURL, apiKey: "none" });
const model = mode.startsWith("responses") ? provider("gpt-5") : provider.chat("gpt-4o-mini");
const tools = Object.fromEntries(
  schemas.map(({ function: { name, description, parameters } }) => [
    name,
    tool({ description, inputSchema: jsonSchema(parameters), execute: async (input) => call(name, input) }),
  ]),
);

const messages = [];
for (const content of questions) {
  messages.push({ role: "user", content });
  const asked = { model, system, messages, tools, stopWhen: stepCountIs(8), maxRetries: 0 };
  if (mode.endsWith("stream")) {
    const result = streamText(asked);
    await result.consumeStream();
    messages.push(...(await result.response).messages);
  } else {
    messages.push(...(await generateText(asked)).response.messages);
  }
}
