"""Let the model call your functions until it can answer."""

from weir_client import Client, Message, Tool

QUESTION = "Do I need an umbrella in Ulm?"
ROUNDS_MAX = 5  # a model that calls tools for ever must not run for ever


def get_weather(city: str) -> str:
    """Stand in for your own code: a query, an HTTP call, a calculation."""
    return f"It is raining in {city}, 12 degrees."


FUNCTIONS = {"get_weather": get_weather}
TOOLS = [
    Tool(
        "get_weather",
        "The weather in a city now.",
        {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        strict=True,  # the arguments always fit the schema
    )
]

with Client() as client:
    talk = [Message("user", QUESTION)]
    for _ in range(ROUNDS_MAX):
        answer = client.complete("demo", talk, tools=TOOLS, temperature=0, max_output_tokens=500)
        if not answer.tool_calls:
            break
        talk.append(Message("assistant", answer.text, answer.tool_calls))
        for call in answer.tool_calls:
            print(f"{call.name}({call.arguments})")
            try:
                result = FUNCTIONS[call.name](**call.arguments)
            except Exception as error:  # the model can correct its call if it sees the error
                result = f"error: {error}"
            talk.append(Message("tool", result, tool_call_id=call.id))
    print(answer.text)
