// A multi-step tool loop of Vercel's `ai` with the provider that the first argument names.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";

const [provider, model, mode] = process.argv.slice(2);
const providers = { openai: createOpenAI, anthropic: createAnthropic };
const settings = {
  model: providers[provider]()(model),
  prompt: "How is the weather in Oslo?",
  stopWhen: isStepCount(5),
  maxRetries: 0,
  tools: {
    weather: tool({
      description: "Tells the weather.",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => `rain in ${city}`,
    }),
  },
};
if (mode === "stream") {
  const result = streamText({ ...settings, onError: ({ error }) => { throw error; } });
  process.stdout.write(await result.text);
} else {
  process.stdout.write((await generateText(settings)).text);
}
