"""One server under test, ready to be measured: reached, named, and its way of counting prompt tokens known.

Owns: the first contact, the calibration of prompt lengths, the fields that go into every request, and the
server's own token counter. Does not know: scenarios.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from edgeserve.bench.figures import Run
from edgeserve.bench.options import BenchOptions
from edgeserve.bench.prompts import Calibration, PromptMaker, calibration_messages
from edgeserve.bench.runner import Outcome, Record, Request, Runner
from edgeserve.bench.workload import Planned
from edgeserve.client import Client
from edgeserve.errors import EdgeserveError, RequestError, ServerUnreachableError

CALIBRATION_WORDS = (20, 220)
# Counters of generated tokens, as llama-server and edgeserve name them.
TOKEN_COUNTERS = ("edgeserve_generation_tokens_total", "llamacpp:tokens_predicted_total")

Progress = Callable[[str], None]


@dataclass
class Lane:
    """`name` is A or B. `records` of the run in progress stay reachable when a run is interrupted."""

    name: str
    client: Client
    options: BenchOptions
    progress: Progress
    calibration: Calibration = field(default_factory=Calibration)
    has_system_role: bool = True
    n_ctx: int | None = None
    salt: str = field(default_factory=lambda: secrets.token_hex(4))
    runner: Runner | None = None

    @property
    def is_local(self) -> bool:
        """Whether the server runs on this machine, as far as its address tells."""
        return urlsplit(self.client.root).hostname in ("localhost", "127.0.0.1", "::1")

    @property
    def params(self) -> dict[str, object]:
        """Greedy and of a fixed length, so that two runs do the same work."""
        fixed: dict[str, object] = {"temperature": 0}
        if self.options.ignore_eos:
            fixed["ignore_eos"] = True
        return fixed | dict(self.options.extra_params)

    async def prepare(self) -> None:
        """Reach the server, ask for its limits, and let it count two prompts. Raises what goes wrong."""
        model = await self.client.default_model()
        found = {entry.id: entry for entry in await self.client.models()}
        self.n_ctx = found[model].n_ctx if model in found else None
        self.has_system_role = await self._has_system_role()
        maker = self.maker("calibration")
        counts = [await self._count(maker, num_words) for num_words in CALIBRATION_WORDS]
        self.calibration = Calibration.from_counts(
            (CALIBRATION_WORDS[0], counts[0]), (CALIBRATION_WORDS[1], counts[1])
        )

    def maker(self, *run: object) -> PromptMaker:
        """Prompts for one run: cold against every other run, with the same words on every server."""
        salt = f"{self.salt}-{self.name}-{'-'.join(str(part) for part in run)}"
        return PromptMaker(self.options.seed, salt, self.calibration, self.has_system_role)

    def start(self, label: str, num_requests: int | None = None) -> Runner:
        """A runner whose clock starts now and whose progress is shown under `label`."""
        of = f" of {num_requests}" if num_requests else ""

        def show(in_flight: int, ended: int) -> None:
            self.progress(f"{label} on {self.name}: {ended}{of} done, {in_flight} in flight")

        self.runner = Runner(self.client, self.params, self.options.timeout_s, show)
        return self.runner

    def requests(self, maker: PromptMaker, planned: list[Planned]) -> list[Request]:
        return [
            Request(
                index=plan.index,
                messages=maker.messages(plan),
                max_tokens=plan.max_tokens,
                at_s=plan.at_s,
                label=plan.label,
                num_prompt_tokens=plan.num_prompt_tokens,
            )
            for plan in planned
        ]

    async def server_tokens(self) -> float | None:
        """The server's own count of generated tokens; None where it does not publish one."""
        try:
            text = await self.client.get_text("/metrics")
        except ServerUnreachableError:
            raise
        except RequestError:
            return None
        for name in TOKEN_COUNTERS:
            values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})?\s+(\S+)", text, flags=re.MULTILINE)
            if values:
                return sum(float(value) for value in values)
        return None

    async def _has_system_role(self) -> bool:
        """llama-server's own finding about the model's template; yes where it is not told."""
        try:
            props = await self.client.get_json("/props")
        except ServerUnreachableError:
            raise
        except RequestError:
            return True
        caps = props.get("chat_template_caps") if isinstance(props, dict) else None
        return not (isinstance(caps, dict) and caps.get("supports_system_role") is False)

    async def _count(self, maker: PromptMaker, num_words: int) -> int:
        runner = self.start("counting tokens")
        request = Request(num_words, calibration_messages(maker, num_words), max_tokens=1)
        record = await runner.send(request)
        if record.outcome not in (Outcome.OK, Outcome.EMPTY):
            raise _as_error(record)
        return record.num_prompt_tokens or 0


def _as_error(record: Record) -> EdgeserveError:
    return RequestError(
        f"The server did not answer a first short request: {record.message or record.outcome}.",
        "Try the same request with curl; a server that refuses `ignore_eos` needs it switched off.",
        code=record.code,
    )


class Stopwatch:
    """Wall and CPU time of this process over one run: a busy client measures itself."""

    def __init__(self) -> None:
        self._wall_s = time.perf_counter()
        self._cpu_s = time.process_time()

    @property
    def cpu_share(self) -> float | None:
        wall_s = time.perf_counter() - self._wall_s
        return (time.process_time() - self._cpu_s) / wall_s if wall_s > 0 else None


def clipped(run: Run, now_s: float) -> Run:
    """An interrupted run ends now."""
    return replace(run, window_s=(min(run.window_s[0], now_s), min(run.window_s[1], now_s)))
