"""The plan screen: its numbers are the planner's, whatever is typed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from screen_text import press, resize, screen_text, until, until_shown
from textual.widgets import Input

from edgeserve.errors import UsageError
from edgeserve.gguf import read_header
from edgeserve.models_view import ModelRow, list_rows
from edgeserve.planner.device_search import find_profile
from edgeserve.planner.goals import FixedSettings, Goals
from edgeserve.planner.plan import make_plan
from edgeserve.planner.target import described_target
from edgeserve.planner.words import size
from edgeserve.settings.sources import gather
from edgeserve.settings.values import defaults_of
from tui.app import EdgeserveApp
from tui.dialogs import Question
from tui.feed import Feed
from tui.pick_list import PickList
from tui.plan_fields import STEPS
from tui.plan_query import PlanDesk, PlanForm, contexts_around, device_names, name_of
from tui.plan_texts import (
    by_context,
    command_of,
    flags_of,
    paragraphs,
    profile_text,
    side_by_side,
    startable,
    table_text,
)
from tui.pool_bars import PoolBars

DEVICE = "MacBook Air M2 16 GB"


@pytest.fixture(scope="module")
def header(model_path):
    return read_header(model_path)


@pytest.fixture
def estimate_only(monkeypatch):
    """No dry run: the figures stay those of the first answer."""
    monkeypatch.setattr("tui.plan_screen.PROVE_AFTER_S", 1000.0)


def planned(header, fixed=None, goals=None):
    goals = goals or Goals()
    target = described_target(find_profile(DEVICE), goals)
    return make_plan(header, target, goals, fixed, dry_run=False)


async def opened(pilot, model_path, **fields):
    await until(pilot, lambda: bool(pilot.app.screen.query(PoolBars)), "for the screen")
    screen = pilot.app.screen
    for name, text in {"model": str(model_path), "device": DEVICE, **fields}.items():
        screen.query_one(f"#{name}", Input).value = text
    return screen


def plan_app():
    return EdgeserveApp(Feed("127.0.0.1:9"), mode="plan")


async def estimated(pilot, screen):
    await until(pilot, lambda: screen.plan is not None and screen._planned_for == screen.form, "for a plan")
    return screen.plan


async def test_bars_and_sentences_are_those_of_the_planner(estimate_only, model_path, header):
    app = plan_app()
    async with app.run_test(size=(130, 40)) as pilot:
        screen = await opened(pilot, model_path)
        await estimated(pilot, screen)
        expected = planned(header)
        (bar,) = screen.query_one(PoolBars).pools
        (use,) = expected.best.uses
        assert sum(bar.parts.values()) == use.need_bytes
        assert bar.usable_bytes == use.pool.usable_bytes
        assert bar.parts["kv"] == expected.best.report.context_bytes
        await until_shown(pilot, size(use.pool.usable_bytes))
        await until_shown(pilot, f"-c {expected.settings.n_ctx}")
        await until_shown(pilot, f"kv {size(bar.parts['kv'])}")
        await until_shown(pilot, expected.reasons[0].split(":")[0][:40])


async def test_with_room_every_part_has_a_row_and_the_tables_stand_beside_the_text(
    estimate_only, model_path, header
):
    app = plan_app()
    async with app.run_test(size=(200, 60)) as pilot:
        screen = await opened(pilot, model_path, n_seq_max="2")
        plan = await estimated(pilot, screen)
        for name, n_bytes in screen.query_one(PoolBars).pools[0].parts.items():
            row = re.compile(rf"[█▓▒░] {name} +{re.escape(size(n_bytes))} +(< 1|\d+) %  [█▓▒░]")
            await until(pilot, lambda row=row: bool(row.search(screen_text(app))), "for a part")
        await until_shown(pilot, "more or less context")
        text, tables = screen.query_one("#text"), screen.query_one("#tables")
        await until(pilot, lambda: tables.region.x >= text.region.right, "for the tables beside the text")
        shown = screen_text(app)
        for reason in plan.reasons:
            assert reason.split()[-1] in shown, "nothing is clipped"
        resize(pilot, 80, 24)
        await until(pilot, lambda: tables.region.y >= text.region.bottom, "for the tables below it")
        assert not screen.query_one(PoolBars).has_room
        resize(pilot, 180, 50)
        await until(pilot, lambda: tables.region.x >= text.region.right, "for the tables beside the text")


def test_other_contexts_are_planned_as_if_they_were_asked_for(model_path, header):
    desk, form = PlanDesk(), PlanForm(str(model_path), DEVICE, n_ctx="8k", n_seq_max="2")
    plan = desk.answer(form, dry_run=False)
    options = desk.other_contexts(form, plan)
    assert [option.choice.n_ctx_seq for option in options] == [512, 1024, 2048, 4096, 8192]
    asked = desk.answer(replace(form, n_ctx="16k"), dry_run=False)
    assert options[-1].uses == asked.best.uses and options[-1].speed == asked.best.speed
    rows = by_context(plan, options)
    assert [row[0] for row in rows] == ["", "", "", "", "›", ""]
    assert rows[4][1:3] == ["8,192", "4,096"] and rows[4][3] == size(plan.best.uses[0].high_bytes)
    assert all(len(line) <= 72 for line in table_text(rows, 72).splitlines())
    short = by_context(plan, options, 42)
    assert short[4] == ["›", "8,192", *rows[4][3:]]
    assert all(len(line) <= 42 for line in table_text(short, 42).splitlines())


def test_a_context_that_does_not_fit_is_compared_with_those_that_would(model_path):
    desk, form = PlanDesk(), PlanForm(str(model_path), DEVICE, n_ctx="4000k", n_seq_max="1")
    plan = desk.answer(form, dry_run=False)
    rows = by_context(plan, desk.other_contexts(form, plan))
    assert rows[-1][0] == "›" and rows[-1][-1] == "too much"
    assert "too much" not in rows[-2]


@pytest.mark.parametrize(
    ("n_ctx_seq", "n_ctx_train", "around"),
    [
        (12_288, 262_144, [1024, 2048, 4096, 8192, 12_288, 16_384, 32_768, 65_536, 131_072]),
        (8192, 8192, [512, 1024, 2048, 4096, 8192]),
        (300, 0, [300]),
        (100_000, 2048, [512, 1024, 2048, 100_000]),
    ],
)
def test_contexts_to_compare_are_halves_of_what_the_model_was_trained_for(n_ctx_seq, n_ctx_train, around):
    assert contexts_around(n_ctx_seq, n_ctx_train) == around


async def test_bars_move_with_what_is_typed(estimate_only, model_path, header):
    app = plan_app()
    async with app.run_test(size=(120, 36)) as pilot:
        screen = await opened(pilot, model_path, n_ctx="8k", n_seq_max="1")
        await estimated(pilot, screen)
        (small,) = screen.query_one(PoolBars).pools
        assert small.parts["kv"] == 23_040 * 8192
        screen.query_one("#n_ctx", Input).value = "16,384"
        await until(
            pilot, lambda: screen.query_one(PoolBars).pools[0].parts["kv"] == 23_040 * 16384, "for it"
        )
        screen.query_one("#kv_type", Input).value = "q8_0"
        await until(
            pilot, lambda: screen.query_one(PoolBars).pools[0].parts["kv"] == 12_240 * 16384, "for it"
        )


async def test_what_rests_is_proven_by_a_dry_run(model_path):
    app = plan_app()
    async with app.run_test(size=(120, 36)) as pilot:
        screen = await opened(pilot, model_path, device="this machine")
        await until(pilot, lambda: screen.plan is not None and screen.plan.proof.is_dry_run, "for the proof")
        await until_shown(pilot, "proven by a dry run")


async def test_a_misfit_says_what_would_help(estimate_only, model_path):
    app = plan_app()
    async with app.run_test(size=(120, 36), notifications=True) as pilot:
        screen = await opened(pilot, model_path, n_ctx="4000k")
        plan = await estimated(pilot, screen)
        assert not plan.fits
        await until_shown(pilot, "too much by")
        await until_shown(pilot, "remedy")
        fits = plan.remedy.changes[0].settings
        await until_shown(pilot, f"-c {fits.n_ctx}")
        await press(pilot, "ctrl+r")
        await until_shown(pilot, "This plan is for another device")
        assert command_of(plan, "m").startswith(f"edgeserve serve m -c {fits.n_ctx} -np {fits.n_seq_max} ")


async def test_what_fits_instead_is_started_after_a_question(estimate_only, model_path, monkeypatch):
    app = plan_app()
    started = []

    async def start(arguments, port):
        """Not the real one: what just fits takes most of this machine's memory."""
        started.append(arguments)
        return "http://127.0.0.1:9"

    monkeypatch.setattr(app.launcher, "start", start)
    async with app.run_test(size=(120, 36)) as pilot:
        screen = await opened(pilot, model_path, device="this machine", n_ctx="400000k")
        plan = await estimated(pilot, screen)
        await press(pilot, "ctrl+r")
        await until(pilot, lambda: isinstance(app.screen, Question), "for the question")
        await press(pilot, "y")
        await until(pilot, lambda: bool(started), "for the start")
    assert started == [[str(model_path), *flags_of(plan, startable(plan))]]
    assert startable(plan) != plan.settings


