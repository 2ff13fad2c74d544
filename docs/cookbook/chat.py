"""Chat in a terminal: each answer streams, and the model remembers the conversation."""

from weir_client import Client, Message

with Client() as client:
    talk = [Message("system", "Answer in one short paragraph.")]
    while question := input("\nYou: ").strip():
        talk.append(Message("user", question))
        with client.generate("demo", talk, max_output_tokens=300) as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)
        print(f"\n({stream.result.usage.billed_token_count} tokens, {stream.result.cost})")
        talk.append(Message("assistant", stream.result.text))
