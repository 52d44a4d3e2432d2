from __future__ import annotations

import dataclasses

import pytest

from gpuworker.settings import SettingError, Settings


def error_of(environ: dict[str, str]) -> str:
    with pytest.raises(SettingError) as caught:
        Settings.from_environ(environ)
    return str(caught.value)


def test_nothing_set_gives_the_defaults() -> None:
    assert Settings.from_environ({"PATH": "/bin"}) == Settings(devices="auto", load_timeout=600.0, threads=None)


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("GPUWORKER_DEVICES", "auto", "devices", "auto"),
        ("GPUWORKER_DEVICES", "0,GPU-1234,MIG-5678", "devices", "0,GPU-1234,MIG-5678"),
        ("GPUWORKER_DEVICES", "  cpu ", "devices", "cpu"),
        ("GPUWORKER_LOAD_TIMEOUT", "600", "load_timeout", 600.0),
        ("GPUWORKER_LOAD_TIMEOUT", "0.5", "load_timeout", 0.5),
        ("GPUWORKER_LOAD_TIMEOUT", " 1e3\n", "load_timeout", 1000.0),
        ("GPUWORKER_RELOAD", "rolling", "reload", "rolling"),
        ("GPUWORKER_RELOAD", " recreate ", "reload", "recreate"),
        ("GPUWORKER_FDSTORE", "on", "fdstore", True),
        ("GPUWORKER_FDSTORE", "off", "fdstore", False),
        ("GPUWORKER_THREADS", "1", "threads", 1),
        ("GPUWORKER_THREADS", " 16 ", "threads", 16),
    ],
)
def test_a_good_value_is_taken(name: str, text: str, field: str, value: object) -> None:
    assert Settings.from_environ({name: text}) == dataclasses.replace(Settings(), **{field: value})


def test_settings_are_read_together() -> None:
    environ = {"GPUWORKER_DEVICES": "1", "GPUWORKER_LOAD_TIMEOUT": "9", "GPUWORKER_THREADS": "2", "HOME": "/root"}
    assert Settings.from_environ(environ) == Settings(devices="1", load_timeout=9.0, threads=2)


@pytest.mark.parametrize("text", ["0", "-1", "", "ten", "600s", "1,5", "nan", "inf", "-inf", "1e999"])
def test_bad_seconds_are_quoted_with_what_is_allowed(text: str) -> None:
    assert error_of({"GPUWORKER_LOAD_TIMEOUT": text}) == (
        f"GPUWORKER_LOAD_TIMEOUT={text!r} is not a number of seconds above 0 and up to a year, such as 600."
    )


@pytest.mark.parametrize("text", ["", "1", "true", "ON"])
def test_a_bad_switch_is_quoted_with_what_is_allowed(text: str) -> None:
    assert error_of({"GPUWORKER_FDSTORE": text}) == f"GPUWORKER_FDSTORE={text!r} is neither on nor off."


@pytest.mark.parametrize("text", ["0", "-1", "", "two", "1.5", "1e3", "1_0", "+1", "0x2", "1 2", "²", "\u0663"])
def test_a_bad_count_is_quoted_with_what_is_allowed(text: str) -> None:
    assert error_of({"GPUWORKER_THREADS": text}) == f"GPUWORKER_THREADS={text!r} is not a whole number from 1 to 9999."


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("GPUWORKER_LOAD_TIMEOUT", "1e12", id="faulthandler-cannot-wait-for-so-long"),
        pytest.param("GPUWORKER_THREADS", "1" + "0" * 20, id="torch-takes-a-c-int"),
        pytest.param("GPUWORKER_THREADS", "9" * 5000, id="python-does-not-even-read-it"),
    ],
)
def test_a_number_too_large_to_be_used_is_quoted(name: str, text: str) -> None:
    assert f"{name}={text!r}" in error_of({name: text})


@pytest.mark.parametrize("text", ["", "replace", "Rolling", "1"])
def test_an_unknown_way_to_reload_is_quoted_with_what_is_allowed(text: str) -> None:
    assert error_of({"GPUWORKER_RELOAD": text}) == f"GPUWORKER_RELOAD={text!r} is neither rolling nor recreate."


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_list_of_devices_is_refused(text: str) -> None:
    assert "GPUWORKER_DEVICES is empty" in error_of({"GPUWORKER_DEVICES": text})


def test_an_empty_list_of_devices_is_told_what_is_allowed() -> None:
    message = error_of({"GPUWORKER_DEVICES": ""})
    assert "auto" in message
    assert "cpu" in message


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("GPUWORKER_DEVICE", "GPUWORKER_DEVICES"),
        ("GPUWORKER_DEVCIES", "GPUWORKER_DEVICES"),
        ("GPUWORKER_THREAD", "GPUWORKER_THREADS"),
        ("GPUWORKER_TREADS", "GPUWORKER_THREADS"),
        ("GPUWORKER_LOADTIMEOUT", "GPUWORKER_LOAD_TIMEOUT"),
        ("GPUWORKER_LOAD_TIMOUT", "GPUWORKER_LOAD_TIMEOUT"),
    ],
)
def test_a_misspelt_name_is_told_the_right_one(given: str, meant: str) -> None:
    assert error_of({given: "1"}) == f"there is no setting {given}: did you mean {meant}?"


@pytest.mark.parametrize(
    "name",
    [
        "GPUWORKER_PORT",
        "GPUWORKER_PORT_8000_TCP",
        "GPUWORKER_PORT_8000_TCP_ADDR",
        "GPUWORKER_SERVICE_HOST",
        "GPUWORKER_SERVICE_PORT",
        "GPUWORKER_SERVICE_PORT_HTTP",
        "GPUWORKER_SLOT",
    ],
)
def test_names_that_others_set_are_ignored(name: str) -> None:
    assert Settings.from_environ({name: "tcp://10.0.0.1:8000"}) == Settings()


@pytest.mark.parametrize("name", ["DEVICES", "XGPUWORKER_DEVICE", "gpuworker_device"])
def test_names_without_the_prefix_are_ignored(name: str) -> None:
    assert Settings.from_environ({name: "1"}) == Settings()


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().threads = 2  # type: ignore[misc]
