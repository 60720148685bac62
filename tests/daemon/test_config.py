"""Settings: every row refuses by name what is out of its range, sources override in one order, the docs agree."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon import config
from daemon.config import ConfigError, load, resolve
from daemon.core.limits import state_cache_problem
from daemon.core_settings import core_config
from daemon.frontend.prepare import namespace
from daemon.rank import modeled, torch_runner
from daemon.rank_settings import rank_settings
from daemon.settings_table import TABLE, Setting, Settings

NUMERIC = [row for row in TABLE if row.low is not None]
ROOT = Path(__file__).resolve().parents[2]


def ids(row: Setting) -> str:
    return row.key


def test_every_number_has_a_range_and_a_default_inside() -> None:
    """No numeric setting is without a range, and every default is allowed by its own row."""
    for row in TABLE:
        assert (row.low is None) == (row.kind not in ("int", "fraction", "bytes", "seconds")), row.key
        assert config.parse_value(row, config.render_value(row, row.default), "default") == row.default


@pytest.mark.parametrize("row", NUMERIC, ids=ids)
def test_I7_a_number_out_of_range_is_refused_by_name_and_value(row: Setting) -> None:
    """Below, above, negative, not a number, infinite, empty: each is refused with flag, value and range."""
    assert row.low is not None
    assert row.high is not None
    below = row.low - 1 if row.kind in ("int", "bytes") or row.low == 0 else row.low / 2
    wrong: list[object] = [row.high + 1, -1, "x", "", "nan", "inf", "1e400", None, True, [], 10**30]
    wrong += [] if row.zero and below == 0 else [below]
    wrong += [] if row.zero or row.low == 0 else [0]
    for value in wrong:
        text = str(value) if not isinstance(value, bool) else "True"
        with pytest.raises(ConfigError) as caught:
            resolve("serve" if "serve" in row.commands else "frontend", {row.attribute: text}, {})
        assert row.flag in str(caught.value)
        assert repr(text) in str(caught.value)
        assert caught.value.code == 2


@pytest.mark.parametrize("row", NUMERIC, ids=ids)
@given(data=st.data())
def test_I7_a_number_in_range_is_taken(row: Setting, data: st.DataObject) -> None:
    """Any value inside the range comes back as given."""
    assert row.low is not None
    assert row.high is not None
    number: Any = (
        data.draw(st.integers(int(row.low), int(row.high)))
        if row.kind in ("int", "bytes")
        else round(data.draw(st.floats(row.low, row.high)), 3)
    )
    assert config.parse_value(row, str(number), "flag") == pytest.approx(number)


@pytest.mark.parametrize("row", [row for row in TABLE if row.choices], ids=ids)
def test_choices_are_closed(row: Setting) -> None:
    """A choice takes its values and no other, and the refusal lists them."""
    for choice in row.choices:
        assert getattr(resolve(row.commands[0], {row.attribute: choice}, {}), row.attribute) == choice
    with pytest.raises(ConfigError, match=re.escape(", ".join(row.choices))):
        resolve(row.commands[0], {row.attribute: "sideways"}, {})


@pytest.mark.parametrize(
    "host", ["", " ", "http://localhost", "localhost/", "a b", "127.0.0.1:8000", "[::1]", "\u0661.1.1.1", "a\n"]
)
def test_a_host_that_is_none_is_refused(host: str) -> None:
    """Empty, with scheme, path, port, space or brackets: refused by name, with exit code 2."""
    with pytest.raises(ConfigError, match=r"--host \(flag\).*without scheme") as caught:
        resolve("serve", {"host": host}, {})
    assert caught.value.code == 2


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "::1", "fe80::1%eth0", "my-host.example", "localhost"])
def test_hosts_are_taken(host: str) -> None:
    """Names, and addresses of both families."""
    assert resolve("serve", {"host": host}, {}).host == host


@pytest.mark.parametrize("row", NUMERIC, ids=ids)
@pytest.mark.parametrize("text", ["\u0663", "\uff13", "1_0", "0_1"])
def test_only_ascii_digits_are_numbers(row: Setting, text: str) -> None:
    """Digits of other scripts, and separators that only Python reads, are refused."""
    with pytest.raises(ConfigError, match=row.flag):
        config.parse_value(row, text, "flag")


@pytest.mark.parametrize("option", ["zork", "", "=1", " =1", "a=1,b=2"])
def test_a_rank_option_without_its_form_is_refused(option: str) -> None:
    """An option that is not KEY=VALUE never reaches a rank; exit code 2."""
    with pytest.raises(ConfigError, match=r"--rank-option.*KEY=VALUE") as caught:
        load("serve", ["--rank-option", option], environ={})
    assert caught.value.code == 2


@pytest.mark.parametrize("pairs", ['{ "" = "1" }', '{ a = "1,b=2" }', "{ a = { b = 1 } }"])
def test_a_rank_option_of_a_file_has_the_same_form(tmp_path: Path, pairs: str) -> None:
    """A TOML table is held to the same rule, or it would not survive the way to a child."""
    file = tmp_path / "c.toml"
    file.write_text(f"rank-option = {pairs}\n")
    with pytest.raises(ConfigError, match=r"--rank-option.*KEY=VALUE"):
        load("serve", ["--config", str(file)], environ={})


def test_the_options_of_both_runners_are_listed() -> None:
    """The help names what the runners themselves take, no more and no less."""
    row = next(row for row in TABLE if row.attribute == "rank_option")
    entries = re.sub(r" \([^)]*\)", "", row.help).replace(" and ", "; ")
    torch, whole_numbers = entries.partition("torch: ")[2].split(". modeled, in whole numbers: ")
    assert torch.split("; ") == list(torch_runner.OPTIONS)
    assert sorted(whole_numbers.split("; ")) == sorted(modeled.OPTIONS)


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    """The four sources, each overridden by the next."""
    file = tmp_path / "c.toml"
    file.write_text('port = 1001\nhost = "file"\nmax_queued_requests = 7\n')
    environ = {"BANDMASTER_PORT": "1002", "BANDMASTER_HOST": "env", "BANDMASTER_CONFIG": str(file)}
    settings = load("serve", ["--port", "1003"], environ=environ)
    assert (settings.port, settings.host, settings.max_queued_requests, settings.page_size) == (1003, "env", 7, 16)


def test_units_are_understood() -> None:
    """Bytes and durations take the usual suffixes; the alias is the flag."""
    argv = ["--arena-bytes", "2GiB", "--drain-timeout", "1500ms", "--max-num-seqs", "9", "--request-size-limit", "1MB"]
    settings = load("serve", argv, environ={})
    assert settings.arena_bytes == 2 << 30
    assert settings.drain_timeout_s == 1.5
    assert settings.max_running_requests == 9
    assert settings.request_size_limit_bytes == 1_000_000


def test_what_does_not_exist_is_refused_by_name(tmp_path: Path) -> None:
    """Unknown flags and file keys are errors, unknown variables a line each, with the nearest name."""
    with pytest.raises(ConfigError, match="--prot"):
        load("serve", ["--prot", "1"], environ={})
    file = tmp_path / "c.toml"
    file.write_text("pory = 3\n")
    with pytest.raises(ConfigError, match=r"pory.*'port'"):
        load("serve", ["--config", str(file)], environ={})
    with pytest.raises(ConfigError, match="cannot be read"):
        load("serve", ["--config", str(tmp_path / "absent.toml")], environ={})
    lines = config.unknown_variables({"BANDMASTER_PROT": "1", "BANDMASTER_PORT": "1", "BANDMASTER_CACHE": "x"})
    assert len(lines) == 1
    assert "BANDMASTER_PORT" in lines[0]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--max-num-batched-tokens", "8", "--max-running-requests", "9"], ["--max-num-batched-tokens 8", "9"]),
        (["--max-num-batched-tokens", "64", "--chunked-prefill-size", "65"], ["--chunked-prefill-size 65", "64"]),
        (["--checkpoint-interval", "100"], ["--checkpoint-interval 100", "--page-size 16", "112"]),
        (["--page-size", "3", "--checkpoint-interval", "256"], ["--checkpoint-interval 256", "--page-size 3", "258"]),
        (["--state-cache", "no_buffer", "--page-size", "16"], ["--state-cache no_buffer", "--page-size is 16"]),
        (["/nowhere/model"], ["model", "/nowhere/model"]),
        (["--chat-template", "/nowhere/t"], ["--chat-template", "/nowhere/t"]),
        (["--endpoint", "udp://x"], ["--endpoint", "udp://x"]),
        (["--endpoint", "tcp://0.0.0.0:1"], ["--endpoint", "--keys", "--insecure"]),
        (["--rank-option", "novalue"], ["--rank-option", "novalue"]),
    ],
)
def test_settings_that_cannot_work_together(argv: list[str], named: list[str]) -> None:
    """Each combination is refused with both names and values."""
    with pytest.raises(ConfigError) as caught:
        load("serve", argv, environ={})
    for word in named:
        assert word in str(caught.value)


def test_a_default_gives_way_to_an_explicit_value() -> None:
    """One explicit limit does not collide with the default of another: the defaults follow."""
    small = load("serve", ["--max-num-batched-tokens", "100"], environ={})
    assert (small.chunked_prefill_size, small.max_running_requests) == (100, 64)
    many = load("serve", ["--max-running-requests", "4096"], environ={})
    assert many.max_num_batched_tokens == 4096


@pytest.mark.parametrize(
    ("argv", "page_size", "interval"),
    [
        ([], 16, 256),
        (["--page-size", "48"], 48, 288),
        (["--page-size", "1024"], 1024, 1024),
        (["--state-cache", "no_buffer"], 1, 256),
        (["--no-enable-prefix-caching", "--state-cache", "no_buffer"], 16, 256),
    ],
)
def test_the_checkpoint_grid_follows_the_pages(argv: list[str], page_size: int, interval: int) -> None:
    """Without a wish of its own the interval is a multiple of the page size; no_buffer brings pages of one token."""
    settings = load("serve", argv, environ={})
    assert (settings.page_size, settings.checkpoint_interval) == (page_size, interval)


def test_what_the_cache_asks_of_pages_counts_only_with_the_cache() -> None:
    """Without the prefix cache no state is kept, so neither its grid nor its pages are refused."""
    argv = ["--no-enable-prefix-caching", "--page-size", "16", "--checkpoint-interval", "100"]
    assert not load("serve", argv, environ={}).enable_prefix_caching
    assert load("serve", [*argv, "--state-cache", "no_buffer"], environ={}).state_cache == "no_buffer"


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("mode", ["extra_buffer", "no_buffer"])
def test_flags_and_core_refuse_the_same_states(caching: bool, mode: str) -> None:
    """What the flags let through the core takes, and what the core would refuse never reaches it."""
    for page_size, interval in itertools.product((1, 3, 16, 64), (1, 16, 48, 256)):
        chosen: dict[str, Any] = {"page_size": page_size, "checkpoint_interval": interval, "state_cache": mode}
        settings = dataclasses.replace(Settings(), enable_prefix_caching=caching, **chosen)
        try:
            config.check_together(settings)
            refused = False
        except ConfigError:
            refused = True
        assert refused == bool(state_cache_problem(core_config(settings))), chosen


def test_a_switch_that_is_on_can_be_switched_off_everywhere(tmp_path: Path) -> None:
    """By flag, by variable and by file; the positive flag overrides both of the latter."""
    file = tmp_path / "c.toml"
    file.write_text("enable-prefix-caching = false\n")
    assert load("serve", [], environ={}).enable_prefix_caching
    for argv, environ in (
        (["--no-enable-prefix-caching"], {}),
        ([], {"BANDMASTER_ENABLE_PREFIX_CACHING": "false"}),
        (["--config", str(file)], {}),
    ):
        assert not load("serve", argv, environ=environ).enable_prefix_caching
        last = load("serve", [*argv, "--enable-prefix-caching"], environ=environ)
        assert last.enable_prefix_caching


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], 256),
        (["--checkpoint-interval", "64"], 64),
        (["--no-enable-prefix-caching"], 0),
        (["--state-cache", "no_buffer"], 0),
    ],
)
def test_ranks_hear_of_checkpoints_only_where_requests_own_a_slot_for_them(argv: list[str], told: int) -> None:
    """The interval, or 0 where a request holds its working slot alone; the core hears the settings as they are."""
    settings = load("serve", argv, environ={})
    assert rank_settings(settings).checkpoint_interval == told
    core = core_config(settings)
    assert (core.enable_prefix_caching, core.checkpoint_interval, core.state_cache) == (
        settings.enable_prefix_caching,
        settings.checkpoint_interval,
        settings.state_cache,
    )


CHANGED: dict[str, Any] = {
    "enable_prefix_caching": False,
    "rank_option": {"eos_id": "2", "delay_us": "10"},
    "host": "::1",
    "api_key": "s3cret",
    "mem_fraction": 0.25,
    "arena_bytes": 3 << 20,
    "drain_timeout_s": 2.5,
    "disable_overlap": True,
    "served_model_name": 'a "quoted" name',
}


def test_a_child_gets_exactly_the_parents_settings() -> None:
    """What `to_environment` writes, `load` of the child reads back, secrets and odd characters included."""
    settings = dataclasses.replace(Settings(), **CHANGED)
    environ = config.to_environment(settings, {"BANDMASTER_CONFIG": "/gone", "PATH": "x"})
    assert load("serve", [], environ=environ) == settings


def test_print_config_reads_back_and_hides_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--print-config` prints a file that gives the same settings, without the secret."""
    settings = dataclasses.replace(Settings(), **CHANGED)
    with pytest.raises(SystemExit) as ended:
        load("serve", ["--print-config"], environ=config.to_environment(settings, {}))
    assert ended.value.code == 0
    file = tmp_path / "c.toml"
    file.write_text(capsys.readouterr().out)
    assert "s3cret" not in file.read_text()
    assert load("serve", ["--config", str(file)], environ={}) == dataclasses.replace(settings, api_key="")


