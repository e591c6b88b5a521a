"""Does the benchmark report what a server of known timing did? Role chunk first, pings, late usage.

    python benchmarks/known_timing.py [--requests 10]

The server (tests/mock_openai.py) sends the role chunk and a ping at once, content after 300 ms, then chunks
of three tokens every 50 ms, and usage 400 ms after the last one. What it really did is read off its own
clock, in the same process; the way from the client to it is a part of the first token's error. What a whole
call takes with a server that does nothing (connecting included, which a TTFT leaves out) is printed beside
it. The exit code is 1 where the median error of ttft, time per token or the worst gap is above 2 ms; a busy
machine can do that too.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import mock_openai as mock

from edgeserve.bench.runner import Record, Request, Runner
from edgeserve.bench.self_test import client_cost
from edgeserve.client import Client

NUM_CHUNKS, TOKENS_PER_CHUNK = 8, 3
TTFT_S, GAP_S, USAGE_S = 0.3, 0.05, 0.4
MAX_ERROR_MS = 2.0


async def measure(url: str, num_requests: int) -> list[Record]:
    async with Client(url, model="mock") as client:
        runner = Runner(client, {}, 60.0)
        for index in range(num_requests):
            await runner.send(Request(index, ({"role": "user", "content": "x"},), NUM_CHUNKS))
        return runner.records


def errors_ms(record: Record, sent: mock.Sent) -> dict[str, float]:
    """The client's figures less the server's own, in milliseconds."""
    timeline = record.timeline
    assert timeline is not None and timeline.tpot_s is not None
    content_s = sent.stamps_s[2 : 2 + NUM_CHUNKS]
    first_s = content_s[0] - sent.stamps_s[0]
    span_s = content_s[-1] - content_s[0]
    real_gaps_s = [after - before for before, after in pairwise(content_s)]
    found = {
        "ttft": timeline.ttft_s - first_s,
        "per token": timeline.tpot_s - span_s / (NUM_CHUNKS * TOKENS_PER_CHUNK - 1),
        "worst gap": max(
            (seen - real for seen, real in zip(timeline.gaps_s, real_gaps_s, strict=True)), key=abs
        ),
    }
    return {name: 1000 * value for name, value in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=10)
    arguments = parser.parse_args()
    answer = mock.answer(
        NUM_CHUNKS, tokens_per_chunk=TOKENS_PER_CHUNK, ttft_s=TTFT_S, gap_s=GAP_S, usage_delay_s=USAGE_S
    )
    floor_ms = 1000 * asyncio.run(client_cost()).ttft_s
    print(f"a server that does nothing: {floor_ms:.2f} ms from the call to the first token")
    with mock.MockServer(lambda body: answer).running() as server:
        records = asyncio.run(measure(server.url, arguments.requests))
        rows = [errors_ms(record, sent) for record, sent in zip(records, server.sent, strict=True)]
    is_good = True
    for name in rows[0]:
        sizes = [abs(row[name]) for row in rows]
        is_good = is_good and median(sizes) <= MAX_ERROR_MS
        print(f"{name:10} off by {median(sizes):.2f} ms in the middle, {max(sizes):.2f} ms at most")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
