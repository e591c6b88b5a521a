"""The first screen: its values are the server's, on any size, through loss, overload and emptiness."""

from __future__ import annotations

import asyncio
import os
import re

import pytest
from screen_text import press, resize, screen_lines, screen_text, until, until_shown
from tui_server import llama_server, serve, slot, streams

from tui.app import EdgeserveApp
from tui.charts import StepTimeline, TimeChart
from tui.dialogs import Figures, Question
from tui.feed import Feed
from tui.memory_panel import MemoryPanel
from tui.request_list import RequestList
from tui.server_memory import find_process, planned_memory, process_memory
from tui.snapshot import LinkState, Status


async def test_values_on_the_screen_are_those_of_the_endpoints(live, monkeypatch):
    # Windows of time that no slowness of this test can end.
    monkeypatch.setattr("tui.history.NOW_S", 600.0)
    monkeypatch.setattr("tui.history.DONE_SHOWN_S", 600.0)
    app = EdgeserveApp(Feed(live.url))
    async with app.run_test(size=(130, 36)) as pilot:
        await until(pilot, lambda: app.feed.latest is not None, "for the server")
        num_before = live.state.engine_stats().num_steps
        answer = await asyncio.to_thread(
            lambda: live.chat("Count: one two three four five six.", max_tokens=24)
        )
        requests = app.query_one(RequestList)
        await until(pilot, lambda: [row.view.status for row in requests.rows] == [Status.DONE], "for its row")
        await until_shown(pilot, "0 running")
        total = live.metric('edgeserve_kv_cells{state="total"}')
        used = sum(live.metric(f'edgeserve_kv_cells{{state="{state}"}}') for state in ("used", "cached"))
        await until_shown(pilot, f"{used:,.0f} of {total:,.0f}")
        (done,) = requests.rows
        assert done.view.num_prompt == answer["usage"]["prompt_tokens"]
        await until_shown(pilot, f"{done.view.num_prompt:,} (")
        assert app.feed.facts.model in screen_text(app)
        assert app.feed.latest.totals.output_tokens == live.metric("edgeserve_generation_tokens_total")
        # The charts follow once a second, behind the rows and the cells.
        timeline, num_steps = app.query_one(StepTimeline), live.metric("edgeserve_decode_calls_total")
        await until(pilot, lambda: bool(timeline.steps) and timeline.steps[-1].number == num_steps, "for it")
        await until_shown(pilot, "╌ target 80.0 ms")  # as /props has it
        steps = [step for step in live.state.engine_stats().recent_steps if step.step > num_before]
        decodes = [step for step in steps if step.num_decode_tokens]
        assert sum(step.num_decode_tokens for step in decodes) == answer["usage"]["completion_tokens"] - 1
        told = len(decodes) / sum(step.duration_s for step in decodes)
        await until(pilot, lambda: _shown_decode_rate(app) == pytest.approx(told, rel=0.01), "for the speed")


def _output_of(app, chosen):
    """Tokens of a request that runs."""
    return {view.request_id: view.num_output for view in app.feed.latest.running}[chosen.request_id]


def _shown_decode_rate(app):
    """Tokens a second as the title of the decode chart has them."""
    shown = re.search(r"decode\s+[\d.,]+ ms/token · ([\d.,]+) tok/s", screen_text(app))
    return float(shown[1].replace(",", "")) if shown else None


async def test_who_runs_and_who_waits_stand_in_the_list(live):
    app = EdgeserveApp(Feed(live.url))
    async with app.run_test(size=(120, 34)) as pilot:
        with streams(live, 3):
            await until_shown(pilot, "2 of 2 running, 1 waiting")
            requests = app.query_one(RequestList)
            await until(pilot, lambda: requests.rows[0].view.num_output > 3, "for tokens")
            await until_shown(pilot, "· waiting")
            assert "for a free sequence" in screen_text(app)
            assert "▮ decode" in screen_text(app)
            await until(pilot, lambda: any(app.query_one("#decode", TimeChart).values), "for the chart")
            rules = [found.rule for found in app.screen.findings]
            assert "waiting" in rules
            assert app.screen.findings[0].sentence in app.query_one("#finding").text
            await press(pilot, "e")
            await until(pilot, lambda: isinstance(app.screen, Figures), "for the evidence")
            assert "its prompt" in app.screen.text.plain


