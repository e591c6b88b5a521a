from __future__ import annotations

import json
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from chat_terminal import run_piped, terminal
from mock_openai import MockServer, Reply, Sent, Step, chunk, error_response, sse, usage_chunk


def words_of(text: str) -> list[str]:
    return [f"{word} " for word in text.split(" ")]


def timings(num_tokens: int, prompt_n: int = 28, cache_n: int = 290) -> dict[str, Any]:
    return {
        "cache_n": cache_n,
        "prompt_n": prompt_n,
        "prompt_ms": 212.0,
        "predicted_n": num_tokens,
        "predicted_ms": 13.4 * (num_tokens - 1),
    }


def reply(text: str, *, gap_s: float = 0.0, prompt_n: int = 28, cache_n: int = 290) -> list[Step]:
    """`text` word by word with llama-server's timings at the end."""
    pieces = words_of(text)
    steps = [Step(chunk({"role": "assistant", "content": ""})), Step(b": ping\n\n")]
    steps += [Step(chunk({"content": piece}), gap_s) for piece in pieces]
    last = {"choices": [], "timings": timings(len(pieces), prompt_n, cache_n)}
    return [*steps, Step(chunk({}, "stop")), Step(sse(last)), Step(sse("[DONE]"))]


def echo(body: dict[str, Any]) -> Reply:
    return reply(f"got <{body['messages'][-1]['content']}> in full")


@pytest.fixture
def server() -> Iterator[Callable[..., MockServer]]:
    """Start a scripted server; it ends with the test."""
    running = []

    def start(script: Callable[[dict[str, Any]], Reply] = echo, **pages: Any) -> MockServer:
        context = MockServer(script, {f"/{name}": page for name, page in pages.items()}).running()
        running.append(context)
        return context.__enter__()

    yield start
    for context in running:
        context.__exit__(None, None, None)


def messages(server: MockServer) -> list[str]:
    return [sent.body["messages"][-1]["content"] for sent in server.sent]


def wait_until_abandoned(sent: Sent) -> None:
    deadline = time.monotonic() + 10
    while not sent.is_abandoned:
        assert time.monotonic() < deadline, "the server was never told that nobody listens"
        time.sleep(0.01)


# --- one message -------------------------------------------------------------------------------------------


def test_piped_text_is_one_message_and_only_the_answer_is_on_stdout(server, tmp_path) -> None:
    mock = server()
    done = run_piped(mock.url, tmp_path, stdin="first\nsecond 中文 😀\n".encode())
    assert done.returncode == 0
    assert done.stdout.decode() == "got <first\nsecond 中文 😀\n> in full \n"
    assert done.stderr == b""
    assert messages(mock) == ["first\nsecond 中文 😀\n"]


def test_a_prompt_is_answered_without_reading_standard_input(server, tmp_path) -> None:
    mock = server()
    done = run_piped(
        mock.url,
        tmp_path,
        stdin=b"not this",
        prompt="this",
        system="Be brief.",
        max_tokens=7,
        temperature=0.5,
    )
    body = mock.sent[0].body
    assert done.stdout == b"got <this> in full \n"
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "this"},
    ]
    assert (body["max_tokens"], body["temperature"]) == (7, 0.5)


@pytest.mark.parametrize("given", [b"", b" \n\t\n"])
def test_nothing_to_answer_is_no_failure_and_asks_nobody(server, tmp_path, given: bytes) -> None:
    mock = server()
    done = run_piped(mock.url, tmp_path, stdin=given)
    assert (done.returncode, done.stdout, mock.sent) == (0, b"", [])
    assert b"nothing to answer" in done.stderr


def test_reasoning_does_not_reach_a_pipe(server, tmp_path) -> None:
    split = server(lambda _: [Step(chunk({"reasoning_content": "secret"})), *reply("\n\nan answer")])
    tagged = server(lambda _: [Step(chunk({"content": "<thi"})), *reply("nk>a<b</think>\n\nplain **x**")])
    assert run_piped(split.url, tmp_path, prompt="q").stdout == b"an answer \n"
    done = run_piped(tagged.url, tmp_path, prompt="q", environ={"FORCE_COLOR": "1"})
    assert (done.stdout, done.stderr) == (b"plain **x** \n", b"")


def test_a_servers_error_is_one_sentence_and_exit_code_1(server, tmp_path) -> None:
    mock = server(lambda _: error_response(400, "temperature must be below 2.", "invalid"))
    done = run_piped(mock.url, tmp_path, prompt="q")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode() == "error: temperature must be below 2.\n"


