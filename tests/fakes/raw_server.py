"""A server of HTTP that writes the bytes of its answers as they stand, also those that no server should."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.waiting import leap


@dataclass
class RawServer:
    """Answers each request with the next of its texts, on as many connections as it is given."""

    answers: Sequence[bytes | None]
    """None: say nothing and wait."""
    pause: float | None = None
    """Seconds that pass on the loop's clock after each byte; None: all are written at once."""
    heads: list[bytes] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    connections: int = 0
    closed_by_client: asyncio.Event = field(default_factory=asyncio.Event)

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while len(self.heads) < len(self.answers):
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split()[0])
                await reader.readexactly(length)
                answer = self.answers[len(self.heads)]
                self.heads.append(head)
                self.asked.set()
                if answer is None:
                    break
                await self._write(writer, answer)
                if _ends_connection(answer.lower()):
                    return
            await reader.read()
            self.closed_by_client.set()
        except asyncio.IncompleteReadError:
            self.closed_by_client.set()
        finally:
            writer.close()

    async def _write(self, writer: asyncio.StreamWriter, answer: bytes) -> None:
        pieces = [answer] if self.pause is None else [answer[at : at + 1] for at in range(len(answer))]
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            leap(self.pause or 0.0)
            await asyncio.sleep(0)


def _ends_connection(answer: bytes) -> bool:
    says_its_length = b"content-length" in answer or b"chunked" in answer
    return b"connection: close" in answer or not says_its_length
