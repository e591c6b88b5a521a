"""Send the golden transcripts to any server and print how its answers differ from ours.

    python benchmarks/compare_transcripts.py --url http://127.0.0.1:8080 [--only chat native]

Meant for a llama-server with the same model file (SmolLM2-135M) and a context of 2,048 tokens a slot. Index
numbers in places are left out, so that a difference that every event has is printed once, with its count.
docs/api.md says which differences are accepted, and why.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

import httpx2

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "server"))

from transcripts import Transcript, differences, load, perform

NAMES = ("chat", "completions", "native", "errors", "info")


def compare(http: httpx2.Client, transcript: Transcript) -> list[str]:
    try:
        return differences(transcript, perform(http, transcript))
    except (AssertionError, ValueError, httpx2.HTTPError) as error:
        return [f"no readable answer: {error or type(error).__name__}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--width", type=int, default=200, help="cut longer lines")
    arguments = parser.parse_args()
    num_same = num_all = 0
    with httpx2.Client(base_url=arguments.url, timeout=120) as http:
        for name in arguments.only:
            for transcript in load(name):
                found = Counter(re.sub(r"\[\d+\]", "[]", line) for line in compare(http, transcript))
                num_all += 1
                num_same += not found
                if found:
                    print(f"{name}: {transcript.name}")
                for line, count in found.items():
                    times = f" ({count} times)" if count > 1 else ""
                    print(f"    {line[: arguments.width]}{times}")
    print(f"{num_same} of {num_all} answers are the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
