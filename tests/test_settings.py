import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

import commsched
from commsched.core.errors import ConfigError
from commsched.core.policies import policy_names
from commsched.core.scheduler import MAX_PARTITION_BYTES, SchedulerConfig
from commsched.settings import (
    DEFAULT_BUDGET,
    Budget,
    Settings,
    SettingsKeywords,
    parse_address,
    parse_bytes,
    parse_rate,
    parse_seconds,
    parse_server,
    parse_switch,
    to_environ,
)

HUGE = "9" * 400
POLICIES = ", ".join(policy_names())


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (65536, 65536),
        ("65536", 65536),
        (4e6, 4_000_000),
        ("4MB", 4_000_000),
        ("4 mb", 4_000_000),
        ("4M", 4_000_000),
        ("4MiB", 4 * 2**20),
        ("1.5KiB", 1536),
        ("512KiB", 2**19),
        ("0.001K", 1),
        ("2GB", 2 * 10**9),
        (" 7b ", 7),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["4XB", "", "0", "-4MB", "MB", "4MBit", "1e6", "nan", "inf", "0.1", None, True, [], HUGE, f"{HUGE}GB"]
)
def test_what_is_not_a_size(text: object) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_bytes(text, "partition")
    assert str(raised.value) == f"partition={text!r} is not a size; write it like 4MB, 512KiB or 65536"


@pytest.mark.parametrize("key", ["partition", "credit"])
def test_a_wrong_size_of_what_can_choose_itself_offers_that(key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(**{key: "4XB"})
    assert str(raised.value) == f"{key}='4XB' is not a size; write it like 4MB, 512KiB or 65536, or auto"


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("200mbit", 25e6),
        ("1gbit", 125e6),
        ("1 Gbit/s", 125e6),
        ("800kbit", 1e5),
        ("8bit", 1.0),
        ("2.5gbps", None),
        ("2.5gbitps", 312.5e6),
    ],
)
def test_rates_are_in_bits_as_tc_writes_them(text: str, rate: float | None) -> None:
    if rate is not None:
        assert parse_rate(text) == rate
    else:
        with pytest.raises(ConfigError, match="is not a rate"):
            parse_rate(text)


@pytest.mark.parametrize("text", ["200", "200MB", "0mbit", "-1mbit", "fast", "", None, HUGE + "mbit"])
def test_what_is_not_a_rate(text: object) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_rate(text, "rate")
    assert str(raised.value) == f"rate={text!r} is not a rate; write it like 200mbit or 1gbit"


@pytest.mark.parametrize(("text", "seconds"), [(10, 10.0), ("2.5", 2.5), ("2.5s", 2.5), (" 3 s", 3.0), (0.25, 0.25)])
def test_times(text: object, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["10ms", "ten", "", None, "inf", "nan", HUGE, "9999999999999"])
def test_what_is_not_a_time(text: object) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_seconds(text, "fail_after")
    assert str(raised.value) == f"fail_after={text!r} is not a time; write it in seconds, like 10 or 2.5"


@pytest.mark.parametrize("text", ["0", "-1", 0.0, "0 s"])
def test_a_time_is_above_0(text: object) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_seconds(text, "fail_after")
    assert str(raised.value) == f"fail_after={text!r} is not above 0; write it in seconds, like 10 or 2.5"


@pytest.mark.parametrize("value", [True, 1, "1", "true", "Yes", "ON"])
def test_on(value: object) -> None:
    assert parse_switch(value) is True


@pytest.mark.parametrize("value", [False, 0, "0", "false", "No", "OFF", ""])
def test_off(value: object) -> None:
    assert parse_switch(value) is False


@pytest.mark.parametrize("value", ["maybe", 2, None])
def test_what_is_neither_on_nor_off(value: object) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_switch(value, "disable")
    assert str(raised.value) == f"disable={value!r} is neither on nor off; write 1 or 0"


@pytest.mark.parametrize("text", ["10.0.0.7:29600", "localhost:0", "node-3.cluster:65535", "[::1]:29600", "[fe80::1%eth0]:1"])
def test_addresses(text: str) -> None:
    assert parse_address(f" {text} ") == text


