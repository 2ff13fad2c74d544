"""Scraped metrics of a service, for tests that compare two scrapes."""

from __future__ import annotations

import asyncio
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 60.0


class Scrape:
    """Metrics of one scrape of a service."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = list(text_string_to_metric_families(text))
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        """Return the value of the series with exactly these labels; 0 if there is none yet."""
        return float(self.samples.get((name, frozenset(labels.items())), 0.0))

    def names(self) -> set[str]:
        """Return the names of all samples."""
        return {name for name, _ in self.samples}


async def scrape(url: str) -> Scrape:
    """Scrape the metrics of a URL."""

    def ask() -> str:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            body: bytes = response.read()
            return body.decode()

    return Scrape(await asyncio.to_thread(ask))