def test_an_error_inside_the_stream_keeps_what_came_before(server, tmp_path) -> None:
    broken = {"error": {"message": "decode failed", "type": "server_error"}}
    mock = server(lambda _: [Step(chunk({"content": "half an "})), Step(sse(broken))])
    done = run_piped(mock.url, tmp_path, prompt="q")
    assert (done.returncode, done.stdout) == (1, b"half an \n")
    assert done.stderr == b"error: decode failed\n"


def test_no_server_is_exit_code_4(tmp_path) -> None:
    done = run_piped("http://127.0.0.1:9", tmp_path, prompt="q")
    assert (done.returncode, done.stdout) == (4, b"")
    assert b"No server answers at http://127.0.0.1:9." in done.stderr


def test_a_server_that_knows_no_extras_is_asked_without_them(server, tmp_path) -> None:
    def strict(body: dict[str, Any]) -> Reply:
        if "return_progress" in body:
            return error_response(400, "Unknown parameter: return_progress", "unknown_parameter")
        return reply("fine")

    mock = server(strict)
    assert run_piped(mock.url, tmp_path, prompt="q").stdout == b"fine \n"
    assert "timings_per_token" not in mock.sent[1].body


def test_token_times_go_to_standard_error(server, tmp_path) -> None:
    def timed(_: dict[str, Any]) -> Reply:
        steps = []
        for number, piece in enumerate(words_of("the quick brown fox"), 1):
            choice = {"index": 0, "delta": {"content": piece}}
            steps.append(Step(sse({"choices": [choice], "timings": timings(number)})))
        return [*steps, Step(chunk({}, "stop")), Step(sse("[DONE]"))]

    done = run_piped(server(timed).url, tmp_path, prompt="q", timings_per_token=True)
    shown = done.stderr.decode()
    assert done.stdout == b"the quick brown fox \n"
    assert "by the server's clock" in shown
    assert "13.4 quick·" in shown and "13.4 fox·" in shown
    assert "n 3   p50 13.4 ms" in shown


def test_ctrl_c_stops_the_one_answer_with_exit_code_130(server, tmp_path) -> None:
    mock = server(lambda _: reply("word " * 500, gap_s=0.02))
    with terminal(mock.url, tmp_path, prompt="q") as screen:
        screen.wait_for("word")
        screen.interrupt()
        assert screen.exit_code() == 130
    wait_until_abandoned(mock.sent[0])


# --- a conversation ----------------------------------------------------------------------------------------