@pytest.mark.parametrize(
    "text",
    ["10.0.0.7", ":29600", "host:", "host:65536", "host:-1", "::1:29600", "http://host:80", "a b:1", "", None, "h:1,h:"],
)
def test_what_is_not_an_address(text: object) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_address(text, "control")
    assert str(raised.value) == f"control={text!r} is not an address; write it like 10.0.0.7:29600"


def test_a_server_may_have_an_address_on_each_card() -> None:
    assert parse_server("10.0.0.9:1+[::1]:2") == "10.0.0.9:1+[::1]:2"
    assert Settings.load({"servers": "a:1+b:1,c:2"}, {}).servers == ("a:1+b:1", "c:2")
    with pytest.raises(ConfigError, match=r"servers='b' is not an address"):
        Settings.load({"servers": "a:1+b"}, {})


@pytest.mark.parametrize(
    ("host", "hosts"), [("10.0.0.7", ("10.0.0.7",)), ("[::1]", ("::1",)), ("a + 10.1.0.7", ("a", "10.1.0.7"))]
)
def test_a_rank_may_have_an_address_on_each_card(host: str, hosts: tuple[str, ...]) -> None:
    assert Settings.load({"host": host}, {}).hosts == hosts
    assert Settings.load({}, {}).hosts == ()


@pytest.mark.parametrize("host", ["a+", "+a", "a+a"])
def test_an_address_that_is_missing_or_named_twice_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"host=.*: write one address, or several different ones like 10.0.0.7\+10.1.0.7"):
        Settings.load({"host": host}, {})


@pytest.mark.parametrize("parse", [parse_bytes, parse_rate, parse_seconds, parse_switch, parse_address])
@given(value=st.one_of(st.text(), st.integers(), st.floats(), st.none(), st.lists(st.text())))
def test_any_value_is_parsed_or_refused_by_name(parse: Callable[[object, str], Any], value: object) -> None:
    said = None
    try:
        parse(value, "the_key")
    except ConfigError as error:
        said = str(error)
    assert said is None or said.startswith(f"the_key={value!r} is n")  # "not a ..." or "neither ..."


# --- Settings.load ---


def load(environ: dict[str, str] | None = None, **keywords: Any) -> Settings:
    return Settings.load(keywords, environ or {})


def refused(environ: dict[str, str] | None = None, **keywords: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        load(environ, **keywords)
    return str(raised.value)


def test_the_defaults() -> None:
    assert load() == Settings()
    assert load().scheduler == SchedulerConfig(4_000_000, 16_000_000, "priority")
    assert (load().transport, load().order, load().wire, load().hierarchy) == ("auto", "auto", "none", "auto")


def test_keywords_go_before_the_environment_before_the_file_before_defaults(tmp_path: Path) -> None:
    file = tmp_path / "commsched.toml"
    file.write_text('partition = "1MB"\ncredit = "2MB"\npolicy = "fifo"\ndisable = true\nservers = ["a:1", "b:2"]\n')
    environ = {"COMMSCHED_CONFIG": str(file), "COMMSCHED_PARTITION": "3MB", "COMMSCHED_CREDIT": "4MB"}
    settings = load(environ, partition="5MB")
    assert (settings.partition, settings.credit, settings.policy) == (5_000_000, 4_000_000, "fifo")
    assert settings.disable is True
    assert settings.servers == ("a:1", "b:2")
    assert settings.fail_after == 10.0


def test_none_and_empty_values_count_as_not_given() -> None:
    assert load({"COMMSCHED_PARTITION": "3MB", "COMMSCHED_CREDIT": ""}, partition=None) == load(partition="3MB")


def test_servers_are_separated_by_commas() -> None:
    assert load({"COMMSCHED_SERVERS": "10.0.0.1:1, 10.0.0.2:2,"}).servers == ("10.0.0.1:1", "10.0.0.2:2")


def test_variables_of_the_world_are_no_settings() -> None:
    assert load({"COMMSCHED_RANK": "1", "COMMSCHED_WORLD_SIZE": "2", "COMMSCHED_LOCAL_RANK": "1"}) == Settings()
    assert load({"HOME": "/root", "PARTITION": "4XB"}) == Settings()


def test_a_typo_is_answered_in_the_same_form() -> None:
    assert refused(partitoin="4MB") == "partitoin is not a setting; did you mean partition?"
    said = refused({"COMMSCHED_PARTITOIN": "4MB"})
    assert said == "COMMSCHED_PARTITOIN is not a setting; did you mean COMMSCHED_PARTITION?"


def test_a_typo_in_the_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "commsched.toml"
    file.write_text("credits = 4\n")
    said = refused({"COMMSCHED_CONFIG": str(file)})
    assert said == f"credits in {file} is not a setting; did you mean credit?"


def test_a_table_in_the_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "commsched.toml"
    file.write_text('[commsched]\ncredit = "4MB"\n')
    said = refused({"COMMSCHED_CONFIG": str(file)})
    assert said == f"commsched in {file} is not a setting; settings stand at the top of the file, and in no table"


def test_what_is_like_nothing_is_answered_with_all_there_is() -> None:
    said = refused(zzz=1)
    assert said.startswith("zzz is not a setting; there are: transport, servers, ")
    assert "tune_end" not in said  # which commsched sets by itself


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("servers", "10.0.0.1"),
        ("lane", "pigeon"),
        ("flows", "0"),
        ("order", "any"),
        ("wire", "float8"),
        ("hierarchy", "maybe"),
        ("partition", "4XB"),
        ("credit", "0"),
        ("policy", "lifo"),
        ("rate", "200"),
        ("fail_after", "soon"),
        ("join_within", "-1"),
        ("tune", "for ever"),
        ("tune_policies", "lifo"),
        ("tuned", "4MB"),
        ("disable", "perhaps"),
        ("control", "nowhere"),
    ],
)
def test_a_bad_value_names_its_key_as_the_user_wrote_it(tmp_path: Path, key: str, value: str) -> None:
    file = tmp_path / "commsched.toml"
    file.write_text(f'{key} = "{value}"\n')
    assert refused(**{key: value}).startswith(f"{key}={value!r} is ")
    assert refused({f"COMMSCHED_{key.upper()}": value}).startswith(f"COMMSCHED_{key.upper()}={value!r} is ")
    assert refused({"COMMSCHED_CONFIG": str(file)}).startswith(f"{key} in {file}={value!r} is ")


