// The SDK of OpenAI for Node: `runTools`, whose messages go before the next question.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const [baseURL, mode] = process.argv.slice(2);
const { system, questions, schemas } = JSON.parse(readFileSync(0, "utf-8"));

const tools = {
  weather: ({ city, days = 1 }) => ({ city, days, sky: "☀ heiter", degrees: [21.5, 19.0].slice(0, days) }),
  convert: ({ amount, source, target }) => `${amount} ${source} = ${amount * 2} ${target}`,
  book: ({ route, traveller, flexible = false }) => ({ booked: route, for: traveller, flexible, price: null }),
  note: ({ text }) => `noted: "${text}"`,
  clock: () => "2024-05-01T12:00:00Z",
};
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
