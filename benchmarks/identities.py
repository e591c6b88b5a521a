"""Do the server's figures and a client's agree? Three identities, over every request of one run.

    edgeserve serve MODEL -np 4 &
    python benchmarks/identities.py http://127.0.0.1:8080 [--requests 500] [--rate 1.5] [--prompt 60]

1. The parts that the server gives for a request (front end, queue, restore, prefill, own decode, stalls,
   delivery) add up to what the client measured, from just before it wrote the request to the last token's
   arrival. The way there and back is in between, and so is the time that either process waits for a core, so
   this needs an otherwise idle machine.
2. The tokens in all answers' usage are those that /metrics counted over the run.
3. Little's law: the mean number in flight is the rate times the mean latency.

Exit code 1 when a request is off by more than 5 ms, tokens differ, or Little's gap is 5 % or more.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from edgeserve.bench.options import BenchOptions, Scenario
from edgeserve.bench.runner import Record
from edgeserve.bench.session import run_bench
from edgeserve.bench.workload import Lengths

PARTS = (
    "front_end_ms",
    "queue_ms",
    "restore_ms",
    "prompt_ms",
    "decode_ms",
    "stalled_ms",
    "delivery_ms",
)
MAX_OFF_MS = 5.0
MAX_LITTLE_GAP = 0.05
WARM_UP_S = 5.0


def parts_ms(record: Record) -> list[float]:
    """The server's parts of one request, in milliseconds; it must have given them all."""
    timings = record.timings
    if timings is None:
        raise SystemExit("The server gave no timings: is this edgeserve?")
    told = {**timings.extra, "prompt_ms": timings.prompt_ms}
    return [told[name] for name in PARTS]


def client_ms(record: Record) -> float:
    """From sending to the last token, on the client's clock."""
    return (record.stamps_s[-1] - record.sent_s) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rate", type=float, default=1.5, help="arrivals a second (Poisson)")
    parser.add_argument("--prompt", default="60")
    parser.add_argument("--output-tokens", default="16")
    arguments = parser.parse_args()
    result = run_bench(
        BenchOptions(
            arguments.url,
            Scenario.LOAD,
            prompt=Lengths.parse(arguments.prompt),
            output=Lengths.parse(arguments.output_tokens),
            rates_per_s=(arguments.rate,),
            duration_s=arguments.requests / arguments.rate,
            warmup_s=WARM_UP_S,
            repeats=1,
        )
    )
    (run,) = result.runs
    (case,) = result.cases
    ok = [record for record in run.records if record.is_ok]
    parts = np.array([parts_ms(record) for record in ok])
    client = np.array([client_ms(record) for record in ok])
    off = client - parts.sum(axis=1)
    print(f"{len(run.records)} requests, {len(ok)} answered; medians and means of the parts, ms")
    for name, column in zip(PARTS, parts.T, strict=True):
        print(f"  {name:14} {np.median(column):9.3f} {column.mean():9.3f}")
    p50, p99 = np.percentile(off, (50, 99))
    beyond = int((np.abs(off) > MAX_OFF_MS).sum())
    print(f"client's time less the sum: median {p50:.2f}, p99 {p99:.2f}, max {off.max():.2f} ms")
    print(f"  beyond {MAX_OFF_MS:g} ms: {beyond} of {len(ok)}")
    usage = sum(record.usage.completion_tokens for record in ok if record.usage)
    print(f"output tokens: {usage} in the answers, {run.server_tokens:.0f} in /metrics")
    gap = case.median("little_gap")
    print(f"Little's law: gap {gap:.2%}" if gap is not None else "Little's law: undefined")
    is_good = not beyond and run.server_tokens == usage and gap is not None and abs(gap) < MAX_LITTLE_GAP
    return 0 if is_good and len(ok) == len(run.records) else 1


if __name__ == "__main__":
    sys.exit(main())