@pytest.mark.parametrize("value", [0, 33, "many", 1.5, True])
def test_a_number_of_flows_is_between_1_and_32(value: object) -> None:
    assert refused(flows=value) == f"flows={value!r} is not a number of connections; write 1 to 32"


def test_several_flows_over_grpc_are_refused() -> None:
    assert refused(flows=2, lane="grpc") == "flows=2 needs lane='tcp': gRPC has one connection between two processes"
    assert load(flows=1, lane="grpc").flows == 1


def test_flows_may_be_a_number_or_its_text() -> None:
    assert [load(flows=value).flows for value in (1, " 32 ", "5")] == [1, 32, 5]


@pytest.mark.parametrize("key", ["token", "job"])
def test_bytes_that_are_no_text_are_refused_and_not_shown(key: str) -> None:
    value = os.fsdecode(b"\xff" * 32)
    assert refused({f"COMMSCHED_{key.upper()}": value}) == f"COMMSCHED_{key.upper()} has bytes that are no text in UTF-8"


def test_a_partition_has_an_upper_bound() -> None:
    assert load(partition=MAX_PARTITION_BYTES).partition == MAX_PARTITION_BYTES
    assert refused(partition="1GiB") == "partition='1GiB' is more than the largest partition, 256MiB"


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("COMSCHED_PARTITION", "COMMSCHED_PARTITION"),
        ("COMMSHED_LOG", "COMMSCHED_LOG"),
        ("COMM_SCHED_FAIL_AFTER", "COMMSCHED_FAIL_AFTER"),
        ("COMMSCHEDULER_RATE", "COMMSCHED_RATE"),
        ("commsched_token", "COMMSCHED_TOKEN"),
        ("COMSCHED_PARTITON", "COMMSCHED_PARTITION"),
        ("COMMSCHD_WORLD_SIZE", "COMMSCHED_WORLD_SIZE"),
        ("COMMSHED_CONFIG", "COMMSCHED_CONFIG"),
    ],
)
def test_a_prefix_that_is_almost_ours_is_noticed(variable: str, meant: str) -> None:
    assert refused({variable: "1"}) == f"{variable} is not a setting; did you mean {meant}?"


