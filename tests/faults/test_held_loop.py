"""Event loop of an api process held by one piece of work: health answers, and the log names it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from api.core.endpoint import forget_endpoint
from tests.conftest import new_database
from tests.forked_workers import start_api
from tests.held_api import FRAME, HELD, HTTP
from tests.probing import parts_of, probe
from tests.scraped import scrape
from tests.service import MODEL, Service, log_events, running, start, until

pytestmark = pytest.mark.faults

LIVE = (200, {"status": "live"})


class HeldService(Service):
    """Api process of `tests.held_api`."""

    def spawn(self) -> None:
        forget_endpoint(self.home)
        self.home.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **self.settings.to_environment(), "WEIR_LOG": "info"}
        self.process = start_api(environment, self.home / "api.log", "tests.held_api")
        assert self.process is not None

    def hold(self, name: str) -> Path:
        """Hold the loop at a function's next call; return the file that holds it."""
        file = self.home / f"{name}{HELD}"
        file.touch()
        return file


@pytest.fixture(scope="module")
def held(
    tmp_path_factory: pytest.TempPathFactory,
    postgres_server: str,
    template_database: str,
    model: Path,
) -> Iterator[HeldService]:
    home = tmp_path_factory.mktemp("home")
    with (
        new_database(postgres_server, template=template_database) as url,
        running(service := HeldService(home, url, model)),
    ):
        yield service


async def test_health_answers_while_one_piece_of_work_holds_the_loop(held: HeldService) -> None:
    """The port of clients does not answer meanwhile; the log names who held it, and where."""
    tenant = await held.tenant()
    holding = held.hold(HTTP)
    async with asyncio.TaskGroup() as tasks:
        requested = tasks.create_task(ask(held, tenant.secret))
        await until(lambda: not answers(held.openai_url), "the loop to be held")

        for _ in range(3):
            assert probe(held.metrics_url, "/livez") == LIVE
            assert parts_of(held.metrics_url)["database"]["state"] == "serving"
        await until(lambda: probe(held.metrics_url, "/readyz")[0] == 503, "its refusal")
        _, reported = probe(held.metrics_url, "/readyz")
        assert reported is not None
        assert "the event loop has not answered for" in reported["reasons"][0]
        assert probe(held.metrics_url, "/livez") == LIVE, "it is not to be restarted"
        holding.unlink()
        assert (await requested).status_code == 200

    await until(lambda: probe(held.metrics_url, "/readyz")[0] == 200, "it to be ready again")
    [incident] = await incidents(held, "/v1/chat/completions")
    assert (incident["api_key_id"], incident["organization_id"]) == (
        str(tenant.key.id),
        str(tenant.organization_id),
    )
    assert "held_api.py" in str(incident["stack"])
    assert tenant.secret not in held.log
    scraped = await scrape(held.metrics_url)
    name = "weir_event_loop_longest_block_seconds"
    assert scraped.value(name, since="start") > 1.0
    assert scraped.value(name, since="scrape") > 1.0
    assert (await scrape(held.metrics_url)).value(name, since="scrape") < 1.0


async def test_a_frame_that_blocks_the_loop_is_named(held: HeldService) -> None:
    tenant = await held.tenant()
    holding = held.hold(FRAME)
    async with held.stream(tenant.secret) as stream:
        frame = start(max_output_tokens=3)
        # A send to a held loop still ends: the transport takes the message.
        await stream.send(frame)
        await until(lambda: not answers(held.openai_url), "the loop to be held")
        holding.unlink()
        await stream.finished(frame.request_id)

    [incident] = await incidents(held, "/weir.v1.InferenceService/Generate")
    assert (incident["api_key_id"], incident["stage"]) == (str(tenant.key.id), "frames")


async def ask(service: Service, secret: str) -> httpx2.Response:
    """Send one request over HTTP."""
    async with httpx2.AsyncClient(timeout=180.0) as client:
        return await client.post(
            f"{service.openai_url}/chat/completions",
            headers={"authorization": f"Bearer {secret}"},
            json={"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
        )


def answers(url: str) -> bool:
    """Return whether the port of clients answers a health check within half a second."""
    try:
        return probe(url, "/livez", timeout_s=0.5) == LIVE
    except TimeoutError:
        return False


async def incidents(service: Service, path: str) -> list[dict[str, object]]:
    """Wait for incidents of the event loop in requests to this path, and return them."""

    def found() -> list[dict[str, object]]:
        reported = log_events(service.log, "incident")
        return [each for each in reported if (each["source"], each["path"]) == ("event_loop", path)]

    await until(found, "the incident")
    return found()
