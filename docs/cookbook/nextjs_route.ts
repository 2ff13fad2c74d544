// app/api/ask/route.ts: stream answers from a Next.js server.
import { QuotaExceeded, Unavailable, WeirClient, WeirError } from "@weir/client";

export const runtime = "nodejs"; // gRPC needs Node.js, not the edge runtime

// One client for the process, also after a hot reload of the development server.
const shared = globalThis as { weir?: WeirClient };

/** Answers the question in the body as a stream of text. */
export async function POST(request: Request): Promise<Response> {
  const client = (shared.weir ??= new WeirClient());
  const { question } = (await request.json()) as { question: string };
  // The signal aborts when the browser leaves: the request is cancelled, and you stop paying.
  const options = { prompt: question, maxOutputTokens: 200, signal: request.signal };
  const answer = client.generate("demo", options)[Symbol.asyncIterator]();
  try {
    let next = await answer.next(); // a refusal is thrown here, while the status can still be set
    const encoder = new TextEncoder();
    const body = new ReadableStream<Uint8Array>({
      async pull(controller) {
        if (next.done) return controller.close();
        controller.enqueue(encoder.encode(next.value.text));
        next = await answer.next();
      },
      cancel: () => answer.return().then(() => undefined),
    });
    return new Response(body, { headers: { "content-type": "text/plain; charset=utf-8" } });
  } catch (error) {
    if (error instanceof WeirError) return refusal(error);
    throw error;
  }
}

function refusal(error: WeirError): Response {
  const status =
    error instanceof QuotaExceeded ? 429 : error instanceof Unavailable ? 503 : 502;
  const { message, reason, retryAfterMs } = error;
  const headers =
    retryAfterMs === undefined ? {} : { "retry-after": `${Math.ceil(retryAfterMs / 1000)}` };
  return Response.json({ error: message, reason }, { status, headers });
}
