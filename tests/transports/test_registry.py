"""Finding a transport by name."""

import pytest

from commsched.core.errors import ConfigError
from commsched.transports import require_transport, transport_names


def test_lists_transports_and_not_what_they_share():
    assert transport_names() == ["gloo", "local", "mpi", "nccl", "ps"]


def test_a_known_name_is_accepted():
    assert require_transport("ps") == "ps"


def test_an_unknown_name_is_answered_with_those_there_are():
    with pytest.raises(ConfigError, match=r"transport='tcpx' is unknown; there are: .*local.*ps"):
        require_transport("tcpx")