async def test_fields_are_stepped_through_by_key(estimate_only, model_path):
    app = plan_app()
    async with app.run_test(size=(120, 36)) as pilot:
        screen = await opened(pilot, model_path, n_ctx="10000", n_seq_max="1")
        await estimated(pilot, screen)
        context = screen.query_one("#n_ctx", Input)
        context.focus()
        await press(pilot, "up")
        await until(pilot, lambda: context.value == "16,384", "for twice the context")
        kv_type = screen.query_one("#kv_type", Input)
        kv_type.focus()
        await press(pilot, "down", "up", "up")
        await until(pilot, lambda: kv_type.value == "q8_0", "for the next type")
        plan = await estimated(pilot, screen)
        assert (plan.settings.n_ctx, plan.settings.type_k) == (16384, "q8_0")


@pytest.mark.parametrize(
    ("name", "text", "up", "down"),
    [
        ("n_ctx", "8k", "16,384", "4,096"),
        ("n_ctx", "10,000", "16,384", "8,192"),
        ("n_ctx", "256", "512", "256"),
        ("n_seq_max", "1", "2", "1"),
        ("n_gpu_layers", "all 31", "32", "30"),
        ("n_gpu_layers", "no GPU", "no GPU", "no GPU"),
        ("kv_type", "q4_0", "f16", "q4_1"),
        ("prefer", "balanced", "context", "quality"),
    ],
)
def test_a_step_is_what_one_would_try_next(name, text, up, down):
    assert (STEPS[name](text, 1), STEPS[name](text, -1)) == (up, down)


