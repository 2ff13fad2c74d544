"""`weir price`: what tokens cost. A price is set per million tokens and kept as whole picos per token."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from api.cli.amounts import decimal_text, parse_price, per_million, time_text
from api.cli.connection import AddressOption, KeyOption, admin_client
from api.cli.models import models as list_models
from api.cli.output import JsonOption, note, print_json

price = typer.Typer(help="Set and list prices.", no_args_is_help=True)
price.command("list", help="List the models with the prices in force now.")(list_models)
price.command("list-of-models", hidden=True)(list_models)


@price.command("set")
def set_price(
    model: Annotated[str, typer.Argument(help="The model; it need not exist yet.")],
    input_price: Annotated[str, typer.Option("--input", help="Per million input tokens, in units of the currency.")],
    output_price: Annotated[str, typer.Option("--output", help="Per million output tokens.")],
    cached_price: Annotated[
        str | None, typer.Option("--cached-input", help="Per million input tokens from the prefix cache. Default: as --input.")
    ] = None,
    currency: Annotated[str, typer.Option(help="ISO 4217 code.")] = "USD",
    effective_time: Annotated[
        datetime | None,
        typer.Option(
            help="Since when it holds, in UTC. Default: now.", formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%SZ"]
        ),
    ] = None,
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Set a new price version. Earlier versions stay: a request costs what was in force when it was admitted."""
    per_token = _price("--input", input_price)
    cached_per_token = per_token if cached_price is None else _price("--cached-input", cached_price)
    output_per_token = _price("--output", output_price)
    since = effective_time.replace(tzinfo=UTC) if effective_time else None
    with admin_client(address, api_key) as client:
        version = client.set_price(
            model,
            input_picos_per_token=per_token,
            cached_input_picos_per_token=cached_per_token,
            output_picos_per_token=output_per_token,
            currency_code=currency,
            effective_time=since,
        )
    if as_json:
        document = {"model": model, "version": version, "currency_code": currency, "effective_time": since}
        picos = {"input": per_token, "cached_input": cached_per_token, "output": output_per_token}
        print_json(document | {f"{kind}_picos_per_token": value for kind, value in picos.items()})
        return
    shown = [decimal_text(per_million(value)) for value in (per_token, cached_per_token, output_per_token)]
    note(
        f"price version {version} of {model} from {time_text(since, 'now')} on, in {currency} per million tokens: "
        f"input {shown[0]}, cached input {shown[1]}, output {shown[2]}"
    )


def _price(flag: str, text: str) -> int:
    try:
        return parse_price(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=flag) from error
