"""`weir console`: where the page for people is, and the browser to see it with."""

from __future__ import annotations

import webbrowser
from typing import Annotated

import typer

from api.cli.local import HomeOption, fail, read_settings
from api.cli.output import note
from api.core.endpoint import read_console_url, serving_endpoint


def console(
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in the browser of this machine.")] = False,
    home: HomeOption = None,
) -> None:
    """Print where the console of the server on this machine is.

    It asks for an API key and shows what that key may see. `weir env` prints the keys that `weir up` made.
    """
    settings = read_settings(home)
    if serving_endpoint(settings.home) is None:
        fail(f"no server of {settings.home} serves now: start one with `weir up`")
    url = read_console_url(settings.home)
    if url is None:
        fail("the server has no console: it was started with WEIR_CONSOLE=0 or WEIR_OPENAI_LISTEN=off")
    typer.echo(url)
    if open_browser and not webbrowser.open(url):
        note("no browser could be opened here: open the address in yours")
