"""Chat in a terminal, as the client of any OpenAI-compatible server.

`run_once` answers one message and leaves: the answer on standard output, everything else on standard error.
`run_chat` holds a conversation. Owns the loop between person and server: asking, stopping, showing, and what
is remembered. Knows nothing of models or engines; a server in the same process is reached over HTTP too.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import FrameType

from edgeserve.chat.answer import Answer, figures_of
from edgeserve.chat.commands import COMMANDS, Commands, message_of
from edgeserve.chat.figures import Totals, figures_lines, progress_text, token_time_lines
from edgeserve.chat.input import CommandCompleter, Editor, open_history, quiet_terminal
from edgeserve.chat.session import Conversation, Turn
from edgeserve.chat.settings import SETTINGS, Value
from edgeserve.chat.view import ChatView, columns
from edgeserve.client import Client
from edgeserve.errors import EdgeserveError, RequestError
from edgeserve.reasoning import Part
from edgeserve.stream_events import EventKind, RemoteError, StreamEvent

EXIT_INTERRUPTED = 130
STATUS_AFTER_S = 0.4
STATUS_EVERY_S = 0.25
_PLACEHOLDER = "a message; Alt-Enter adds a line, /help lists commands"
# llama-server's and our own additions to the API; a strict server may refuse to know them.
_EXTRAS: Mapping[str, object] = {"return_progress": True, "timings_per_token": True}


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How to ask and how to show. None leaves the choice to the server.

    `settings` holds further request fields by the names of `chat_settings.SETTINGS`. `shows_figures` False
    leaves out the line under an answer. `history_path` None takes the user's state folder. A server that
    lives only for this chat has an address that says nothing: `shows_address` False leaves it out.
    """

    model: str | None = None
    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    settings: Mapping[str, Value] = field(default_factory=dict)
    plain: bool = False
    shows_figures: bool = True
    timings_per_token: bool = False
    history_path: Path | None = None
    shows_address: bool = True

    def conversation(self) -> Conversation:
        """An empty conversation with these settings."""
        given: dict[str, Value | None] = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        settings = {name: value for name, value in given.items() if value is not None}
        for name in ("plain", "timings_per_token"):
            if getattr(self, name):
                settings[name] = True
        return Conversation(self.system, {**self.settings, **settings})


def message_given(prompt: str | None) -> str | None:
    """The one message to answer: `prompt`, or all of standard input when that is not a terminal.

    None when a person sits there: then it is a conversation. A prompt of "-" reads standard input, too.
    """
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        return None
    # A byte order mark is what some editors and PowerShell put before piped text.
    return sys.stdin.buffer.read().decode("utf-8", "replace").removeprefix("\ufeff")


def run_once(base_url: str, api_key: str | None, options: ChatOptions, message: str) -> int:
    """Answer one message on standard output and return the exit code. A blank message needs no answer."""
    if not message.strip():
        print("There was nothing to answer: the message is empty.", file=sys.stderr)
        return 0
    return _run(lambda chat: chat.once(message), base_url, api_key, options)


def run_chat(base_url: str, api_key: str | None, options: ChatOptions) -> int:
    """Hold a conversation on the terminal until the person leaves; returns the exit code."""
    return _run(lambda chat: chat.converse(), base_url, api_key, options)


def _run(
    work: Callable[[Chat], Coroutine[None, None, int]],
    base_url: str,
    api_key: str | None,
    options: ChatOptions,
) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A pipe on Windows would otherwise get the ANSI code page.
            stream.reconfigure(encoding="utf-8", errors="replace")
    view = ChatView(sys.stdout, sys.stderr, os.environ)

    async def main() -> int:
        async with Client(base_url, api_key, model=options.model) as client:
            with quiet_terminal():
                return await work(Chat(client, options, view))

    try:
        return asyncio.run(main())
    except EdgeserveError as error:
        view.error(error)
        return error.exit_code
    except BrokenPipeError:
        # The reader has seen enough. Python flushes standard output once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


