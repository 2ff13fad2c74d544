"""Give each of your users a key that can spend only so much a month."""

import sys

from weir_client import (
    AdminClient,
    Client,
    Money,
    QuotaDimension,
    QuotaExceeded,
    QuotaSubject,
)

MONTHLY = Money.of(sys.argv[1] if len(sys.argv) > 1 else "5.00", "USD")


def key_for(admin: AdminClient, user: str) -> str:
    """Create the key of a user with its budget. Store the secret: it is returned only once."""
    admin.create_organization("shop", allow_existing=True)
    admin.create_project("shop", "chat", allow_existing=True)
    created = admin.create_api_key("shop", "chat", user)
    admin.set_quota(
        QuotaSubject.API_KEY,
        created.api_key.prefix,
        QuotaDimension.COST_PER_MONTH,
        MONTHLY.picos,
    )
    return created.secret


def ask(client: Client, question: str) -> str:
    """Answer for at most a cent, or say when the budget starts again."""
    try:
        result = client.complete(
            "demo", question, max_output_tokens=100, max_cost=Money.of("0.01", "USD")
        )
    except QuotaExceeded as error:
        return f"Your budget is used up. It starts again at {error.reset_time:%d %B, %H:%M} UTC."
    return result.text


with AdminClient() as admin:
    secret = key_for(admin, "ada")
with Client(api_key=secret) as client:
    for question in ("Which hotel has a pool?", "Is breakfast included?"):
        print(ask(client, question))
    [budget] = client.get_quota()
    print(f"{Money('USD', budget.remaining_value).amount:.6f} of {MONTHLY} are left")
