"""What a scrape says, for tests that compare two of them."""

from __future__ import annotations

import asyncio
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 60.0


class Scrape:
    """One scrape of a service."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = list(text_string_to_metric_families(text))
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value for family in self.families for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        """Of the series with exactly these labels; 0 if there is none yet."""
        return float(self.samples.get((name, frozenset(labels.items())), 0.0))

    def names(self) -> set[str]:
        """Of all samples."""
        return {name for name, _ in self.samples}


async def scrape(url: str) -> Scrape:
    """Ask now."""

    def ask() -> str:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            body: bytes = response.read()
            return body.decode()

    return Scrape(await asyncio.to_thread(ask))
