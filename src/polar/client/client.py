"""The client for programs that do not use asyncio: the same methods, run by an event loop in a thread."""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from polar.client.async_client import AsyncClient, Task
from polar.client.connection import Authority
from polar.models.policy import PauseMode, PolicyView
from polar.models.views import TaskBatchView, TaskView

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """A method that returns once what it starts has ended."""

    @wraps(method)
    def call(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return client._run(method(client._client, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[AsyncClient, P], AsyncIterator[T]],
) -> Callable[Concatenate[Client, P], Iterator[T]]:
    """A method whose iterator asks for each item when it is wanted."""

    @wraps(method)
    def call(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return client._iterate(method(client._client, *args, **kwargs))

    signature = inspect.signature(method)
    returned = str(signature.return_annotation).removeprefix("Async")
    call.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
    return call


class Client:
    """A connection to a rollout server, for programs that do not use asyncio."""

    def __init__(
        self,
        server: str | None = None,
        token: str | None = None,
        *,
        timeout: float = 30.0,
        ca: Authority = None,
    ) -> None:
        """Without arguments: as $POLAR_SERVER, $POLAR_TOKEN and $POLAR_CA say, else the server started here.

        `ca`: whose certificates to trust besides the machine's own, a file in PEM.
        """
        self._client = AsyncClient(server, token, timeout=timeout, ca=ca)
        self.server = self._client.server
        self._loop = asyncio.new_event_loop()
        closing = asyncio.Event()
        # It must not refer to this client, which is closed when nothing refers to it.
        run = partial(_keep_open, self._client, self._loop, closing)
        self._thread = threading.Thread(target=run, name="polar-client", daemon=True)
        self._thread.start()
        self._close = weakref.finalize(self, self._loop.call_soon_threadsafe, closing.set)

    def close(self) -> None:
        self._close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    health = _blocking(AsyncClient.health)
    overview = _blocking(AsyncClient.overview)
    metrics = _blocking(AsyncClient.metrics)
    submit = _blocking(AsyncClient.submit)
    task = _blocking(AsyncClient.task)
    tasks = _iterating(AsyncClient.tasks)
    cancel = _blocking(AsyncClient.cancel)
    runs = _iterating(AsyncClient.runs)
    run = _blocking(AsyncClient.run)
    begin_run = _blocking(AsyncClient.begin_run)
    report_steps = _blocking(AsyncClient.report_steps)
    session = _blocking(AsyncClient.session)
    sessions = _iterating(AsyncClient.sessions)
    cancel_session = _blocking(AsyncClient.cancel_session)
    branch = _blocking(AsyncClient.branch)
    replay = _blocking(AsyncClient.replay)
    recording = _blocking(AsyncClient.recording)
    artifacts = _blocking(AsyncClient.artifacts)
    session_events = _blocking(AsyncClient.session_events)
    watch = _iterating(AsyncClient.watch)
    events = _blocking(AsyncClient.events)
    results = _iterating(AsyncClient.results)
    result_pages = _iterating(AsyncClient.result_pages)
    newest_result = _blocking(AsyncClient.newest_result)
    wait = _blocking(AsyncClient.wait)
    policy = _blocking(AsyncClient.policy)
    pause_policy = _blocking(AsyncClient.pause_policy)
    update_policy = _blocking(AsyncClient.update_policy)
    resume_policy = _blocking(AsyncClient.resume_policy)
    nodes = _blocking(AsyncClient.nodes)
    drain_node = _blocking(AsyncClient.drain_node)
    resume_node = _blocking(AsyncClient.resume_node)
    tokens = _blocking(AsyncClient.tokens)
    create_token = _blocking(AsyncClient.create_token)
    revoke_token = _blocking(AsyncClient.revoke_token)
    webhooks = _blocking(AsyncClient.webhooks)

    # What makes the tasks runs in the caller's thread: it may use this client itself.

    def submit_all(self, tasks: Iterable[Task]) -> Iterator[TaskView]:
        """Submit many tasks, some hundred per request; a task is stored when its view is yielded."""
        return self._iterate(self._client.submit_all(list(tasks)))

    def submit_batches(self, tasks: Iterable[Task]) -> Iterator[TaskBatchView]:
        """Like `submit_all`, one request at a time, with the ids of the tasks that the server had already."""
        return self._iterate(self._client.submit_batches(list(tasks)))

    @contextmanager
    def paused(
        self, mode: PauseMode = PauseMode.KEEP, *, holder: str | None = None, timeout_seconds: float = 60.0
    ) -> Iterator[Paused]:
        """Nothing is sampled while the block runs, however long; the pause ends if this process does."""
        block = self._client.paused(mode, holder=holder, timeout_seconds=timeout_seconds)
        pause = self._run(block.__aenter__())
        try:
            yield Paused(pause.holder, self)
        finally:
            self._run(block.__aexit__(None, None, None))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        finally:
            # Of no effect once it has ended; but a caller that is interrupted waits no longer.
            running.cancel()
            # Refers to what was raised, which refers to this frame.
            del running

    def _iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        async def step() -> T:
            return await anext(items)

        while True:
            try:
                item = self._run(step())
            except StopAsyncIteration:
                return
            yield item


@dataclass(frozen=True, slots=True)
class Paused:
    """A pause that this process holds."""

    holder: str
    _client: Client

    def update(self, path: str | Path | None = None, *, version: int | None = None) -> PolicyView:
        """Replace the weights; see `Client.update_policy`."""
        return self._client.update_policy(path, version=version, holder=self.holder)


def _keep_open(client: AsyncClient, loop: asyncio.AbstractEventLoop, closing: asyncio.Event) -> None:
    async def until_closing() -> None:
        async with client:
            await closing.wait()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(until_closing())