async def test_a_request_is_cancelled_only_after_a_yes(live):
    app = EdgeserveApp(Feed(live.url))
    async with app.run_test(size=(100, 30)) as pilot:
        with streams(live, 1):
            await until(pilot, lambda: app.query_one(RequestList).chosen is not None, "for a request")
            chosen = app.query_one(RequestList).chosen
            await press(pilot, "c")
            await until(pilot, lambda: isinstance(app.screen, Question), "for the question")
            await press(pilot, "n")
            await until(pilot, lambda: not isinstance(app.screen, Question), "for the monitor")
            num_output = app.feed.latest.running[0].num_output
            await until(pilot, lambda: _output_of(app, chosen) > num_output, "for it to go on")
            await press(pilot, "c")
            await until(pilot, lambda: isinstance(app.screen, Question), "for the question")
            await press(pilot, "y")
            await until(pilot, lambda: not app.feed.latest.running, "for the request to end")
            assert app.feed.latest.totals.finished["cancelled"] >= 1


async def test_all_figures_of_a_request_are_one_key_away(live):
    app = EdgeserveApp(Feed(live.url))
    async with app.run_test(size=(100, 30)) as pilot:
        with streams(live, 1):
            await until(pilot, lambda: app.query_one(RequestList).chosen is not None, "for a request")
            await press(pilot, "enter")
            await until(pilot, lambda: isinstance(app.screen, Figures), "for the figures")
            assert "stalled by others" in app.screen.text.plain


async def test_every_panel_is_there_at_every_size(live):
    app = EdgeserveApp(Feed(live.url))
    async with app.run_test(size=(80, 24)) as pilot:
        for size in ((80, 24), (100, 30), (200, 60)):
            resize(pilot, *size)
            top = app.query_one("#top")
            await until(pilot, lambda top=top, size=size: top.size.width == size[0], "for the layout")
            await until(pilot, lambda size=size: len(screen_lines(app)) == size[1], "for all rows")
            for name in ("cells", "prefill", "decode", "steps", "requests", "now"):
                await until_shown(pilot, name)
            requests, memory = app.query_one(RequestList).region, app.query_one(MemoryPanel).region
            is_folded = memory.y >= requests.bottom
            assert is_folded == (size[0] < 110), "the right column folds under the left where it is narrow"
            assert requests.height >= 5


async def test_nothing_is_lost_when_the_size_changes_meanwhile(live):
    app = EdgeserveApp(Feed(live.url))
    async with app.run_test(size=(120, 40)) as pilot:
        with streams(live, 2):
            await until(pilot, lambda: len(app.feed.history.steps) > 20, "for steps")
            for size in ((80, 24), (61, 18), (100, 30)):
                resize(pilot, *size)
                await until(pilot, lambda wanted=size: app.size == wanted, "for the size")
            before = len(app.feed.history.steps)
            await until(pilot, lambda: len(app.feed.history.steps) > before, "for further steps")
            numbers = [step.number for step in app.feed.history.steps]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            await until_shown(pilot, "2 of 2 running")


async def test_without_a_server_it_says_how_to_start_one():
    app = EdgeserveApp(Feed("127.0.0.1:9"))
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "No server answers at 127.0.0.1:9")
        await until_shown(pilot, "edgeserve serve")
        await press(pilot, "s")
        await until(pilot, lambda: isinstance(app.screen, Question), "for the question")
        await press(pilot, "escape")
        await press(pilot, "c", "e", "w")
        assert not app.launcher.is_alive


async def test_a_server_that_goes_is_said_to_be_gone_and_comes_back(tui_engine):
    with serve(tui_engine) as live:
        app = EdgeserveApp(Feed(live.url))
        port = int(live.url.rpartition(":")[2])
        runner = app.run_test(size=(100, 30))
        pilot = await runner.__aenter__()
        await until_shown(pilot, "0 running")
    try:
        await until_shown(pilot, "server gone, again in")
        assert "requests" in screen_text(app), "what was seen stays"
        with serve(tui_engine, port):
            await until_shown(pilot, "0 running")
            assert app.feed.link.state is LinkState.LIVE
            await runner.__aexit__(None, None, None)
    except BaseException:
        app.exit()
        raise