@pytest.mark.parametrize(
    "variable",
    ["COMMAND_LOG", "COMMS_TOKEN", "SCHED_RATE", "COMMSHED_VERSION_ID", "COMSCHED", "_", "RANK", "OLD_COMMSCHED_LOG"],
)
def test_the_variables_of_others_are_theirs(variable: str) -> None:
    assert load({variable: "1"}) == load()


def test_an_unknown_policy_is_answered_with_those_there_are() -> None:
    assert refused(policy="lifo") == f"policy='lifo' is unknown; did you mean fifo? there are: {POLICIES}"


def test_a_word_that_is_not_one_of_them_is_answered_with_all() -> None:
    assert refused(wire="float8") == "wire='float8' is unknown; did you mean float16? there are: none, bfloat16, float16"


def test_a_file_that_is_not_there_or_not_toml_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    assert refused({"COMMSCHED_CONFIG": str(missing)}).startswith(f"COMMSCHED_CONFIG={str(missing)!r} cannot be read: ")
    broken = tmp_path / "broken.toml"
    broken.write_bytes(b"partition = \xff")
    assert refused({"COMMSCHED_CONFIG": str(broken)}).startswith(f"COMMSCHED_CONFIG={str(broken)!r} cannot be read: ")
    broken.write_text("partition 4MB")
    assert refused({"COMMSCHED_CONFIG": str(broken)}).startswith(f"COMMSCHED_CONFIG={str(broken)!r} cannot be read: ")


# --- tuning ---


@pytest.mark.parametrize(
    ("value", "budget"),
    [
        (1, DEFAULT_BUDGET),
        (True, DEFAULT_BUDGET),
        ("on", DEFAULT_BUDGET),
        ("0", None),
        (False, None),
        ("90s", Budget(seconds=90.0)),
        ("2.5 s", Budget(seconds=2.5)),
        ("500steps", Budget(steps=500)),
        (" 20 trials ", Budget(trials=20)),
        (Budget(trials=3, seconds=60.0), Budget(trials=3, seconds=60.0)),
    ],
)
def test_a_budget_is_a_switch_or_how_long_to_tune(value: object, budget: Budget | None) -> None:
    assert load(tune=value).tune == budget


@pytest.mark.parametrize("value", ["60", "5 minutes", "0trials", "1.5steps", "-3trials", "trials", "nan s", 2])
def test_what_is_no_budget(value: object) -> None:
    said = f"tune={value!r} is not a budget; write 1, 0, or how long to tune, like 90s, 500steps or 20trials"
    assert refused(tune=value) == said


def test_a_budget_in_seconds_is_a_time() -> None:
    assert refused(tune="0s") == "tune='0' is not above 0; write it in seconds, like 10 or 2.5"


def test_tuning_is_off_unless_it_is_asked_for() -> None:
    settings = load()
    assert (settings.tune, settings.tune_out, settings.tune_by, settings.tune_policies, settings.tuned) == (
        None,
        None,
        "bayes",
        (),
        None,
    )


def test_tuning_by_the_environment() -> None:
    environ = {
        "COMMSCHED_TUNE": "1",
        "COMMSCHED_TUNE_OUT": "tuned.toml",
        "COMMSCHED_TUNE_BY": "grid",
        "COMMSCHED_TUNE_POLICIES": "priority, fifo",
    }
    settings = load(environ)
    assert settings.tune == Budget(trials=12)
    assert (settings.tune_by, settings.tune_policies) == ("grid", ("priority", "fifo"))
    assert settings.tune_out == os.path.abspath("tuned.toml")


def test_policies_to_choose_from_must_exist() -> None:
    assert (
        refused(tune_policies=["priority", "lifo"])
        == f"tune_policies='lifo' is unknown; did you mean fifo? there are: {POLICIES}"
    )


def test_what_somebody_set_is_known_to_be_given() -> None:
    assert load().given == frozenset()
    assert load({"COMMSCHED_PARTITION": "1MB"}, credit="2MB", policy=None).given == {"partition", "credit"}
    assert load({"COMMSCHED_PARTITION": ""}).given == frozenset()