class Chat:
    """One conversation with one server."""

    def __init__(self, client: Client, options: ChatOptions, view: ChatView) -> None:
        self._client = client
        self._options = options
        self._view = view
        self._conversation = options.conversation()
        self._totals = Totals()
        self._n_ctx: int | None = None
        self._extras = dict(_EXTRAS)

    # -- one answer -----------------------------------------------------------------------------------------

    async def once(self, message: str) -> int:
        """Answer `message`; raises what the server or the connection raised."""
        answer = await self._answer(message)
        if answer.was_stopped:
            return EXIT_INTERRUPTED
        if self._options.shows_figures and sys.stderr.isatty():
            self._n_ctx = await self._context_length()
            self._show_figures(answer)
        if self._options.timings_per_token:
            self._show_token_times(answer)
        return 0

    async def _answer(self, message: str) -> Answer:
        """Ask and show. Ctrl-C ends it early; what came until then stays."""
        conversation = self._conversation
        conversation.unanswered = message
        answer = Answer(sent_s=time.perf_counter())
        self._view.begin(plain=bool(conversation.settings.get("plain")))
        task = asyncio.ensure_future(self._receive(answer, message))
        status = asyncio.ensure_future(self._show_status(answer))
        try:
            with _on_interrupt(task.cancel):
                await task
        except asyncio.CancelledError:
            if not task.cancelled() or _is_being_cancelled():
                raise
            answer.was_stopped = True
        finally:
            status.cancel()
            self._show_parts(answer.finish())
            self._view.end()
            self._remember(answer, message)
        return answer

    async def _receive(self, answer: Answer, message: str) -> None:
        try:
            await self._stream(answer, message)
        except RemoteError as error:
            if not self._was_too_strict(error):
                raise
            self._extras.clear()
            await self._stream(answer, message)

    def _was_too_strict(self, error: RemoteError) -> bool:
        """Whether the server refused a field that it does not know and that can be left out."""
        return error.status in (400, 422) and any(name in error.message for name in self._extras)

    async def _stream(self, answer: Answer, message: str) -> None:
        params = {**self._conversation.request_params(), **self._extras}
        stream = self._client.chat_stream(self._conversation.messages(message), **params)
        async with aclosing(stream) as events:
            async for event in events:
                self._take(answer, event)

    def _take(self, answer: Answer, event: StreamEvent) -> None:
        if event.kind is EventKind.ERROR and event.error is not None:
            raise event.error
        self._show_parts(answer.take(event))

    def _show_parts(self, parts: list[Part]) -> None:
        for part in parts:
            self._view.show(part)

    async def _show_status(self, answer: Answer) -> None:
        """Until the first token: how far the prompt is, or at least that something is waited for."""
        await asyncio.sleep(STATUS_AFTER_S)
        while not answer.stamps_s:
            now_s = time.perf_counter()
            if answer.progress is not None:
                self._view.status(progress_text(answer.progress, now_s - answer.progress_at_s))
            elif (waited_s := now_s - answer.sent_s) >= 1:
                self._view.status(f"waiting for the first token, {waited_s:.0f} s")
            await asyncio.sleep(STATUS_EVERY_S)

    def _remember(self, answer: Answer, message: str) -> None:
        if answer.text or answer.finish_reason:
            self._conversation.add(Turn(message, answer.text, answer.reasoning))
            self._totals.add(figures_of(answer))

    # -- the conversation -----------------------------------------------------------------------------------

    async def converse(self) -> int:
        """Read messages and commands until the person leaves."""
        await self._greet()
        editor = Editor(_completer(), open_history(self._options.history_path))
        commands = Commands(self._conversation, self._client.model or "", self._stats)
        placeholder = _PLACEHOLDER
        num_interrupts = 0
        while True:
            try:
                line = await editor.read(placeholder)
            except EOFError:
                return 0
            except KeyboardInterrupt:
                num_interrupts += 1
                if num_interrupts > 1:
                    return EXIT_INTERRUPTED
                self._view.note("Ctrl-C again leaves, as does Ctrl-D.")
                continue
            placeholder = ""
            # After a stopped answer one more Ctrl-C leaves.
            num_interrupts = 0
            if line.strip():
                outcome = await self._take_line(commands, line)
                if outcome is None:
                    return 0
                num_interrupts = outcome

    async def _take_line(self, commands: Commands, line: str) -> int | None:
        """Act on one line: None to leave, else how often Ctrl-C was pressed meanwhile."""
        message = message_of(line)
        try:
            if message is None:
                outcome = commands.run(line.strip())
                if outcome.leaves:
                    return None
                if outcome.lines:
                    self._view.note(*outcome.lines)
                    self._view.blank()
                message = outcome.message
            return await self._say(message) if message else 0
        except EdgeserveError as error:
            self._view.error(error)
            self._view.blank()
            return 0

    async def _say(self, message: str) -> int:
        self._view.blank()
        try:
            answer = await self._answer(message)
        except EdgeserveError as error:
            raise EdgeserveError(error.message, error.hint or _remedy(error)) from error
        self._view.blank()
        if self._options.shows_figures:
            self._show_figures(answer)
        if self._conversation.settings.get("timings_per_token"):
            self._show_token_times(answer)
        self._view.blank()
        return int(answer.was_stopped)

    async def _greet(self) -> None:
        # Some servers name a model by the path of its file.
        model = PurePath(await self._client.default_model()).name
        self._n_ctx = await self._context_length()
        context = f" · context {self._n_ctx:,}" if self._n_ctx else ""
        address = f" · {self._client.root}" if self._options.shows_address else ""
        self._view.note(f"{model}{context}{address}")
        self._view.blank()

    async def _context_length(self) -> int | None:
        """Tokens that one conversation may hold; /props says it for one sequence, so it is asked first."""
        with suppress(EdgeserveError, AttributeError, TypeError, ValueError):
            props = await self._client.get_json("/props")
            if n_ctx := props.get("default_generation_settings", {}).get("n_ctx"):
                return int(n_ctx)
        with suppress(EdgeserveError):
            return next((model.n_ctx for model in await self._client.models() if model.n_ctx), None)
        return None

    # -- figures --------------------------------------------------------------------------------------------

    def _show_figures(self, answer: Answer) -> None:
        if answer.was_stopped and not answer.stamps_s:
            self._view.note(self._view.ink("stopped before the first token", "dim"))
            return
        figures = figures_of(answer)
        lines = figures_lines(figures, self._n_ctx, self._view.ink, columns() - 2, _ending(answer))
        self._view.note(*lines)

    def _show_token_times(self, answer: Answer) -> None:
        by_server = len(answer.server_times) > 1
        times = answer.server_times if by_server else answer.client_times
        clock = "server" if by_server else "client"
        ttft_s = figures_of(answer).ttft_s
        self._view.note(*token_time_lines(times, ttft_s, clock, self._view.ink, columns() - 2))

    def _stats(self) -> tuple[str, ...]:
        return tuple(self._totals.lines(self._view.ink))


def _ending(answer: Answer) -> str:
    """Why the answer ended, where it did not end by itself."""
    if answer.was_stopped:
        return "stopped"
    return "cut at the token limit" if answer.finish_reason == "length" else ""


def _remedy(error: EdgeserveError) -> str:
    """What helps in a chat, where the server says only what is wrong."""
    if not isinstance(error, RequestError):
        return ""
    if error.code == "context_length_exceeded" or error.type == "exceed_context_size_error":
        return "/reset begins anew with an empty context."
    if error.status in (401, 403):
        return "The server wants a key: leave with /quit and give it with --api-key."
    return "/retry sends the message again." if error.status >= 429 else ""


def _is_being_cancelled() -> bool:
    """Whether it is the chat itself that ends, and not just one answer."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _completer() -> CommandCompleter:
    commands = [(name, command.about) for name, command in COMMANDS.items()]
    settings = [(name, setting.about) for name, setting in SETTINGS.items()]
    return CommandCompleter(commands, settings)


@contextmanager
def _on_interrupt(stop: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C calls `stop` in the event loop instead of raising anywhere."""
    loop = asyncio.get_running_loop()

    def handle(_: int, __: FrameType | None) -> None:
        loop.call_soon_threadsafe(stop)

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
