"""The table of settings, and the order of its sources: flag, environment, file, default."""

from __future__ import annotations

from dataclasses import fields
from itertools import chain
from pathlib import Path

import pytest

from edgeserve.config import EngineConfig, ServerConfig
from edgeserve.errors import UsageError
from edgeserve.settings.kinds import Size, format_value
from edgeserve.settings.llama_server import ABSENT, ALWAYS_SO
from edgeserve.settings.sources import COMMANDS, Settings, Typed, gather, table
from edgeserve.settings.table import SETTINGS, Command, settings_of
from edgeserve.settings.values import defaults_of, engine_config, sampling_options, server_config


def given(
    command: Command = "serve",
    typed: Typed | None = None,
    environ: dict[str, str] | None = None,
    config: Path | None = None,
) -> Settings:
    environ = {"EDGESERVE_CONFIG": str(config)} | (environ or {}) if config else environ or {}
    return gather(command, typed or {}, environ, defaults_of(command), config_path=config)


@pytest.fixture(autouse=True)
def _no_file_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("edgeserve.settings.sources.default_config_path", lambda: tmp_path / "none.toml")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


# --- the table ---------------------------------------------------------------------------------------------


def test_every_field_of_the_configurations_can_be_set() -> None:
    reachable = {setting.field for setting in settings_of("serve")}
    wanted = {field.name for field in chain(fields(EngineConfig), fields(ServerConfig))}
    # The path is what becomes of the model's name; the sampling settings fill the request defaults; steps are
    # measured, not set.
    assert wanted - reachable == {"model_path", "request_defaults", "step_samples"}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_two_settings_share_a_flag_a_field_or_an_environment_name(command: Command) -> None:
    settings = settings_of(command)
    flags = [flag for setting in settings for flag in setting.flags + setting.off_flags]
    names = [name for setting in settings for name in (setting.env, *setting.llama_env)]
    for words in (flags, names, [setting.field for setting in settings]):
        assert sorted(words) == sorted(set(words))


def test_a_flag_is_a_setting_or_absent_or_always_so_and_never_two_of_them() -> None:
    groups = [
        [flag for setting in SETTINGS for flag in setting.flags + setting.off_flags],
        [flag for absent in ABSENT for flag in absent.flags],
        list(ALWAYS_SO),
    ]
    assert len(set(chain(*groups))) == sum(len(set(group)) for group in groups)
    assert len(groups[1]) == len(set(groups[1]))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_default_is_a_value_that_one_could_type(command: Command) -> None:
    defaults = defaults_of(command)
    shown = {
        setting: format_value(defaults[setting.field], setting.kind)
        for setting in settings_of(command)
        if defaults.get(setting.field) is not None
    }
    assert len(shown) > 20
    for setting, text in shown.items():
        assert setting.kind.parse(text) == defaults[setting.field], setting.name


# --- the order of sources ----------------------------------------------------------------------------------


def test_flag_beats_environment_beats_file_beats_default(config: Path) -> None:
    config.write_text("[serve]\nparallel = 2\nctx-size = 1024\nport = 1111\n")
    settings = given(
        typed={"n_seq_max": "8"},
        environ={"EDGESERVE_PARALLEL": "4", "EDGESERVE_CTX_SIZE": "2048"},
        config=config,
    )
    assert [settings["n_seq_max"], settings["n_ctx"], settings["port"]] == [8, 2048, 1111]
    assert settings["host"] == ServerConfig().host
    sources = [settings.source(field) for field in ("n_seq_max", "n_ctx", "port", "host")]
    assert sources == ["flag", "EDGESERVE_CTX_SIZE", f"{config} [serve]", "default"]


def test_our_environment_names_come_before_those_of_llama_cpp() -> None:
    environ = {"LLAMA_ARG_CTX_SIZE": "1", "EDGESERVE_CTX_SIZE": "2", "LLAMA_ARG_N_PARALLEL": "3"}
    settings = given(environ=environ)
    assert (settings["n_ctx"], settings.source("n_ctx")) == (2, "EDGESERVE_CTX_SIZE")
    assert (settings["n_seq_max"], settings.source("n_seq_max")) == (3, "LLAMA_ARG_N_PARALLEL")


@pytest.mark.parametrize(
    "environ",
    [
        {"EDGESERVE_MMAP": "0"},
        {"EDGESERVE_NO_MMAP": "true"},
        {"LLAMA_ARG_MMAP": "off"},
        # llama.cpp looks at the name only.
        {"LLAMA_ARG_NO_MMAP": "0"},
    ],
)
def test_a_switch_has_a_name_for_off_in_the_environment_too(environ: dict[str, str]) -> None:
    settings = given(environ=environ)
    assert settings["use_mmap"] is False
    assert settings.source("use_mmap") == next(iter(environ))


def test_an_empty_variable_counts_as_none() -> None:
    assert given(environ={"EDGESERVE_PORT": ""}).source("port") == "default"


