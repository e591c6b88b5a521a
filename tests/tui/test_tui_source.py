"""The feed over HTTP: edgeserve's stream, llama-server by polling, refusals, loss and return."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from tui_server import llama_server, serve, slot, streams

from edgeserve.errors import UsageError
from tui.feed import Feed
from tui.snapshot import Link, LinkState, ServerFacts, ServerKind, Snapshot, Status
from tui.source import watch


async def first(url, kind, api_key=None, holds=lambda update: True):
    """The first update of a kind for which something holds."""
    async with asyncio.timeout(60), aclosing(watch(url, api_key)) as updates:
        async for update in updates:
            if isinstance(update, kind) and holds(update):
                return update
    raise AssertionError("a feed never ends by itself")


async def link_that(url, state):
    return await first(url, Link, holds=lambda link: link.state is state)


async def test_facts_of_edgeserve_are_what_its_endpoints_say(live):
    facts = await first(live.url, ServerFacts)
    props, (model,) = live.get("/props"), live.get("/v1/models")["data"]
    assert facts.kind is ServerKind.EDGESERVE
    assert facts.can_cancel
    assert (facts.model, facts.n_ctx_train) == (model["id"], model["meta"]["n_ctx_train"])
    assert (facts.n_ctx, facts.n_ctx_seq) == (props["engine"]["n_ctx"], model["max_model_len"])
    assert facts.itl_target_ms == 80
    assert (
        facts.request_defaults["temperature"] == props["default_generation_settings"]["params"]["temperature"]
    )
    assert facts.unknown == ()


async def test_a_snapshot_holds_who_runs_and_who_waits(live):
    with streams(live, 3):
        snapshot = await first(live.url, Snapshot, holds=lambda s: s.waiting and s.running[0].num_output > 2)
    assert len(snapshot.running) == 2
    (waiting,) = snapshot.waiting
    assert waiting.status is Status.WAITING
    assert waiting.waits_for
    assert snapshot.cells.total == live.get("/props")["engine"]["n_ctx"]
    assert snapshot.steps, "every snapshot tells the steps since the last one"


async def test_steps_are_told_once_each(live):
    numbers = []
    async with asyncio.timeout(60), aclosing(watch(live.url)) as updates:
        with streams(live, 1):
            async for update in updates:
                if isinstance(update, Snapshot):
                    numbers += [step.number for step in update.steps]
                    if len(numbers) > 30:
                        break
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


async def test_llama_server_is_polled_and_says_what_it_cannot_tell():
    metrics = {"prompt_tokens_total": 900, "prompt_seconds_total": 3.5, "requests_deferred": 2}
    with llama_server([slot(0, decoded=12), slot(1)], metrics) as stand_in:
        facts = await first(stand_in.url, ServerFacts)
        snapshot = await first(stand_in.url, Snapshot)
    assert facts.kind is ServerKind.LLAMA_SERVER
    assert (facts.model, facts.n_ctx_seq, facts.num_slots) == ("qwen3-4b", 4096, 2)
    assert not facts.can_cancel
    assert any("TTFT" in sentence for sentence in facts.unknown)
    decoding, prefilling = snapshot.running
    assert (decoding.status, decoding.num_output, decoding.num_cached) == (Status.DECODE, 12, 100)
    assert (prefilling.status, prefilling.prompt_share) == (Status.PREFILL, 1.0)
    assert (snapshot.waiting, snapshot.num_waiting) == (None, 2)
    assert snapshot.steps is None and snapshot.cells is None
    assert decoding.max_tokens == 112
    assert snapshot.totals.prefill_ms == 3500


async def test_a_prompt_stays_as_long_as_it_was_while_its_answer_grows():
    """llama-server's count of a slot's prompt takes in what has been said."""
    busy = slot(0, decoded=80, n_prompt_tokens=426, n_prompt_tokens_processed=342, n_prompt_tokens_cache=4)
    with llama_server([busy], {}) as stand_in:
        snapshot = await first(stand_in.url, Snapshot)
    assert snapshot.running[0].num_prompt == 346


async def test_of_a_model_that_is_named_by_its_file_the_folder_is_left_out():
    with llama_server([], {}) as stand_in:
        stand_in.model = "/models/a b/qwen.gguf"
        assert (await first(stand_in.url, ServerFacts)).model == "qwen.gguf"
        stand_in.model = "org/qwen"
        assert (await first(stand_in.url, ServerFacts)).model == "org/qwen"


async def test_older_forms_of_slots_are_read():
    old = {"id": 0, "id_task": 5, "is_processing": True, "next_token": {"n_decoded": 7}}
    with llama_server([old, {"id": 1, "is_processing": False}], {}) as stand_in:
        snapshot = await first(stand_in.url, Snapshot)
    (view,) = snapshot.running
    assert (view.num_output, view.num_prompt, view.num_evaluated) == (7, None, None)


@pytest.mark.parametrize(
    ("slots", "metrics", "flag"), [(None, {"requests_deferred": 0}, "--slots"), ([], None, "--metrics")]
)
async def test_switched_off_endpoints_are_named_with_their_flag(slots, metrics, flag):
    with llama_server(slots, metrics) as stand_in:
        facts = await first(stand_in.url, ServerFacts)
        snapshot = await first(stand_in.url, Snapshot)
    assert any(flag in sentence for sentence in facts.unknown)
    assert snapshot.tells_prefill == (flag != "--metrics")
    assert not snapshot.tells_decode


async def test_a_refused_key_and_a_loading_model_are_said():
    with llama_server([], {}) as stand_in:
        stand_in.refusal = (401, "Invalid API Key")
        assert "--api-key" in (await link_that(stand_in.url, LinkState.REFUSED)).message
        stand_in.refusal = (503, "Loading model")
        assert (await link_that(stand_in.url, LinkState.LOADING)).message == "Loading model"


@pytest.mark.parametrize("status", [200, 404])
async def test_what_is_no_server_for_models_is_told_so(status):
    with llama_server() as stand_in:
        stand_in.refusal = (status, "Not found")
        assert "not as a server" in (await link_that(stand_in.url, LinkState.REFUSED)).message


async def test_a_server_that_goes_is_found_again_when_it_is_back(tui_engine):
    feed = Feed("127.0.0.1:9")
    with serve(tui_engine) as live:
        feed.turn_to(live.url)
        following = asyncio.create_task(feed.follow())
        await settled(lambda: feed.is_live and feed.latest is not None)
        port = int(live.url.rpartition(":")[2])
    await settled(lambda: feed.link.state is LinkState.LOST)
    assert feed.link.retry_s
    assert feed.latest is not None, "what was seen stays on the screen"
    with serve(tui_engine, port):
        await settled(lambda: feed.is_live)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def settled(holds):
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.02)


async def test_cancelling_is_asked_over_http(live):
    feed = Feed(live.url)
    with streams(live, 1):
        snapshot = await first(live.url, Snapshot, holds=lambda s: s.running)
        assert await feed.cancel(snapshot.running[0].request_id) == "Cancelled."
        live.wait_until_idle()
    assert "Not cancelled" in await feed.cancel("chatcmpl-nobody")


def test_an_address_that_is_none_is_a_users_error():
    with pytest.raises(UsageError):
        Feed("ftp://x")
