// Code of a chat in the languages of the clients. Texts are JSON strings, which are literals of
// Python and TypeScript too, and are quoted for the shell.

export interface Asked {
  model: string;
  system: string;
  prompt: string;
  maxTokens: number | null;
  temperature: number | null;
}

export type Language = "python" | "typescript" | "curl";
export const LANGUAGES: [Language, string][] = [
  ["python", "Python"],
  ["typescript", "TypeScript"],
  ["curl", "curl"],
];

export function snippet(language: Language, asked: Asked, address: string): string {
  return { python, typescript, curl }[language](asked, address);
}

function messages({ system, prompt }: Asked): { role: string; content: string }[] {
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    { role: "user", content: prompt },
  ];
}

function options({ maxTokens, temperature }: Asked): [string, number][] {
  const all: [string, number | null][] = [
    ["max_completion_tokens", maxTokens],
    ["temperature", temperature],
  ];
  return all.filter((each): each is [string, number] => each[1] !== null);
}

function python(asked: Asked, address: string): string {
  const given = messages(asked).map(
    (each) => `        {"role": "${each.role}", "content": ${JSON.stringify(each.content)}},`,
  );
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(address)}, api_key=os.environ["WEIR_API_KEY"])`,
    "stream = client.chat.completions.create(",
    `    model=${JSON.stringify(asked.model)},`,
    "    messages=[",
    ...given,
    "    ],",
    ...options(asked).map(([name, value]) => `    ${name}=${value},`),
    "    stream=True,",
    '    stream_options={"include_usage": True},',
    ")",
    "for chunk in stream:",
    "    if chunk.choices:",
    '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
    "    else:",
    '        print(chunk.usage, chunk.model_extra["weir"]["cost"])',
  ].join("\n");
}

function typescript(asked: Asked, address: string): string {
  const given = messages(asked).map(
    (each) => `    { role: "${each.role}", content: ${JSON.stringify(each.content)} },`,
  );
  return [
    'import OpenAI from "openai";',
    "",
    `const client = new OpenAI({ baseURL: ${JSON.stringify(address)}, apiKey: ` +
      "process.env.WEIR_API_KEY });",
    "const stream = await client.chat.completions.create({",
    `  model: ${JSON.stringify(asked.model)},`,
    "  messages: [",
    ...given,
    "  ],",
    ...options(asked).map(([name, value]) => `  ${name}: ${value},`),
    "  stream: true,",
    "  stream_options: { include_usage: true },",
    "});",
    "for await (const chunk of stream) {",
    '  process.stdout.write(chunk.choices[0]?.delta.content ?? "");',
    "  if (chunk.usage) console.log(chunk.usage);",
    "}",
  ].join("\n");
}

function curl(asked: Asked, address: string): string {
  const body = {
    model: asked.model,
    messages: messages(asked),
    ...Object.fromEntries(options(asked)),
    stream: true,
    stream_options: { include_usage: true },
  };
  const quoted = `'${JSON.stringify(body, null, 2).replaceAll("'", "'\\''")}'`;
  return [
    `curl ${address}/chat/completions \\`,
    '  -H "Authorization: Bearer $WEIR_API_KEY" \\',
    '  -H "Content-Type: application/json" \\',
    `  -d ${quoted}`,
  ].join("\n");
}