async def test_llama_server_shows_what_it_tells_and_names_the_rest(monkeypatch):
    monkeypatch.setattr("tui.history.NOW_S", 600.0)
    metrics = {"requests_deferred": 3, "prompt_tokens_total": 0, "prompt_seconds_total": 0}
    with llama_server([slot(0, decoded=10), slot(1)], metrics) as stand_in:
        app = EdgeserveApp(Feed(stand_in.url))
        async with app.run_test(size=(120, 30), notifications=True) as pilot:
            await until_shown(pilot, "3 waiting")
            stand_in.slots[0] = slot(0, decoded=30)
            stand_in.metrics.update(prompt_tokens_total=400, prompt_seconds_total=2)
            await until(pilot, lambda: app.feed.history.now(app.feed.now()).prefill_tokens, "for a poll")
            await until_shown(pilot, "prefill  200 tok/s")
            text = screen_text(app)
            assert "llama-server" in text
            assert "only edgeserve's own server tells them" in text
            assert "500 (100)" in text
            assert re.search(r"cells\s+n/a", text)
            await press(pilot, "c")
            await until_shown(pilot, "cannot be asked to cancel")
            await press(pilot, "e")
            await until(pilot, lambda: isinstance(app.screen, Figures), "for what is unknown")
            assert "TTFT" in app.screen.text.plain


async def test_what_cannot_be_known_is_not_called_idle():
    with llama_server([slot(0, decoded=10)], None) as stand_in:
        app = EdgeserveApp(Feed(stand_in.url))
        async with app.run_test(size=(120, 30)) as pilot:
            await until_shown(pilot, "prefill  n/a")
            await until_shown(pilot, "this server does not tell it")
            await until_shown(pilot, "queue n/a")
            await until_shown(pilot, "4 things this server does not tell")


async def test_memory_is_planned_by_the_planner_and_read_from_the_system(live, monkeypatch):
    monkeypatch.setattr("tui.feed.MEMORY_EVERY_S", 0.2)
    feed = Feed(live.url)
    app = EdgeserveApp(feed)
    async with app.run_test(size=(120, 34)) as pilot:
        await until(pilot, lambda: feed.planned is not None and feed.real is not None, "for memory")
        await until_shown(pilot, "private")
        text = screen_text(app)
    planned = planned_memory(feed.facts)
    assert planned == feed.planned
    # E6: 23,040 bytes a token of this model at f16.
    assert planned.kv_bytes == 23_040 * feed.facts.n_ctx
    assert "45.0 MiB" in text
    assert find_process(live.url) == os.getpid()
    assert process_memory(os.getpid()).resident_bytes > planned.weights_bytes


async def test_a_window_of_time_is_chosen_by_key(live):
    app = EdgeserveApp(Feed(live.url))
    async with app.run_test(size=(120, 34)) as pilot:
        await until_shown(pilot, "-20 s")
        await press(pilot, "w")
        await until(pilot, lambda: "-20 s" not in screen_text(app), "for columns of two seconds")
        await until_shown(pilot, "-40 s")


async def test_a_list_longer_than_its_room_keeps_the_cursor_in_sight():
    with llama_server([slot(index, decoded=5) for index in range(30)], {}) as stand_in:
        app = EdgeserveApp(Feed(stand_in.url))
        async with app.run_test(size=(80, 24)) as pilot:
            requests = app.query_one(RequestList)
            await until(pilot, lambda: len(requests.rows) == 30, "for the rows")
            for _ in range(20):
                app.simulate_key("down")
            await until(pilot, lambda: requests.chosen.request_id == "90", "for the cursor")
            await until_shown(pilot, "›90")
            assert requests.chosen.status is Status.DECODE


async def test_who_runs_stays_in_sight_until_the_cursor_is_moved(monkeypatch):
    monkeypatch.setattr("tui.history.DONE_SHOWN_S", 0.0)
    with llama_server([slot(index, decoded=5) for index in range(3)], {}) as stand_in:
        app = EdgeserveApp(Feed(stand_in.url))
        async with app.run_test(size=(80, 24)) as pilot:
            requests = app.query_one(RequestList)
            await until(pilot, lambda: len(requests.rows) == 3, "for the rows")
            stand_in.slots.insert(0, slot(9, decoded=1))
            await until(pilot, lambda: len(requests.rows) == 4, "for another row")
            assert requests.chosen.request_id == "79", "the first row, whoever it is"
            await press(pilot, "down")
            await until(pilot, lambda: requests.chosen.request_id == "70", "for the cursor")
            stand_in.slots.insert(0, slot(8, decoded=1))
            await until(pilot, lambda: len(requests.rows) == 5, "for another row")
            assert requests.chosen.request_id == "70", "the one that somebody chose"
            del stand_in.slots[2]
            await until(pilot, lambda: len(requests.rows) == 4, "for it to go")
            assert requests.chosen.request_id == "78"