def test_a_plain_file_gives_and_a_tuned_one_suggests(tmp_path: Path) -> None:
    file = tmp_path / "commsched.toml"
    file.write_text('partition = "1MB"\n')
    assert load({"COMMSCHED_CONFIG": str(file)}).given == {"partition"}
    file.write_text("partition = 1000000\ncredit = 2000000\n[tuned]\nworld_size = 4\n")
    settings = load({"COMMSCHED_CONFIG": str(file), "COMMSCHED_CREDIT": "3MB"})
    assert (settings.partition, settings.credit, settings.tuned) == (1_000_000, 3_000_000, {"world_size": 4})
    assert settings.given == {"credit"}


def test_scheduler_config_travels_as_a_record() -> None:
    config = SchedulerConfig(1_000_000, 4 * 2**20, "fifo")
    assert SchedulerConfig(**config.to_record()) == config


def test_keywords_travel_by_the_environment() -> None:
    keywords = {
        "transport": "ps",
        "partition": 4_000_000,
        "credit": "auto",
        "rate": "200mbit",
        "trace_steps": "10-20",
        "fail_after": 2.5,
        "disable": False,
        "tune": True,
        "tune_policies": ["fifo", "priority"],
        "trace": Path("there"),
        "wire": None,
        "job": "",
    }
    environ = to_environ(keywords)
    assert Settings.load({}, environ) == Settings.load(keywords, {})
    assert environ["COMMSCHED_TUNE_POLICIES"] == "fifo,priority"
    assert "COMMSCHED_WIRE" not in environ


@pytest.mark.parametrize("value", [Budget(trials=3), Budget(trials=3, seconds=90.0)])
def test_what_no_text_says_cannot_travel(value: Budget) -> None:
    with pytest.raises(ConfigError) as raised:
        to_environ({"transport": "ps", "tune": value})
    assert str(raised.value) == f"tune={value!r} cannot be set by the environment; give it as the text of COMMSCHED_TUNE"


def test_the_token_is_not_shown() -> None:
    settings = load({"COMMSCHED_TOKEN": "s3cret"})
    assert settings.token == "s3cret"
    assert "s3cret" not in repr(settings)
    assert "transport='auto'" in repr(settings)


#: commsched sets them itself, by the environment or in a tuned file.
NOT_FOR_SCRIPTS = {"tune_end", "record", "launcher_file", "tuned", "given"}
KEYWORDS = get_type_hints(SettingsKeywords)


def words_of(hint: Any) -> tuple[str, ...]:
    """The words of the Literal in ``hint``; empty if there is none."""
    return next((get_args(part) for part in get_args(hint) if get_origin(part) is Literal), ())


def test_the_keywords_are_the_settings() -> None:
    assert KEYWORDS.keys() == Settings.__dataclass_fields__.keys() - NOT_FOR_SCRIPTS


def test_init_has_the_keywords() -> None:
    assert get_type_hints(commsched.init)["settings"] == Unpack[SettingsKeywords]


def test_every_keyword_may_be_none() -> None:
    assert [key for key, hint in KEYWORDS.items() if type(None) not in get_args(hint)] == []


@pytest.mark.parametrize("key", KEYWORDS)
def test_the_words_of_a_keyword_are_those_of_its_parser(key: str) -> None:
    """A parser that takes words only says all of them; so a new word cannot be forgotten in the types."""
    try:
        Settings.load({key: "no such word"}, {})
        known: tuple[str, ...] = ()
    except ConfigError as error:
        known = tuple(str(error).partition("there are: ")[2].split(", ")) if "there are: " in str(error) else ()
    assert words_of(KEYWORDS[key]) == (() if key in ("policy", "tune_policies") else known)


@pytest.mark.parametrize("key", [key for key, hint in KEYWORDS.items() if not words_of(hint)])
def test_a_value_of_every_type_of_a_keyword_is_taken(key: str) -> None:
    texts = {
        "servers": "a:1,b:2",
        "control": "a:1",
        "rate": "1gbit",
        "policy": "fifo",
        "tune": "9trials",
        "tune_policies": "fifo",
    }
    examples = {
        str: texts.get(key, "8"),
        int: 8,
        float: 2.5,
        bool: True,
        Path: Path("file"),
        Budget: DEFAULT_BUDGET,
        Sequence[str]: ["fifo"] if key == "tune_policies" else ["a:1", "b:2"],
        type(None): None,
    }
    for kind in get_args(KEYWORDS[key]):
        Settings.load({key: examples[kind]}, {})