def test_a_word_for_the_default_counts_as_no_value() -> None:
    settings = given(typed={"n_seq_max": "auto", "seed": "-1"})
    assert settings["n_seq_max"] == EngineConfig("x").n_seq_max
    assert sampling_options(settings) == {}


def test_keys_come_from_a_repeated_flag_and_between_commas() -> None:
    assert given(typed={"api_keys": ["a", "b,c"]})["api_keys"] == ("a", "b", "c")


@pytest.mark.parametrize(
    ("text", "n_bytes", "spelled"),
    [
        ("6GiB", 6 << 30, "6GiB"),
        ("1.5 gb", 1536 << 20, "1536MiB"),
        ("8", 8 << 30, "8GiB"),
        ("100B", 100, "100B"),
        ("0", 0, "0B"),
    ],
)
def test_a_size_is_read_in_its_unit_and_spelled_exactly(text: str, n_bytes: int, spelled: str) -> None:
    kind = Size()
    assert kind.parse(text) == n_bytes
    assert format_value(n_bytes, kind) == spelled
    assert kind.parse(spelled) == n_bytes
    assert given(environ={"LLAMA_ARG_FIT_TARGET": "512"})["margin_bytes"] == 512 << 20


@pytest.mark.parametrize("text", ["lots", "-1", "1e3", "6 PiB", "1,5G"])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="is no size"):
        given(typed={"memory_bytes": text})


# --- the file ----------------------------------------------------------------------------------------------


def test_file_keys_are_the_long_flags_with_dashes_or_underscores(config: Path) -> None:
    config.write_text(
        '[serve]\nctx_size = 4096\ncache-type-k = "q8_0"\nno_mmap = true\nflash-attn = true\n'
        'n-gpu-layers = "all"\n'
        'allow-origin = ["https://a.example", "https://b.example"]\ntensor-split = [3, 1]\ntemp = 1\n'
    )
    settings = given(config=config)
    engine = engine_config(settings, Path("m.gguf"))
    assert (engine.n_ctx, engine.type_k, engine.use_mmap, engine.flash_attn) == (4096, "q8_0", False, "on")
    assert (engine.n_gpu_layers, engine.tensor_split) == (-1, (3.0, 1.0))
    server = server_config(settings)
    assert server.allowed_origins == ("https://a.example", "https://b.example")
    assert server.request_defaults == {"temperature": 1.0}


def test_a_section_for_a_model_beats_the_commands_section_and_nothing_else(config: Path) -> None:
    config.write_text(
        '[serve]\nmodel = "small"\nparallel = 2\nctx-size = 10\nthreads = 1\n'
        '[models."small"]\nparallel = 3\nctx-size = 20\nthreads = 5\n[models.other]\nparallel = 9\n'
    )
    settings = given(typed={"n_threads": "7"}, environ={"EDGESERVE_CTX_SIZE": "30"}, config=config)
    assert [settings[field] for field in ("n_seq_max", "n_ctx", "n_threads")] == [3, 30, 7]
    assert given(typed={"model": "other"}, config=config)["n_seq_max"] == 9


def test_the_sections_of_the_commands_are_separate(config: Path) -> None:
    config.write_text('[serve]\nport = 9000\n[chat]\nsystem = "Be brief."\nplain = true\n')
    chat = given("chat", config=config)
    assert (chat["system"], chat["plain"]) == ("Be brief.", True)
    assert given(config=config)["port"] == 9000


@pytest.mark.parametrize(
    "text, in_message, in_hint",
    [
        ("[serve]\nparalel = 2", "[serve] has an unknown key paralel", "parallel"),
        ("[serve]\nzzz = 2", "unknown key zzz", "Known keys: model,"),
        ("[chat]\nport = 2", "port has no meaning in [chat]", "It belongs into [serve]."),
        ('[models."x"]\nport = 2', 'port has no meaning in [models."x"]', "[serve]"),
        ("[server]\nport = 2", "no section [server]", "serve"),
        ("port = 2", "no section [port]", "[serve]"),
        ('[serve]\nctx-size = "many"', "[serve] ctx-size: 'many' is not a whole number", "from 0"),
        ("[serve]\nctx-size = true", "[serve] ctx-size: 'on' is not", "whole number"),
        ("[serve]\nport = 70000", "[serve] port: '70000' is out of range", "from 0 to 65535"),
        ('[serve]\ncache-type-k = "q9"', "cache-type-k: 'q9' is not one of them", "q8_0"),
        ("[serve]\nmmap = [1]", "[serve] mmap", "on or off"),
        ("[serve]\nserve = 1\n[serve]", "not valid TOML", ""),
        ("serve = 3", "[serve] must be a section", ""),
        ("models = 3", "models must be sections", ""),
    ],
)
def test_a_mistake_in_the_file_is_named_with_file_key_and_remedy(
    config: Path, text: str, in_message: str, in_hint: str
) -> None:
    config.write_text(text)
    with pytest.raises(UsageError) as caught:
        given(config=config)
    assert str(config) in caught.value.message
    assert in_message in caught.value.message
    assert in_hint in caught.value.hint


