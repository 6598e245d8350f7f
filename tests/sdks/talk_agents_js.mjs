// The Agents SDK of OpenAI for JavaScript, as it is by default: the history goes before the next question.
import { readFileSync } from "node:fs";
import { Agent, run, setDefaultOpenAIClient, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { call } from "./tools.mjs";

const [baseURL, mode] = process.argv.slice(2);
const { system, questions, schemas } = JSON.parse(readFileSync(0, "utf-8"));
setTracingDisabled(true);
setDefaultOpenAIClient(new OpenAI({ baseURL, apiKey: "none" }));
const agent = new Agent({
  name: "planner",
  instructions: system,
  model: "gpt-5",
  tools: schemas.map(({ function: { name, description, parameters } }) =>
    tool({
      name,
      description,
      parameters: { ...parameters, required: [], additionalProperties: true },
      strict: false,
      execute: (input) => call(name, input),
    }),
  ),
});

let said = [];
for (const content of questions) {
  said = [...said, { role: "user", content }];
  const stream = mode.endsWith("stream");
  const result = await run(agent, said, { stream });
  if (stream) {
    for await (const event of result) void event;
    await result.completed;
  }
  said = result.history;
}
