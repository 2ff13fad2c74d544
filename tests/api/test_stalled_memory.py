"""A thousand requests that nobody reads: what waits for a client takes some bytes a token, not the kilobyte of a frame."""

from __future__ import annotations

import gc
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from weir.v1 import inference_service_pb2 as pb

from api.generation.feed import Feed, FlowControl
from api.generation.mailbox import Mailboxes
from api.generation.outbox import Outbox
from api.generation.receiver import Receiver
from metering.holds.journal import UsageJournal

ORGANIZATION = uuid.uuid4()
REQUEST_COUNT = 1000
TOKENS_AT_FIRST, TOKENS_THEN = 20, 100  # each; the first fill what every request has, however little waits
BYTES_PER_TOKEN_MAX = 100  # arrays with their reserve; one object per token would be far above it
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[UsageJournal]:
    journal = UsageJournal(tmp_path, uuid.uuid4())
    yield journal
    journal.close()


def resident_bytes() -> int:
    """Memory of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def say(feeds: list[Feed], token_count: int) -> None:
    """So many steps of all of them."""
    for index in range(token_count):
        for feed in feeds:
            feed.tally.usage.generated_token_count += 1
            feed.say(0, " word", (index,))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="tells memory by Linux's /proc")
@pytest.mark.parametrize("credit", [None, 0], ids=["nobody reads the stream", "nobody grants credit"])
async def test_a_thousand_stalled_requests_take_some_bytes_a_token(journal: UsageJournal, credit: int | None) -> None:
    outbox = Outbox(journal)
    feeds = []
    for _ in range(REQUEST_COUNT):
        feeds.append(Feed(Receiver(outbox, str(uuid.uuid4()), lambda _: None), "m", FlowControl(credit, 60.0, lambda: None), None))
        feeds[-1].tally.hold_id = uuid.uuid4()

    say(feeds, TOKENS_AT_FIRST)
    before = resident_bytes()
    say(feeds, TOKENS_THEN)
    grown = resident_bytes() - before

    assert grown / (REQUEST_COUNT * TOKENS_THEN) < BYTES_PER_TOKEN_MAX
    assert sum(feed.unsent_token_count for feed in feeds) == REQUEST_COUNT * (TOKENS_AT_FIRST + TOKENS_THEN)
    for feed in feeds:
        feed.discard()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="tells memory by Linux's /proc")
async def test_log_probabilities_that_wait_take_little_more_than_their_message(journal: UsageJournal) -> None:
    """Twenty alternatives for each token, as objects, were three kilobytes."""
    alternatives = [pb.TokenLogprob(token_id=100 + place, logprob=-float(place)) for place in range(20)]
    told = pb.TokenLogprobs(chosen=alternatives[0], top=alternatives)
    feed = Feed(Receiver(Outbox(journal), "r", lambda _: None), "m", FlowControl(0, 60.0, lambda: None), None)
    feed.tally.hold_id = uuid.uuid4()
    before = resident_bytes()

    for index in range(20_000):
        again = pb.TokenLogprobs()
        again.CopyFrom(told)
        feed.say(0, " word", (index,), [again])
    grown = resident_bytes() - before

    assert grown / 20_000 < 2 * len(told.SerializeToString())
    feed.discard()


async def test_what_is_kept_stays_within_its_bounds(journal: UsageJournal) -> None:
    """Of one request, and of all together however many they are: nobody reads any of them."""
    mailboxes = Mailboxes(journal, bytes_max=200_000, bytes_per_request_max=20_000)
    feeds = []
    for _ in range(50):
        mailbox = mailboxes.open(ORGANIZATION)
        feed = Feed(Receiver(Outbox(journal), "r", lambda _: None), "m", FlowControl(None, 60.0, lambda: None), mailbox)
        feed.tally.hold_id = uuid.uuid4()
        feed.detach()
        feeds.append(feed)

    say(feeds[:5], 1000)
    assert mailboxes.byte_count <= 50 * mailboxes.allowance(ORGANIZATION)
    say(feeds, 200)

    assert all(feed.mailbox is not None and feed.mailbox.byte_count <= mailboxes.allowance(ORGANIZATION) for feed in feeds)
    assert mailboxes.byte_count == sum(feed.mailbox.byte_count for feed in feeds if feed.mailbox is not None) <= 200_000
    assert feeds[0].tally.usage.delivered_token_count == 1200, "dropped or not, it was delivered"


def begun(journal: UsageJournal, mailboxes: Mailboxes, organization_id: uuid.UUID) -> Feed:
    """A request that nobody receives."""
    mailbox = mailboxes.open(organization_id)
    feed = Feed(Receiver(Outbox(journal), "r", lambda _: None), "m", FlowControl(None, 60.0, lambda: None), mailbox)
    feed.tally.hold_id = uuid.uuid4()
    feed.detach()
    return feed


def answered(
    journal: UsageJournal, mailboxes: Mailboxes, organization_id: uuid.UUID, token_count: int
) -> tuple[uuid.UUID, uuid.UUID]:
    """The same with so many tokens, ended; by what it is found."""
    key = uuid.uuid4(), uuid.uuid4()
    feed = begun(journal, mailboxes, organization_id)
    assert feed.mailbox is not None
    say([feed], token_count)
    feed.end(None)
    mailboxes.keep(key, feed, feed.mailbox, 60.0)
    return key


async def test_a_flood_of_answers_of_one_customer_evicts_its_own_and_not_those_of_another(journal: UsageJournal) -> None:
    mailboxes = Mailboxes(journal, bytes_max=65_536, bytes_per_request_max=65_536)
    victim, flooding = uuid.uuid4(), uuid.uuid4()
    theirs = answered(journal, mailboxes, victim, 300)
    flood = [answered(journal, mailboxes, flooding, 300) for _ in range(20)]
    running = [begun(journal, mailboxes, flooding) for _ in range(5)]
    say(running, 300)

    there = [mailboxes.find(key) is not None for key in flood]
    assert mailboxes.find(theirs) is not None
    assert there == sorted(there)
    assert not there[0]
    assert mailboxes.allowance(flooding) == 65_536 // 2 // 5
    assert mailboxes.allowance(victim) == 65_536 // 2
    assert mailboxes.byte_count <= 65_536
    for feed in running:
        assert feed.mailbox is not None
        mailboxes.close(feed.mailbox)
    mailboxes.forget_all()  # their timers, too
    assert mailboxes.byte_count == mailboxes.live_count == mailboxes.ended_count == 0


async def test_who_keeps_more_than_an_equal_share_makes_room_for_whoever_comes_later(journal: UsageJournal) -> None:
    mailboxes = Mailboxes(journal, bytes_max=65_536, bytes_per_request_max=65_536)
    first, later = uuid.uuid4(), uuid.uuid4()
    before = [answered(journal, mailboxes, first, 100) for _ in range(12)]
    after = [answered(journal, mailboxes, later, 100) for _ in range(4)]

    assert all(mailboxes.find(key) is not None for key in after)
    kept = [mailboxes.find(key) is not None for key in before]
    assert kept == sorted(kept)
    assert not all(kept)
    mailboxes.forget_all()


async def test_what_ended_first_is_forgotten_first(journal: UsageJournal) -> None:
    mailboxes = Mailboxes(journal, bytes_max=65_536, bytes_per_request_max=65_536)
    keys = [answered(journal, mailboxes, ORGANIZATION, 300) for _ in range(5)]

    there = [mailboxes.find(key) is not None for key in keys]
    assert there == sorted(there)
    assert not there[0]
    assert there[-1]
    assert mailboxes.byte_count <= 65_536
    for key in keys:
        mailboxes.forget(key)  # its timers, too
    assert mailboxes.byte_count == 0
