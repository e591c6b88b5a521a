"""What holds on every screen: modes, help, themes, the mouse, pictures, imports; and a benchmark."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
from screen_text import press, until, until_shown
from textual.widgets import Input, OptionList

from edgeserve.bench.options import Scenario
from edgeserve.cli import main
from edgeserve.errors import UsageError
from tui.app import EdgeserveApp, Picture, run
from tui.bench_runs import FIELDS, BenchChild, command_of
from tui.feed import Feed
from tui.help_texts import help_sections
from tui.launcher import Launcher, free_port
from tui.themes import full_name, themes


async def test_every_screen_is_one_key_away_and_has_help(live):
    app = EdgeserveApp(Feed(live.url))
    async with app.run_test(size=(100, 30)) as pilot:
        await until_shown(pilot, "0 running")
        for key, mode in (("f2", "plan"), ("f4", "bench"), ("f3", "chat"), ("f1", "monitor")):
            await press(pilot, key)
            await until(pilot, lambda wanted=mode: app.current_mode == wanted, f"for {mode}")
            await until_shown(pilot, app.feed.facts.model)
        await until_shown(pilot, "No request is running.")
        await press(pilot, "question_mark")
        await until_shown(pilot, "cancel the chosen request")
        await until_shown(pilot, "--no-mouse")


def test_every_screen_has_help():
    for mode in EdgeserveApp.MODES:
        assert help_sections(mode)[0][0] == mode


async def test_themes_change_colours_and_not_words(live):
    app = EdgeserveApp(Feed(live.url))
    async with app.run_test(size=(100, 30)) as pilot:
        await until_shown(pilot, "target 80.0 ms")
        seen = {app.theme: app.get_css_variables()["prefill"]}
        for _ in themes()[1:]:
            await press(pilot, "ctrl+t")
            await until_shown(pilot, "target 80.0 ms")
            seen[app.theme] = app.get_css_variables()["prefill"]
        assert len(set(seen.values())) == len(themes()) == len(seen)
        app.theme = "nord"
        await until_shown(pilot, "target 80.0 ms")


async def test_the_mouse_is_given_back_by_a_key():
    app = EdgeserveApp(Feed("127.0.0.1:9"))
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await press(pilot, "f8")
        await until_shown(pilot, "Mouse off")
        assert not app.has_mouse


async def test_no_color_leaves_all_words(live, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    app = EdgeserveApp(Feed(live.url))
    async with app.run_test(size=(100, 30)) as pilot:
        await until_shown(pilot, "▮ decode  ▯ prefill  ◧ both")
        assert app.no_color


def test_a_screen_can_be_written_as_a_picture(live, tmp_path):
    path = tmp_path / "monitor.svg"
    run(live.url, picture=Picture(path, (100, 30), 0.8), theme="light")
    text = path.read_text()
    assert text.startswith("<svg")
    assert "edgeserve" in text
    light = next(theme for theme in themes() if theme.name == full_name("light"))
    assert light.background in text


async def test_a_picture_of_any_screen_is_one_key_away(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    app = EdgeserveApp(Feed("127.0.0.1:9"))
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        await until_shown(pilot, "No server answers")
        await press(pilot, "f9")
        await until(pilot, lambda: any(tmp_path.glob("edgeserve-monitor-*.svg")), "for the picture")
        await until_shown(pilot, "Written to")


def test_it_runs_without_a_terminal_where_textual_brings_a_driver():
    """As in a browser, by textual-serve."""
    driver = "textual.drivers.web_driver:WebDriver"
    process = subprocess.Popen(
        [sys.executable, "-m", "edgeserve", "tui", "--url", "http://127.0.0.1:9"],
        env={**os.environ, "TEXTUAL_DRIVER": driver},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        seen = b""
        while b"No server answers" not in seen and (data := os.read(process.stdout.fileno(), 65536)):
            seen += data
        assert b"No server answers" in seen
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--screen", "kitchen", "There is no screen kitchen"),
        ("--theme", "pink", "One of: dark, light, contrast"),
        ("--size", "wide", "Columns and rows"),
        ("--wait", "0", "more than 0"),
        ("--url", "ftp://nowhere", "ftp"),
    ],
)
def test_options_that_are_none_are_refused(option, value, said, tmp_path, capsys):
    picture = tmp_path / "x.svg"
    assert main(["tui", "--screenshot", str(picture), option, value]) == 2
    assert said in capsys.readouterr().err
    assert not picture.exists()


def test_without_a_terminal_there_is_no_screen(capsys):
    assert main(["tui"]) == 2
    assert "--screenshot" in capsys.readouterr().err


def test_an_address_that_is_none_is_told_before_anything_is_shown():
    with pytest.raises(UsageError):
        run("ftp://nowhere")


def test_the_application_loads_no_runtime_and_no_server():
    code = (
        "import sys, tui.app, tui.chat_screen, tui.plan_screen, tui.bench_screen;"
        "names = 'llama_cpp', 'edgeserve.llama', 'edgeserve.engine.engine', 'starlette', 'uvicorn';"
        "print([name for name in names if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_a_benchmark_runs_in_a_child_and_is_compared_with_another(live, own_folders):
    app = EdgeserveApp(Feed(live.url), mode="bench")
    async with app.run_test(size=(130, 40)) as pilot:
        await until(pilot, lambda: app.feed.facts is not None, "for the server")
        screen = app.screen
        screen.query_one("#scenario").value = Scenario.DECODE
        values = {"streams": "1", "prompt": "16", "output_tokens": "8", "repeats": "1"}
        await until(pilot, lambda: set(screen.typed) == {"scenario", *values}, "for the form")
        for field in screen.query("#fields Input").results(Input):
            field.value = values[field.name]
        await press(pilot, "ctrl+r")
        await until(pilot, lambda: screen.is_measuring, "for the start")
        await until(pilot, lambda: not screen.is_measuring, "for the end", 180)
        assert "decode, 1 stream" in screen.report, screen.report
        (first,) = screen.store.runs()
        assert "decode" in first.title
        # The same result under a later name: everything is the same.
        later = first.directory.with_name("20991231-235959_decode")
        later.mkdir()
        for file in first.directory.iterdir():
            (later / file.name).write_bytes(file.read_bytes())
        screen._list_runs()
        screen.query_one("#runs", OptionList).highlighted = 0
        screen.query_one("#runs", OptionList).focus()
        await press(pilot, "x")
        await until(pilot, lambda: "1.00×" in screen.report, "for the comparison")


@pytest.mark.parametrize("field", ["repeats", "streams"])
def test_options_are_checked_before_the_child_starts(field, tmp_path):
    with pytest.raises(UsageError):
        BenchChild("http://127.0.0.1:9", None, {"scenario": "decode", field: "some"}, tmp_path)


async def test_a_server_that_is_not_there_is_the_benchmarks_answer(tmp_path):
    child = BenchChild("http://127.0.0.1:9", None, {"scenario": "decode", "repeats": "1"}, tmp_path / "out")
    news = [item async for item in child.news()]
    assert "No server answers" in news[-1]["error"]


def test_the_command_can_be_pasted_and_holds_no_key():
    words = command_of("http://127.0.0.1:8080", {"scenario": "stall", "stall_prompt": "200", "repeats": ""})
    assert " ".join(words) == (
        "edgeserve bench --url http://127.0.0.1:8080 --scenario stall --stall-prompt 200"
    )


def test_every_scenario_has_its_fields():
    assert set(Scenario) <= set(FIELDS)


async def test_a_server_started_from_here_says_why_it_did_not_start():
    launcher = Launcher()
    port = free_port("http://127.0.0.1:9")
    assert await launcher.start(["no-such-model-anywhere"], port) == f"http://127.0.0.1:{port}"
    async with asyncio.timeout(60):
        while launcher.is_alive:
            await asyncio.sleep(0.05)
    await launcher.stop()
    assert any("no-such-model-anywhere" in line for line in launcher.lines)