def test_secrets_are_in_no_record() -> None:
    """The journal and the log learn only that a secret is set; a refused secret is not repeated."""
    recorded = config.recorded(dataclasses.replace(Settings(), api_key="s3cret"), "serve")
    assert recorded["api-key"] == "set"
    assert "s3cret" not in str(recorded)
    with pytest.raises(ConfigError) as caught:
        resolve("serve", {"api_key": "s3cret\n"}, {})
    assert "s3cret" not in str(caught.value)


def test_the_daemon_records_what_is_in_force_there() -> None:
    """Settings that only the front end reads have their defaults in a daemon, whatever was asked for: not shown."""
    recorded = config.recorded(Settings())
    assert not {"host", "port", "api-key"} & recorded.keys()
    assert {"model", "max-running-requests", "journal-sync"} <= recorded.keys()


def test_the_docs_show_the_table() -> None:
    """docs/settings.md holds the generated tables of settings and exit codes, word for word."""
    assert config.document() == (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")


def test_shares_of_the_arena_reach_the_core_in_parts_per_million() -> None:
    """Quotas for all namespaces and by name, and what pins may take."""
    flags = {"cache_quota": "0.5", "cache_quotas": ["salt:a=0.2", "salt:b=1"], "pinned_max": "0"}
    core = core_config(resolve("daemon", flags, {}))
    assert (core.cache_quota_ppm, core.pinned_max_ppm) == (500_000, 0)
    assert core.cache_quotas == {"salt:a": 200_000, "salt:b": 1_000_000}


def test_a_quota_of_a_namespace_that_no_request_can_be_in_is_refused() -> None:
    """The bare salt limits nobody: the refusal says what the namespace of such requests is called."""
    salted: Any = SimpleNamespace(cache_salt="a")
    assert namespace(salted) == f"{config.SALT}a"
    for command in ("serve", "daemon"):
        with pytest.raises(ConfigError, match=r"--cache-quotas a: .* cache_salt 'a' is salt:a") as caught:
            load(command, ["--cache-quotas", "a=0.1"], environ={})
        assert "no request is ever in a namespace of this name" in str(caught.value)
        assert load(command, ["--cache-quotas", "salt:a=0.1"], environ={}).cache_quotas == {"salt:a": "0.1"}


@pytest.mark.parametrize(
    ("argv", "policy", "names"),
    [
        (["--enable-priority-preemption"], "fcfs", "--enable-priority-preemption: with --schedule-policy fcfs"),
        (["--fair-quantum-tokens", "64"], "priority", "--fair-quantum-tokens 64: .* --schedule-policy priority"),
    ],
)
def test_what_the_order_of_the_queue_never_reads_is_refused(argv: list[str], policy: str, names: str) -> None:
    """A setting without effect is no silent one; beside an order that reads it, it is taken."""
    with pytest.raises(ConfigError, match=names):
        load("serve", [*argv, "--schedule-policy", policy], environ={})
    assert load("serve", [*argv, "--schedule-policy", "fair"], environ={}).schedule_policy == "fair"


@pytest.mark.parametrize("share", ["1.5", "-0.1", "much", ""])
def test_a_quota_by_name_is_refused_like_the_one_for_all(share: str) -> None:
    """Out of range or no number: the refusal has the namespace, the value and the range."""
    with pytest.raises(ConfigError, match="--cache-quotas salt:a") as caught:
        resolve("daemon", {"cache_quotas": [f"salt:a={share}"]}, {})
    assert "0 to 1" in str(caught.value)