def test_two_messages_and_their_figures(server, tmp_path) -> None:
    props = {"default_generation_settings": {"n_ctx": 8192}}
    mock = server(echo, props=props)
    with terminal(mock.url, tmp_path, system="Be kind.") as screen:
        screen.wait_for("mock · context 8,192")
        screen.send("one\r")
        screen.wait_for("got <one> in full")
        line = screen.wait_for("context 322/8,192")
        assert "prompt 318 (290 cached)" in line
        assert "prefill 132 tok/s" in line
        assert "decode 13.4 ms/token" in line
        screen.send("two\r")
        screen.wait_for("got <two> in full")
        screen.send("\x04")
        assert screen.exit_code() == 0
    assert [message["role"] for message in mock.sent[1].body["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert mock.sent[1].body["messages"][2]["content"] == "got <one> in full "
    history = tmp_path / "history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "+one" in history.read_text()


def test_a_prefix_hit_shows_counts_and_no_rate(server, tmp_path) -> None:
    mock = server(lambda _: reply("yes", prompt_n=1, cache_n=14))
    with terminal(mock.url, tmp_path) as screen:
        screen.send("again\r")
        screen.wait_for("prompt 15 (14 cached)")
        line = screen.wait_for("context 16/4,096")
    assert "prefill 1 evaluated" in line and "decode n/a" in line


PASTE = "\n".join(f"line {number} of 50" for number in range(50))


@pytest.mark.parametrize("newline", ["\r", "\n"])
@pytest.mark.parametrize("brackets", [("\x1b[200~", "\x1b[201~"), ("", "")])
def test_fifty_pasted_lines_are_one_message(
    server, tmp_path, newline: str, brackets: tuple[str, str]
) -> None:
    mock = server(lambda _: reply("read"))
    with terminal(mock.url, tmp_path) as screen:
        screen.wait_for(">")
        screen.send(brackets[0] + PASTE.replace("\n", newline) + brackets[1])
        screen.wait_for("line 49 of 50")
        screen.send("\r")
        screen.wait_for("context")
        screen.send("\x04")
        assert screen.exit_code() == 0
    assert messages(mock) == [PASTE]


def test_what_is_typed_in_one_go_is_sent(server, tmp_path) -> None:
    mock = server()
    with terminal(mock.url, tmp_path) as screen:
        screen.wait_for(">")
        screen.send("a\rb\r\r")
        screen.wait_for("in full")
    assert messages(mock) == ["a\nb\n"]


def test_lines_are_added_and_edited_with_the_arrow_keys(server, tmp_path) -> None:
    mock = server()
    with terminal(mock.url, tmp_path) as screen:
        screen.wait_for(">")
        screen.send("one\x1b\rtwo\\\r")
        screen.send("three\x1b[A\x1b[AX")
        shown = screen.wait_for("X")
        screen.send("\r")
        screen.wait_for("in full")
    assert messages(mock) == ["oneX\ntwo\nthree"]
    assert "..." not in shown


def test_wide_and_combining_characters_are_erased_one_by_one(server, tmp_path) -> None:
    mock = server()
    with terminal(mock.url, tmp_path) as screen:
        screen.wait_for(">")
        screen.send("中文字\x7f😀e\u0301!\x7f")
        screen.send("\r")
        screen.wait_for("in full")
        # A message that was answered is shown again as it was typed.
        screen.send("\x1b[A")
        screen.wait_for("中文😀e\u0301")
    assert messages(mock) == ["中文😀e\u0301"]


def test_ctrl_c_stops_the_answer_then_leaves(server, tmp_path) -> None:
    mock = server(lambda _: reply("word " * 500, gap_s=0.02))
    with terminal(mock.url, tmp_path) as screen:
        screen.send("go\r")
        screen.wait_for("word word")
        screen.interrupt()
        screen.wait_for("stopped")
        screen.wait_for(">")
        screen.interrupt()
        assert screen.exit_code() == 130
    wait_until_abandoned(mock.sent[0])


def test_the_chat_goes_on_with_what_a_stopped_answer_said(server, tmp_path) -> None:
    mock = server(lambda body: reply("word " * 500, gap_s=0.02) if len(body["messages"]) == 1 else echo(body))
    with terminal(mock.url, tmp_path) as screen:
        screen.send("go\r")
        screen.wait_for("word word")
        screen.interrupt()
        screen.wait_for("stopped")
        screen.send("on\r")
        screen.wait_for("got <on> in full")
    sent = mock.sent[1].body["messages"]
    assert sent[1]["content"].startswith("word word") and len(sent[1]["content"]) < 2000


def test_ctrl_c_clears_a_draft_and_twice_on_nothing_leaves(server, tmp_path) -> None:
    mock = server()
    with terminal(mock.url, tmp_path) as screen:
        screen.wait_for(">")
        screen.send("draft\x1b\rmore")
        screen.wait_for("more")
        screen.interrupt()
        screen.interrupt()
        screen.wait_for("Ctrl-C again leaves")
        screen.wait_for(">")
        screen.interrupt()
        assert screen.exit_code() == 130
    assert mock.sent == []


def test_keys_pressed_during_an_answer_are_kept_and_not_echoed(server, tmp_path) -> None:
    mock = server(
        lambda body: reply("first part " * 30, gap_s=0.01) if len(body["messages"]) == 1 else echo(body)
    )
    with terminal(mock.url, tmp_path) as screen:
        screen.send("go\r")
        screen.wait_for("first")
        screen.send("typed ahead\r")
        answer = screen.wait_for("context")
        assert "typed" not in answer
        screen.wait_for("got <typed ahead> in full")


def test_progress_of_a_long_prompt_is_shown_and_disappears(server, tmp_path) -> None:
    def slow(_: dict[str, Any]) -> Reply:
        steps = []
        for done in (0, 620, 1240, 1860):
            progress = {"total": 3120, "cache": 0, "processed": done, "time_ms": done * 4.0}
            steps.append(Step(sse({"choices": [], "prompt_progress": progress}), 0.3))
        return [*steps, Step(b": ping\n\n", 0.6), *reply("done at last")]

    mock = server(slow)
    with terminal(mock.url, tmp_path) as screen:
        screen.send("long\r")
        screen.wait_for("prefill 1,240 of 3,120 tokens (40 %), ")
        screen.wait_for(" s left")
        screen.wait_for("done at last")
        assert "\r\x1b[Kdone" in screen.seen
    piped = run_piped(mock.url, tmp_path, prompt="long")
    assert (piped.stdout, piped.stderr) == (b"done at last \n", b"")
    assert mock.sent[0].body["return_progress"] is True


def test_commands_change_the_conversation(server, tmp_path) -> None:
    mock = server()
    session = tmp_path / "talk.json"
    with terminal(mock.url, tmp_path) as screen:
        for line, shown in [
            ("hello", "got <hello> in full"),
            ("/nope", "Unknown command /nope."),
            ("/set temp 0.25", "temperature is 0.25."),
            ("/set temp hot", "temperature cannot be 'hot'."),
            ("/system Speak German.", "The system message is set."),
            (f"/save {session}", "Saved 1 answer"),
            ("/reset", "begins anew"),
            ("//etc", "got </etc> in full"),
            (f"/load {session}", "Loaded 1 answer"),
            ("/retry", "got <hello> in full"),
            ("/stats", "answers   3"),
            ("/help", "/set NAME VALUE"),
        ]:
            screen.send(f"{line}\r")
            screen.wait_for(shown)
            screen.wait_for(">")
        screen.send("/quit\r")
        assert screen.exit_code() == 0
    assert messages(mock) == ["hello", "/etc", "hello"]
    assert [len(sent.body["messages"]) for sent in mock.sent] == [1, 2, 2]
    assert mock.sent[2].body["temperature"] == 0.25
    assert json.loads(session.read_text())["messages"][0] == {"role": "system", "content": "Speak German."}


def test_errors_are_told_and_the_chat_goes_on(server, tmp_path) -> None:
    def script(body: dict[str, Any]) -> Reply:
        text = body["messages"][-1]["content"]
        if text == "long":
            return error_response(400, "This prompt has 9,000 tokens.", "context_length_exceeded")
        return [Step(chunk({"content": "half"}))] if text == "cut" else echo(body)

    mock = server(script)
    with terminal(mock.url, tmp_path) as screen:
        screen.send("long\r")
        screen.wait_for("error: This prompt has 9,000 tokens.")
        screen.wait_for("/reset begins anew")
        screen.wait_for(">")
        screen.send("cut\r")
        screen.wait_for("error: The server closed the stream")
        screen.wait_for(">")
        screen.send("fine\r")
        screen.wait_for("got <fine> in full")
    # The refused message is not part of the talk; the half answer is.
    assert [message["content"] for message in mock.sent[2].body["messages"]] == ["cut", "half", "fine"]


def test_a_server_that_went_away_is_said(tmp_path) -> None:
    with MockServer(echo).running() as mock:
        context = terminal(mock.url, tmp_path)
        screen = context.__enter__()
        screen.wait_for(">")
    screen.send("hello\r")
    screen.wait_for(f"error: No server answers at {mock.url}.")
    screen.wait_for(">")
    screen.send("\x04")
    assert screen.exit_code() == 0
    context.__exit__(None, None, None)


def test_reasoning_is_dimmed_and_apart(server, tmp_path) -> None:
    mock = server(lambda _: [Step(chunk({"reasoning_content": "hmm"})), *reply("\n\nan answer")])
    with terminal(mock.url, tmp_path) as screen:
        screen.send("q\r")
        screen.wait_for("an answer")
        assert "\x1b[2mreasoning:\x1b[0m\n\x1b[2mhmm\x1b[0m\n\nan answer" in screen.seen
    with terminal(mock.url, tmp_path, environ={"NO_COLOR": "1"}) as screen:
        screen.send("q\r")
        screen.wait_for("reasoning:\nhmm\n\nanswer:\nan answer")


def test_an_answer_cannot_send_codes_to_the_terminal(server, tmp_path) -> None:
    mock = server(lambda _: reply("a\x1b]0;title\x07b\x9b2Jc\rd"))
    with terminal(mock.url, tmp_path, environ={"NO_COLOR": "1"}) as screen:
        screen.send("q\r")
        screen.wait_for("a␛]0;title␇b\ufffd2Jcd")
        assert "\x1b]0;title" not in screen.seen


@pytest.mark.parametrize(
    ("environ", "plain", "is_styled"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_answers_are_styled_only_where_wanted(
    server, tmp_path, environ, plain: bool, is_styled: bool
) -> None:
    mock = server(lambda _: reply("some **bold** words"))
    with terminal(mock.url, tmp_path, environ=environ, plain=plain) as screen:
        screen.send("q\r")
        screen.wait_for("some **bold** words")
        screen.wait_for("context")
    assert ("\x1b[1mbold\x1b[0m" in screen.seen) is is_styled


def test_figures_from_usage_alone(server, tmp_path) -> None:
    """A server without timings: decode as the client saw it, prefill unknown."""
    steps = [Step(chunk({"content": "word "}), 0.02) for _ in range(10)]
    mock = server(
        lambda _: [*steps, Step(chunk({}, "length")), Step(usage_chunk(318, 10, 290)), Step(sse("[DONE]"))]
    )
    with terminal(mock.url, tmp_path) as screen:
        screen.send("q\r")
        screen.wait_for("prompt 318 (290 cached)")
        line = screen.wait_for("cut at the token limit")
    assert "prefill n/a" in line and "ms/token" in line and "context 328/4,096" in line
