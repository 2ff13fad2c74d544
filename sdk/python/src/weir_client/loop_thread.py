"""Event loop in its own thread, and blocking calls into it: the base of the sync clients."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

from weir_client import errors

_Client = TypeVar("_Client")
_Result = TypeVar("_Result")


class LoopThread(Generic[_Client]):
    """Thread with an event loop that keeps an async client open, from its first use to `close`.

    One task enters and leaves the client, so that its task group has one parent. Calls may come
    from any thread but the loop's own. The thread is a daemon: a program that forgets to close
    still exits.
    """

    def __init__(self, client: AbstractAsyncContextManager[_Client]) -> None:
        self._client = client
        self._process_id = 0  # process that runs the thread
        self._lock = threading.Lock()  # between calls and close
        self._opening = threading.Lock()
        self._is_open = self._is_entered = self._is_closed = False
        self._calls: set[Future[Any]] = set()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def enter(self) -> None:
        """Open the client for a `with` block. A second block may follow the first.

        Raises: RuntimeError if it is in a block already; any error of opening.
        """
        if self._is_entered:
            raise RuntimeError("this client is open already")
        self._is_closed = False
        self.open()
        self._is_entered = True

    def open(self) -> _Client | None:
        """Start the thread and enter the client, unless it is open. Return the entered client.

        Raises: RuntimeError if the client is closed, or was opened in another process; any error of
        entering.
        """
        if self._is_of_another_process:
            raise RuntimeError(
                "the client was opened before this process was forked: open one in each process"
            )
        if self._is_open:
            return None
        with self._opening:
            if self._is_open:
                return None
            if self._is_closed:
                raise RuntimeError(
                    "the client is closed: make a new one, or close it after its last use"
                )
            entered: Future[_Client] = Future()
            self._process_id = os.getpid()
            self._thread = threading.Thread(
                target=lambda: asyncio.run(self._live(entered)), name="weir-client", daemon=True
            )
            self._thread.start()
            try:
                client = entered.result()
            except BaseException:
                self.close()
                self._is_closed = False
                raise
            atexit.register(self.close)  # a client without a block: cancels what runs
            self._is_open = True
            return client

    def forget(self) -> None:
        """Tell the thread to end, without waiting: nothing uses its client any more."""
        if self._stop is not None and not self._is_entered:
            atexit.unregister(self.close)
            self.run_soon(self._stop.set)

    def close(self) -> None:
        """Close the client and end the thread. Running calls end as Cancelled. Idempotent."""
        self._is_closed, self._is_entered, self._is_open = True, False, False
        atexit.unregister(self.close)
        if self._is_of_another_process:
            self._thread = None
            return
        with self._lock:
            thread, loop, stop = self._thread, self._loop, self._stop
            self._thread = None
        if thread is None or loop is None or stop is None:
            return
        with contextlib.suppress(RuntimeError):  # entering failed, and the loop is closed already
            loop.call_soon_threadsafe(stop.set)
        thread.join()
        for call in list(self._calls):
            call.cancel()  # it came after the loop had stopped, so nothing else would end it

    def run(self, call: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        """Run `call()` in the loop and wait for its result. Interrupting the wait cancels the call.

        Raises: as `open`; RuntimeError if called from the loop's own thread (which would deadlock);
        Cancelled if the client is closed meanwhile.
        """
        self.open()
        with self._lock:
            loop = self._loop
            if self._thread is None or loop is None:
                raise errors.Cancelled("the client was closed")
            if threading.current_thread() is self._thread:
                raise RuntimeError(
                    "a sync client cannot be called from its own event loop: use AsyncClient there"
                )
            future = asyncio.run_coroutine_threadsafe(call(), loop)
            self._calls.add(future)
        try:
            return future.result()
        except CancelledError:
            if self._thread is not None:
                raise
            raise errors.Cancelled("the client was closed") from None
        except BaseException:
            future.cancel()  # no effect if it has ended
            raise
        finally:
            self._calls.discard(future)

    def run_soon(self, call: Callable[[], object]) -> None:
        """Schedule `call()` in the loop without waiting. Does nothing once the client is closed."""
        loop = self._loop
        if self._thread is not None and loop is not None and not self._is_of_another_process:
            with contextlib.suppress(RuntimeError):  # it was just closed
                loop.call_soon_threadsafe(call)

    @property
    def _is_of_another_process(self) -> bool:
        """Return whether this process is a fork of the one that opened the client."""
        return self._thread is not None and self._process_id != os.getpid()

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