async def test_what_cannot_be_understood_is_said_with_a_way_out(estimate_only, model_path):
    app = plan_app()
    async with app.run_test(size=(120, 36)) as pilot:
        screen = await opened(pilot, model_path)
        for field, text, said in (
            ("n_ctx", "many", "not a whole number"),
            ("kv_type", "q9", "Unknown cache type q9"),
            ("prefer", "luck", "cannot prefer luck"),
            ("device", "a toaster 9", "No device profile matches"),
            ("model", "nothing-like-it", "No model answers to"),
        ):
            entry = screen.query_one(f"#{field}", Input)
            before, entry.value = entry.value, text
            await until_shown(pilot, said)
            assert screen.plan is None
            assert list(screen.query_one(PoolBars).pools) == []
            entry.value = before
        assert (await estimated(pilot, screen)).fits


async def test_a_saved_plan_is_a_configuration_that_serve_reads(estimate_only, model_path, own_folders):
    app = plan_app()
    async with app.run_test(size=(120, 36)) as pilot:
        screen = await opened(pilot, model_path, n_ctx="8192", n_seq_max="2", kv_type="q8_0")
        plan = await estimated(pilot, screen)
        await press(pilot, "ctrl+s")
        config = own_folders / "config"
        await until(pilot, lambda: any(file.read_text() for file in config.rglob("*.toml")), "for the file")
        (path,) = config.rglob("*.toml")
    settings = gather("serve", {}, {}, defaults_of("serve"), config_path=path)
    assert settings["model"] == str(model_path)
    assert (settings["n_ctx"], settings["n_seq_max"], settings["type_k"]) == (8192, 2, "q8_0")
    assert path.read_text() == profile_text(plan, str(model_path))


