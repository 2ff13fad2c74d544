"""An event loop in a thread of its own, and calls into it that block: what the sync clients stand on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

_Client = TypeVar("_Client")
_Result = TypeVar("_Result")


class LoopThread(Generic[_Client]):
    """Keeps an async client open in a thread, from `open` to `close`.

    The client is entered and left by one task, so that its task group has one parent. Calls may come from any thread but
    the loop's own. The thread is a daemon: a program that forgets to close still ends.
    """

    def __init__(self, client: AbstractAsyncContextManager[_Client]) -> None:
        self._client = client
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def open(self) -> _Client:
        """Starts the thread and enters the client. Raises what entering raises; RuntimeError if it is open."""
        if self._thread is not None:
            raise RuntimeError("this client is open already")
        entered: Future[_Client] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live(entered)), name="weir-client", daemon=True)
        self._thread.start()
        try:
            return entered.result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leaves the client and ends the thread. Closing twice changes nothing."""
        thread, loop, stop = self._thread, self._loop, self._stop
        self._thread = None
        if thread is None or loop is None or stop is None:
            return
        with contextlib.suppress(RuntimeError):  # entering failed, and the loop is closed already
            loop.call_soon_threadsafe(stop.set)
        thread.join()

    def run(self, call: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        """Awaits `call()` in the loop and returns its result. An interrupt of the waiting thread cancels it there.

        Raises: RuntimeError if the client is not open, or if called from the loop's own thread (which would wait for itself).
        """
        loop = self._loop
        if self._thread is None or loop is None:
            raise RuntimeError("the client is not open: use it inside its `with` block")
        if threading.current_thread() is self._thread:
            raise RuntimeError("a sync client cannot be called from its own event loop: use AsyncClient there")
        future = asyncio.run_coroutine_threadsafe(call(), loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # no effect on one that has ended
            raise

    def run_soon(self, call: Callable[[], object]) -> None:
        """Runs `call()` in the loop, soon, without waiting. Nothing happens once the client is closed."""
        loop = self._loop
        if self._thread is not None and loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed just now
                loop.call_soon_threadsafe(call)

    async def _live(self, entered: Future[_Client]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            async with self._client as client:
                entered.set_result(client)
                await self._stop.wait()
        except BaseException as error:
            if entered.done():
                raise
            entered.set_exception(error)