def test_a_file_asked_for_by_name_must_be_there(tmp_path: Path) -> None:
    for typed in (True, False):
        missing = tmp_path / "missing.toml"
        environ = {} if typed else {"EDGESERVE_CONFIG": str(missing)}
        with pytest.raises(UsageError, match="There is no configuration file"):
            gather("serve", {}, environ, {}, config_path=missing if typed else None)


def test_an_unreadable_file_is_a_named_error(config: Path) -> None:
    config.write_bytes(b"\xff\xfe[serve]")
    with pytest.raises(UsageError, match="not a text in UTF-8"):
        given(config=config)
    with pytest.raises(UsageError, match="cannot be read"):
        given(config=config.parent)


def test_a_bad_value_names_the_flag_or_the_variable_and_what_is_allowed() -> None:
    with pytest.raises(UsageError, match=r"-c/--ctx-size: 'x' is not a whole number\. A whole number from 0"):
        given(typed={"n_ctx": "x"})
    with pytest.raises(UsageError, match=r"LLAMA_ARG_FLASH_ATTN: 'perhaps' .* One of: on, off, auto\."):
        given(environ={"LLAMA_ARG_FLASH_ATTN": "perhaps"})


# --- what they become --------------------------------------------------------------------------------------


def test_without_settings_the_configurations_have_their_own_defaults() -> None:
    assert engine_config(given(), Path("m.gguf")) == EngineConfig("m.gguf")
    assert server_config(given()) == ServerConfig()


def test_a_chat_has_one_sequence_unless_asked_otherwise() -> None:
    assert engine_config(given("chat"), Path("m.gguf")).n_seq_max == 1
    assert engine_config(given("chat", {"n_seq_max": "2"}), Path("m.gguf")).n_seq_max == 2


def test_llama_cpps_words_for_automatic_and_for_no_limit() -> None:
    typed = {"n_gpu_layers": "-1", "n_threads": "-1", "n_predict": "-1", "n_cpu_moe": "all"}
    engine = engine_config(given(typed=typed), Path("m.gguf"))
    assert (engine.n_gpu_layers, engine.n_threads) == (-1, 0)
    assert engine.n_predict > 10**6
    assert engine.n_cpu_moe > 500


def test_tensor_patterns_and_shares_are_read_as_llama_cpp_reads_them() -> None:
    typed = {"override_tensor": r"blk\.(1|2)=CPU, up=CPU", "tensor_split": "3/1"}
    engine = engine_config(given(typed=typed), Path("m.gguf"))
    assert engine.override_tensor == ((r"blk\.(1|2)", "CPU"), ("up", "CPU"))
    assert engine.tensor_split == (3.0, 1.0)
    for field, text in (("override_tensor", "blk"), ("tensor_split", "0,0"), ("tensor_split", "a")):
        with pytest.raises(UsageError):
            given(typed={field: text})


def test_settings_that_contradict_each_other_are_refused() -> None:
    settings = given(typed={"flash_attn": "off", "type_v": "q8_0"})
    with pytest.raises(UsageError, match="needs flash attention"):
        engine_config(settings, Path("m.gguf"))


def test_keys_and_template_are_read_from_their_files(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\nfirst\n  second \n")
    (tmp_path / "t.jinja").write_text("{{ x }}")
    typed: Typed = {
        "api_keys": ["zero"],
        "api_key_file": str(tmp_path / "keys"),
        "chat_template": str(tmp_path / "t.jinja"),
    }
    server = server_config(given(typed=typed))
    assert server.api_keys == ("zero", "first", "second")
    assert server.chat_template == "{{ x }}"


def test_an_empty_key_file_does_not_open_the_server(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n\n")
    with pytest.raises(UsageError, match="is empty"):
        server_config(given(typed={"api_key_file": str(tmp_path / "keys")}))
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        server_config(given(typed={"api_key_file": str(tmp_path / "none")}))


def test_the_printed_table_has_every_setting_and_no_key() -> None:
    settings = given(environ={"EDGESERVE_API_KEY": "hidden-1,hidden-2"}, typed={"n_ctx": "4096"})
    lines = table(settings)
    assert len(lines) == len(settings_of("serve"))
    assert next(line.split() for line in lines if line.startswith("ctx-size")) == ["ctx-size", "4096", "flag"]
    assert not any("hidden" in line for line in lines)
    keys = next(line for line in lines if line.startswith("api-key "))
    assert keys.split() == ["api-key", "2", "keys", "EDGESERVE_API_KEY"]


def test_a_bad_key_is_not_repeated_in_the_error() -> None:
    with pytest.raises(UsageError) as caught:
        given(typed={"api_keys": [" , "]})
    assert caught.value.message == "--api-key: the value is empty."