async def test_models_and_devices_are_found_by_a_part_of_the_name(estimate_only, model_path):
    app = plan_app()
    async with app.run_test(size=(120, 36)) as pilot:
        screen = await opened(pilot, model_path)
        await press(pilot, "ctrl+d")
        await until(pilot, lambda: isinstance(app.screen, PickList), "for the list")
        await press(pilot, *"4090", "enter")
        await until(pilot, lambda: "4090" in screen.query_one("#device", Input).value, "for the device")
        plan = await estimated(pilot, screen)
        assert "4090" in plan.target.profile.name


def test_of_a_misfit_every_pool_that_is_short_and_the_remedy_come_first(header):
    plan = planned(header, FixedSettings(n_ctx=4_096_000))
    lines = list(paragraphs(plan, "m"))
    assert [label for label, _ in lines if label][:4] == ["asked", "why", "remedy", "run"]
    remedy = [label for label, _ in lines].index("remedy")
    assert all("does not fit" in text for _, text in lines[1:remedy])
    assert not any("does not fit" in text for _, text in lines[remedy:])


def test_a_server_s_model_is_called_by_its_name_where_it_has_one(monkeypatch, tmp_path):
    entry = list_rows()[0].entry
    known = ModelRow(entry, tmp_path / "known.gguf", None)
    monkeypatch.setattr("tui.plan_query.list_rows", lambda: [known])
    assert name_of(str(tmp_path / "known.gguf")) == entry.name
    assert name_of("/elsewhere/other.gguf") == "/elsewhere/other.gguf"


def test_alternatives_stand_side_by_side(header):
    plan = planned(header, FixedSettings(n_seq_max=1))
    rows = side_by_side(plan)
    assert all(len(row) == 2 + len(plan.alternatives) for row in rows)
    text = table_text(rows, 90)
    assert "suggested" in text and all(len(line) <= 90 for line in text.splitlines())
    assert f"{plan.settings.n_ctx:,}" in text


def test_the_command_is_what_the_plan_says(header, model_path):
    plan = planned(header, FixedSettings(n_ctx=8192))
    assert command_of(plan, "smollm2-135m").startswith("edgeserve serve smollm2-135m -c 8192 ")


def test_forms_are_read_as_people_write():
    form = PlanForm("m", n_ctx="16k", n_seq_max=" 4 ", min_ctx="4,096", prefer="Context")
    assert form.fixed() == FixedSettings(n_ctx=16384, n_seq_max=4)
    assert form.goals() == Goals(min_ctx=4096, prefer="context")
    with pytest.raises(UsageError):
        PlanForm("m", n_gpu_layers="-").fixed()


def test_a_header_is_read_once(model_path):
    desk = PlanDesk()
    form = PlanForm(str(model_path), DEVICE)
    first = desk.answer(form, dry_run=False)
    assert desk.answer(form, dry_run=False).best.report == first.best.report
    assert len(desk._headers) == 1


def test_every_device_that_is_offered_can_be_planned_for():
    this, *names = device_names()
    assert this == "this machine"
    assert len(names) > 100
    assert all(find_profile(name).profile for name in names[::25])
