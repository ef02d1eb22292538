"""Devices are found by name, and errors say which there are."""

import pytest

from commsched.core.errors import ConfigError
from commsched.devices import device_kinds, open_device


def test_kinds_are_the_modules_of_the_folder() -> None:
    assert device_kinds() == ["cuda", "host"]


def test_the_host_has_no_number() -> None:
    assert open_device("host").name == "host"
    assert open_device("host:0").name == "host"
    with pytest.raises(ConfigError, match=r"^there is no device 'host:1'; the host's memory is one device, 'host'$"):
        open_device("host:1")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tpu:0", r"^there is no device 'tpu:0'; the kinds of device are: cuda, host$"),
        ("", r"^there is no device ''; the kinds of device are: cuda, host$"),
        ("cuda:first", r"^there is no device 'cuda:first'; write cuda:0, with the number of the device$"),
        ("cuda:-1", r"^there is no device 'cuda:-1'; write cuda:0, with the number of the device$"),
    ],
)
def test_an_unknown_device_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_device(name)
